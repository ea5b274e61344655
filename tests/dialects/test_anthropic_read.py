"""Reading Anthropic's requests and messages: what is refused, what is the provider's business, what survives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tersely.dialects.anthropic.read import read_message, read_request, read_usage
from tersely.dialects.anthropic.write import write_message, write_request
from tersely.dialects.dialect import RequestPatch, Usage
from tersely.dialects.wire import raw_json
from tersely.domain.errors import InvalidRequest
from tersely.domain.history.chain import canonical, without_injected
from tersely.domain.history.pairing import prove_pairing
from tersely.domain.messages import Media, Message, Reasoning, Text, ToolCall, ToolResult
from tests.dialects.recordings import MISSING, client_requests, requests

REQUESTS = requests("anthropic.messages")
CLIENTS = client_requests("/v1/messages")


def read(role: str, *blocks: Any) -> Message:
    return read_message(json.dumps({"role": role, "content": list(blocks)}).encode())


def parts(role: str, *blocks: Any) -> tuple[Any, ...]:
    return read(role, *blocks).parts


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def result(call_id: str, content: Any = "ok") -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content}


def test_a_request_is_read():
    body = (
        b'{"model":"m","max_tokens":9,"system":[ {"type":"text","text":"S"} ],'
        b'"messages":[{"role":"user","content":"hi"}],'
        b'"stream":true,"tools":[ {"x":1} ],"tool_choice":{"type":"auto"},"stop_sequences":["a"],'
        b'"output_config":{"effort":"low","format":{"type":"json_schema"}}}'
    )
    request = read_request(body)
    assert (request.model, request.stream, request.include_usage, request.n) == ("m", True, True, 1)
    assert (request.tools, request.tool_choice, request.stop) == (b'[ {"x":1} ]', b'{"type":"auto"}', b'["a"]')
    assert request.response_format == b'{"type":"json_schema"}'
    assert request.max_tokens == 9
    assert [(each.role, each.text) for each in request.messages] == [("system", "S"), ("user", "hi")]
    assert request.messages[0].raw == b'{"system":[ {"type":"text","text":"S"} ]}'
    assert request.unreadable is None


def test_absent_members_and_nulls_read_the_same():
    plain = read_request(b'{"messages":[]}')
    nulls = b'{"messages":[],"model":null,"stream":null,"tools":null,"tool_choice":null,"metadata":null,"max_tokens":0}'
    assert read_request(nulls) == plain
    assert (plain.model, plain.messages, plain.stream, plain.tools, plain.ids) == ("", (), False, b"", {})


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        (b"", None, "not valid JSON"),
        (b'{"messages":[}', None, "not valid JSON"),
        (b"[]", None, "expected `object`"),
        (b'{"messages":[],"x":"\xff"}', None, "not valid UTF-8 (byte 20)"),
        (b"{}", "messages", "required"),
        (b'{"x":"\\ud800"}', "messages", "required"),
        (b'{"messages":"hi"}', "messages", "expected `array`"),
        (b'{"messages":{"a":"\\ud800"}}', "messages", "expected `array`"),
        (b'{"messages":[],"model":5}', "model", "expected `str"),
        (b'{"messages":[],"stream":"yes","x":"\\ud800"}', "stream", "expected `bool"),
        (b'{"messages":' + b"[" * 200_000, None, "too deep"),
    ],
)
def test_malformed_requests_are_refused(body: bytes, field: str | None, words: str):
    with pytest.raises(InvalidRequest) as caught:
        read_request(body)
    assert caught.value.field == field
    assert words in caught.value.detail


@pytest.mark.parametrize(
    "message",
    [
        b'{"role":"wizard","content":"x"}', b'{"content":"x"}', b'"hi"', b"null", b'{"role":"user","content":5}',
        b'{"role":"user","content":["x"]}', b'{"role":"user","content":"\\ud800","system":7}', b'{"role":5}',
    ],
)  # fmt: skip
def test_unreadable_messages_are_left_to_the_provider(message: bytes):
    request = read_request(b'{"model":"m","stream":true,"messages":[{"role":"user","content":"x"},' + message + b"]}")
    assert request.unreadable
    assert request.messages == ()
    assert request.stream


def test_odd_characters_and_numbers_survive_in_raw_and_text():
    raw = b'{"role":"user","content":"a\\u0000\\ud800b","n":1.0,"big":123456789012345678901234567890}'
    (message,) = read_request(b'{"messages":[ ' + raw + b' ],"temperature":1.0}').messages
    assert message.raw == raw
    assert message.text == "a\x00\ud800b"


def test_texts_are_read():
    assert parts("user", text("a", cache_control={})) == (Text(text="a"),)
    assert parts("user", text("")) == ()
    assert read_message(b'{"role":"user","content":"a"}').parts == (Text(text="a"),)
    assert read_message(b'{"role":"user","content":null}').parts == ()
    between = read_message(b'{"role":"system","content":"later"}')
    assert (between.role, between.text) == ("system", "later")


def test_thoughts_are_reasoning_and_no_part_of_the_identity():
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s"}
    reply = read("assistant", thinking, {"type": "redacted_thinking", "data": "x"}, text("a"))
    assert reply.parts == (Reasoning(text="hm", hidden=1), Reasoning(text="", hidden=1), Text(text="a"))
    assert canonical(reply) == canonical(read("assistant", text("a")))


def test_calls_and_results_are_read():
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1.0, "a": "é"}}
    assert parts("assistant", call) == (ToolCall(id="c", name="f", arguments='{"x":1.0,"a":"é"}'),)
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
    answered = read("user", result("c", [text("x"), image, text("y")]), result("d"), result("e", None))
    assert answered.role == "tool"
    assert not answered.starts_turn
    assert answered.results == (
        ToolResult(call_id="c", text="x\n[image]\ny"),
        ToolResult(call_id="d", text="ok"),
        ToolResult(call_id="e", text=""),
    )


def test_results_with_user_text_start_a_turn():
    both = read("user", result("c"), text("and now?"))
    assert (both.role, both.starts_turn, both.text) == ("user", True, "and now?")
    reminded = read("user", result("c"), text("<system-reminder>x</system-reminder>"))
    assert not reminded.starts_turn
    assert canonical(reminded) == canonical(read("user", result("c")))
    assert canonical(reminded) != canonical(read("user", result("c", "other")))


def test_media_are_read():
    source = {"type": "base64", "media_type": "image/gif", "data": "R0lGODlhBwAFAAAA"}
    (image,) = parts("user", {"type": "image", "source": source, "cache_control": {"type": "ephemeral"}})
    assert (image.kind, image.width, image.height) == ("image", 7, 5)
    kinds = parts(
        "user",
        {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}},
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "words"}, "title": "t"},
        {"type": "container_upload", "file_id": "f"},
        {"type": "hologram", "hologram": 1},
        {"type": "hologram", "hologram": 2},
    )
    assert [part.kind for part in kinds] == ["image", "file", "file", "other", "other"]
    assert len({part.digest for part in kinds}) == 5


def test_providers_own_tools_are_not_read_as_calls():
    search = {"type": "server_tool_use", "id": "srv", "name": "web_search", "input": {"query": "x"}}
    found = {"type": "web_search_tool_result", "tool_use_id": "srv", "content": [{"encrypted_content": "E"}]}
    reply = read("assistant", search, found, text("a"))
    assert not reply.calls
    assert not reply.results
    assert [type(part) for part in reply.parts] == [Media, Media, Text]
    assert canonical(reply) == canonical(read("assistant", {**search, "caller": {"type": "direct"}}, found, text("a")))
    prove_pairing([reply])


@pytest.mark.parametrize(
    ("user_id", "expected"),
    [
        ('{"device_id":"d","account_uuid":"","session_id":"s-1"}', {"session_id": "s-1"}),
        ("user_ab_account__session_01234567-89ab-cdef-0123-456789abcdef",
         {"session_id": "01234567-89ab-cdef-0123-456789abcdef"}),
        ("somebody", {}),
        ('{"session_id":7}', {}),
        ("{broken", {}),
        (7, {}),
    ],
)  # fmt: skip
def test_the_session_that_a_client_names(user_id: Any, expected: dict[str, str]):
    body = json.dumps({"messages": [], "metadata": {"user_id": user_id}}).encode()
    assert read_request(body).ids == expected


def test_usage_counts_the_cache_as_input():
    raw = b'{"input_tokens":5,"cache_creation_input_tokens":20,"cache_read_input_tokens":100,"output_tokens":7,"x":[]}'
    assert read_usage(raw) == Usage(input=125, cached=100, output=7, written=20)
    assert read_usage(b'{"input_tokens":5,"output_tokens":7}') == Usage(input=5, cached=None, output=7)
    assert read_usage(b"") == read_usage(b"[") == read_usage(b'{"input_tokens":"x"}') == Usage()
    assert read_usage(b'{"input_tokens":5,"output_tokens":"7","cache_read_input_tokens":null}') == Usage(input=5)


@pytest.mark.parametrize(
    ("creation", "written"),
    [
        ({"ephemeral_5m_input_tokens": 80, "ephemeral_1h_input_tokens": 20}, 160),
        ({"ephemeral_5m_input_tokens": 100, "ephemeral_1h_input_tokens": 0}, 100),
        ({"ephemeral_1h_input_tokens": 900}, 400),
        ({"ephemeral_1h_input_tokens": "many"}, 100),
        ("unknown", 100),
    ],
)
def test_writes_for_an_hour_count_as_four(creation: object, written: int):
    """Their surcharge on plain input is four times that of writes for five minutes."""
    usage = {"input_tokens": 5, "cache_creation_input_tokens": 100, "output_tokens": 7, "cache_creation": creation}
    assert read_usage(json.dumps(usage).encode()) == Usage(input=105, cached=None, output=7, written=written)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"role":"user","content":"\xc3\xa4"}',
        b'{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}',
        b'{"role":"assistant","content":[{"type":"text","text":"a"},{"type":"tool_use","id":"c",'
        b'"name":"f","input":{"x": 1.0}}]}',
        b'{"role":"user","content":[{"type":"tool_result","tool_use_id":"c","content":"ok"}]}',
        b'{"role":"system","content":"s"}',
    ],
)
def test_written_messages_read_the_same(raw: bytes):
    assert write_message(read_message(raw)) == raw.replace(b": 1.0", b":1.0")


# Recorded requests


@pytest.mark.skipif(not REQUESTS, reason=MISSING)
@pytest.mark.parametrize("path", REQUESTS, ids=lambda path: path.stem[:60])
def test_recorded_requests_are_understood_and_written_back(path: Path):
    body = path.read_bytes()
    request = read_request(body)
    assert request.unreadable is None
    _check_messages(request.messages, json.loads(body))
    written = write_request(body, RequestPatch(messages=[message.raw for message in request.messages]))
    before, after = raw_json.split_object(body), raw_json.split_object(written)
    assert raw_json.split_array(after["messages"]) == raw_json.split_array(before["messages"])
    assert {**after, "messages": b""} == {**before, "messages": b""}


@pytest.mark.skipif(not CLIENTS, reason=MISSING)
@pytest.mark.parametrize(("client", "number", "body"), CLIENTS, ids=[f"{each[0]}-{each[1]}" for each in CLIENTS])
def test_requests_of_real_clients_are_understood(client: str, number: int, body: dict[str, Any]):
    raw = json.dumps(body, ensure_ascii=False).encode()
    request = read_request(raw)
    assert request.unreadable is None
    _check_messages(request.messages, body)
    assert json.loads(write_request(raw, RequestPatch(messages=[message.raw for message in request.messages]))) == body
    prove_pairing([message for message in request.messages if not message.is_instruction])
    if client == "claude-code":
        assert request.ids["session_id"]
        assert request.messages[0].is_instruction


def _check_messages(messages: tuple[Message, ...], body: dict[str, Any]) -> None:
    """Roles, calls and results are those of the body."""
    leading = 1 if body.get("system") is not None else 0
    assert len(messages) == leading + len(body["messages"])
    for message, wire in zip(messages[leading:], body["messages"], strict=True):
        assert message.role == wire["role"] or (message.role == "tool" and wire["role"] == "user")
        blocks = [wire["content"]] if isinstance(wire["content"], str) else wire["content"]
        of = {kind: [block for block in blocks if isinstance(block, dict) and block["type"] == kind] for kind in
              ("tool_use", "tool_result", "text")}  # fmt: skip
        assert [call.id for call in message.calls] == [block["id"] for block in of["tool_use"]]
        assert [result.call_id for result in message.results] == [block["tool_use_id"] for block in of["tool_result"]]
        assert [json.loads(call.arguments) for call in message.calls] == [block["input"] for block in of["tool_use"]]
        if not isinstance(wire["content"], str):
            texts = [block["text"] for block in of["text"] if block["text"]]
            if message.role == "user":
                texts = [words for text in texts if (words := without_injected(text)).strip() or words is text]
            assert message.text == "\n".join(texts)
