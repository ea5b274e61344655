"""OpenAI's responses format: requests and items read and written, patched and put back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tersely.dialects.dialect import ErrorDescription, RequestPatch, Usage
from tersely.dialects.openai_chat.dialect import OPENAI_CHAT
from tersely.dialects.openai_responses.content import items_of
from tersely.dialects.openai_responses.dialect import OPENAI_RESPONSES
from tersely.dialects.openai_responses.read import read_message, read_request, read_usage
from tersely.dialects.openai_responses.write import (
    as_input,
    as_reply,
    error_event,
    restore_reply,
    with_prefix,
    with_results,
    with_text,
    without_history,
    write_message,
    write_request,
    write_text,
)
from tersely.dialects.wire import raw_json
from tersely.domain.errors import InvalidRequest
from tersely.domain.history.chain import canonical
from tersely.domain.history.pairing import prove_pairing
from tersely.domain.messages import Media, Message, Part, Reasoning, Text, ToolCall, ToolResult
from tests.dialects.recordings import MISSING, SHARED, client_requests, requests

REQUESTS = requests("openai.responses")
CLIENTS = client_requests("/v1/responses")

USER = {"role": "user", "content": "hi"}
THOUGHT = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [{"type": "summary_text", "text": "hm"}],
    "encrypted_content": "x",
}
SAID = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "found"}


def raw(item: object) -> bytes:
    return json.dumps(item).encode()


def run(*items: object) -> bytes:
    return raw({"output": list(items)})


def body(*items: object, **more: Any) -> bytes:
    return raw({"model": "m", "input": list(items), **more})


def parts(item: object) -> tuple[Part, ...]:
    return read_message(raw(item)).parts


def text(words: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": kind, "text": words}


# Requests


def test_a_request_is_read():
    request = read_request(
        b'{"model":"m","instructions":"S","input":[ {"role":"user","content":"hi"} ],"stream":true,'
        b'"tools":[ {"x":1} ],"tool_choice":"auto","text":{"format":{"type":"json_schema"}},"max_output_tokens":9,'
        b'"previous_response_id":"resp_0","conversation":{"id":"conv_1"},"prompt_cache_key":"k","store":false}'
    )
    assert (request.model, request.stream, request.include_usage, request.n) == ("m", True, True, 1)
    assert (request.tools, request.tool_choice, request.max_tokens) == (b'[ {"x":1} ]', b'"auto"', 9)
    assert request.response_format == b'{"type":"json_schema"}'
    assert [(each.role, each.text) for each in request.messages] == [("system", "S"), ("user", "hi")]
    assert [each.raw for each in request.messages] == [b'{"instructions":"S"}', b'{"role":"user","content":"hi"}']
    assert request.ids == {"previous_response_id": "resp_0", "conversation": "conv_1"}
    assert request.unreadable is None


def test_absent_members_and_nulls_read_the_same():
    nulls = (
        b'{"input":null,"instructions":null,"model":null,"stream":null,"tools":null,"text":{"format":{"type":"text"}}}'
    )
    assert read_request(b"{}") == read_request(nulls)
    assert read_request(b"{}").messages == ()
    assert write_request(b'{"model":"m"}', RequestPatch(messages=[])) == b'{"model":"m"}'
    assert read_request(b'{"input":[],"conversation":"conv_1"}').ids == {"conversation": "conv_1"}


@pytest.mark.parametrize(
    ("sent", "field"),
    [
        (b"", None),
        (b"[]", None),
        (b"\xff", None),
        (b"[" * 9999, None),
        (b'{"model":1}', "model"),
        (b'{"stream":1}', "stream"),
    ],
)
def test_malformed_requests_are_refused(sent: bytes, field: str | None):
    with pytest.raises(InvalidRequest) as caught:
        read_request(sent)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "item",
    [7, "x", {"role": "wizard", "content": ""}, {"content": "x"}, {**USER, "content": [7]}, {**USER, "content": 7}],
)
def test_unreadable_items_are_left_to_the_provider(item: object):
    request = read_request(body(USER, item))
    assert request.unreadable
    assert request.messages == ()
    assert read_request(b'{"input":{"a":1}}').unreadable


def test_an_input_that_is_a_string_is_one_message():
    sent = b'{"input": "h\\u0069 \\ud800","model":"m"}'
    (message,) = read_request(sent).messages
    assert (message.role, message.text) == ("user", "hi \ud800")
    assert write_request(sent, RequestPatch(messages=[message.raw])) == b'{"input":"h\\u0069 \\ud800","model":"m"}'
    longer = json.loads(
        write_request(b'{"input":"hi"}', RequestPatch(messages=[b'{"role":"user","content":"hi"}', raw(SAID)]))
    )
    assert longer == {"input": [USER, SAID]}


def test_neighbouring_items_of_the_model_are_one_message():
    items = (USER, THOUGHT, SAID, CALL, RESULT, SAID, {"role": "user", "content": "more"})
    messages = read_request(body(*items)).messages
    assert [each.role for each in messages] == ["user", "assistant", "tool", "assistant", "user"]
    assert messages[1].parts == (
        Reasoning(text="hm", hidden=1),
        Text(text="I look."),
        ToolCall(id="c1", name="f", arguments='{"a": 1}'),
    )
    assert [each.starts_turn for each in messages] == [True, False, False, False, True]
    assert items_of(messages[1].raw) == [raw(each) for each in (THOUGHT, SAID, CALL)]
    assert messages[3].raw == raw(SAID)
    prove_pairing(messages)
    assert json.loads(write_request(body(), RequestPatch(messages=[each.raw for each in messages])))["input"] == list(
        items
    )


def test_an_echo_without_thoughts_ids_and_states_is_the_same_message():
    reply = read_message(
        run(THOUGHT, SAID, CALL, {"type": "web_search_call", "id": "ws", "status": "completed", "action": 1})
    )
    lean = {"role": "assistant", "content": "I look."}
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a":1}'}
    echo = read_message(run(lean, call, {"type": "web_search_call", "action": 1}))
    assert canonical(reply) == canonical(echo)


def test_codex_metadata_is_no_part_of_the_history():
    items = (
        {"type": "additional_tools", "role": "developer", "tools": []},
        USER,
        {"type": "configuration_update"},
        SAID,
    )
    messages = read_request(body(*items)).messages
    assert [each.role for each in messages] == ["developer", "user", "developer", "assistant"]
    assert [bool(canonical(each)) for each in messages] == [False, True, False, True]


def test_results_of_calls_that_are_only_referred_to_cannot_be_placed():
    known = ({"type": "item_reference", "id": "rs_1"}, CALL, RESULT)
    assert read_request(body(USER, *known)).unreadable is None
    assert read_request(body(USER, {"type": "item_reference", "id": "fc_1"}, RESULT)).unreadable
    # Without a reference the call may lie behind `previous_response_id`, which the ids tell.
    assert read_request(body(RESULT, previous_response_id="resp_0")).messages[0].results


# Items


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ({"type": "custom_tool_call", "call_id": "c", "name": "n", "input": "free text"}, ("n", "free text")),
        ({"type": "computer_call", "call_id": "c", "action": {"type": "click"}}, ("computer", '{"type":"click"}')),
        ({"type": "local_shell_call", "call_id": "c", "action": {"x": 1}}, ("local_shell", '{"x":1}')),
        ({"type": "shell_call", "call_id": "c", "action": {"x": 1}}, ("shell", '{"x":1}')),
        ({"type": "apply_patch_call", "call_id": "c", "operation": {"x": 1}}, ("apply_patch", '{"x":1}')),
        ({"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {}}, ("tool_search", "{}")),
        ({"type": "mcp_approval_request", "id": "c", "name": "n", "arguments": "{}"}, ("n", "{}")),
        ({"type": "function_call", "call_id": "c", "name": "n"}, ("n", "")),
    ],
)
def test_calls_are_read(item: dict[str, Any], expected: tuple[str, str]):
    name, arguments = expected
    assert parts(item) == (ToolCall(id="c", name=name, arguments=arguments),)


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (
            {"type": "function_call_output", "output": [text("a"), {"type": "input_image", "image_url": "u"}]},
            "a\n[image]",
        ),
        ({"type": "function_call_output", "output": None}, ""),
        ({"type": "custom_tool_call_output", "output": "a"}, "a"),
        ({"type": "computer_call_output", "output": {"type": "computer_screenshot", "image_url": "u"}}, "[image]"),
        ({"type": "local_shell_call_output", "output": "a"}, "a"),
        (
            {"type": "shell_call_output", "output": [{"stdout": "a", "stderr": "b"}, {"stdout": "", "stderr": ""}]},
            "a\nb",
        ),
        ({"type": "apply_patch_call_output", "status": "failed", "output": "a"}, "a"),
        ({"type": "apply_patch_call_output", "status": "completed"}, ""),
        ({"type": "tool_search_output", "execution": "client", "tools": []}, "[]"),
        ({"type": "brand_new_output", "output": "a"}, "a"),
    ],
)
def test_results_are_read(item: dict[str, Any], expected: str):
    message = read_message(raw({**item, "call_id": "c"}))
    assert (message.role, message.parts) == ("tool", (ToolResult(call_id="c", text=expected),))


def test_odd_types_are_no_reason_to_fail():
    odd = {"type": ["x"], "text": "a"}
    assert (
        read_message(raw({"role": "user", "content": [odd]})).parts[0] == parts({"role": "user", "content": [odd]})[0]
    )
    assert as_input(run({**CALL, "status": {}})) == run({**CALL, "status": {}})


def test_an_approval_is_a_result():
    message = read_message(raw({"type": "mcp_approval_response", "approval_request_id": "r", "approve": True}))
    assert (message.role, message.parts) == ("tool", (ToolResult(call_id="r", text="approved"),))


@pytest.mark.parametrize(
    "item",
    [
        {"type": "compaction", "id": "cmp_1", "encrypted_content": "x"},
        {"type": "item_reference", "id": "msg_1"},
        {"type": "web_search_call", "id": "ws_1", "action": {"type": "search"}},
        {"type": "mcp_call", "id": "mcp_1", "name": "n", "arguments": "{}", "output": "o"},
        {"type": "tool_search_output", "call_id": None, "execution": "server", "tools": []},
        {"type": "brand_new", "x": 1},
    ],
)
def test_other_items_are_the_models_and_something(item: dict[str, Any]):
    message = read_message(raw(item))
    assert message.role == "assistant"
    (part,) = message.parts
    assert isinstance(part, Media)
    assert part.kind == "other"
    (read,) = read_request(body(item)).messages
    assert write_request(body(item), RequestPatch(messages=[read.raw])) == write_request(
        body(item), RequestPatch(messages=[raw(item)])
    )


def test_calls_that_the_provider_answers_itself_are_none():
    call = {"type": "shell_call", "call_id": "s", "action": {}, "environment": {"type": "container_reference"}}
    output = {"type": "shell_call_output", "call_id": "s", "output": []}
    reply = read_message(run(call, output, SAID))
    assert [type(part) for part in reply.parts] == [Media, Media, Text]
    messages = read_request(body(USER, call, output, SAID)).messages
    assert [each.role for each in messages] == ["user", "assistant"]
    assert canonical(messages[1]) == canonical(reply)
    prove_pairing(messages)


def test_media_are_read():
    png = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAMAAAAFCAYAAAA="
    content = [
        {"type": "input_image", "image_url": png, "detail": "low"},
        {"type": "input_image", "file_id": "f"},
        {"type": "input_file", "filename": "a.pdf", "file_data": "x"},
        {"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}},
        {"type": "brand_new", "x": 1},
    ]
    found = [part for part in parts({"role": "user", "content": content}) if isinstance(part, Media)]
    assert [each.kind for each in found] == ["image", "image", "file", "audio", "other"]
    assert (found[0].width, found[0].height, found[0].detail) == (3, 5, "low")
    (made,) = parts({"type": "image_generation_call", "id": "i", "result": "b64"})
    assert isinstance(made, Media)
    assert made.kind == "image"


def test_refusal_is_read_as_text():
    item = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    assert parts(item) == (Text(text="no", is_refusal=True),)
    assert parts({"role": "assistant", "content": [{"type": "refusal", "refusal": ""}]}) == ()


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (
            b'{"input_tokens":7,"output_tokens":3,"input_tokens_details":{"cached_tokens":4}}',
            Usage(input=7, cached=4, output=3),
        ),
        (b'{"input_tokens":7}', Usage(input=7)),
        (b"", Usage()),
        (b"null", Usage()),
        (b'{"input_tokens":"x"}', Usage()),
    ],
)
def test_usage_is_read(sent: bytes, expected: Usage):
    assert read_usage(sent) == expected


# Writing requests


def test_write_request_changes_only_the_messages():
    sent = b'{ "x": 1.0, "input": [], "store":false,"previous_response_id":"r","include":[ "a" ]}'
    written = write_request(sent, RequestPatch(messages=[raw(USER)]))
    assert (
        written == b'{"x":1.0,"input":[' + raw(USER) + b'],"store":false,"previous_response_id":"r","include":[ "a" ]}'
    )


@pytest.mark.parametrize(
    ("more", "ours", "expected"),
    [
        ({"instructions": "S"}, None, "S"),
        ({"instructions": "S"}, "T", "S\n\nT"),
        ({}, "T", "T"),
        ({}, None, None),
        ({"instructions": None}, None, None),
        ({"instructions": ""}, "T", "T"),
    ],
)
def test_instructions_stand_beside_the_input(more: dict[str, Any], ours: str | None, expected: str | None):
    sent = body(USER, **more)
    messages = [each.raw for each in read_request(sent).messages]
    written = json.loads(write_request(sent, RequestPatch(messages=messages, instructions=ours)))
    assert (written.get("instructions"), written["input"]) == (expected, [USER])
    assert ("instructions" in written) == (expected is not None or "instructions" in more)


def test_instructions_beside_a_stored_prompt_lead_the_input():
    written = json.loads(
        write_request(body(USER, prompt={"id": "p"}), RequestPatch(messages=[raw(USER)], instructions="T"))
    )
    assert "instructions" not in written
    assert written["input"] == [{"type": "message", "role": "developer", "content": "T"}, USER]


def test_whole_history_is_sent_without_references():
    sent = b'{"model":"m", "conversation":"c","input":"x","previous_response_id":"r"}'
    assert OPENAI_RESPONSES.without_history(sent) == b'{"model":"m","input":"x"}'
    assert without_history(b'{"model": "m"}') == b'{"model": "m"}'
    assert OPENAI_CHAT.without_history(b'{"previous_response_id":"r"}') == b'{"previous_response_id":"r"}'


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ({"type": "function_call"}, {"type": "function_call_output", "output": "t"}),
        ({"type": "custom_tool_call", "input": "x"}, {"type": "custom_tool_call_output", "output": "t"}),
        ({"type": "apply_patch_call"}, {"type": "apply_patch_call_output", "status": "failed", "output": "t"}),
        ({"type": "local_shell_call"}, {"type": "local_shell_call_output", "id": "c", "output": "t"}),
        (
            {"type": "tool_search_call", "execution": "client"},
            {"type": "tool_search_output", "execution": "client", "status": "completed", "tools": []},
        ),
    ],
)
def test_results_of_our_own_take_the_form_of_their_calls(call: dict[str, Any], expected: dict[str, Any]):
    ours = write_message(Message(role="tool", parts=(ToolResult(call_id="c", text="t"),), raw=b""))
    sent = body()
    written = json.loads(write_request(sent, RequestPatch(messages=[raw({**call, "call_id": "c"}), ours])))["input"]
    assert written[1] == {**expected, "call_id": "c"}


@pytest.mark.parametrize("kind", ["computer_call", "shell_call", "mcp_approval_request"])
def test_every_call_can_be_answered(kind: str):
    call = {"type": kind, "call_id": "c", "id": "c"}
    ours = write_message(Message(role="tool", parts=(ToolResult(call_id="c", text="t"),), raw=b""))
    written = write_request(body(), RequestPatch(messages=[raw(call), ours]))
    messages = read_request(written).messages
    assert messages[1].results[0].call_id == "c"
    assert json.loads(written)["input"][1]["type"] != "function_call_output"


# Writing messages


def test_messages_of_our_own():
    call = ToolCall(id="c", name="f", arguments="")
    message = Message(role="assistant", parts=(Reasoning(text="hm"), Text(text="a"), call), raw=b"")
    assert json.loads(write_message(message)) == {
        "output": [
            {"type": "message", "role": "assistant", "content": "a"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        ]
    }
    user = Message(role="user", parts=(Text(text="a"), Media(kind="image", digest="x")), raw=b"")
    assert json.loads(write_message(user)) == {"type": "message", "role": "user", "content": "a\n[image]"}
    assert read_message(write_text("developer", "a")).role == "developer"
    results = Message(role="tool", parts=(ToolResult(call_id="c", text="t"),), raw=b"")
    assert json.loads(write_message(results)) == {"type": "function_call_output", "call_id": "c", "output": "t"}


def test_a_reply_as_input():
    assert as_input(run(THOUGHT, SAID, CALL)) == run(THOUGHT, SAID, CALL)
    kept_elsewhere = {"type": "reasoning", "id": "rs_1", "summary": []}
    without_id = {key: value for key, value in CALL.items() if key != "id"}
    assert json.loads(as_input(run(kept_elsewhere, CALL))) == without_id
    half = {**CALL, "status": "in_progress"}
    assert json.loads(as_input(run(SAID, half))) == SAID
    assert read_message(as_input(run(half))).parts == ()
    assert json.loads(as_reply(raw(SAID))) == {"output": [SAID]}
    assert json.loads(as_reply(run(SAID, CALL))) == {"output": [SAID, CALL]}


def test_restore_reply_restores_the_models_text():
    tagged = {**SAID, "content": [{"type": "output_text", "text": "I <terse>x</terse>look.", "annotations": [1]}]}
    reply = run(THOUGHT, tagged, CALL)
    restored = restore_reply(run(THOUGHT, SAID, CALL), reply)
    assert items_of(restored)[0] == raw(THOUGHT)
    assert json.loads(restored) == {"output": [THOUGHT, tagged, CALL]}
    assert restore_reply(reply, reply) == reply
    lean = {"role": "assistant", "content": "I look."}
    assert json.loads(restore_reply(run(lean, CALL), reply))["output"] == [
        {"role": "assistant", "content": "I <terse>x</terse>look."},
        CALL,
    ]
    assert json.loads(restore_reply(raw(lean), reply))["content"] == "I <terse>x</terse>look."
    # The client left an empty text out: it comes back behind the thoughts.
    (thought, words, call) = json.loads(restore_reply(run(THOUGHT, CALL), reply))["output"]
    assert (thought, words["content"], call) == (THOUGHT, "I <terse>x</terse>look.", CALL)


def test_with_text_replaces_the_text_of_a_message():
    image = {"type": "input_image", "image_url": "u"}
    user = {"role": "user", "content": [text("a"), image, text("b")]}
    assert json.loads(with_text(raw(user), "c")) == {"role": "user", "content": [text("c"), image]}
    assert json.loads(with_text(raw(USER), "c")) == {"role": "user", "content": "c"}
    assert json.loads(with_text(run(THOUGHT, SAID, CALL, SAID), "c"))["output"] == [
        THOUGHT,
        {**SAID, "content": [{"type": "output_text", "text": "c", "annotations": []}]},
        CALL,
    ]
    assert json.loads(with_text(raw({"role": "user", "content": [image]}), "c"))["content"] == [image, text("c")]


def test_other_texts_of_results():
    assert json.loads(with_results(raw(RESULT), {"c1": "short"})) == {**RESULT, "output": "short"}
    assert with_results(raw(RESULT), {"c2": "short"}) == raw(RESULT)
    image = {"type": "input_image", "image_url": "u"}
    rich = {**RESULT, "output": [text("long"), image]}
    assert json.loads(with_results(raw(rich), {"c1": "short\n[image]"}))["output"] == [text("short"), image]
    shell = {"type": "shell_call_output", "call_id": "c1", "output": [{"stdout": "a", "stderr": "b", "outcome": {}}]}
    (output,) = json.loads(with_results(raw(shell), {"c1": "short"}))["output"]
    assert output == {"stdout": "short", "stderr": "", "outcome": {}}
    shot = raw({"type": "computer_call_output", "call_id": "c1", "output": {"type": "computer_screenshot"}})
    assert with_results(shot, {"c1": "short"}) == shot


def test_a_text_in_front():
    assert json.loads(with_prefix(raw(USER), "before"))["content"] == "before\n\nhi"
    rich = {"role": "user", "content": [text("a")]}
    assert json.loads(with_prefix(raw(rich), "before"))["content"] == [text("before"), text("a")]
    written = write_request(body(), RequestPatch(messages=[with_prefix(raw(RESULT), "before")]))
    assert json.loads(written)["input"] == [{"type": "message", "role": "user", "content": "before"}, RESULT]


def test_an_error_in_a_stream_is_one_for_every_client():
    event = error_event(OPENAI_RESPONSES.error_body(ErrorDescription(message="no", code="c")))
    assert event.startswith(b"event: error\ndata: {")
    error = json.loads(event.partition(b"data: ")[2])
    assert (error["type"], error["message"], error["code"], error["error"]["message"]) == ("error", "no", "c", "no")


# Recorded requests


@pytest.mark.skipif(not REQUESTS, reason=MISSING)
@pytest.mark.parametrize("path", REQUESTS, ids=lambda path: path.stem[:70])
def test_recorded_requests_are_understood_and_written_back(path: Path):
    body = path.read_bytes()
    assert len(_check(body)) > 0 or not json.loads(body).get("input")


@pytest.mark.skipif(not CLIENTS, reason=MISSING)
@pytest.mark.parametrize(("client", "number", "sent"), CLIENTS, ids=[f"{each[0]}-{each[1]}" for each in CLIENTS])
def test_requests_of_real_clients_are_understood(client: str, number: int, sent: dict[str, Any]):
    messages = _check(json.dumps(sent, ensure_ascii=False).encode())
    linked = [message for message in messages if not message.is_instruction]
    if "previous_response_id" not in sent:
        prove_pairing(linked)
    if client == "codex":
        assert not read_request(raw(sent)).ids, "a key for the prompt cache names no conversation"
        assert not any("<environment_context>" in message.text and canonical(message) for message in linked[:1])


@pytest.mark.skipif(not CLIENTS, reason=MISSING)
@pytest.mark.parametrize("client", ["copilot-cli", "langchain", "llamaindex", "pi", "pydantic-ai", "vercel-ai-sdk"])
def test_replies_are_recognised_as_real_clients_resend_them(client: str):
    sent = {number: body for name, number, body in CLIENTS if name == client}
    lines = map(json.loads, (SHARED / "clients" / client / "responses.jsonl").read_text().splitlines())
    replies = [read_message(raw({"output": line["reply"]})) for line in lines if line["n"] in sent]
    last = read_request(raw(sent[max(sent)])).messages
    assert len(replies) > 2
    assert {canonical(each) for each in replies[:-1]} == {canonical(each) for each in last if each.role == "assistant"}


def _check(sent: bytes) -> tuple[Message, ...]:
    """Everything is understood: words, calls, results; and comes back to the byte."""
    request = read_request(sent)
    assert request.unreadable is None
    before = raw_json.split_object(sent)
    after = raw_json.split_object(
        write_request(sent, RequestPatch(messages=[message.raw for message in request.messages]))
    )
    items_before = before.get("input", b"null")
    if items_before.startswith(b"["):
        assert raw_json.split_array(after["input"]) == raw_json.split_array(items_before)
    else:
        assert after.get("input", b"null") == items_before
    assert {**after, "input": b""} == {**before, "input": b""}
    items = json.loads(items_before) if items_before.startswith(b"[") else []
    others = [item for item in items if item.get("execution") != "server"]
    calls = [item["call_id"] for item in others if item.get("type") in {"function_call", "tool_search_call"}]
    results = [item["call_id"] for item in others if item.get("type") in {"function_call_output", "tool_search_output"}]
    assert [call.id for message in request.messages for call in message.calls] == calls
    assert [result.call_id for message in request.messages for result in message.results] == results
    roles = [
        item["role"] for item in items if "content" in item and item.get("role") in {"user", "developer", "system"}
    ]
    others = [each.role for each in request.messages if each.role not in {"assistant", "tool"}]
    assert len(others) >= len(roles)
    return request.messages
