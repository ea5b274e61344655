"""Replies without end, or longer than what is read of them: streamed and whole, packed and not, in every dialect."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Iterator

import pytest

from tersely.store.db.connection import Database as Store
from tests.conftest import Database
from tests.proxy.streaming.test_idle_streams import KINDS
from tests.support.dialect_wires import WIRES
from tests.support.http import body_of, post, request_bytes, wire
from tests.support.loop_time import callback_times
from tests.support.loops import eventually
from tests.support.rows import messages_by_number
from tests.support.services import Service, serve
from tests.support.tenants import tenant
from tests.support.upstreams import DONE, RawRequest, RawUpstream, http_head, sse

KIB = 1024
MIB = 1024 * KIB
LIMIT = 128 * KIB
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module", params=["slim", "window", "full"])
def limited(request: pytest.FixtureRequest, store: Database, raw: RawUpstream) -> Iterator[Service]:
    """A service that reads 128 KiB of a reply."""
    with serve(store, raw.url, strategy=request.param, max_reply=LIMIT) as running:
        yield running


def whole_body(text: str) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return json.dumps({"id": "c", "object": "chat.completion", "model": "m", "choices": [choice]}).encode()


@pytest.mark.parametrize("name", KINDS)
async def test_the_rest_of_a_long_stream_passes_through_unread(
    limited: Service, raw: RawUpstream, key: str, name: str
) -> None:
    speaker = KINDS[name]
    more = _more_of(speaker.beginning)
    stream = [speaker.beginning, *[more] * (4 * LIMIT // len(more)), speaker.end]
    raw.answer(http_head(), *stream)
    answer = await post(limited, speaker.body, path=speaker.path, X_Tersely_Session=key)

    assert answer.body == b"".join(stream)
    question, reply = await messages_by_number(limited, key)
    assert (question.role, reply.role, reply.finish) == ("user", "assistant", "oversized")
    assert b"half a word" in reply.raw
    assert len(reply.raw) < 2 * LIMIT


def _more_of(beginning: bytes) -> bytes:
    """The events of ``beginning`` that carry its words."""
    mark = b"\r\n\r\n" if b"\r\n\r\n" in beginning else b"\n\n"
    return b"".join(event + mark for event in beginning.split(mark) if b"half a word" in event)


async def test_a_long_stream_among_tools_of_tersely(limited: Service, raw: RawUpstream, key: str) -> None:
    more = sse("some words here for you ")
    stream = [sse(role=True), *[more] * (4 * LIMIT // len(more)), sse(finish="stop"), DONE]
    raw.answer(http_head(), *stream)
    answer = await post(limited, body_of("hello", stream=True, tools=[TOOL]), X_Tersely_Session=key)

    assert answer.body == b"".join(stream)
    assert [each.finish for each in await messages_by_number(limited, key)] == [None, "oversized"]


async def test_a_long_whole_reply_passes_through_unread(limited: Service, raw: RawUpstream, key: str) -> None:
    body = whole_body("some words " * (4 * LIMIT))
    raw.answer(http_head("application/json"), body)
    answer = await post(limited, body_of("hello"), X_Tersely_Session=key)

    assert (answer.status, answer.body) == (200, body)
    question, beginning = await messages_by_number(limited, key)
    assert (question.role, beginning.finish, beginning.status) == ("user", "unread", "superseded")
    assert body.startswith(json.loads(beginning.raw).encode())


async def test_endless_stream_does_not_block_other_calls(store: Database, raw: RawUpstream, key: str) -> None:
    more = sse("some words here for you " * 2000)

    async def endless(_: RawRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        del reader
        writer.write(http_head() + sse(role=True))
        while True:
            writer.write(more)
            await writer.drain()

    raw.handler = endless
    with serve(store, raw.url, max_reply=4 * MIB) as service, callback_times(service) as times:
        async with wire(service) as line:
            await line.send(request_bytes(body_of("hello", stream=True), x_tersely_session=key))
            read = 0
            async with asyncio.timeout(20):
                while read < 24 * MIB:
                    read += len(await line.reader.read(MIB))

        async def is_stored() -> bool:
            return len(await messages_by_number(service, key)) == 2

        await eventually(is_stored)
    assert [each.finish for each in await messages_by_number(service, key)] == [None, "oversized"]
    assert times.worst[0] < 0.02, times.worst


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_long_reply_does_not_block_other_calls(
    store: Database, raw: RawUpstream, key: str, *, is_streamed: bool
) -> None:
    text = "some words here for you " * (6 * MIB // 24)
    if is_streamed:
        events = [sse(text[start : start + 60 * KIB]) for start in range(0, len(text), 60 * KIB)]
        raw.answer(http_head(), sse(role=True), *events, sse(finish="stop"), DONE)
    else:
        raw.answer(http_head("application/json"), whole_body(text))
    with serve(store, raw.url) as service, callback_times(service) as times:
        await post(service, body_of("hello", stream=is_streamed), X_Tersely_Session=key)
    reply = (await messages_by_number(service, key))[1]
    assert reply.finish == "stop"
    assert json.loads(reply.raw)["content"] == text
    assert times.worst[0] < 0.02, times.worst


def _bomb(first: bytes) -> list[bytes]:
    """A packed stream that begins with ``first`` and stands for 64 MiB."""
    packer = zlib.compressobj(wbits=16 + zlib.MAX_WBITS)
    packed = packer.compress(first) + packer.flush(zlib.Z_SYNC_FLUSH)
    for _ in range(64):
        packed += packer.compress(b"\n" * MIB)
    return [packed + packer.flush()]


@pytest.mark.parametrize("name", KINDS)
async def test_a_packed_stream_is_bounded(limited: Service, raw: RawUpstream, key: str, name: str) -> None:
    speaker = KINDS[name]
    raw.answer(http_head(content_encoding="gzip"), *_bomb(speaker.beginning))
    answer = await post(limited, speaker.body, path=speaker.path, X_Tersely_Session=key)

    assert b"half a word" in answer.body
    assert len(answer.body) < LIMIT + 4 * KIB
    assert b"compressed reply is over" in answer.body
    assert [each.finish for each in await messages_by_number(limited, key)] == [None, "interrupted"]


@pytest.mark.parametrize("dialect", WIRES)
async def test_a_packed_whole_reply_is_bounded(limited: Service, raw: RawUpstream, key: str, dialect: str) -> None:
    packed = gzip.compress(whole_body(" " * 64 * MIB))
    raw.answer(http_head("application/json", content_encoding="gzip"), packed)
    answer = await WIRES[dialect].send(limited, "hello", X_Tersely_Session=key)

    assert answer.status == 502
    assert b"compressed reply is over" in answer.body


@pytest.mark.parametrize("name", KINDS)
async def test_a_stream_packed_event_by_event_is_relayed_whole(
    limited: Service, raw: RawUpstream, key: str, name: str
) -> None:
    speaker = KINDS[name]
    stream = [speaker.beginning, *[_more_of(speaker.beginning)] * 20, speaker.end]
    raw.answer(http_head(content_encoding="gzip"), *[gzip.compress(each) for each in stream])
    answer = await post(limited, speaker.body, path=speaker.path, X_Tersely_Session=key)

    assert answer.body == b"".join(stream)
    assert b"half a word" in (await messages_by_number(limited, key))[1].raw


@pytest.mark.parametrize("name", ["openai_chat", "openai_responses", "anthropic"])
async def test_a_long_event_under_the_operators_key_does_not_block_other_calls(
    store: Database, raw: RawUpstream, keyring: Store, name: str
) -> None:
    """The stream is searched for ids, although nothing of the call is stored."""
    speaker = KINDS[name]
    event = _more_of(speaker.beginning).replace(b"half a word", b"half a word " * MIB)
    raw.answer(http_head(), speaker.beginning, event, speaker.end)
    keys = {"openai_api_key": "sk-one", "anthropic_api_key": "sk-two"}
    caller = await tenant(keyring)
    with serve(store, raw.url, auth="keys", **keys) as service, callback_times(service) as times:
        answer = await post(service, speaker.body, path=speaker.path, X_Tersely_Key=caller.key, X_Tersely_Bypass="true")
    assert answer.body == speaker.beginning + event + speaker.end
    assert times.worst[0] < 0.02, times.worst
