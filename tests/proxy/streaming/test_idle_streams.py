"""Streams in which nothing happens for a while, or nothing more at all: every dialect, in rounds with tools too."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tersely.dialects.registry import DIALECTS
from tests.conftest import Database
from tests.proxy.dialects.test_dialects_streaming import MESSAGE, SPEAKERS, Speaker, event
from tests.support.http import request_bytes, wire
from tests.support.loops import eventually, until
from tests.support.rows import messages_by_number
from tests.support.services import FROM_THE_START, Service, serve
from tests.support.upstreams import DONE, RawRequest, RawUpstream, http_head, sse

ARGUMENTS = '{"operation": "read"}'
NAME = "manage_scratchpad"


def _wrapped(stream: bytes) -> bytes:
    lines = [line for line in stream.split(b"\r\n") if line]
    return b"".join(b'data: {"response":' + line.removeprefix(b"data: ") + b"}\r\n\r\n" for line in lines)


GEMINI = SPEAKERS["gemini"]
KINDS: dict[str, Speaker] = {
    **SPEAKERS,
    "openai_chat": Speaker(
        path="/v1/chat/completions",
        request={"model": "m", "stream": True, "messages": [{"role": "user", "content": "hello"}]},
        beginning=sse("half a word", role=True),
        end=sse(finish="stop") + DONE,
        error=b'data: {"error":',
        heartbeat=b": keep-alive",
        overflow=b"",
    ),
    "gemini_gca": replace(
        GEMINI,
        path="/v1internal:streamGenerateContent?alt=sse",
        request={"model": "m", "project": "p", "request": GEMINI.request},
        beginning=_wrapped(GEMINI.beginning),
        end=_wrapped(GEMINI.end),
    ),
}
by_kind = pytest.mark.parametrize("name", KINDS)
_FUNCTION = {"name": NAME, "arguments": ARGUMENTS}
_USE = {"type": "tool_use", "id": "toolu_1", "name": NAME, "input": {}}
_ITEM = {"id": "fc_1", "type": "function_call", "status": "completed", "call_id": "call_1", **_FUNCTION}
_PARTS = [{"functionCall": {"name": NAME, "args": json.loads(ARGUMENTS)}}]
_GENERATED = event(
    {"candidates": [{"content": {"parts": _PARTS, "role": "model"}, "finishReason": "STOP", "index": 0}]},
    newline=b"\r\n",
)
# A round in which the model does nothing but call a tool of ours.
CALLS: dict[str, bytes] = {
    "openai_chat": b'data: {"id":"c1","choices":[{"index":0,"delta":{"role":"assistant","content":null,"tool_calls":'
    + json.dumps([{"index": 0, "id": "call_1", "type": "function", "function": _FUNCTION}]).encode()
    + b"}}]}\n\n"
    + sse(finish="tool_calls")
    + DONE,
    "anthropic": b"".join(
        event(each, named=True)
        for each in (
            {"type": "message_start", "message": MESSAGE},
            {"type": "content_block_start", "index": 0, "content_block": _USE},
            {
                "type": "content_block_delta",
                "index": 0,
                "delta": {"type": "input_json_delta", "partial_json": ARGUMENTS},
            },
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 1}},
            {"type": "message_stop"},
        )
    ),
    "openai_responses": b"".join(
        event(each, named=True)
        for each in (
            {"type": "response.created", "response": {"id": "r", "output": []}},
            {"type": "response.output_item.added", "output_index": 0, "item": {**_ITEM, "arguments": ""}},
            {
                "type": "response.function_call_arguments.delta",
                "item_id": "fc_1",
                "output_index": 0,
                "delta": ARGUMENTS,
            },
            {
                "type": "response.function_call_arguments.done",
                "item_id": "fc_1",
                "output_index": 0,
                "arguments": ARGUMENTS,
            },
            {"type": "response.output_item.done", "output_index": 0, "item": _ITEM},
            {
                "type": "response.completed",
                "response": {"id": "r", "status": "completed", "output": [_ITEM], "error": None},
            },
        )
    ),
    "gemini": _GENERATED,
    "gemini_gca": _wrapped(_GENERATED),
}


@pytest.fixture(scope="module")
def offering(store: Database, raw: RawUpstream) -> Iterator[Service]:
    """With tools of its own in every chat."""
    with serve(
        store, raw.url, strategy="window", epoch=FROM_THE_START, instructions="off", heartbeat=0.3, idle_timeout=1.5
    ) as running:
        yield running


def play(raw: RawUpstream, *rounds: tuple[bytes | float, ...]) -> list[RawRequest]:
    """Each request gets the next of ``rounds``, with pauses; the requests as they come in."""
    seen: list[RawRequest] = []
    raw.gone.clear()

    async def handler(request: RawRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(request)
        for piece in (http_head(), *rounds[len(seen) - 1]):
            if isinstance(piece, bytes):
                writer.write(piece)
                await writer.drain()
                continue
            try:
                async with asyncio.timeout(piece):
                    left = not await reader.read(1)
            except TimeoutError:
                continue
            except ConnectionError:
                left = True
            if left:
                raw.gone.set()
                return

    raw.handler = handler
    return seen


def check_only(got: bytes, speaker: Speaker, stream: bytes) -> None:
    """Nothing but the host's own events, and the heartbeats that this dialect's clients bear."""
    body = _unchunked(got)
    if speaker.heartbeat:
        assert speaker.heartbeat in body
        whole = DIALECTS[_dialect_of(speaker)].streaming.heartbeat
        assert body.replace(whole, b"") == stream.replace(whole, b"")
    else:
        assert body == stream
        assert not [line for line in body.splitlines() if line[:1] == b":" or line.startswith(b"event")]


def _dialect_of(speaker: Speaker) -> Any:
    return next(name for name, each in KINDS.items() if each.path == speaker.path)


def _unchunked(got: bytes) -> bytes:
    rest = got.partition(b"\r\n\r\n")[2]
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size or b"0", 16)
        body, rest = body + rest[:length], rest[length + 2 :]
    return body


async def ask(service: Service, speaker: Speaker, key: str, mark: bytes) -> bytes:
    """All that comes until ``mark``, with its chunk."""
    async with wire(service) as line:
        await line.send(request_bytes(speaker.body, path=speaker.path, x_tersely_session=key))
        return await line.until(mark)


LAST_CHUNK = b"\r\n0\r\n\r\n"


@by_kind
@pytest.mark.parametrize("is_offered", [False, True])
async def test_a_slow_host(
    behind_raw: Service, offering: Service, raw: RawUpstream, key: str, name: str, is_offered: bool
) -> None:
    speaker = KINDS[name]
    play(raw, (speaker.beginning, 0.8, speaker.end))
    got = await ask(offering if is_offered else behind_raw, speaker, key, LAST_CHUNK)
    check_only(got, speaker, speaker.beginning + speaker.end)
    assert got.endswith(LAST_CHUNK)
    assert (speaker.heartbeat or b"") in got


@by_kind
async def test_a_slow_host_in_a_later_round(offering: Service, raw: RawUpstream, key: str, name: str) -> None:
    speaker = KINDS[name]
    seen = play(raw, (CALLS[name],), (0.8, speaker.beginning, 0.8, speaker.end))
    got = await ask(offering, speaker, key, LAST_CHUNK)
    assert len(seen) == 2
    body = _unchunked(got)
    assert b"half a word" in body
    assert NAME.encode() not in body
    if speaker.heartbeat:
        assert body.count(speaker.heartbeat) >= 2
    else:
        lines = [line for line in body.splitlines() if line]
        assert all(line.startswith(b"data: {") for line in lines)


@by_kind
@pytest.mark.parametrize(
    "place", ["before the first byte", "in the middle", "in a later round", "before a later round"]
)
async def test_a_client_that_goes_away_stops_the_host_within_a_second(
    offering: Service, raw: RawUpstream, key: str, name: str, place: str
) -> None:
    speaker = KINDS[name]
    rounds: dict[str, tuple[tuple[bytes | float, ...], ...]] = {
        "before the first byte": ((30.0,),),
        "in the middle": ((speaker.beginning, 30.0),),
        "in a later round": ((CALLS[name],), (speaker.beginning, 30.0)),
        "before a later round": ((CALLS[name],), (30.0,)),
    }
    seen = play(raw, *rounds[place])
    has_words = place.startswith("in ")
    async with wire(offering) as line:
        await line.send(request_bytes(speaker.body, path=speaker.path, x_tersely_session=key))
        if has_words:
            await line.until(b"half a word")
        await until(lambda: len(seen) == len(rounds[place]))
        await asyncio.sleep(0.1)
        assert not raw.gone.is_set()
    await until(raw.gone.is_set, limit=1.0)

    if has_words:

        async def is_kept() -> bool:
            return any(b"half a word" in each.raw for each in await messages_by_number(offering, key))

        await eventually(is_kept)
        assert (await messages_by_number(offering, key))[-1].finish == "client_left"


@by_kind
@pytest.mark.parametrize("is_later", [False, True])
async def test_a_host_that_breaks_off(offering: Service, raw: RawUpstream, key: str, name: str, is_later: bool) -> None:
    speaker = KINDS[name]
    seen: list[RawRequest] = []

    async def handler(request: RawRequest, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(request)
        if is_later and len(seen) == 1:
            writer.write(http_head() + CALLS[name])
            return
        # The length is a lie: there is more to come that never does.
        head = http_head().replace(b"\r\n\r\n", b"\r\ncontent-length: 100000\r\n\r\n")
        writer.write(head + speaker.beginning)
        await writer.drain()

    raw.handler = handler
    got = await ask(offering, speaker, key, LAST_CHUNK)
    body = _unchunked(got)
    assert b"half a word" in body
    assert speaker.error in body.partition(b"half a word")[2]
    if not speaker.heartbeat:
        assert not [line for line in body.splitlines() if line and not line.startswith(b"data: {")]
    stored = await messages_by_number(offering, key)
    assert b"half a word" in stored[-1].raw
    assert stored[-1].finish == "interrupted"
