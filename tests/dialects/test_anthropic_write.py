"""Writing Anthropic's requests: patches that leave every other byte alone, and what comes out is what is accepted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tersely.dialects.anthropic.read import read_message
from tersely.dialects.anthropic.write import (
    OPENING,
    as_input,
    error_body,
    error_event,
    restore_reply,
    with_prefix,
    with_results,
    with_text,
    write_message,
    write_request,
    write_text,
)
from tersely.dialects.dialect import UNCHANGED, ClientView, ErrorDescription, RequestPatch
from tersely.dialects.errors import classify_error
from tersely.dialects.registry import DIALECTS
from tersely.domain.errors import InvalidRequest
from tersely.domain.messages import Media, Message, Reasoning, Role, Text, ToolCall, ToolResult
from tersely.domain.text.tags import TagKinds

USER = b'{"role":"user","content":"u"}'
CALLS = (
    b'{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"f","input":{}},'
    b'{"type":"tool_use","id":"b","name":"f","input":{}}]}'
)
BODY = (
    b'{ "model" : "m", "seed": 1.0, "messages" : [ {"role":"user","content":"old"} ],\n "x": {"y" :[1 ,2]},'
    b'"big":123456789012345678901234567890,"odd":"\\ud800\\u0000" }'
)


def result(call_id: str) -> bytes:
    return b'{"role":"user","content":[{"type":"tool_result","tool_use_id":"%b","content":"ok"}]}' % call_id.encode()


def messages_of(body: bytes) -> list[Any]:
    messages: list[Any] = json.loads(body)["messages"]
    return messages


def assistant(*blocks: dict[str, Any]) -> bytes:
    return json.dumps({"role": "assistant", "content": list(blocks)}, separators=(",", ":")).encode()


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


# Requests


def test_only_the_messages_change():
    assert write_request(BODY, RequestPatch(messages=[b'{"role":"user" , "content":"new"}'])) == (
        b'{"model":"m","seed":1.0,"messages":[{"role":"user" , "content":"new"}],"x":{"y" :[1 ,2]},'
        b'"big":123456789012345678901234567890,"odd":"\\ud800\\u0000"}'
    )


def test_invalid_body_is_refused():
    for body in (b"{", b"[]"):
        with pytest.raises(InvalidRequest):
            write_request(body, RequestPatch(messages=[]))


@pytest.mark.parametrize(
    ("leading", "ours", "expected"),
    [
        ([], None, None),
        ([], "OURS", b'"OURS"'),
        ([b'{"system": "A"}'], None, b'"A"'),
        ([b'{"system":"A"}'], "OURS", b'"A\\n\\nOURS"'),
        ([b'{"system":""}'], "OURS", b'"OURS"'),
        ([b'{"system":null}'], "OURS", b'"OURS"'),
        ([b'{"system":[ {"type":"text", "text":"A"} ]}'], None, b'[ {"type":"text", "text":"A"} ]'),
        (
            [b'{"system":[ {"type":"text", "text":"A"} ]}'],
            "OURS",
            b'[{"type":"text", "text":"A"},{"type":"text","text":"OURS"}]',
        ),
        # Instructions whose place was cut, and those of another session's dialect.
        (
            [b'{"system":"A"}', b'{"role":"system","content":"B"}'],
            None,
            b'[{"type":"text","text":"A"},{"type":"text","text":"B"}]',
        ),
        ([b'{"role":"system","content":"B"}'], "OURS", b'"B\\n\\nOURS"'),
    ],
)
def test_leading_instructions_are_the_system(leading: list[bytes], ours: str | None, expected: bytes | None):
    later = b'{"role":"system","content":"later"}'
    written = write_request(
        b'{"system":"old","messages":[]}', RequestPatch(messages=[*leading, USER, later], instructions=ours)
    )
    system = b'"system":%b,' % expected if expected else b""
    assert written == b"{" + system + b'"messages":[' + USER + b"," + later + b"]}"


def test_the_results_of_a_reply_come_in_one_message():
    more = b'{"role":"user","content":[{"type":"tool_result","tool_use_id":"b"},{"type":"text","text":"and"}]}'
    written = messages_of(
        write_request(b'{"messages":[]}', RequestPatch(messages=[USER, CALLS, result("a"), more, USER]))
    )
    assert [message["role"] for message in written] == ["user", "assistant", "user", "user"]
    assert [block["type"] for block in written[2]["content"]] == ["tool_result", "tool_result", "text"]


def test_two_messages_of_the_user_stay_two():
    """The provider joins them itself, and bytes that were sent once stay as they are."""
    written = write_request(b'{"messages":[]}', RequestPatch(messages=[USER, USER]))
    assert written == b'{"messages":[' + USER + b"," + USER + b"]}"


def test_a_context_begins_with_the_user():
    written = messages_of(
        write_request(b'{"messages":[]}', RequestPatch(messages=[b'{"system":"S"}', assistant(text("a")), USER]))
    )
    assert written[0] == {"role": "user", "content": OPENING}
    assert len(written) == 3


# Messages


@pytest.mark.parametrize(
    ("role", "expected"), [("user", "user"), ("assistant", "assistant"), ("system", "system"), ("developer", "system")]
)
def test_plain_text_is_written_as_a_string(role: Role, expected: str):
    assert json.loads(write_text(role, "ä")) == {"role": expected, "content": "ä"}


def test_messages_of_our_own():
    message = Message(
        role="assistant",
        parts=(
            Reasoning(text="hm"),
            Text(text=" "),
            Text(text="a"),
            Media(kind="image", digest="d"),
            ToolCall(id="c", name="f", arguments='{"x": 1.0}'),
            ToolCall(id="d", name="f", arguments=""),
            ToolCall(id="e", name="f", arguments="[broken"),
        ),
        raw=b"",
    )
    assert json.loads(write_message(message)) == {
        "role": "assistant",
        "content": [
            text("a"),
            text("[image]"),
            {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1.0}},
            {"type": "tool_use", "id": "d", "name": "f", "input": {}},
            {"type": "tool_use", "id": "e", "name": "f", "input": {"arguments": "[broken"}},
        ],
    }
    answered = Message(role="user", parts=(Text(text="and"), ToolResult(call_id="c", text="ok")), raw=b"")
    assert [block["type"] for block in json.loads(write_message(answered))["content"]] == ["tool_result", "text"]
    results = Message(role="tool", parts=(ToolResult(call_id="c", text=""),), raw=b"")
    assert json.loads(write_message(results)) == {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "c", "content": ""}],
    }


def test_a_reply_as_input():
    thought = {"type": "thinking", "thinking": "", "signature": "s"}
    hidden = {"type": "redacted_thinking", "data": "x"}
    whole = assistant(thought, hidden, text("a", citations=None), {"type": "odd"})
    assert as_input(whole) is whole
    unsigned = {"type": "thinking", "thinking": "hm", "signature": ""}
    partial = {"type": "tool_use", "id": "c", "name": "f", "input": {}, "partial_json": '{"a'}
    assert json.loads(as_input(assistant(unsigned, text(" \n"), text("a"), partial)))["content"] == [text("a")]
    enveloped = b'{"id":"x","content":[{"type":"text","text":"\\ud800"}],"role":"assistant","usage":{}}'
    assert as_input(enveloped) == b'{"role":"assistant","content":[{"type":"text","text":"\\ud800"}]}'
    assert read_message(as_input(assistant(text("")))).parts == ()


THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "s"}
CALL = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
TAG = "<terse>x</terse>"


@pytest.mark.parametrize(
    ("echo", "blocks", "expected"),
    [
        # What the client added stays.
        (
            [THOUGHT, text("a", cache_control={"type": "ephemeral"})],
            [THOUGHT, text(f"a{TAG}")],
            [THOUGHT, text(f"a{TAG}", cache_control={"type": "ephemeral"})],
        ),
        # What it left out stays out.
        ([text("a"), CALL], [THOUGHT, text(f"a{TAG}"), CALL], [text(f"a{TAG}"), CALL]),
        # Texts return to where they were said.
        ([THOUGHT, CALL], [THOUGHT, text(TAG), CALL], [THOUGHT, text(TAG), CALL]),
        ([text("a"), CALL, text("b")], [text("a"), CALL, text(f"b{TAG}")], [text("a"), CALL, text(f"b{TAG}")]),
        # Two texts that the client made one.
        ([text("ab")], [text("a"), text(f"b{TAG}")], [text("a"), text(f"b{TAG}")]),
        ("a", [text("a"), text(TAG)], f"a{TAG}"),
        ("", [text(TAG)], TAG),
        ([], [text(TAG)], [text(TAG)]),
        # Blocks that the model never said stay.
        ([text("a"), CALL], [text(f"a{TAG}")], [text(f"a{TAG}"), CALL]),
    ],
)
def test_restore_reply_restores_the_models_text(echo: Any, blocks: list[dict[str, Any]], expected: Any):
    raw = json.dumps({"role": "assistant", "content": echo, "x": 1.0}).encode()
    restored = json.loads(restore_reply(raw, assistant(*blocks)))
    assert restored == {"role": "assistant", "content": expected, "x": 1.0}


@pytest.mark.parametrize(
    ("content", "words", "expected"),
    [
        ("a", "b", "b"),
        ("a", None, ""),
        ([text("a", n=1.5), {"type": "image"}, text("c")], "b", [text("b", n=1.5), {"type": "image"}]),
        ([{"type": "tool_result"}, {"type": "image"}], "b", [{"type": "tool_result"}, {"type": "image"}, text("b")]),
        ([THOUGHT, CALL], "b", [THOUGHT, text("b"), CALL]),
        ([text("a"), {"type": "image"}], "", [{"type": "image"}]),
    ],
)
def test_with_text_replaces_the_text_of_a_message(content: Any, words: str | None, expected: Any):
    raw = json.dumps({"role": "user", "content": content, "x": 1.0}).encode()
    assert json.loads(with_text(raw, words)) == {"role": "user", "content": expected, "x": 1.0}


def test_other_texts_of_results():
    raw = (
        b'{"role":"user","content":[{"type":"tool_result", "tool_use_id":"a","content":"long","is_error":true},'
        b'{"type":"tool_result","tool_use_id":"b", "content":[{"type":"text","text":"long"},'
        b'{"type":"image", "x":1.0}]},'
        b'{"type":"tool_result", "tool_use_id":"c", "content":"kept"}, {"type":"text", "text":"words"}]}'
    )
    assert with_results(raw, {"a": "short", "b": "shorter\n[image]"}) == (
        b'{"role":"user","content":[{"type":"tool_result","tool_use_id":"a","content":"short","is_error":true},'
        b'{"type":"tool_result","tool_use_id":"b","content":[{"type":"text","text":"shorter"},'
        b'{"type":"image", "x":1.0}]},'
        b'{"type":"tool_result", "tool_use_id":"c", "content":"kept"},{"type":"text", "text":"words"}]}'
    )
    assert with_results(USER, {"a": "x"}) is USER


def test_a_text_in_front():
    assert (
        with_prefix(b'{"role":"user", "content":"u","x":1.0}', "P") == b'{"role":"user","content":"P\\n\\nu","x":1.0}'
    )
    assert with_prefix(b'{"role":"user"}', "P") == b'{"role":"user","content":"P"}'
    both = b'{"role":"user","content":[{"type":"tool_result", "a":1},{"type":"text", "text":"u"}]}'
    assert with_prefix(both, "P") == (
        b'{"role":"user","content":[{"type":"tool_result", "a":1},{"type":"text","text":"P"},'
        b'{"type":"text", "text":"u"}]}'
    )


@pytest.mark.parametrize(
    ("given", "code", "expected"),
    [
        ("invalid_request_error", None, "invalid_request_error"),
        ("invalid_request_error", "invalid_api_key", "authentication_error"),
        ("invalid_request_error", "forbidden", "permission_error"),
        ("invalid_request_error", "not_found", "not_found_error"),
        ("invalid_request_error", "request_too_large", "request_too_large"),
        ("upstream_error", "upstream_unavailable", "api_error"),
        ("server_error", "database_unavailable", "api_error"),
    ],
)
def test_errors_in_the_providers_shape(given: str, code: str | None, expected: str):
    body = error_body(ErrorDescription(message="no", type=given, code=code, param="p"))
    assert json.loads(body) == {"type": "error", "error": {"type": expected, "message": "no"}}
    assert error_event(body) == b"event: error\ndata: " + body + b"\n\n"


def test_the_registry_knows_the_dialect_by_its_name():
    dialect = DIALECTS["anthropic"]
    assert dialect.read_request(dialect.write_request(BODY, RequestPatch(messages=[USER]))).messages[0].text == "u"
    stream = dialect.open_stream(ClientView(tags=TagKinds(terse=True), strip_usage=True))
    event = dialect.error_event(
        dialect.error_body(ErrorDescription(message="prompt is too long: 2 tokens > 1 maximum"))
    )
    assert stream.feed(event) + stream.close() == event
    assert classify_error(200, event) is not None
    stopped = b'{"type":"message","content":[],"stop_reason":"model_context_window_exceeded"}'
    assert classify_error(200, dialect.split_reply(stopped, UNCHANGED)[0]) is not None
