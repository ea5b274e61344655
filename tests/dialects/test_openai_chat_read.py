"""Reading requests and messages: what is refused, what is the provider's business, what survives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tersely.dialects.openai_chat.read import read_message, read_reply, read_request
from tersely.dialects.openai_chat.write import write_message
from tersely.domain.errors import InvalidRequest
from tersely.domain.messages import Media, Reasoning, Text, ToolCall, ToolResult, with_injected_text
from tests.builders import assistant, call, result, system, user

SHARED = Path(__file__).parents[3] / "shared" / "data"


def read(**members: Any) -> tuple[Any, ...]:
    return read_message(json.dumps(members).encode()).parts


def parts(*content: Any) -> tuple[Any, ...]:
    return read(role="user", content=list(content))


def test_a_request_is_read():
    body = (
        b'{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true,"stream_options":{"include_usage":true},'
        b'"n":2,"tools":[ {"x":1} ],"tool_choice":"auto","response_format":{"type":"json_object"},"temperature":1.0}'
    )
    request = read_request(body)
    assert (request.model, request.stream, request.include_usage, request.n) == ("m", True, True, 2)
    assert (request.tools, request.tool_choice) == (b'[ {"x":1} ]', b'"auto"')
    assert request.response_format == b'{"type":"json_object"}'
    assert [message.text for message in request.messages] == ["hi"]
    assert request.unreadable is None


def test_absent_members_and_nulls_read_the_same():
    plain = read_request(b'{"messages":[]}')
    nulls = b'{"messages":[],"model":null,"stream":null,"stream_options":null,"n":null,"tools":null,"tool_choice":null}'
    assert read_request(nulls) == plain
    assert (plain.model, plain.messages, plain.stream, plain.n, plain.tools) == ("", (), False, 1, b"")


@pytest.mark.parametrize(
    ("body", "field", "text"),
    [
        (b"", None, "not valid JSON"),
        (b'{"messages":[}', None, "not valid JSON"),
        (b'{"messages":[]} x', None, "not valid JSON"),
        (b"[]", None, "expected `object`"),
        (b'{"messages":[],"x":"\xff"}', None, "not valid UTF-8 (byte 20)"),
        (b"{}", "messages", "required"),
        (b'{"x":"\\ud800"}', "messages", "required"),
        (b'{"messages":"hi"}', "messages", "expected `array`"),
        (b'{"messages":{"a":"\\ud800"}}', "messages", "expected `array`"),
        (b'{"messages":[],"model":5}', "model", "expected `str"),
        (b'{"messages":[],"stream":"yes"}', "stream", "expected `bool"),
        (b'{"messages":[],"stream":"yes","x":"\\ud800"}', "stream", "expected `bool"),
        (b'{"messages":[],"stream_options":[]}', "stream_options", "expected `object"),
        (b'{"messages":[],"n":1.5}', "n", "expected `int"),
        (b'{"messages":' + b"[" * 200_000, None, "too deep"),
        (b'{"messages":[' + b'{"a":' * 200_000 + b"1" + b"}" * 200_000 + b"]}", None, "too deep"),
        (b'{"y":"\\ud800","messages":[],"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}", None, "too deep"),
    ],
)
def test_malformed_requests_are_refused(body: bytes, field: str | None, text: str):
    with pytest.raises(InvalidRequest) as caught:
        read_request(body)
    assert caught.value.field == field
    assert text in caught.value.detail


@pytest.mark.parametrize(
    "message",
    [b'{"role":"wizard","content":"x"}', b'{"content":"x"}', b'"hi"', b"null", b'{"role":"user","content":5}',
     b'{"role":"user","content":"\\ud800","tool_calls":7}', b'{"role":"assistant","tool_calls":[1]}', b'{"role":5}']
)  # fmt: skip
def test_unreadable_messages_are_left_to_the_provider(message: bytes):
    request = read_request(b'{"model":"m","stream":true,"messages":[{"role":"user","content":"x"},' + message + b"]}")
    assert request.unreadable
    assert request.messages == ()
    assert request.stream


def test_odd_characters_and_numbers_survive_in_raw_and_text():
    raw = b'{"role":"user","content":"a\\u0000\\ud800b","n":1.0,"m":1,"big":123456789012345678901234567890,"role2":1e5}'
    (message,) = read_request(b'{"messages":[ ' + raw + b' ],"seed":1.0}').messages
    assert message.raw == raw
    assert message.text == "a\x00\ud800b"


@pytest.mark.parametrize(
    "message",
    [user("a"), user("ä\ud800\x00"), system("s"), assistant("x", call("c1", "f", {"a": 1})), assistant(None, call("c1"),
     call("c2", "g", "not json")), assistant(""), result("c1", "ok"), result("function_call:f", "old style"),
     assistant(None, call("function_call:f", "f", "{}"))]
)  # fmt: skip
def test_written_messages_read_the_same(message: Any):
    assert read_message(message.raw) == message
    assert write_message(message) == message.raw


def test_content_is_read():
    assert read(role="user", content="a") == parts({"type": "text", "text": "a"}) == (Text(text="a"),)
    assert read(role="user", content=None) == read(role="user") == read(role="user", content="") == ()
    assert parts({"type": "text", "text": ""}) == ()
    assert parts("a", {"type": "text", "text": "b", "cache_control": {}}) == (Text(text="a"), Text(text="b"))


def test_media_are_read():
    (image,) = parts({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "low"}})
    assert (image.kind, image.detail, len(image.digest)) == ("image", "low", 32)
    assert parts({"type": "image_url", "image_url": "data:image/png;base64,AA"})[0].digest == image.digest
    (other,) = parts({"type": "image_url", "image_url": {"url": "http://x/y.png"}})
    assert other.digest != image.digest
    kinds = parts(
        {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
        {"type": "file", "file": {"file_id": "f"}},
        {"type": "hologram", "hologram": 1},
    )
    assert [part.kind for part in kinds] == ["audio", "file", "other"]
    hologram = parts({"type": "hologram", "hologram": 2})
    assert hologram != kinds[2:]
    assert read(role="assistant", audio={"id": "a1"}) == (Media(kind="audio", digest="a1"),)


def test_calls_and_results_are_read():
    made = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1.0}'}}
    assert read(role="assistant", content=None, tool_calls=[made]) == (
        ToolCall(id="a", name="f", arguments='{"x": 1.0}'),
    )
    custom = {"id": "b", "type": "custom", "custom": {"name": "g", "input": "free text"}}
    assert read(role="assistant", tool_calls=[custom]) == (ToolCall(id="b", name="g", arguments="free text"),)
    as_object = {"id": "a", "function": {"name": "f", "arguments": {"x": 1}}}
    assert read(role="assistant", tool_calls=[as_object]) == (ToolCall(id="a", name="f", arguments='{"x":1}'),)
    old = read(role="assistant", content=None, function_call={"name": "f", "arguments": "{}"})
    assert old == (ToolCall(id="function_call:f", name="f", arguments="{}"),)
    assert read(role="function", name="f", content="r") == (ToolResult(call_id="function_call:f", text="r"),)
    listed = read(
        role="tool", tool_call_id="a", content=[{"type": "text", "text": "x"}, {"type": "image_url", "image_url": "y"}]
    )
    assert listed == (ToolResult(call_id="a", text="x\n[image]"),)
    assert read(role="tool", tool_call_id="a", content=None) == (ToolResult(call_id="a", text=""),)
    assert read(role="assistant", content="x", tool_calls=None, function_call=None) == (Text(text="x"),)


@pytest.mark.parametrize(
    "members",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm", "reasoning_details": [{"type": "reasoning.text", "text": "hm"}]},
        {"reasoning_details": [{"type": "reasoning.summary", "summary": "hm"}]},
    ],
)
def test_reasoning_comes_first_and_once(members: dict[str, Any]):
    assert read(role="assistant", content="x", **members) == (Reasoning(text="hm"), Text(text="x"))


@pytest.mark.parametrize(
    "members",
    [{"content": None, "refusal": "no"}, {"refusal": "no"}, {"content": [{"type": "refusal", "refusal": "no"}]}],
)
def test_refusal_is_read_as_text(members: dict[str, Any]):
    assert read(role="assistant", **members) == (Text(text="no", is_refusal=True),)


def test_a_reply_without_a_role():
    assert read_reply(b'{"content":"x"}').role == "assistant"


@pytest.mark.parametrize("path", sorted(SHARED.glob("transcripts/*.jsonl")), ids=lambda path: path.stem)
def test_recorded_conversations_are_understood(path: Path):
    for line in path.read_text().splitlines():
        for message in json.loads(line)["messages"]:
            wire = {key: value for key, value in message.items() if not key.startswith("x_")}
            raw = json.dumps(wire, ensure_ascii=False).encode()
            found = read_message(raw)
            assert found.raw == raw
            assert [each.id for each in found.calls] == [each["id"] for each in wire.get("tool_calls") or ()]
            if isinstance(wire.get("content"), str) and found.role != "tool":
                assert with_injected_text(found).text.replace("\n", "") == wire["content"].replace("\n", "")


def test_recorded_requests_are_understood():
    paths = sorted(SHARED.glob("wire/requests/openai*.chat/*.json"))
    if not paths:
        pytest.skip(f"the recorded provider traffic is not there: {SHARED}")
    for path in paths:
        body = path.read_bytes()
        request = read_request(body)
        assert request.unreadable is None, path
        assert len(request.messages) == len(json.loads(body)["messages"])
