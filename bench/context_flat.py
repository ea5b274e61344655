"""Does a call get slower as its session gets longer? A session of 100,000 messages against one of 100.

`python -m bench.context_flat [--long 100000] [--rounds 40]`: both are filled through REST; then their context is
built, and a client sends only its newest message through the proxy (`X-Tersely-Session`), in turns, short and long.
Messages are sized so that the short session fills a context about as well as the long one does. Last, a word that
occurs once in the long session is searched for.
"""

import argparse
import http.client
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from bench import report, servers, texts

SHORT: Final = 100
BATCH: Final = 500
MESSAGE_BYTES: Final = 500
"""100 messages of this size are about 10,000 tokens: as much as a fresh epoch keeps of a long session."""
RATIO_LIMIT: Final = 1.3
SEARCH_LIMIT_MS: Final = 100.0
WARM_UP: Final = 5
RARE: Final = "quetzalcoatlus"


class Api:
    """A keep-alive connection to one server."""

    def __init__(self, port: int) -> None:
        self.http = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        self.headers: dict[str, str] = {}
        """Of the newest answer, lower-case."""

    def post(self, path: str, body: object, headers: dict[str, str] | None = None) -> Any:
        """POST JSON; the answer as JSON. Anything but 2xx ends the run."""
        return self.send("POST", path, body, headers)

    def send(self, method: str, path: str, body: object, headers: dict[str, str] | None = None) -> Any:
        """Send JSON; the answer as JSON. Anything but 2xx ends the run."""
        data = json.dumps(body).encode()
        self.http.request(method, path, data, {"content-type": "application/json"} | (headers or {}))
        answer = self.http.getresponse()
        text = answer.read()
        if answer.status // 100 != 2:
            raise SystemExit(f"{path}: {answer.status} {text[:500]!r}")
        self.headers = {name.lower(): value for name, value in answer.getheaders()}
        return json.loads(text)


def message(session: str, number: int, *, rare: bool) -> dict[str, str]:
    """One stored message; user and assistant take turns."""
    key = texts.mark(session, number)
    text = texts.question(key, MESSAGE_BYTES).decode() + (f" {RARE}" if rare else "")
    return {"role": "assistant" if number % 2 else "user", "content": text}


