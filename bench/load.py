"""A closed-loop load of real conversations against one server, checked answer by answer.

Each connection plays one conversation after another as a stateless client does: it resends the whole history,
echoes the reply that came back, and adds one new user message. A request is built before its clock starts.
The sequence of a connection depends on the seed alone, so every server gets the same one.

`--plan` mixes shapes: `4k:9,200k:1` plays nine short conversations for each long one.
Prints one JSON object; times in milliseconds.

`--serve` takes one plan after another as a line of JSON (see `LoadPlan`), so that no process is started for each. Where
a plan has calls to warm up with, it prints a line when they are done, and goes on when it is sent one.
"""

import argparse
import asyncio
import json
import re
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Final, cast
from urllib.parse import urlsplit

import httptools
import uvloop
from typing_extensions import override

from bench import texts

_CONTENT: Final = re.compile(rb'"content":\s*"((?:[^"\\]|\\.)*)"')
_TEXT: Final = re.compile(rb'"text":\s*"((?:[^"\\]|\\.)*)"')
_REPLY_ID: Final = re.compile(rb'"id":\s*"(resp_\w+)"')
_DONE: Final = b"data: [DONE]"
_STOPPED: Final = b'data: {"type":"message_stop"}'
_HEADERS: Final = (
    b"accept: application/json\r\naccept-encoding: identity\r\ncontent-type: application/json\r\n"
    b"user-agent: AsyncOpenAI/Python 2.54.0\r\nx-stainless-lang: python\r\nx-stainless-package-version: 2.54.0\r\n"
    b"x-stainless-os: Linux\r\nx-stainless-arch: x64\r\nx-stainless-runtime: CPython\r\n"
    b"x-stainless-runtime-version: 3.11.7\r\nx-stainless-async: async:asyncio\r\n"
    b"x-stainless-retry-count: 0\r\nx-stainless-read-timeout: 600\r\nauthorization: Bearer sk-bench\r\n"
)
_MAX_ERRORS_SHOWN: Final = 3


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The calls to play, their target, and the duration."""

    url: str
    shapes: tuple[texts.Shape, ...]
    """Shapes of a connection's conversations, in turn."""
    streams: tuple[bool, ...]
    """Whether a conversation is streamed, in turn."""
    connections: int
    seed: str
    seconds: float
    """No request starts later than this; those under way are finished. 0: no limit."""
    requests: int
    """No request starts after this many. 0: no limit."""
    timeout_s: float
    limit_s: float
    """The whole run fails after this."""
    warm_up: int = 0
    """Calls of each connection that do not count. The counted ones begin when all connections are done with these."""
    calls: int = 0
    """Counted calls of each connection. 0: no limit."""
    headers: str = ""
    """Further header lines."""
    delta: bool = False
    """A conversation carries its history in its first request alone, and names its session in each."""


@dataclass(slots=True)
class LoadTally:
    """The counts of a run."""

    started: int = 0
    total_ms: list[float] = field(default_factory=list)
    opening_ms: list[float] = field(default_factory=list)
    """The first request of each conversation."""
    first_byte_ms: list[float] = field(default_factory=list)
    body_bytes: int = 0
    reads: int = 0
    errors: int = 0
    examples: list[str] = field(default_factory=list)
    last_at: float = 0.0

    def fail(self, why: str) -> None:
        self.errors += 1
        if len(self.examples) < _MAX_ERRORS_SHOWN:
            self.examples.append(why[:300])


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One run's figures; times in milliseconds."""

    requests: int
    errors: int
    examples: list[str]
    wall_s: float
    rps: float
    p50_ms: float
    p99_ms: float
    first_byte_p50_ms: float
    opening_p50_ms: float
    body_bytes: float
    reads_per_reply: float


def _message(role: bytes, text: bytes) -> bytes:
    return b'{"role":"' + role + b'","content":"' + text + b'"}'


