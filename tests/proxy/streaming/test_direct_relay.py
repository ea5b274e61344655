"""Events that are sent on in the callback that received them: the client gets what it would get otherwise."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tersely.api.transport.body_writer import BodyWriter
from tersely.dialects.dialect import ClientView
from tersely.dialects.registry import dialect_named
from tersely.domain.errors import UpstreamUnavailable
from tersely.domain.text.tags import TagKinds
from tersely.service.proxy.streams.client_stream import ClientStream
from tersely.service.proxy.streams.direct_relay import DirectRelay
from tersely.service.proxy.streams.host_chunks import iter_until_terminal_event
from tersely.upstream.client import UpstreamReply
from tersely.upstream.connection import Receive
from tests.proxy.streaming.test_idle_streams import KINDS, _unchunked, by_kind
from tests.support.http import request_bytes, wire
from tests.support.rows import messages_by_number
from tests.support.services import Service
from tests.support.upstreams import DONE, RawUpstream, http_head, sse

WORDS = ["plain ", "<", "<<", "a << b ", "<<terse>>", "short", "<</terse>>", "## State\n", "é ", "data: [DONE]"]


class Host:
    """A host with a stream in pieces, of which ``None`` is silence."""

    def __init__(self, pieces: Iterator[bytes | None], quick: Iterable[bool] = (), *, breaks: bool = False) -> None:
        """``quick``: whether the next piece is there before whoever waits has its turn, each time."""
        self._pieces = pieces
        self._is_quick = iter(quick)
        self._breaks = breaks

    async def next_piece(self, heartbeat: float, receive: Receive | None) -> bytes | None:
        for piece in self._pieces:
            if piece is None or receive is None:
                return piece
            if not receive(piece):
                self._may_break()
                return next(self._pieces, b"") if next(self._is_quick, False) else None
        self._may_break()
        return b""

    def _may_break(self) -> None:
        if self._breaks:
            raise UpstreamUnavailable("the model host broke off")

    async def trailer(self, wait: float) -> bytes:
        return b"".join(piece for piece in self._pieces if piece)


class Client:
    """A client that is behind now and then."""

    def __init__(self, ready: Iterator[bool]) -> None:
        self._ready = ready
        self.got: list[bytes] = []

    @property
    def is_ready(self) -> bool:
        return next(self._ready, True)

    def write(self, part: bytes) -> None:
        assert part
        self.got.append(part)


async def relayed(
    name: str,
    view: ClientView,
    tools: frozenset[str],
    pieces: list[bytes | None],
    ready: list[bool] | None,
    quick: Sequence[bool] = (),
) -> tuple[bytes, Any]:
    """Return what the client gets, and the reply as it was read. ``ready`` None: nothing is sent on in the callback."""
    stream = ClientStream(dialect_named(name), 4000, view, tools=tools)
    direct = None
    client = Client(iter(ready or ()))
    if ready is not None:
        direct = DirectRelay(stream, 60)
        direct.write_to(client)
    host = cast(UpstreamReply, Host(iter(pieces), quick))
    async for chunk in iter_until_terminal_event(host, stream.end, 60, direct):
        start = 0
        while not start or start < len(chunk):
            out, start = await stream.feed_part(chunk, start)
            client.got += [out] if out else []
    client.got.append(await stream.end_round() + stream.close())
    return b"".join(client.got), await stream.reply()


def _last_event(events: bytes, words: str) -> bytes:
    """Return the last one of ``events`` with other words."""
    between = b"\r\n\r\n" if b"\r" in events else b"\n\n"
    last = events.split(between)[-2] + between
    return last.replace(b'"half a word"', json.dumps(words).encode())


@st.composite
def streams(draw: st.DrawFn) -> tuple[str, list[bytes | None]]:
    name = draw(st.sampled_from(sorted(KINDS)))
    speaker = KINDS[name]
    words = draw(st.lists(st.sampled_from(WORDS), max_size=12))
    events = speaker.beginning + b"".join(_last_event(speaker.beginning, word) for word in words) + speaker.end
    cuts = sorted(draw(st.lists(st.integers(0, len(events)), max_size=20)))
    pieces: list[bytes | None] = [
        events[start:end] for start, end in zip([0, *cuts], [*cuts, len(events)], strict=True) if start < end
    ]
    for at in draw(st.lists(st.integers(0, len(pieces)), max_size=3)):
        pieces.insert(at, None)
    return name, pieces


@given(
    streams(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([frozenset[str](), frozenset({"manage_scratchpad"})]),
    st.lists(st.booleans(), max_size=20),
    st.lists(st.booleans(), max_size=20),
)
@settings(max_examples=400, deadline=None)
def test_the_client_gets_the_same_stream(
    drawn: tuple[str, list[bytes | None]],
    has_tags: bool,
    strips: bool,
    tools: frozenset[str],
    ready: list[bool],
    quick: list[bool],
) -> None:
    name, pieces = drawn
    view = ClientView(tags=TagKinds(terse=has_tags, state=has_tags), strip_usage=strips)

    async def both() -> None:
        expected = await relayed(name, view, tools, pieces, None)
        assert await relayed(name, view, tools, pieces, ready, quick) == expected

    asyncio.run(both())


async def test_a_failure_while_an_event_is_read_ends_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = ClientStream(dialect_named("openai_chat"), 4000, ClientView())
    direct = DirectRelay(stream, 60)
    direct.write_to(Client(iter(())))

    def fail(chunk: bytes) -> bytes:
        raise ValueError("unreadable")

    monkeypatch.setattr(stream, "feed", fail)
    host = cast(UpstreamReply, Host(iter([b"data: {}\n\n", b"data: {}\n\n"])))
    with pytest.raises(ValueError, match="unreadable"):
        await anext(aiter(iter_until_terminal_event(host, stream.end, 60, direct)))


async def test_what_came_before_a_break_is_not_lost() -> None:
    stream = ClientStream(dialect_named("openai_chat"), 4000, ClientView())
    direct = DirectRelay(stream, 60)
    direct.write_to(Client(iter([True, False])))
    host = cast(UpstreamReply, Host(iter([b"data: {}\n\n", b'data: {"id":"x"}\n\n']), breaks=True))
    chunks = iter_until_terminal_event(host, stream.end, 60, direct)
    assert await anext(chunks) == b'data: {"id":"x"}\n\n'
    with pytest.raises(UpstreamUnavailable):
        await anext(chunks)


@by_kind
async def test_spaced_events_wake_no_task(
    behind_raw: Service, raw: RawUpstream, key: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    speaker = KINDS[name]
    written: list[bytes] = []
    write = BodyWriter.write

    def note(self: BodyWriter, part: bytes) -> None:
        written.append(part)
        write(self, part)

    monkeypatch.setattr(BodyWriter, "write", note)
    pieces = [_last_event(speaker.beginning, f"word {number}") for number in range(5)]
    raw.answer(http_head(), speaker.beginning, 0.05, *(each for piece in pieces for each in (piece, 0.02)), speaker.end)
    async with wire(behind_raw) as line:
        await line.send(request_bytes(speaker.body, path=speaker.path, x_tersely_session=key))
        got = await line.until(b"\r\n0\r\n\r\n")
    assert _unchunked(got) == speaker.beginning + b"".join(pieces) + speaker.end
    # Of Gemini's events the client gets the data alone: they are changed on their way.
    assert len(written) >= (0 if name.startswith("gemini") else len(pieces) - 2)
    assert (await messages_by_number(behind_raw, key))[-1].finish != "client_left"


async def test_a_client_that_reads_slowly_loses_nothing(behind_raw: Service, raw: RawUpstream, key: str) -> None:
    text = "word " * 200
    events = [sse(f"{number} {text}") for number in range(6000)]
    stream = [sse("half a word", role=True), *events, sse(finish="stop") + DONE]
    raw.answer(http_head(), stream[0], 0.05, *events[:20], 0.05, *events[20:], stream[-1])
    async with wire(behind_raw) as line:
        await line.send(request_bytes(KINDS["openai_chat"].body, path=KINDS["openai_chat"].path, x_tersely_session=key))
        await line.until(b"half a word")
        await asyncio.sleep(1)
        got = await line.until(b"[DONE]\n\n\r\n0\r\n\r\n", limit=30)
    assert _unchunked(got) == b"".join(stream)
    stored = (await messages_by_number(behind_raw, key))[-1]
    assert f"5999 {text}".strip().encode() in stored.raw


async def test_bursts_lose_nothing(behind_raw: Service, raw: RawUpstream, key: str) -> None:
    """Pieces are too long to be sent on, and the next one comes before the call's task has its turn."""
    bursts = [b"".join(sse(f"{burst}-{number} {'word ' * 200}") for number in range(1500)) for burst in range(4)]
    stream = [sse("half a word", role=True), *bursts, sse(finish="stop") + DONE]
    raw.answer(http_head(), stream[0], 0.1, *(each for burst in bursts for each in (burst, 0.05)), stream[-1])
    async with wire(behind_raw) as line:
        await line.send(request_bytes(KINDS["openai_chat"].body, path=KINDS["openai_chat"].path, x_tersely_session=key))
        got = await line.until(b"[DONE]\n\n\r\n0\r\n\r\n", limit=30)
    assert _unchunked(got) == b"".join(stream)
