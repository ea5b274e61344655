"""Measure the first search in a long session, in a worker that has not seen the session.

`python -m bench.first_search [--messages 100000] [--rounds 5]`: the texts of the annotated conversations, over and
over, each message with a word of its own, are appended through REST. When the pages of the session are built, each
round starts the service anew and asks for a word that occurs once (`search`) and a question (`relevant`): the first
time, and again. The conversations are looked for as `bench.recall` does.
"""

import argparse
import contextlib
import itertools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from bench import recall, servers
from bench.context_flat import BATCH, Api, timed_ms
from bench.servers import Server

SESSION: Final = "long"
QUESTION_WORDS: Final = 6
"""Questions of at least so many words are asked."""


def conversations(directory: Path) -> tuple[list[str], list[str]]:
    """Return the texts of all messages, and the questions."""
    found = [each for name in recall.SETS.values() for each in recall.load(directory, name)]
    texts = [text for each in found for text in each.texts if text.strip()]
    asked = [question.text for each in found for question in each.questions]
    return texts, [text for text in asked if len(text.split()) >= QUESTION_WORDS]


def fill(api: Api, texts: list[str], size: int) -> None:
    """Append ``size`` messages."""
    numbered = enumerate(itertools.islice(itertools.cycle(texts), size))
    while batch := list(itertools.islice(numbered, BATCH)):
        messages = [
            {"role": "assistant" if number % 2 else "user", "content": f"{text} {_own_word(number)}"}
            for number, text in batch
        ]
        api.post(
            f"/api/sessions/{SESSION}/messages",
            {"dialect": "openai_chat", "messages": messages},
            {"idempotency-key": f"{SESSION}-{batch[0][0]}"},
        )


def _own_word(number: int) -> str:
    return f"w{number:07d}"


def search(api: Api, mode: str, query: str) -> dict[str, Any]:
    """Search the session."""
    found: dict[str, Any] = api.post(f"/api/sessions/{SESSION}/search", {"mode": mode, "query": query})
    if not found["excerpts"]:
        raise SystemExit(f"{mode} {query!r} found nothing")
    return found


@contextlib.contextmanager
def fresh_service(host: Server, scratch: Path) -> Iterator[Api]:
    """Start a worker that has seen nothing yet, on the same database."""
    server = servers.tersely(host, scratch)
    try:
        yield Api(server.port)
    finally:
        server.stop()


def measure(scratch: Path, directory: Path, size: int, rounds: int, wait: float) -> dict[str, list[float]]:
    """Return milliseconds by what was measured."""
    texts, questions = conversations(directory)
    times: dict[str, list[float]] = {}
    with servers.running([]) as started:
        started.append(servers.upstream(scratch))
        with fresh_service(started[0], scratch) as api:
            fill(api, texts, size)
            time.sleep(wait)
        for round_ in range(rounds):
            for mode, queries in (
                ("search", [_own_word(size * (each + 1) // (rounds + 3)) for each in range(round_, round_ + 3)]),
                ("relevant", questions[round_ * 3 : round_ * 3 + 3]),
            ):
                with fresh_service(started[0], scratch) as api:
                    for query, when in zip(queries, ("first", "later", "later"), strict=True):
                        took = timed_ms(lambda mode=mode, query=query, api=api: search(api, mode, query))
                        times.setdefault(f"{mode}, {when}", []).append(took)
            print({name: round(each[-1]) for name, each in times.items()}, flush=True)
    return times


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?")
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--wait", type=float, default=90, help="seconds for building the pages")
    args = parser.parse_args()
    with servers.scratch_dir() as scratch:
        times = measure(scratch, recall.find_data(args.directory), args.messages, args.rounds, args.wait)
    for name, each in times.items():
        print(f"{name}: median {statistics.median(each):.0f} ms, worst {max(each):.0f} ms")


if __name__ == "__main__":
    main()