class ClientHistory:
    """One client's history, as the bytes between the brackets of `messages`."""

    def __init__(self, shape: texts.Shape, *, stream: bool, keys: tuple[object, ...]) -> None:
        self.shape = shape
        self.keys = keys
        self.stream = stream
        self.turn = 0
        self.parts = [_message(b"system", texts.SYSTEM), *self._history()]
        tools = b"," + texts.tools(shape.tools) if shape.tools else b""
        self.tail = b'],"model":"gpt-4o-mini"' + tools + (b',"stream":true}' if stream else b"}")

    def _history(self) -> Iterator[bytes]:
        """Return the messages from before the server came in: the model's own answers, padded to the wanted size."""
        if not self.shape.history_messages:
            return
        size = self.shape.history_bytes // self.shape.history_messages - 40
        for n in range(0, self.shape.history_messages, 2):
            key = texts.mark(*self.keys, "history", n)
            yield _message(b"user", texts.question(key, size))
            yield _message(b"assistant", texts.ANSWER + key + b"] " + texts.passage(key[::-1], size))

    def ask(self) -> bytes:
        """Add the next user message; the request's body."""
        self.key = texts.mark(*self.keys, self.turn)
        self.turn += 1
        self.parts.append(_message(b"user", texts.question(self.key, self.shape.question_bytes)))
        return b'{"messages":[' + b",".join(self.parts) + self.tail

    def hear(self, text: bytes) -> None:
        """Echo the reply from now on."""
        self.parts.append(_message(b"assistant", text))

    @property
    def over(self) -> bool:
        return self.turn >= self.shape.turns


_BREAKPOINT: Final = b',"cache_control":{"type":"ephemeral"}'


class AnthropicConversation(ClientHistory):
    """The same in Anthropic's format, as its agents send it: a breakpoint moves along with the newest message."""

    def __init__(self, shape: texts.Shape, *, stream: bool, keys: tuple[object, ...]) -> None:
        super().__init__(shape, stream=stream, keys=keys)
        self.parts = [self._blocks(part) for part in self.parts[1:]]
        system = b',"system":[{"type":"text","text":"' + texts.SYSTEM + b'"' + _BREAKPOINT + b"}]"
        tools = b"," + texts.anthropic_tools(shape.tools) if shape.tools else b""
        end = b',"stream":true}' if stream else b"}"
        self.tail = b'],"model":"claude-sonnet-4-5","max_tokens":1024' + system + tools + end

    @staticmethod
    def _blocks(message: bytes) -> bytes:
        """A message with its text as a block."""
        front, content, text = message.partition(b'"content":')
        return front + content + b'[{"type":"text","text":' + text[:-1] + b"}]}"

    @override
    def ask(self) -> bytes:
        self.key = texts.mark(*self.keys, self.turn)
        self.turn += 1
        question = self._blocks(_message(b"user", texts.question(self.key, self.shape.question_bytes)))
        marked = question[: -len(b"}]}")] + _BREAKPOINT + b"}]}"
        body = b'{"messages":[' + b",".join([*self.parts, marked]) + self.tail
        self.parts.append(question)
        return body

    @override
    def hear(self, text: bytes) -> None:
        self.parts.append(self._blocks(_message(b"assistant", text)))


class ReferencedConversation(ClientHistory):
    """One in OpenAI's responses format whose requests after the first name the last reply instead of the history."""

    def __init__(self, shape: texts.Shape, *, stream: bool, keys: tuple[object, ...]) -> None:
        super().__init__(shape, stream=stream, keys=keys)
        del self.parts[0]
        tools = b"," + texts.responses_tools(shape.tools) if shape.tools else b""
        self.tail = b'],"model":"gpt-4o-mini","instructions":"' + texts.SYSTEM + b'"' + tools
        self.reply_id = b""

    @override
    def ask(self) -> bytes:
        self.key = texts.mark(*self.keys, self.turn)
        self.turn += 1
        self.parts.append(_message(b"user", texts.question(self.key, self.shape.question_bytes)))
        named = b',"previous_response_id":"' + self.reply_id + b'"}' if self.reply_id else b"}"
        body = b'{"input":[' + b",".join(self.parts) + self.tail + named
        self.parts.clear()
        return body

    @override
    def hear(self, text: bytes) -> None:
        """The host has the reply."""


class DeltaConversation(ClientHistory):
    """One whose requests after the first carry nothing but their new message."""

    @override
    def ask(self) -> bytes:
        whole = super().ask()
        return whole if self.turn == 1 else b'{"messages":[' + self.parts[-1] + b'],"model":"gpt-4o-mini"}'


