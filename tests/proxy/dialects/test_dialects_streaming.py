"""Streams and errors of every dialect: ends that wait for the disk, breaks, silence, overflow."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import pytest

from tersely.dialects.registry import dialect_named
from tersely.service.proxy.streams.stream_end import terminal_detector, whole_events
from tests.support.http import post, request_bytes, wire
from tests.support.rows import messages_by_number
from tests.support.services import Service
from tests.support.upstreams import RawRequest, RawUpstream, http_head


def event(data: dict[str, Any], *, named: bool = False, newline: bytes = b"\n") -> bytes:
    head = b"event: " + data["type"].encode() + newline if named else b""
    return head + b"data: " + json.dumps(data, separators=(",", ":")).encode() + newline * 2


def _generated(text: str, **more: Any) -> dict[str, Any]:
    return {"candidates": [{"content": {"parts": [{"text": text}], "role": "model"}, **more, "index": 0}]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Speaker:
    """A dialect on the wire: a request, a reply's beginning, its end, and how an error is told in a stream."""

    path: str
    request: dict[str, Any]
    beginning: bytes
    end: bytes
    error: bytes
    heartbeat: bytes
    overflow: bytes
    hangs: bool = True

    @property
    def body(self) -> bytes:
        return json.dumps(self.request).encode()


MESSAGE = {"id": "m1", "type": "message", "role": "assistant", "model": "m", "content": [], "usage": {}}
ITEM = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed"}
PART = {"type": "output_text", "text": "half a word", "annotations": []}
SPEAKERS = {
    "anthropic": Speaker(
        path="/v1/messages",
        request={"model": "m", "max_tokens": 9, "stream": True, "messages": [{"role": "user", "content": "hello"}]},
        beginning=event({"type": "message_start", "message": MESSAGE}, named=True)
        + event({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}, named=True)
        + event(
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "half a word"}},
            named=True,
        ),
        end=event({"type": "content_block_stop", "index": 0}, named=True)
        + event(
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 1}}, named=True
        )
        + event({"type": "message_stop"}, named=True),
        error=b'event: error\ndata: {"type":"error","error":{"type":"api_error"',
        heartbeat=b"event: ping",
        overflow=b'{"type":"error","error":{"type":"invalid_request_error","message":"prompt is too long: 210000 '
        b'tokens > 200000 maximum"}}',
    ),
    "openai_responses": Speaker(
        path="/v1/responses",
        request={"model": "m", "stream": True, "input": [{"role": "user", "content": "hello"}]},
        beginning=event({"type": "response.created", "response": {"id": "r", "output": []}}, named=True)
        + event({"type": "response.output_item.added", "output_index": 0, "item": {**ITEM, "content": []}}, named=True)
        + event(
            {
                "type": "response.content_part.added",
                "output_index": 0,
                "content_index": 0,
                "part": {**PART, "text": ""},
            },
            named=True,
        )
        + event(
            {"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "delta": "half a word"},
            named=True,
        ),
        end=event(
            {"type": "response.output_item.done", "output_index": 0, "item": {**ITEM, "content": [PART]}}, named=True
        )
        + event(
            {
                "type": "response.completed",
                "response": {"id": "r", "status": "completed", "output": [{**ITEM, "content": [PART]}], "error": None},
            },
            named=True,
        ),
        error=b"event: error\ndata: ",
        heartbeat=b": keep-alive",
        overflow=b'{"error":{"message":"Your input exceeds the context window of this model.","type":'
        b'"invalid_request_error","param":"input","code":"context_length_exceeded"}}',
    ),
    "gemini": Speaker(
        path="/v1beta/models/m:streamGenerateContent?alt=sse",
        request={"contents": [{"role": "user", "parts": [{"text": "hello"}]}]},
        beginning=event(_generated("half a word"), newline=b"\r\n"),
        end=event(_generated(".", finishReason="STOP"), newline=b"\r\n"),
        error=b'data: {"error":{"code":50',
        heartbeat=b"",
        overflow=b'{"error":{"code":400,"message":"The input token count (1100000) exceeds the maximum number of '
        b'tokens allowed (1048576).","status":"INVALID_ARGUMENT"}}',
        hangs=False,
    ),
}


@pytest.mark.parametrize("name", SPEAKERS)
async def test_stream_ends_after_the_reply_is_stored(
    behind_raw: Service, raw: RawUpstream, key: str, name: str
) -> None:
    speaker = SPEAKERS[name]
    raw.answer(http_head(), speaker.beginning, 0.1, speaker.end, 1.2 if speaker.hangs else 0.0)
    async with wire(behind_raw) as line:
        await line.send(request_bytes(speaker.body, path=speaker.path, x_tersely_session=key))
        await line.until(b"half a word")
        assert speaker.end not in line.got
        await line.until(b"\r\n0\r\n\r\n", 1.0)
        stored = await messages_by_number(behind_raw, key)

    assert [each.role for each in stored] == ["user", "assistant"]
    assert stored[1].finish != "interrupted"