def fill(api: Api, session: str, size: int) -> float:
    """Append `size` messages in batches; seconds."""
    begun = time.perf_counter()
    for start in range(0, size, BATCH):
        batch = [message(session, n, rare=n == size // 3) for n in range(start, min(start + BATCH, size))]
        api.post(
            f"/api/sessions/{session}/messages",
            {"dialect": "openai_chat", "messages": batch},
            {"idempotency-key": f"{session}-{start}"},
        )
    return time.perf_counter() - begun


def timed_ms(call: Callable[[], object]) -> float:
    """Return the duration of a call in milliseconds."""
    begun = time.perf_counter()
    call()
    return (time.perf_counter() - begun) * 1000


def build(api: Api, session: str, **options: object) -> dict[str, Any]:
    """A context, not stored."""
    answer: dict[str, Any] = api.post(f"/api/sessions/{session}/context", {"dialect": "openai_chat", **options})
    return answer


def delta(api: Api, session: str, counter: list[int]) -> dict[str, Any]:
    """One turn through the proxy with nothing but its new message."""
    counter[0] += 1
    key = texts.mark("delta", session, counter[0])
    body = {
        "model": "gpt-4o-mini",
        "messages": [{"role": "user", "content": texts.question(key, MESSAGE_BYTES).decode()}],
    }
    answer: dict[str, Any] = api.post("/v1/chat/completions", body, {"x-tersely-session": session})
    if texts.answer(key).decode() != answer["choices"][0]["message"]["content"].strip():
        raise SystemExit(f"wrong answer: {answer}")
    return answer


def compare(what: str, call: Callable[[str], object], rounds: int) -> dict[str, Any]:
    """Medians of both sessions, measured in turns, as one row."""
    for session in ("short", "long"):
        for _ in range(WARM_UP):
            call(session)
    times: dict[str, list[float]] = {"short": [], "long": []}
    for n in range(rounds):
        for session in ("short", "long") if n % 2 else ("long", "short"):
            times[session].append(timed_ms(lambda session=session: call(session)))
    short, long = statistics.median(times["short"]), statistics.median(times["long"])
    ratio = long / short
    row = {
        "what": what,
        "short_ms": short,
        "long_ms": long,
        "ratio": ratio,
        "limit": f"ratio {RATIO_LIMIT}",
        "reached": ratio <= RATIO_LIMIT,
    }
    print(f"{what}: {short:.2f} ms, {long:.2f} ms, ratio {ratio:.2f}", flush=True)
    return row


def set_epoch(api: Api, session: str, epoch: str | None) -> None:
    """Set the epoch policy of a session; None restores the default."""
    api.send("PATCH", f"/api/sessions/{session}", {"epoch": epoch})


def search_row(api: Api, rounds: int) -> dict[str, Any]:
    """A rare word in the long session, cold once and then warm."""

    def search() -> None:
        found = api.post("/api/sessions/long/search", {"mode": "search", "query": RARE})
        if RARE not in found["text"]:
            raise SystemExit(f"the word was not found: {str(found)[:500]}")

    cold = timed_ms(search)
    warm = statistics.median(timed_ms(search) for _ in range(rounds))
    print(f"search: {cold:.1f} ms cold, {warm:.1f} ms warm", flush=True)
    return {
        "what": f"search for a word that occurs once (first time {cold:.0f} ms)",
        "short_ms": None,
        "long_ms": warm,
        "ratio": None,
        "limit": f"{SEARCH_LIMIT_MS:.0f} ms",
        "reached": warm <= SEARCH_LIMIT_MS,
    }


def context_size(api: Api, session: str) -> str:
    """Return the size of a session's context, for the note."""
    answer = build(api, session)
    return f"{len(answer['messages'])} messages and {answer['report']['tokens_after']:,} tokens"


def measure(api: Api, long: int, rounds: int) -> dict[str, Any]:
    """Fill both sessions and compare them."""
    fill(api, "short", SHORT)
    took = fill(api, "long", long)
    print(f"filled {long:,} messages in {took:.0f} s", flush=True)
    rows: list[dict[str, Any]] = [
        {"what": "append, per message", "short_ms": None, "long_ms": took / long * 1000},
        {"what": "the very first context", "short_ms": timed_ms(lambda: build(api, "short"))},
    ]
    rows[1]["long_ms"] = timed_ms(lambda: build(api, "long"))
    for row in rows:
        row |= {"ratio": None, "limit": "", "reached": None}
    rows.append(compare("context, before any call", lambda s: build(api, s), rounds))
    counter = [0]
    first = {s: timed_ms(partial(delta, api, s, counter)) for s in ("short", "long")}
    rows.append(
        {
            "what": "the first call through the proxy",
            "short_ms": first["short"],
            "long_ms": first["long"],
            "ratio": None,
            "limit": "",
            "reached": None,
        }
    )
    rows.append(compare("call through the proxy, new message only", lambda s: delta(api, s, counter), rounds))
    rows.append(compare("context", lambda s: build(api, s), rounds))
    every = {"strategy": {"name": "slim"}, "epoch": "every_request"}
    rows.append(compare("context under another epoch policy, planned anew", lambda s: build(api, s, **every), rounds))
    for session in ("short", "long"):
        set_epoch(api, session, "every_request")
    rows.append(compare("call that starts an epoch, as each does", lambda s: delta(api, s, counter), rounds))
    for session in ("short", "long"):
        set_epoch(api, session, None)
    rows.append(search_row(api, rounds))
    sizes = f"At the end the short session's context is {context_size(api, 'short')}, the long one's "
    note = f"{sizes}{context_size(api, 'long')}. Medians of {rounds}, over HTTP, one connection."
    return {"short": SHORT, "long": long, "rows": rows, "note": note}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", type=int, default=100_000, help="messages of the long session")
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    with servers.scratch_dir() as scratch, servers.running([]) as started:
        started.append(servers.upstream(scratch))
        started.append(servers.tersely(started[0], scratch))
        data = measure(Api(started[1].port), args.long, args.rounds)
    report.save("flat", data, command="python -m bench.context_flat " + shlex.join(sys.argv[1:]))


if __name__ == "__main__":
    main()
