"""Overflows as each provider tells them, through the whole proxy: in refusals, under status 200, in later rounds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Database
from tests.proxy.streaming.test_idle_streams import CALLS
from tests.support.http import post
from tests.support.rows import messages_by_number, query
from tests.support.services import FROM_THE_START, Service, serve
from tests.support.upstreams import DONE, RawRequest, RawUpstream, http_head, sse

WORDS = "the quick brown fox jumps over the lazy dog and goes on to the river bank " * 8
FITS = "it fits, at last"
TURNS = 40


def events(*each: dict[str, Any]) -> bytes:
    """Named events, as Anthropic and the responses format have them."""
    return b"".join(b"event: %s\ndata: %s\n\n" % (one["type"].encode(), json.dumps(one).encode()) for one in each)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """One dialect: where it is asked, and how a history and a reply of words look in it."""

    path: str
    stream_path: str
    whole: bytes
    stream: bytes

    def body(self, turns: list[tuple[str, str]], *, streams: bool) -> bytes:
        """``turns`` are (role, text)."""
        if self.path.startswith("/v1beta"):
            named = {"user": "user", "assistant": "model"}
            return json.dumps(
                {"contents": [{"role": named[role], "parts": [{"text": text}]} for role, text in turns]}
            ).encode()
        listed = [{"role": role, "content": text} for role, text in turns]
        more = {"stream": True} if streams else {}
        if self.path == "/v1/responses":
            return json.dumps({"model": "m", "input": listed, **more}).encode()
        return json.dumps({"model": "m", "max_tokens": 100, "messages": listed, **more}).encode()


def _message(*content: dict[str, Any], stop: str | None) -> dict[str, Any]:
    usage = {"input_tokens": 9, "output_tokens": 1}
    return {
        "id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": list(content),
        "stop_reason": stop, "stop_sequence": None, "usage": usage,
    }  # fmt: skip


def _message_events(text: str, stop: str) -> bytes:
    words = (
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}},
        {"type": "content_block_stop", "index": 0},
    )
    return events(
        {"type": "message_start", "message": _message(stop=None)},
        {"type": "ping"},
        *(words if text else ()),
        {
            "type": "message_delta",
            "delta": {"stop_reason": stop, "stop_sequence": None},
            "usage": {"output_tokens": 1},
        },
        {"type": "message_stop"},
    )


def _response(status: str, *output: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": "resp_1", "object": "response", "status": status, "model": "m", "output": list(output), **more}


def _said(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [part]}


def _response_events(text: str) -> bytes:
    place = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    return events(
        {"type": "response.created", "response": _response("in_progress")},
        {"type": "response.output_item.added", "output_index": 0, "item": {**_said(""), "content": []}},
        {"type": "response.output_text.delta", **place, "delta": text},
        {"type": "response.output_item.done", "output_index": 0, "item": _said(text)},
        {"type": "response.completed", "response": _response("completed", _said(text))},
    )


def _json(value: object) -> bytes:
    return http_head("application/json") + json.dumps(value).encode()


def _candidate(text: str) -> dict[str, Any]:
    content = {"role": "model", "parts": [{"text": text}]}
    return {"candidates": [{"index": 0, "content": content, "finishReason": "STOP"}]}


_CHOICE = {"index": 0, "message": {"role": "assistant", "content": FITS}, "finish_reason": "stop"}
CHAT = Wire(
    path="/v1/chat/completions",
    stream_path="/v1/chat/completions",
    whole=_json({"id": "c1", "object": "chat.completion", "choices": [_CHOICE]}),
    stream=http_head() + sse(FITS, role=True) + sse(finish="stop") + DONE,
)
RESPONSES = Wire(
    path="/v1/responses",
    stream_path="/v1/responses",
    whole=_json(_response("completed", _said(FITS))),
    stream=http_head() + _response_events(FITS),
)
ANTHROPIC = Wire(
    path="/v1/messages",
    stream_path="/v1/messages",
    whole=_json(_message({"type": "text", "text": FITS}, stop="end_turn")),
    stream=http_head() + _message_events(FITS, "end_turn"),
)
GEMINI = Wire(
    path="/v1beta/models/m:generateContent",
    stream_path="/v1beta/models/m:streamGenerateContent?alt=sse",
    whole=_json(_candidate(FITS)),
    stream=http_head() + b"data: " + json.dumps(_candidate(FITS)).encode() + b"\r\n\r\n",
)


def wire_of(case: dict[str, Any]) -> Wire:
    """The dialect in which a provider said that."""
    if case["provider"] in {"anthropic", "vllm-anthropic-endpoint"}:
        return ANTHROPIC
    if case["provider"] in {"gemini", "vertex-gemini"}:
        return GEMINI
    return RESPONSES if b"response.failed" in case["body"].encode() else CHAT


def history() -> list[tuple[str, str]]:
    """Long enough that it can be reduced, short enough that it is sent whole at first."""
    turns: list[tuple[str, str]] = []
    for number in range(TURNS):
        turns += [("user", f"question {number}: {WORDS}"), ("assistant", f"answer {number}: {WORDS}")]
    return [*turns, ("user", "and the last question")]


async def play(
    service: Service, raw: RawUpstream, wire: Wire, session: str, *answers: bytes, streams: bool
) -> tuple[Any, list[RawRequest]]:
    """Send a long history; its tries are answered with ``answers``."""
    seen: list[RawRequest] = []

    async def handler(request: RawRequest, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(request)
        writer.write(answers[min(len(seen), len(answers)) - 1])
        await writer.drain()

    raw.handler = handler
    path = wire.stream_path if streams else wire.path
    body = wire.body(history(), streams=streams)
    answer = await post(service, body, path=path, X_Tersely_Session=session)
    return answer, seen


async def test_every_known_error_in_its_own_dialect(
    behind_raw: Service, raw: RawUpstream, shared_data: Path, key: str
) -> None:
    path = shared_data / "overflow_errors_dev.json"
    if not path.exists():
        pytest.skip(f"no {path}")
    wrong = []
    for case in json.loads(path.read_text()):
        streams = case["transport"] == "sse"
        wire, refusal_body = wire_of(case), case["body"].encode()
        kind = "text/event-stream" if streams else "application/json"
        refusal = http_head(kind, status=f"{case['status']} X", x_request_id=case["id"], retry_after="7") + refusal_body
        good = wire.stream if streams else wire.whole
        answer, seen = await play(behind_raw, raw, wire, f"{key}-{case['id']}", refusal, good, streams=streams)
        has_begun = wire is ANTHROPIC and case["category"] == "context_overflow_partial"
        if case["is_overflow"] and not has_begun:
            is_right = len(seen) == 2 and answer.status == 200 and FITS.encode() in answer.body
            is_right = is_right and len(seen[1].body) < len(seen[0].body)
        else:
            is_right = len(seen) == 1 and (answer.status, answer.body) == (case["status"], refusal_body)
            is_right = is_right and answer.headers["x-request-id"] == case["id"]
        if not is_right:
            wrong.append((case["id"], case["is_overflow"], len(seen), answer.status, answer.body[:80]))
    assert wrong == []


@pytest.mark.parametrize("streams", [False, True])
async def test_a_full_window_before_the_first_word_is_tried_with_less(
    behind_raw: Service, raw: RawUpstream, key: str, streams: bool
) -> None:
    stop = "model_context_window_exceeded"
    full = http_head() + _message_events("", stop) if streams else _json(_message(stop=stop))
    good = ANTHROPIC.stream if streams else ANTHROPIC.whole

    answer, seen = await play(behind_raw, raw, ANTHROPIC, key, full, good, streams=streams)

    assert len(seen) == 2
    assert len(seen[1].body) < len(seen[0].body)
    assert FITS.encode() in answer.body
    assert stop.encode() not in answer.body
    assert json.loads((await messages_by_number(behind_raw, key))[-1].raw)["content"][0]["text"] == FITS


async def test_overflow_error_after_a_long_preamble_is_recognised(
    behind_raw: Service, raw: RawUpstream, key: str
) -> None:
    pieces = _message_events("", "model_context_window_exceeded").split(b"event: ping")
    seen: list[RawRequest] = []

    async def handler(request: RawRequest, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(request)
        if len(seen) == 2:
            writer.write(ANTHROPIC.stream)
            return
        for piece in (http_head(), pieces[0], b"event: ping" + pieces[1]):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.05)

    raw.handler = handler
    answer = await post(behind_raw, ANTHROPIC.body(history(), streams=True), path="/v1/messages", X_Tersely_Session=key)

    assert len(seen) == 2
    assert FITS.encode() in answer.body


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("wire", [ANTHROPIC, CHAT], ids=["anthropic", "chat"])
async def test_after_a_full_window_in_mid_answer_the_next_context_is_smaller(
    behind_raw: Service, raw: RawUpstream, key: str, streams: bool, wire: Wire
) -> None:
    stop = "model_context_window_exceeded"
    if wire is ANTHROPIC:
        message = _message({"type": "text", "text": "It began"}, stop=stop)
        broken = _message_events("It began", stop) if streams else json.dumps(message).encode()
    else:
        choice = {"index": 0, "message": {"role": "assistant", "content": "It began"}, "finish_reason": stop}
        whole = {"id": "c1", "object": "chat.completion", "choices": [choice]}
        broken = sse("It began", role=True) + sse(finish=stop) + DONE if streams else json.dumps(whole).encode()
    head = http_head() if streams else http_head("application/json")

    answer, seen = await play(behind_raw, raw, wire, key, head + broken, streams=streams)
    assert len(seen) == 1
    assert answer.body == broken
    assert (await messages_by_number(behind_raw, key))[-1].finish == stop

    follow = [*history(), ("assistant", "It began"), ("user", "go on")]
    raw.answer(wire.stream if streams else wire.whole)
    before = len(raw.requests)
    body = wire.body(follow, streams=streams)
    again = await post(behind_raw, body, path=wire.path, X_Tersely_Session=key)
    assert FITS.encode() in again.body
    assert len(raw.requests) == before + 1
    assert len(raw.requests[-1].body) < 0.7 * len(seen[0].body)
    assert b"It began" in raw.requests[-1].body
    reasons = [row["reason"] for row in await query(behind_raw, EPOCHS, key)]
    assert reasons[-1] == "overflow"

    # It is told once: the call after that goes on in the same epoch.
    follow += [("assistant", FITS), ("user", "thanks")]
    await post(behind_raw, wire.body(follow, streams=streams), path=wire.path, X_Tersely_Session=key)
    assert [row["reason"] for row in await query(behind_raw, EPOCHS, key)] == reasons


EPOCHS = "SELECT reason FROM epochs WHERE session_id = $1 ORDER BY number"


async def test_a_full_window_in_mid_answer_is_known_to_a_service_that_remembers_nothing(
    behind_raw: Service, store: Database, raw: RawUpstream, key: str
) -> None:
    broken = _message_events("It began", "model_context_window_exceeded")
    _, seen = await play(behind_raw, raw, ANTHROPIC, key, http_head() + broken, streams=True)
    raw.answer(ANTHROPIC.whole)
    follow = [*history(), ("assistant", "It began"), ("user", "go on")]
    with serve(store, raw.url) as other:  # by lineage
        await post(other, ANTHROPIC.body(follow, streams=False), path="/v1/messages")
    assert len(raw.requests[-1].body) < 0.7 * len(seen[0].body)
    assert (await query(behind_raw, EPOCHS, key))[-1]["reason"] == "overflow"


# Later rounds

PAD = {"operation": "read"}


@pytest.fixture(scope="module")
def offering(store: Database, raw: RawUpstream) -> Iterator[Service]:
    """The service with tools of its own in every chat."""
    window = {"name": "window", "context_size": 100}
    settings: dict[str, Any] = {
        "strategy": json.dumps(window),
        "epoch": FROM_THE_START,
        "instructions": "off",
        "heartbeat": 0.3,
    }
    with serve(store, raw.url, **settings) as running:
        yield running


def calling(wire: Wire, *, streams: bool) -> bytes:
    """A reply that calls a tool of ours."""
    if wire in (RESPONSES, GEMINI):
        return http_head() + CALLS["gemini" if wire is GEMINI else "openai_responses"]
    if wire is ANTHROPIC:
        block: dict[str, Any] = {"type": "tool_use", "id": "toolu_1", "name": "manage_scratchpad", "input": {}}
        if not streams:
            return _json(_message({**block, "input": PAD}, stop="tool_use"))
        delta = {"type": "input_json_delta", "partial_json": json.dumps(PAD)}
        return http_head() + events(
            {"type": "message_start", "message": _message(stop=None)},
            {"type": "content_block_start", "index": 0, "content_block": block},
            {"type": "content_block_delta", "index": 0, "delta": delta},
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 1}},
            {"type": "message_stop"},
        )
    function = {"name": "manage_scratchpad", "arguments": json.dumps(PAD)}
    call = {"index": 0, "id": "call_1", "type": "function", "function": function}
    if not streams:
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        return _json({"id": "c1", "object": "chat.completion", "choices": [choice]})
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    chunk = {"id": "c1", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": message}]}
    return http_head() + b"data: " + json.dumps(chunk).encode() + b"\n\n" + sse(finish="tool_calls") + DONE


_TOO_LONG = {"message": "This model's maximum context length is 64000 tokens", "code": "context_length_exceeded"}
LATER = {
    "anthropic-stop": (ANTHROPIC, http_head() + _message_events("", "model_context_window_exceeded")),
    "anthropic-error": (
        ANTHROPIC,
        http_head()
        + events({"type": "error", "error": {"type": "invalid_request_error", "message": "prompt is too long"}}),
    ),
    "anthropic-400": (
        ANTHROPIC,
        http_head("application/json", status="400 X")
        + json.dumps(
            {"type": "error", "error": {"type": "invalid_request_error", "message": "prompt is too long"}}
        ).encode(),
    ),
    "responses-failed": (
        RESPONSES,
        http_head()
        + events(
            {"type": "response.created", "response": _response("in_progress")},
            {"type": "response.in_progress", "response": _response("in_progress")},
            {"type": "response.failed", "response": _response("failed", error=_TOO_LONG)},
        ),
    ),
    "gemini-event": (
        GEMINI,
        http_head()
        + b'data: {"error":{"code":400,"message":"The input token count (1100000) exceeds the maximum number of tokens '
        b'allowed (1048576).","status":"INVALID_ARGUMENT"}}\r\n\r\n',
    ),
    "chat-event": (CHAT, http_head() + b"data: " + json.dumps({"error": _TOO_LONG}).encode() + b"\n\n"),
}


@pytest.mark.parametrize("later", LATER)
async def test_an_overflow_in_a_later_streamed_round(offering: Service, raw: RawUpstream, key: str, later: str) -> None:
    wire, refusal = LATER[later]
    calls = calling(wire, streams=True)

    answer, seen = await play(offering, raw, wire, key, calls, refusal, wire.stream, streams=True)

    assert len(seen) == 3, answer.body
    assert len(seen[2].body) < len(seen[1].body)
    assert FITS.encode() in answer.body
    assert b"error" not in answer.body
    assert b"exceeded" not in answer.body
    assert b"manage_scratchpad" in seen[2].body
    assert [each.role for each in await messages_by_number(offering, key)][-3:] == ["assistant", "tool", "assistant"]


@pytest.mark.parametrize("wire", [ANTHROPIC, CHAT], ids=["anthropic", "chat"])
async def test_an_overflow_in_a_later_whole_round(offering: Service, raw: RawUpstream, key: str, wire: Wire) -> None:
    stop = "model_context_window_exceeded"
    full = _json(_message(stop=stop)) if wire is ANTHROPIC else _json({"error": _TOO_LONG})

    answer, seen = await play(offering, raw, wire, key, calling(wire, streams=False), full, wire.whole, streams=False)

    assert len(seen) == 3, answer.body
    assert len(seen[2].body) < len(seen[1].body)
    assert FITS.encode() in answer.body
    assert [each.role for each in await messages_by_number(offering, key)][-3:] == ["assistant", "tool", "assistant"]