@pytest.mark.parametrize("name", SPEAKERS)
async def test_a_host_that_breaks_off(behind_raw: Service, raw: RawUpstream, key: str, name: str) -> None:
    speaker = SPEAKERS[name]
    head = http_head().replace(b"connection: close", b"content-length: 99999\r\nconnection: close")
    raw.answer(head, speaker.beginning)
    answer = await post(behind_raw, speaker.body, path=speaker.path, X_Tersely_Session=key)

    assert b"half a word" in answer.body
    assert speaker.error in answer.body
    assert [each.finish for each in await messages_by_number(behind_raw, key)] == [None, "interrupted"]


@pytest.mark.parametrize("name", SPEAKERS)
async def test_heartbeats_during_silence(behind_raw: Service, raw: RawUpstream, key: str, name: str) -> None:
    speaker = SPEAKERS[name]
    raw.answer(http_head(), speaker.beginning, 0.8, speaker.end)
    answer = await post(behind_raw, speaker.body, path=speaker.path, X_Tersely_Session=key)

    if speaker.heartbeat:
        assert speaker.heartbeat in answer.body
    else:
        assert answer.body == speaker.beginning + speaker.end


@pytest.mark.parametrize("name", SPEAKERS)
async def test_an_overflow_is_mended(behind_raw: Service, raw: RawUpstream, key: str, name: str) -> None:
    speaker = SPEAKERS[name]
    seen = await _overflow(
        raw, http_head("application/json", status="400 Bad") + speaker.overflow, speaker.beginning + speaker.end
    )
    answer = await post(behind_raw, _long(name), path=speaker.path, X_Tersely_Session=key)

    assert answer.status == 200
    assert b"half a word" in answer.body
    assert len(seen) == 2
    assert len(seen[1].body) < len(seen[0].body)


async def test_an_overflow_that_a_stream_of_responses_tells(behind_raw: Service, raw: RawUpstream, key: str) -> None:
    speaker = SPEAKERS["openai_responses"]
    error = {"code": "context_length_exceeded", "message": "Your input exceeds the context window of this model."}
    created = event({"type": "response.created", "response": {"id": "r", "output": [], "error": None}}, named=True)
    failed = {"type": "response.failed", "response": {"id": "r", "status": "failed", "error": error, "output": []}}
    seen = await _overflow(raw, http_head() + created + event(failed, named=True), speaker.beginning + speaker.end)
    answer = await post(behind_raw, _long("openai_responses"), path=speaker.path, X_Tersely_Session=key)

    assert b"half a word" in answer.body
    assert b"response.failed" not in answer.body
    assert len(seen) == 2


async def _overflow(raw: RawUpstream, first: bytes, second: bytes) -> list[RawRequest]:
    seen: list[RawRequest] = []

    async def handler(request: RawRequest, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(request)
        writer.write(first if len(seen) == 1 else http_head() + second)
        await writer.drain()

    raw.handler = handler
    return seen


def _long(name: str) -> bytes:
    """A request with a history that can be reduced."""
    words = "the quick brown fox jumps over the lazy dog and goes on to the river bank " * 8
    texts = [(role, f"{role} {number}: {words}") for number in range(40) for role in ("user", "assistant")]
    texts.append(("user", "and the last question"))
    request = dict(SPEAKERS[name].request)
    if name == "gemini":
        roles = {"user": "user", "assistant": "model"}
        request["contents"] = [{"role": roles[role], "parts": [{"text": text}]} for role, text in texts]
    else:
        request["messages" if name == "anthropic" else "input"] = [
            {"role": role, "content": text} for role, text in texts
        ]
    return json.dumps(request).encode()


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("name", SPEAKERS)
def test_an_end_is_held_wherever_the_stream_is_cut(name: str, line_end: bytes) -> None:
    speaker = SPEAKERS[name]
    stream = (speaker.beginning + speaker.end).replace(b"\r\n", b"\n").replace(b"\n", line_end)
    for size in (1, 2, 3, 7, 64, len(stream)):
        end = terminal_detector(dialect_named(name).streaming)
        pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
        out = b"".join([end.hold_back(piece) for piece in pieces])
        assert out + end.held == stream
        assert b"message_stop" not in out
        assert b"response.completed" not in out
        assert b"finishReason" not in out
        assert end.held
        assert end.is_seen is speaker.hangs
        assert whole_events(out) == out  # so that an error may take the place of the end
