"""The end of a reply in rounds: calls that are not whole, replies that the host cut off, later rounds that fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tersely.fakellm.scripted import ScriptedReply
from tersely.fakellm.scripted.anthropic import ANTHROPIC
from tests.conftest import Database
from tests.support.dialect_wires import WIRES
from tests.support.host_replies import HOSTS, answer_with, body_with, reply_with, response
from tests.support.services import FROM_THE_START, Service, serve
from tests.support.upstreams import DONE, MODEL, Model, RawUpstream, http_head, sse

MAX_REPLY = 64 * 1024
PAD = "manage_scratchpad"
READ = '{"action": "read"}'
THEIRS = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def raw_service(store: Database, raw: RawUpstream) -> Iterator[Service]:
    """A service before a host of bytes."""
    options: dict[str, Any] = {"strategy": "window", "instructions": "off", "epoch": FROM_THE_START}
    with serve(store, raw.url, max_reply=MAX_REPLY, **options) as running:
        yield running


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=30) as client:
        yield client


def event(kind: str, **more: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **more})}\n\n".encode()


def anthropic_stream(*calls: tuple[str, str, str], stop: str, text: str = "Well.") -> bytes:
    """A reply with text, and calls: (id, name, the JSON of the input)."""
    message = {"id": "m", "type": "message", "role": "assistant", "model": "claude-x", "content": [], "usage": {}}
    blocks: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"type": "text", "text": ""}, {"type": "text_delta", "text": text})
    ]
    for call_id, name, partial in calls:
        start = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
        blocks.append((start, {"type": "input_json_delta", "partial_json": partial}))
    out = http_head() + event("message_start", message=message)
    for index, (start, delta) in enumerate(blocks):
        out += event("content_block_start", index=index, content_block=start)
        out += event("content_block_delta", index=index, delta=delta) + event("content_block_stop", index=index)
    return out + event("message_delta", delta={"stop_reason": stop}, usage={"output_tokens": 9}) + event("message_stop")


def whole(message: dict[str, Any], *, finish: str = "stop") -> bytes:
    choice = {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": None, **message}}
    body = json.dumps({"id": "c", "object": "chat.completion", "model": MODEL, "choices": [choice]}).encode()
    return http_head("application/json", content_length=str(len(body))) + body


def calling(*names: str, call_id: str = "c1", arguments: str = READ) -> dict[str, Any]:
    functions = [{"name": name, "arguments": arguments if name == PAD else "{}"} for name in names]
    return {"tool_calls": [{"id": call_id, "type": "function", "function": each} for each in functions]}


def ask_anthropic(http: httpx.Client, service: Service, key: str, *more: dict[str, Any]) -> httpx.Response:
    tools = [{"name": "add", "input_schema": {"type": "object"}}]
    messages = [{"role": "user", "content": f"go {key}"}, *more]
    body = {"model": "claude-x", "max_tokens": 100, "stream": True, "tools": tools, "messages": messages}
    return http.post(f"{service.url}/v1/messages", json=body, headers={"x-tersely-session": key})


def ask_chat(http: httpx.Client, service: Service, key: str, **more: Any) -> httpx.Response:
    body = {"model": MODEL, "user": key, "tools": [THEIRS], "messages": [{"role": "user", "content": "go"}], **more}
    return http.post(f"{service.url}/v1/chat/completions", json=body, headers={"x-tersely-session": key})


def stop_reasons(answer: httpx.Response) -> list[str]:
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return [each["delta"]["stop_reason"] for each in events if each["type"] == "message_delta"]


# Calls that are not whole, and replies that were cut off


@pytest.mark.parametrize("stop", ["model_context_window_exceeded", "refusal", "max_tokens"])
@pytest.mark.parametrize("partial", ['{"action": "update", "content": "mi', READ])
def test_the_client_learns_that_a_reply_was_cut_off(
    http: httpx.Client, raw: RawUpstream, raw_service: Service, key: str, stop: str, partial: str
):
    answer_with(raw, anthropic_stream(("t1", PAD, partial), stop=stop))
    assert stop_reasons(ask_anthropic(http, raw_service, key)) == [stop]
    assert len(raw.requests) == 1


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("finish", ["model_length", "insufficient_system_resource", "error", "content_filter"])
def test_no_call_is_run_of_a_chat_reply_that_was_cut_off(
    http: httpx.Client, offering: Service, model: Model, key: str, finish: str, streams: bool
):
    model.script(key, ScriptedReply(message=calling(PAD, arguments='{"action": "up'), finish_reason=finish))
    answer = ask_chat(http, offering, key, stream=streams)
    assert f'"finish_reason":"{finish}"' in answer.text.replace(": ", ":")
    assert len(model.requests(key)) == 1


@pytest.mark.parametrize(("arguments", "rounds"), [('{"action": "up', 1), (READ, 2)])
def test_under_an_unknown_finish_only_whole_calls_are_run(
    http: httpx.Client, offering: Service, model: Model, key: str, arguments: str, rounds: int
):
    odd = ScriptedReply(message=calling(PAD, arguments=arguments), finish_reason="eos")
    model.script(key, odd, ScriptedReply(message={"content": "Done."}))
    assert ask_chat(http, offering, key).status_code == 200
    assert len(model.requests(key)) == rounds


@pytest.mark.parametrize("own", [READ, '{"action": "re'])
@pytest.mark.parametrize("client", ['{"a": 1}', '{"a": 1'])
def test_input_that_is_no_json_leaves_calls_and_results_in_pairs(
    http: httpx.Client, raw: RawUpstream, raw_service: Service, key: str, own: str, client: str
):
    calls = ("t1", PAD, own), ("t2", "add", client)
    answer_with(raw, anthropic_stream(*calls, stop="tool_use"), anthropic_stream(stop="end_turn"))
    assert ask_anthropic(http, raw_service, key).status_code == 200
    given = json.loads(client) if client.endswith("}") else {}
    call = {"type": "tool_use", "id": "t2", "name": "add", "input": given}
    result = {"type": "tool_result", "tool_use_id": "t2", "content": "SUM"}
    echo = [{"type": "text", "text": "Well."}, call]
    following: list[dict[str, Any]] = [{"role": "assistant", "content": echo}, {"role": "user", "content": [result]}]
    assert ask_anthropic(http, raw_service, key, *following).status_code == 200
    last = json.loads(raw.requests[-1].body)
    assert ANTHROPIC.check(last) is None
    ids = [block.get("tool_use_id") for block in last["messages"][-1]["content"]]
    assert ids == ["t1", "t2"]
    assert b"malformed_json" not in raw.requests[-1].body


def test_a_call_alone_whose_input_is_no_json_is_answered(
    http: httpx.Client, raw: RawUpstream, raw_service: Service, key: str
):
    answer_with(
        raw, anthropic_stream(("t1", PAD, '{"action'), stop="tool_use"), anthropic_stream(stop="end_turn", text="So.")
    )
    assert stop_reasons(ask_anthropic(http, raw_service, key)) == ["end_turn"]
    second = json.loads(raw.requests[1].body)
    assert ANTHROPIC.check(second) is None
    assert "action is missing" in json.dumps(second["messages"][-1])


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("call_id", ["", "same"])
def test_calls_of_one_id_are_told_apart(
    http: httpx.Client, raw: RawUpstream, raw_service: Service, key: str, call_id: str, streams: bool
):
    message = calling(PAD, "add", call_id=call_id)
    if streams:
        deltas = [{"index": index, **each} for index, each in enumerate(message["tool_calls"])]
        choices = [{"index": 0, "delta": {"role": "assistant", "tool_calls": [each]}} for each in deltas]
        events = [b"data: " + json.dumps({"id": "c", "choices": [each]}).encode() + b"\n\n" for each in choices]
        reply = http_head() + b"".join(events) + sse(finish="tool_calls") + DONE
    else:
        reply = whole(message, finish="tool_calls")
    answer_with(raw, reply, whole({"content": "Three."}))
    answer = ask_chat(http, raw_service, key, stream=streams)
    assert '"add"' in answer.text
    assert PAD not in answer.text
    theirs = message["tool_calls"][1:]
    history = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": theirs},
        {"role": "tool", "tool_call_id": call_id, "content": "3"},
    ]
    body = {"model": MODEL, "tools": [THEIRS], "messages": history}
    later = http.post(f"{raw_service.url}/v1/chat/completions", json=body)
    assert later.headers["x-tersely-session"] == key


def test_calls_of_one_id_take_effect_in_their_order(
    http: httpx.Client, raw: RawUpstream, raw_service: Service, key: str
):
    adding = [("", PAD, {"action": "append", "content": text}) for text in ("one", "two", "one")]
    answer_with(raw, response(body_with("openai_chat", "", *adding)), whole({"content": "Noted."}))
    assert ask_chat(http, raw_service, key).status_code == 200
    pad = http.get(f"{raw_service.url}/api/sessions/{key}/scratchpad").json()
    assert "one\ntwo\none" in pad.values()


# Later rounds that fail


def test_a_later_round_that_is_too_long_goes_to_the_client_whole(
    http: httpx.Client, raw: RawUpstream, raw_service: Service, key: str
):
    long = whole({"content": "word " * 100_000})
    answer_with(raw, whole(calling(PAD), finish="tool_calls"), long)
    assert ask_chat(http, raw_service, key).content == long.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize(
    ("content_type", "body"),
    [("text/event-stream", sse("x", role=True) + sse(finish="stop") + DONE), ("text/html", b"<html>")],
)
def test_a_later_round_that_is_no_reply_goes_to_the_client_as_it_is(
    http: httpx.Client, raw: RawUpstream, raw_service: Service, key: str, content_type: str, body: bytes
):
    answer_with(raw, whole(calling(PAD), finish="tool_calls"), http_head(content_type) + body)
    answer = ask_chat(http, raw_service, key)
    assert (answer.headers["content-type"], answer.content) == (content_type, body)


def test_the_refusal_of_a_later_round_has_its_own_headers(
    http: httpx.Client, offering: Service, model: Model, key: str
):
    left = "x-ratelimit-remaining-requests"
    refusal = ScriptedReply(status=429, body=b'{"error":{"message":"slow"}}', headers={"retry-after": "7", left: "0"})
    model.script(key, ScriptedReply(message=calling(PAD), headers={left: "5"}), refusal)
    answer = ask_chat(http, offering, key)
    assert (answer.status_code, answer.headers["retry-after"], answer.headers[left]) == (429, "7", "0")


@pytest.mark.parametrize("streams", [False, True])
def test_tokens_of_finished_rounds_count_where_a_later_one_fails(
    http: httpx.Client, offering: Service, model: Model, key: str, streams: bool
):
    usage = {"prompt_tokens": 5_000, "completion_tokens": 700, "total_tokens": 5_700}
    failure = ScriptedReply(status=500, body=b'{"error":{"message":"no"}}')
    model.script(key, ScriptedReply(message=calling(PAD), usage=usage), failure)
    ask_chat(http, offering, key, stream=streams)
    (call,) = http.get(f"{offering.url}/api/sessions/{key}/calls").json()["items"]
    assert (call["input_tokens"], call["output_tokens"]) == (5_000, 700)


# In every dialect

OWN = ("t1", PAD, {"action": "read"})


def ask_in(
    http: httpx.Client,
    service: Service,
    dialect: str,
    key: str,
    text: str = "go",
    *,
    streams: bool = False,
    **more: Any,
) -> httpx.Response:
    wire = WIRES[dialect]
    path = wire.stream_path if streams and wire.stream_path else wire.path
    headers = {"x-tersely-session": key, "x-script": key}
    return http.post(f"{service.url}{path}", content=wire.body(text, stream=streams, **more), headers=headers)


def rounds_of(model: Model, key: str) -> int:
    return sum(each.headers.get("X-Script") == key for each in model.state.received)


@pytest.mark.parametrize("dialect", HOSTS)
@pytest.mark.parametrize("kind", ["html", "events", "array"])
def test_words_that_nobody_saw_are_not_stored(
    http: httpx.Client, raw: RawUpstream, raw_service: Service, key: str, dialect: str, kind: str
):
    last = {
        "html": response(b"<html>", "text/html"),
        "events": response(body_with(dialect, "Done.", streams=True), "text/event-stream"),
        "array": response(b"[" + body_with(dialect, "Done.") + b"]"),
    }[kind]
    answer_with(raw, response(body_with(dialect, "Let me.", OWN)), last, response(body_with(dialect, "Next.")))
    answer = ask_in(http, raw_service, dialect, key)
    assert (answer.status_code, answer.content) == (200, last.partition(b"\r\n\r\n")[2])
    assert "Let me." not in http.get(f"{raw_service.url}/api/sessions/{key}/messages?view=client").text
    assert ask_in(http, raw_service, dialect, key, "next").status_code == 200
    assert b"Let me." not in raw.requests[-1].body


@pytest.mark.parametrize("dialect", ["gemini", "gemini_gca"])
def test_first_round_in_another_framing_is_relayed_as_it_is(
    http: httpx.Client, raw: RawUpstream, raw_service: Service, key: str, dialect: str
):
    body = b"[" + body_with(dialect, "Let me.", OWN) + b"]"
    answer_with(raw, response(body))
    answer = ask_in(http, raw_service, dialect, key)
    assert (answer.status_code, answer.content, len(raw.requests)) == (200, body, 1)


@pytest.mark.parametrize("dialect", HOSTS)
def test_later_round_in_events_that_is_too_long_goes_to_the_client_whole(
    http: httpx.Client, raw: RawUpstream, raw_service: Service, key: str, dialect: str
):
    long = body_with(dialect, "word " * 20_000, streams=True)
    answer_with(raw, response(body_with(dialect, "Let me.", OWN)), response(long, "text/event-stream"))
    assert ask_in(http, raw_service, dialect, key).content == long


@pytest.mark.parametrize("dialect", ["gemini", "gemini_gca"])
@pytest.mark.parametrize("is_long", [False, True])
def test_later_round_of_a_stream_that_is_no_stream_ends_it_with_an_error(
    http: httpx.Client, raw: RawUpstream, raw_service: Service, key: str, dialect: str, is_long: bool
):
    second = response(b"[" + b" " * 1_200_000 + b"]")
    if not is_long:
        second = http_head("application/json", content_length="5000") + b'[{"a":'
    answer_with(raw, response(body_with(dialect, "Let me.", OWN, streams=True), "text/event-stream"), second)
    assert '"error"' in ask_in(http, raw_service, dialect, key, streams=True).text
    (call,) = http.get(f"{raw_service.url}/api/sessions/{key}/calls").json()["items"]
    assert (call["input_tokens"], call["output_tokens"]) == (5_000, 700)
    assert "Let me." in http.get(f"{raw_service.url}/api/sessions/{key}/messages?view=all").text


@pytest.mark.parametrize(
    ("dialect", "streams", "ending"),
    [
        ("openai_chat", False, response(body_with("openai_chat", "word " * 20_000))),
        ("anthropic", False, response(b"<html>", "text/html")),
        ("anthropic", True, http_head(content_length="5000") + b"\n"),
        ("openai_responses", True, http_head(content_length="5000") + b"\n"),
        ("gemini", True, http_head(content_length="5000") + b"\n"),
        ("openai_chat", False, whole({"content": "Done."})),
    ],
    ids=["too long", "no reply", "broken off", "broken off", "broken off", "no usage"],
)
def test_weight_of_a_turn_is_that_of_one_round(
    http: httpx.Client, raw: RawUpstream, raw_service: Service, key: str, dialect: str, streams: bool, ending: bytes
):
    kind = "text/event-stream" if streams else "application/json"
    rounds = [response(body_with(dialect, "w", OWN, streams=streams, number=number), kind) for number in range(3)]
    answer_with(raw, *rounds, ending)
    ask_in(http, raw_service, dialect, key, streams=streams)
    (turn,) = http.get(f"{raw_service.url}/api/sessions/{key}/turns").json()["items"]
    usage = turn["usage"]
    assert (usage["input"], usage["output"], usage["weight"]) == (15_000, 2_100, 5_700)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("dialect", "finish"),
    [
        ("gemini", "MODEL_ARMOR"),
        ("gemini", "MALFORMED_FUNCTION_CALL"),
        ("gemini", "UNEXPECTED_TOOL_CALL"),
        ("gemini_gca", "SAFETY"),
        ("openai_chat", "sensitive"),
        ("openai_chat", "abort"),
    ],
)
def test_no_call_is_run_of_a_reply_that_the_host_took_back(
    http: httpx.Client, offering: Service, model: Model, key: str, dialect: str, finish: str, streams: bool
):
    model.script(key, reply_with(dialect, "Well.", OWN, finish=finish))
    assert f'"{finish}"' in ask_in(http, offering, dialect, key, streams=streams).text
    assert rounds_of(model, key) == 1


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("status", ["incomplete", "in_progress"])
def test_call_whose_item_is_unfinished_never_happened(
    http: httpx.Client, offering: Service, model: Model, key: str, status: str, streams: bool
):
    model.script(key, reply_with("openai_responses", "Well.", OWN, status=status))
    answer = ask_in(http, offering, "openai_responses", key, streams=streams)
    assert "Well." in answer.text
    assert PAD not in answer.text
    assert rounds_of(model, key) == 1


@pytest.mark.parametrize(
    ("dialect", "given"), [("anthropic", {"input": None}), ("openai_responses", {"arguments": {}})]
)
def test_arguments_of_a_hidden_call_have_the_form_of_requests(
    http: httpx.Client, raw: RawUpstream, raw_service: Service, key: str, dialect: str, given: dict[str, Any]
):
    answer_with(raw, response(body_with(dialect, "Well.", OWN, **given)), response(body_with(dialect, "Done.")))
    assert ask_in(http, raw_service, dialect, key).status_code == 200
    assert [HOSTS[dialect].check(json.loads(each.body)) for each in raw.requests] == [None, None]


def test_no_tools_are_offered_where_arguments_are_streamed(
    http: httpx.Client, raw: RawUpstream, raw_service: Service, key: str
):
    config = {"functionCallingConfig": {"streamFunctionCallArguments": True}}
    answer_with(raw, response(body_with("gemini", "Well.", streams=True), "text/event-stream"))
    ask_in(http, raw_service, "gemini", key, streams=True, toolConfig=config)
    assert PAD.encode() not in raw.requests[0].body
