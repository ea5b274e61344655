"""Gemini's requests and contents, read and written; the same in Code Assist's wrapping."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tersely.dialects.clients.known import side_call
from tersely.dialects.dialect import ClientView, Dialect, ErrorDescription, Request, RequestPatch
from tersely.dialects.errors import classify_error
from tersely.dialects.gemini.dialect import GEMINI
from tersely.dialects.gemini.read import read_message, read_request
from tersely.dialects.gemini.write import (
    NO_SIGNATURE,
    as_input,
    error_body,
    restore_reply,
    with_prefix,
    with_results,
    with_text,
    write_message,
    write_request,
    write_text,
)
from tersely.dialects.gemini_gca.dialect import GEMINI_GCA
from tersely.dialects.wire import raw_json
from tersely.domain.errors import InvalidRequest
from tersely.domain.history.chain import canonical, chain
from tersely.domain.history.history import Entry
from tersely.domain.history.pairing import prove_pairing, repair
from tersely.domain.messages import Media, Message, Reasoning, Text, ToolCall, ToolResult
from tersely.domain.text.tags import TagKinds
from tests.dialects.gemini_traffic import CLI, REQUESTS, needs_client, needs_recordings

NOW = datetime(2026, 1, 1, tzinfo=UTC)

both = pytest.mark.parametrize("dialect", [GEMINI, GEMINI_GCA], ids=lambda dialect: dialect.name)


def content(*parts: dict[str, Any], role: str | None = "user") -> dict[str, Any]:
    return {"role": role, "parts": list(parts)} if role else {"parts": list(parts)}


def call(name: str, call_id: str | None = None, **args: Any) -> dict[str, Any]:
    return {"functionCall": {**({"id": call_id} if call_id else {}), "name": name, "args": args}}


def response(name: str, output: Any, call_id: str | None = None) -> dict[str, Any]:
    return {"functionResponse": {**({"id": call_id} if call_id else {}), "name": name, "response": output}}


def body(*contents: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"contents": contents, **more}).encode()


def raw(value: Any) -> bytes:
    return json.dumps(value).encode()


def read(*contents: dict[str, Any], **more: Any) -> Request:
    request = read_request(body(*contents, **more))
    assert request.unreadable is None
    return request


def write(sent: bytes, messages: Sequence[Message], dialect: Dialect = GEMINI, **more: Any) -> bytes:
    return dialect.write_request(
        sent, RequestPatch(messages=[message.raw or write_message(message) for message in messages], **more)
    )


def wrap(sent: bytes) -> bytes:
    return b'{"model": "m", "project": "p", "user_prompt_id":"u", "request": ' + sent + b"}"


# Recorded requests


@needs_recordings
@both
@pytest.mark.parametrize("path", REQUESTS, ids=lambda path: path.stem[:60])
def test_recorded_requests_are_read_and_written_back(path: Path, dialect: Dialect):
    sent = path.read_bytes()
    if dialect is GEMINI_GCA:
        sent = wrap(sent)
    request = dialect.read_request(sent)
    assert request.unreadable is None
    prove_pairing([message for message in request.messages if message.parts])
    written = write(sent, request.messages, dialect)
    assert json.loads(written) == json.loads(sent)
    inner = [raw_json.split_object(each) for each in (sent, written)]
    theirs, ours = (raw_json.split_object(each["request"]) if "request" in each else each for each in inner)
    assert raw_json.split_array(ours["contents"]) == raw_json.split_array(theirs["contents"])


@needs_client
def test_the_recorded_client_is_read():
    main: list[Request] = []
    for line in CLI.read_text().splitlines():
        recorded = json.loads(line)
        sent = json.dumps(recorded["body"], ensure_ascii=False).encode()
        request = read_request(sent)
        assert request.unreadable is None
        assert json.loads(write(sent, request.messages)) == recorded["body"]
        assert request.messages[0].is_instruction
        kind = side_call({}, request.messages, has_tools=bool(request.tools))
        is_side = "side" in recorded["note"]
        assert (kind is not None) == is_side, recorded["note"]
        if not is_side:
            main.append(request)
    for request in main:
        entries = [Entry(seq=i, turn=1, message=m, tokens=1, created_at=NOW) for i, m in enumerate(request.messages)]
        prove_pairing([entry.message for entry in repair(entries)[0]])
    first, second, third = (chain(request.messages) for request in main[:3])
    assert second[: len(first)] == first
    assert third[: len(second)] == second
    assert chain(main[3].messages)[: len(third)] == third  # resumed: context rebuilt, results twice


# Requests


def test_a_request_is_read():
    request = read(
        content({"text": "Hi"}),
        systemInstruction={"parts": [{"text": "Be brief."}]},
        tools=[{"functionDeclarations": [{"name": "f"}]}],
        toolConfig={"functionCallingConfig": {"mode": "ANY"}},
        generationConfig={
            "maxOutputTokens": 9,
            "candidateCount": 2,
            "stopSequences": ["x"],
            "responseSchema": {"type": "object"},
        },
    )
    assert [(message.role, message.text) for message in request.messages] == [("system", "Be brief."), ("user", "Hi")]
    assert (request.n, request.max_tokens, request.stop) == (2, 9, b'["x"]')
    assert json.loads(request.tools) == [{"functionDeclarations": [{"name": "f"}]}]
    assert json.loads(request.tool_choice) == {"functionCallingConfig": {"mode": "ANY"}}
    assert request.response_format == b'{"type":"object"}'
    assert (request.model, request.stream, request.include_usage) == ("", False, True)


def test_the_wrapping_names_the_model_and_the_session():
    request = GEMINI_GCA.read_request(wrap(body(content({"text": "Hi"}), session_id="s-1")))
    assert (request.model, request.ids, request.messages[0].text) == ("m", {"session_id": "s-1"}, "Hi")
    written = GEMINI_GCA.write_request(
        wrap(body(content({"text": "Hi"}), session_id="s-1")),
        RequestPatch(messages=[b'{"parts":[]}'], instructions="x"),
    )
    assert written.startswith(b'{"model":"m","project":"p","user_prompt_id":"u","request":{')
    assert json.loads(written)["request"]["contents"] == [{"parts": []}]
    with pytest.raises(InvalidRequest):
        GEMINI_GCA.read_request(b'{"request": 1}')


def test_other_spellings():
    snake = body(
        {"role": "model", "parts": [{"function_call": {"name": "f", "args": {}}}]},
        {"parts": {"function_response": {"name": "f", "response": {"output": "x"}}}},
        {"parts": {"text": "no role"}},
        system_instruction={"parts": {"text": "S"}},
        generation_config={"max_output_tokens": 3},
        tool_config={"a": 1},
    )
    request = read_request(snake)
    assert [message.role for message in request.messages] == ["system", "assistant", "tool", "user"]
    assert (request.messages[0].text, request.messages[3].text, request.max_tokens) == ("S", "no role", 3)
    assert request.messages[2].results[0].call_id == request.messages[1].calls[0].id
    assert json.loads(request.tool_choice) == {"a": 1}
    assert json.loads(write(snake, request.messages)) == json.loads(snake)
    lone = b'{"contents": {"parts": {"text": "Hi"}}}'
    assert read_request(lone).messages[0].text == "Hi"


@pytest.mark.parametrize(
    "sent",
    [
        b'{"contents": "Hi"}',
        b'{"contents": [1]}',
        b'{"contents": [{"role": "system", "parts": []}]}',
        b'{"contents": [{"parts": ["Hi"]}]}',
        b'{"contents": [{"parts": 5}]}',
        b'{"contents": [{"parts": ""}]}',
        b'{"contents": [{"role": ["user"], "parts": []}]}',
    ],
)
def test_a_request_that_only_the_provider_can_judge_is_unreadable(sent: bytes):
    request = read_request(sent)
    assert request.unreadable
    assert request.messages == ()


@both
@pytest.mark.parametrize("sent", [b"", b"[]", b"{", b'"x"', b'{"a":"\xff"}', b'{"a":' + b"[" * 5000])
def test_a_body_that_is_no_object_is_refused(sent: bytes, dialect: Dialect):
    with pytest.raises(InvalidRequest):
        dialect.read_request(sent)
    with pytest.raises(InvalidRequest):
        dialect.write_request(sent, RequestPatch(messages=[]))


def test_everything_else_of_a_request_keeps_its_bytes():
    sent = b'{"safetySettings" : [ 1.0 ],"contents":[{"parts":[{"text":"a"}]}], "x":{"y" :1e5},"labels":"\\u00e9"}'
    written = write_request(sent, RequestPatch(messages=[b'{"parts":[{"text" : "b"}]}']))
    assert written == (
        b'{"safetySettings":[ 1.0 ],"contents":[{"parts":[{"text" : "b"}]}],"x":{"y" :1e5},"labels":"\\u00e9"}'
    )


def test_instructions_are_read():
    sent = body(content({"text": "Hi"}), system_instruction={"role": "user", "parts": [{"text": "S"}]})
    messages = [message.raw for message in read_request(sent).messages]
    unchanged = json.loads(write_request(sent, RequestPatch(messages=messages)))
    assert unchanged == json.loads(sent)
    added = json.loads(write_request(sent, RequestPatch(messages=messages, instructions="T")))
    assert added["system_instruction"] == {"role": "user", "parts": [{"text": "S"}, {"text": "T"}]}
    assert added["contents"] == json.loads(sent)["contents"]
    alone = json.loads(write_request(sent, RequestPatch(messages=messages[1:], instructions="T")))
    assert alone["systemInstruction"] == {"parts": [{"text": "T"}]}
    assert "system_instruction" not in alone
    text = b'{"systemInstruction":"S"}'
    joined = json.loads(write_request(b"{}", RequestPatch(messages=[text], instructions="T")))
    assert joined["systemInstruction"] == {"parts": [{"text": "S"}, {"text": "T"}]}
    assert write_request(b"{}", RequestPatch(messages=[text])) == b'{"systemInstruction":"S","contents":[]}'


def test_cached_content_allows_no_system_instruction():
    sent = body(content({"text": "Hi"}), cachedContent="cachedContents/1")
    written = json.loads(write(sent, read_request(sent).messages, instructions="T"))
    assert "systemInstruction" not in written
    assert written["contents"] == [content({"text": "T"}), content({"text": "Hi"})]


# Calls and results


def test_results_without_ids_are_paired_by_name_and_order():
    request = read(
        content({"text": "Go"}),
        content(call("f", x=1), call("g"), call("f", x=2), role="model"),
        content(response("f", {"output": "1"}), response("f", {"output": "2"}), response("g", {"output": "3"})),
        content(call("f", x=1), role="model"),
        content(response("f", {"output": "4"}), role="function"),
    )
    prove_pairing(request.messages)
    ids = [each.id for each in request.messages[1].calls]
    assert [(each.call_id, each.text) for each in request.messages[2].results] == [
        (ids[0], "1"),
        (ids[2], "2"),
        (ids[1], "3"),
    ]
    # Alone, as a message from the store is read, it says the same.
    for message in request.messages:
        assert read_message(message.raw) == message


def test_results_in_contents_of_their_own():
    request = read(
        content(call("f", x=1), call("f", x=2), role="model"),
        content(response("f", {"output": "1"})),
        content(response("f", {"output": "2"})),
    )
    assert [message.role for message in request.messages] == ["assistant", "tool", "tool"]
    prove_pairing(request.messages)


def test_ids_on_one_side_only():
    request = read(
        content(call("f"), call("g", "c1"), role="model"),
        content(response("g", {"output": "2"}), response("f", {"output": "1"}, "mine")),
        content(call("f", "c2"), call("f", "c3"), role="model"),
        content(response("f", {"output": "3"}, "c3"), response("f", {"output": "4"}, "c2")),
    )
    prove_pairing(request.messages)
    first, second = request.messages[1].results
    assert (first.call_id, second.call_id) == ("c1", request.messages[0].calls[0].id)
    assert [each.call_id for each in request.messages[3].results] == ["c3", "c2"]


def test_a_result_that_comes_twice_takes_no_other_call():
    once, other = response("f", {"output": "1"}, "c1"), response("f", {"output": "2"}, "c2")
    request = read(content(call("f", "c1"), call("f", "c2"), role="model"), content(once, once, other))
    assert [each.call_id for each in request.messages[1].results] == ["c1", "c1", "c2"]
    assert request.messages[1] == read_message(request.messages[1].raw)


def test_a_result_that_answers_nothing_stays_one():
    request = read(content(call("f", "c1"), role="model"), content(response("g", {"output": "x"}, "c9")))
    assert request.messages[1].results[0].call_id == "c9"


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ({"output": "x"}, "x"),
        ({"result": "x"}, "x"),
        ({"error": "x"}, "x"),
        ({"result": {"a": 1}}, '{"result":{"a":1}}'),
        ({"output": "x", "code": 1}, '{"output":"x","code":1}'),
        ({}, "{}"),
        (None, ""),
    ],
)
def test_texts_of_results_are_read(output: Any, text: str):
    message = read_message(raw(content(response("f", output, "c"))))
    assert message.results == (ToolResult(call_id="c", text=text),)
    patched = read_message(with_results(message.raw, {"c": "short"}))
    assert patched.results == (ToolResult(call_id="c", text="short"),)
    assert with_results(message.raw, {"other": "short"}) == message.raw


def test_results_keep_their_media_when_shortened():
    image = {"inlineData": {"mimeType": "image/png", "data": "AAAA"}}
    wire = content({"functionResponse": {"name": "f", "response": {"output": "long"}, "parts": [image], "x": 1}})
    message = read_message(raw(wire))
    (result,) = message.results
    assert result.text == "long\n[image]"
    patched = with_results(message.raw, {result.call_id: "l\n[image]"})
    wire["parts"][0]["functionResponse"]["response"] = {"output": "l"}
    assert json.loads(patched) == wire


def test_a_result_is_also_known_by_our_own_id():
    """The call came without an id, the client made one up for the result."""
    request = read(content(call("f"), role="model"), content(response("f", {"output": "long"}, "mine")))
    (result,) = request.messages[1].results
    patched = with_results(request.messages[1].raw, {result.call_id: "short"})
    assert json.loads(patched)["parts"] == [response("f", {"output": "short"}, "mine")]


def test_repaired_results_stand_beside_the_clients():
    sent = body(
        content({"text": "Go"}),
        content(call("f", "c1"), call("g", "c2"), call("h"), role="model"),
        content(response("f", {"output": "1"}, "c1")),
        content({"text": "More"}),
    )
    request = read_request(sent)
    entries = [Entry(seq=i, turn=1, message=m, tokens=1, created_at=NOW) for i, m in enumerate(request.messages)]
    mended = [entry.message for entry in repair(entries)[0]]
    written = write(sent, mended)
    contents = json.loads(written)["contents"]
    assert [each["role"] for each in contents] == ["user", "model", "user", "user"]
    names = [part["functionResponse"]["name"] for part in contents[2]["parts"]]
    assert names == ["f", "g", "h"]
    assert "id" not in contents[2]["parts"][2]["functionResponse"]
    prove_pairing(read_request(written).messages)


def test_results_with_names_keep_their_bytes():
    """A call that brings only new messages does not bring the stored ones, which are written in front of them."""
    calling = raw(content({"text": "Go"})), raw(content(call("f"), role="model"))
    answered = b'{"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"output": "1"}}}]}'
    question = content({"text": "More"})
    written = write_request(body(question), RequestPatch(messages=[*calling, answered, raw(question)]))
    assert written == b'{"contents":[' + b",".join([*calling, answered, raw(question)]) + b"]}"


def test_separate_contents_stay_separate():
    sent = body(
        content(call("f", "c1"), call("f", "c2"), role="model"),
        content(response("f", {"output": "1"}, "c1")),
        content(response("f", {"output": "2"}, "c2")),
    )
    assert json.loads(write(sent, read_request(sent).messages)) == json.loads(sent)


def test_calls_never_follow_another_content_of_the_model():
    """A context is cut within a turn: its head ends with an acknowledgement, its tail begins with a call."""
    chunks = [content({"text": "a"}, role="model"), content(call("f", "c1"), role="model")]
    results = content(response("f", {"output": "1"}, "c1"))
    sent = body(content({"text": "Go"}), *chunks, results)
    kept = [message.raw for message in read_request(sent).messages[1:]]
    written = write_request(
        sent, RequestPatch(messages=[write_text("user", "Log"), write_text("assistant", "Noted."), *kept])
    )
    turns = read_request(written).messages
    assert [message.role for message in turns] == ["user", "assistant", "tool"]
    assert [type(part) for part in turns[1].parts] == [Text, ToolCall]
    joined = content({"text": "Noted."}, {"text": "a"}, role="model")
    assert json.loads(written)["contents"] == [content({"text": "Log"}), joined, chunks[1], results]


def test_client_contents_between_which_a_message_is_left_out_are_one_turn():
    """Without the question between them, a call would directly follow another content of the model."""
    sent = body(
        content({"text": "Go"}),
        content({"text": "a"}, role="model"),
        content({"text": "More"}),
        content(call("f", "c1"), role="model"),
        content(response("f", {"output": "1"}, "c1")),
    )
    messages = read_request(sent).messages
    written = json.loads(write(sent, [messages[0], messages[1], *messages[3:]]))["contents"]
    joined = content({"text": "a"}, call("f", "c1"), role="model")
    assert written == [content({"text": "Go"}), joined, content(response("f", {"output": "1"}, "c1"))]


def test_names_and_ids_of_another_kind_do_no_harm():
    odd = raw(content({"functionResponse": {"name": ["f"], "id": {}, "response": {"output": "x"}}}))
    (result,) = read_message(odd).results
    assert read_message(with_results(odd, {result.call_id: "y"})).results[0].text == "y"


# Contents


def test_parts_are_read():
    message = read_message(
        raw(
            content(
                {"text": "thinking", "thought": True},
                {"text": "a"},
                {"text": "", "thoughtSignature": "s"},
                {"text": "b"},
                {"inlineData": {"mimeType": "image/png", "data": "AAAA"}},
                {"fileData": {"mimeType": "video/mp4", "fileUri": "gs://x"}},
                {"executableCode": {"code": "1+1"}, "thoughtSignature": "s"},
                {"thoughtSignature": "s"},
                call("f", "c1", x=1),
                {"text": "c"},
                role="model",
            )
        )
    )
    assert message.role == "assistant"
    kinds = [type(part) for part in message.parts]
    assert kinds == [Reasoning, Text, Media, Media, Media, ToolCall, Text]
    assert message.text == "ab\nc"
    assert [part.kind for part in message.parts if isinstance(part, Media)] == ["image", "video", "other"]
    assert message.calls == (ToolCall(id="c1", name="f", arguments='{"x":1}'),)


def test_identity_ignores_pieces_and_signatures():
    reply = content({"text": "Hel"}, {"text": "lo"}, {**call("f", x=1.0), "thoughtSignature": "s"}, role="model")
    echo = content({"text": "Hello"}, {**call("f", x=1), "thoughtSignature": NO_SIGNATURE}, role="model")
    assert canonical(read_message(raw(reply))) == canonical(read_message(raw(echo)))
    code = {"executableCode": {"language": "PYTHON", "code": "1"}}
    other = {"executableCode": {"language": "PYTHON", "code": "2"}}
    assert canonical(read_message(raw(content(code)))) != canonical(read_message(raw(content(other))))
    assert canonical(read_message(raw(content({**code, "thoughtSignature": "s"})))) == canonical(
        read_message(raw(content(code)))
    )


def test_chunks_that_a_client_sends_back_are_one_message():
    chunks = [
        content({"text": "Hel"}, role="model"),
        content({"text": "lo"}, role="model"),
        content({"text": "", "thoughtSignature": "s"}, role="model"),
    ]
    sent = body(content({"text": "Hi"}), *chunks, content({"text": "More"}))
    request = read_request(sent)
    assert [message.text for message in request.messages] == ["Hi", "Hello", "More"]
    parts = [part for chunk in chunks for part in chunk["parts"]]
    assert json.loads(request.messages[1].raw) == content(*parts, role="model")
    assert json.loads(write(sent, request.messages)) == json.loads(sent)
    assert json.loads(write(b"{}", request.messages[1:2]))["contents"] == [content(*parts, role="model")]
    apart = body(content({"text": "a"}, role="model"), {**content({"text": "b"}, role="model"), "x": 1})
    assert len(read_request(apart).messages) == 2


def test_replies_become_input():
    whole = b'{"parts" : [{"text":"a"}],"role":"model"}'
    assert as_input(whole) == whole
    assert json.loads(as_input(b'{"parts":[{"text":"a"}]}')) == content({"text": "a"}, role="model")
    assert json.loads(as_input(b'{"role":"model"}')) == content({"text": ""}, role="model")
    assert json.loads(as_input(b"{}")) == content({"text": ""}, role="model")


def test_restore_reply_restores_texts_in_their_places():
    signed = {**call("f", "c1"), "thoughtSignature": "s"}
    reply = raw(content({"text": "a <terse>x</terse>"}, signed, {"text": "<terse>y</terse>"}, role="model"))
    echo = raw(content({"text": "t", "thought": True}, {"text": "a "}, signed, role="model"))
    assert json.loads(restore_reply(echo, reply))["parts"] == [
        {"text": "t", "thought": True},
        {"text": "a <terse>x</terse>"},
        signed,
        {"text": "<terse>y</terse>"},
    ]
    pieces = raw(content({"text": "a"}, {"text": " ", "thoughtSignature": "s"}, role="model"))
    assert json.loads(restore_reply(pieces, reply))["parts"] == [
        {"text": "a <terse>x</terse><terse>y</terse>"},
        {"text": "", "thoughtSignature": "s"},
    ]


def test_texts_are_replaced_and_prefixed():
    image = {"inlineData": {"mimeType": "image/png", "data": "AAAA"}}
    wire = raw(content({"text": "a"}, image, {"text": "b"}))
    assert json.loads(with_text(wire, "c"))["parts"] == [{"text": "c"}, image]
    assert json.loads(with_text(raw(content(image)), "c"))["parts"] == [image, {"text": "c"}]
    assert json.loads(with_text(wire, None))["parts"] == [image]
    assert json.loads(with_prefix(wire, "c"))["parts"] == [{"text": "c"}, {"text": "a"}, image, {"text": "b"}]


def test_messages_of_our_own():
    assert json.loads(write_text("user", "a")) == content({"text": "a"})
    assert json.loads(write_text("assistant", "a")) == content({"text": "a"}, role="model")
    assert read_message(write_text("system", "a")).role == "system"
    calls = (ToolCall(id="c1", name="f", arguments='{"x":1}'), ToolCall(id="c2", name="g", arguments="nonsense"))
    message = Message(role="assistant", parts=(Reasoning(text="r"), Text(text="a"), *calls), raw=b"")
    assert json.loads(write_message(message)) == content(
        {"text": "a"},
        {**call("f", "c1", x=1), "thoughtSignature": NO_SIGNATURE},
        call("g", "c2", arguments="nonsense"),
        role="model",
    )
    media = Message(role="user", parts=(Media(kind="image", digest="d"),), raw=b"")
    assert json.loads(write_message(media)) == content({"text": "[image]"})
    assert json.loads(write_message(Message(role="user", parts=(), raw=b""))) == content({"text": ""})


@given(
    st.lists(
        st.one_of(
            st.text().map(lambda text: Text(text=text)),
            st.builds(
                ToolCall,
                id=st.text(st.characters(codec="ascii", categories=["L"]), min_size=1),
                name=st.just("f"),
                arguments=st.dictionaries(st.text(), st.integers()).map(json.dumps),
            ),
        ),
        max_size=5,
    )
)
def test_written_messages_read_the_same(parts: list[Text | ToolCall]):
    message = Message(role="assistant", parts=tuple(parts), raw=b"")
    again = read_message(write_message(message))
    assert [(each.id, each.name, json.loads(each.arguments)) for each in again.calls] == [
        (each.id, each.name, json.loads(each.arguments)) for each in message.calls
    ]
    assert again.text.replace("\n", "") == message.text.replace("\n", "")


def test_errors_have_googles_shape():
    assert json.loads(error_body(ErrorDescription(message="no", code="invalid_api_key"))) == {
        "error": {"code": 401, "message": "no", "status": "UNAUTHENTICATED"}
    }
    bad = json.loads(error_body(ErrorDescription(message="no", param="contents")))["error"]
    assert (bad["code"], bad["status"]) == (400, "INVALID_ARGUMENT")
    assert bad["details"][0]["fieldViolations"] == [{"field": "contents", "description": "no"}]
    down = json.loads(error_body(ErrorDescription(message="away", type="upstream_error", code="upstream_unavailable")))
    assert down["error"]["status"] == "UNAVAILABLE"
    event = GEMINI.error_event(error_body(ErrorDescription(message="no")))
    assert event.startswith(b"data: {")
    assert event.endswith(b"}\r\n\r\n")


def test_overflows_in_googles_framings():
    error = {
        "error": {"code": 400, "message": "The input token count (9) exceeds the maximum number of tokens allowed (8)."}
    }
    body: Any
    for body in (error, [error]):
        found = classify_error(400, raw(body))
        assert found is not None
        assert (found.limit, found.needed) == (8, 9)
    for body in ([error], [{"candidates": []}, error], {"response": error}):
        assert classify_error(200, raw(body)) is not None
    reply = {"candidates": [{"content": {"parts": [{"text": error["error"]["message"]}]}}]}
    assert classify_error(200, raw(reply)) is None
    assert classify_error(200, raw([reply])) is None


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"promptTokenCount": 5, "candidatesTokenCount": 3, "thoughtsTokenCount": 4}, (5, None, 7)),
        ({"promptTokenCount": 5, "cachedContentTokenCount": 2, "toolUsePromptTokenCount": 9}, (5, 2, None)),
        ({"thoughtsTokenCount": 4}, (None, None, 4)),
        ([], (None, None, None)),
    ],
)
def test_usage_is_read(usage: Any, expected: tuple[int | None, ...]):
    read = GEMINI.read_usage(raw(usage))
    assert (read.input, read.cached, read.output) == expected
    assert GEMINI.read_usage(b"") == GEMINI.read_usage(b"{}")


@both
def test_a_message_on_its_own_is_split_like_a_reply(dialect: Dialect):
    reply = raw(content({"text": "Hi<terse>x</terse>"}, role="model"))
    (choice,) = dialect.split_reply(dialect.as_reply(reply), ClientView(tags=TagKinds(terse=True)))[1].choices
    assert (choice.model_message, choice.terse) == (reply, ("x",))
    assert json.loads(choice.client_message) == content({"text": "Hi"}, role="model")