class Client(asyncio.Protocol):
    """One connection that plays conversation after conversation."""

    def __init__(self, plan: LoadPlan, number: int, tally: LoadTally, stop_at: float) -> None:
        self.plan = plan
        self.number = number
        self.tally = tally
        self.stop_at = stop_at
        self.loop = asyncio.get_running_loop()
        self.finished: asyncio.Future[None] = self.loop.create_future()
        self.warm: asyncio.Future[None] = self.loop.create_future()
        self.requests = 0
        self.played = 0
        self.talk: ClientHistory | None = None
        self.content = _TEXT if plan.url.endswith(("/messages", "/responses")) else _CONTENT
        parts = urlsplit(plan.url)
        self.head = b"POST %s HTTP/1.1\r\nhost: %s\r\n%scontent-length: " % (
            parts.path.encode(),
            parts.netloc.encode(),
            _HEADERS + b"".join(line.encode() + b"\r\n" for line in plan.headers.splitlines()),
        )
        if plan.delta:
            self.head = self.head.removesuffix(b"content-length: ")
            self.head += b"x-tersely-session: %s\r\ncontent-length: " % texts.mark(plan.seed, number, "session")

    # transport callbacks

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.parser = httptools.HttpResponseParser(self)
        self.next()

    @override
    def data_received(self, data: bytes) -> None:
        self.reads += 1
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.abandon(f"unreadable answer: {error}")

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        if not self.finished.done():
            self.tally.fail(f"connection lost: {exc!r}")
            self.close()

    # parser callbacks

    def on_message_begin(self) -> None:
        self.body: list[bytes] = []
        self.first_at = 0.0

    def on_body(self, data: bytes) -> None:
        if not self.body:
            self.first_at = time.perf_counter()
        self.body.append(data)

    def on_message_complete(self) -> None:
        now = time.perf_counter()
        self.deadline.cancel()
        assert self.talk is not None
        problem = self.problem(b"".join(self.body))
        if problem:
            self.tally.fail(problem)
            self.talk = None
        else:
            self.count(now)
        self.tally.last_at = now
        keep = self.parser.should_keep_alive()
        if keep:
            # Not from inside the parser's own call.
            self.loop.call_soon(self.next)
        else:
            self.abandon("the server closed the connection")

    # the conversation

    def next(self) -> None:
        """Send the next request, or stop."""
        if not self.warm.done() and self.requests == self.plan.warm_up:
            self.warm.set_result(None)
            if self.plan.warm_up:
                return
        late = self.stop_at and time.perf_counter() >= self.stop_at
        enough = self.plan.requests and self.tally.started >= self.plan.requests
        enough = enough or (self.plan.calls and self.requests >= self.plan.warm_up + self.plan.calls)
        if late or enough or self.transport.is_closing():
            self.close()
            return
        self.tally.started += 1
        self.requests += 1
        if self.talk is None or self.talk.over:
            self.talk = self.begin()
        body = self.talk.ask()
        self.tally.body_bytes += len(body)
        self.deadline = self.loop.call_later(self.plan.timeout_s, self.abandon, "no answer in time")
        request = self.head + b"%d\r\n\r\n%s" % (len(body), body)
        self.reads = 0
        self.sent_at = time.perf_counter()
        self.transport.write(request)

    def begin(self) -> ClientHistory:
        plan, n = self.plan, self.played
        self.played += 1
        # Connections start at different points of the plan, so that few of them do not all play one shape.
        shape = plan.shapes[(n + self.number) % len(plan.shapes)]
        stream = plan.streams[(n // len(plan.shapes) + n + self.number) % len(plan.streams)]
        made = AnthropicConversation if plan.url.endswith("/messages") else ClientHistory
        made = ReferencedConversation if plan.url.endswith("/responses") else made
        made = DeltaConversation if plan.delta else made
        return made(shape, stream=stream, keys=(plan.seed, self.number, n))

    def problem(self, body: bytes) -> str:
        """Return the fault of an answer; empty when there is none."""
        assert self.talk is not None
        status = self.parser.get_status_code()
        if status != 200:
            return f"status {status}: {body[:200]!r}"
        if self.talk.stream and _DONE not in body[-64:] and _STOPPED not in body[-64:]:
            return f"no [DONE]: {body[-100:]!r}"
        text = b"".join(self.content.findall(body)).removesuffix(b"\\n")
        expected = texts.answer(self.talk.key)
        if text != expected:
            return f"wrong text: {text[:40]!r}...{text[-60:]!r} for {expected[:40]!r}...{expected[-60:]!r}"
        if isinstance(self.talk, ReferencedConversation) and (found := _REPLY_ID.search(body)):
            self.talk.reply_id = found[1]
        self.talk.hear(text)
        return ""

    def count(self, now: float) -> None:
        assert self.talk is not None
        took = (now - self.sent_at) * 1000
        self.tally.total_ms.append(took)
        self.tally.first_byte_ms.append((self.first_at - self.sent_at) * 1000)
        self.tally.reads += self.reads
        if self.talk.turn == 1:
            self.tally.opening_ms.append(took)

    def abandon(self, why: str) -> None:
        self.tally.fail(why)
        self.close()

    def close(self) -> None:
        for end in (self.finished, self.warm):
            if not end.done():
                end.set_result(None)
        self.transport.close()


def _quantile(values: list[float], q: float) -> float:
    """The q-quantile by rank; 0 for no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0


async def play(plan: LoadPlan) -> LoadReport:
    """Run a plan and sum it up."""
    loop = asyncio.get_running_loop()
    parts = urlsplit(plan.url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    tally = LoadTally()
    started = time.perf_counter()
    stop_at = started + plan.seconds if plan.seconds else 0.0
    clients = []
    for number in range(plan.connections):
        _, client = await loop.create_connection(
            partial(Client, plan, number, tally, stop_at),
            host,
            port,
        )
        clients.append(client)
    async with asyncio.timeout(plan.limit_s):
        if plan.warm_up:
            await asyncio.gather(*(client.warm for client in clients))
            print("warm", flush=True)
            await loop.run_in_executor(None, sys.stdin.readline)
            before, tally = tally, LoadTally()
            tally.errors, tally.examples = before.errors, before.examples
            started = time.perf_counter()
            for client in clients:
                client.tally = tally
                if not client.finished.done():
                    client.next()
        await asyncio.gather(*(client.finished for client in clients))
    wall = max(tally.last_at - started, 1e-9)
    done = len(tally.total_ms)
    return LoadReport(
        requests=done,
        errors=tally.errors,
        examples=tally.examples,
        wall_s=wall,
        rps=done / wall,
        p50_ms=statistics.median(tally.total_ms) if done else 0.0,
        p99_ms=_quantile(tally.total_ms, 0.99),
        first_byte_p50_ms=statistics.median(tally.first_byte_ms) if done else 0.0,
        opening_p50_ms=statistics.median(tally.opening_ms) if tally.opening_ms else 0.0,
        body_bytes=tally.body_bytes / max(tally.started, 1),
        reads_per_reply=tally.reads / max(done, 1),
    )


def parse_shapes(text: str) -> tuple[texts.Shape, ...]:
    """`4k:2,200k` as shapes: 4k, 4k, 200k."""
    shapes: list[texts.Shape] = []
    for item in text.split(","):
        name, _, times = item.partition(":")
        shapes += [texts.SHAPES[name]] * int(times or 1)
    return tuple(shapes)


def serve() -> None:
    """Play the plans of the standard input, one after the other."""
    while line := sys.stdin.readline():
        given = json.loads(line)
        given["shapes"] = parse_shapes(given["shapes"])
        given["streams"] = tuple(given["streams"])
        print(json.dumps(asdict(uvloop.run(play(LoadPlan(**given))))), flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", action="store_true", help="take plans from the standard input")
    parser.add_argument("--url", help="of the chat completions, the messages or the responses endpoint")
    parser.add_argument("--plan", default="4k", help=f"of {', '.join(texts.SHAPES)}")
    parser.add_argument("--stream", choices=["no", "yes", "both"], default="no")
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--requests", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for one answer")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for the whole run")
    args = parser.parse_args()
    if args.serve:
        serve()
        return
    if not args.url:
        parser.error("give --url")
    if not args.seconds and not args.requests:
        parser.error("give --seconds, --requests or both")
    plan = LoadPlan(
        url=args.url,
        shapes=parse_shapes(args.plan),
        streams={"no": (False,), "yes": (True,), "both": (False, True)}[args.stream],
        connections=args.connections,
        seed=args.seed,
        seconds=args.seconds,
        requests=args.requests,
        timeout_s=args.timeout,
        limit_s=args.limit,
    )
    print(json.dumps(asdict(uvloop.run(play(plan)))))


if __name__ == "__main__":
    main()
