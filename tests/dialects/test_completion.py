"""Plain questions: what each dialect sends, and what is read from its answers."""

from __future__ import annotations

import json

import pytest

from tersely.dialects.completion import PlainReply, read_completion
from tersely.dialects.registry import COMPLETIONS, DIALECTS
from tersely.domain.messages import Dialect
from tersely.fakellm.strict.openai_chat import check

NAMES: tuple[Dialect, ...] = ("openai_chat", "openai_responses", "anthropic", "gemini")

ANSWERS: dict[Dialect, bytes] = {
    "openai_chat": b'{"id":"1","choices":[{"index":0,"message":{"role":"assistant","content":"words"},'
    b'"finish_reason":"%s"}],"usage":{"prompt_tokens":7,"completion_tokens":3}}',
    "openai_responses": b'{"output":[{"type":"message","role":"assistant","content":[{"type":"output_text",'
    b'"text":"words"}]}],"incomplete_details":{"reason":"%s"},"usage":{"input_tokens":7,"output_tokens":3}}',
    "anthropic": b'{"type":"message","role":"assistant","model":"m","content":[{"type":"text","text":"words"}],'
    b'"stop_reason":"%s","usage":{"input_tokens":7,"output_tokens":3}}',
    "gemini": b'{"candidates":[{"content":{"role":"model","parts":[{"text":"words"}]},"finishReason":"%s","index":0}],'
    b'"usageMetadata":{"promptTokenCount":7,"candidatesTokenCount":3}}',
}
FINISHES: dict[Dialect, dict[str, str]] = {
    "openai_chat": {"stop": "stop", "length": "length", "tool_calls": "other", "content_filter": "other"},
    "openai_responses": {"max_output_tokens": "length", "content_filter": "other"},
    "anthropic": {"end_turn": "stop", "max_tokens": "length", "tool_use": "other", "refusal": "other"},
    "gemini": {"STOP": "stop", "MAX_TOKENS": "length", "SAFETY": "other"},
}
CALLS: dict[Dialect, bytes] = {
    "openai_chat": b'{"choices":[{"index":0,"message":{"role":"assistant","content":null,"tool_calls":[{"id":"c",'
    b'"type":"function","function":{"name":"read","arguments":"{}"}}]},"finish_reason":"tool_calls"}]}',
    "openai_responses": b'{"status":"completed","output":[{"type":"function_call","call_id":"c","name":"read",'
    b'"arguments":"{}"}]}',
    "anthropic": b'{"role":"assistant","content":[{"type":"tool_use","id":"c","name":"read","input":{}}],'
    b'"stop_reason":"tool_use","usage":{}}',
    "gemini": b'{"candidates":[{"content":{"role":"model","parts":[{"functionCall":{"name":"read","args":{}}}]},'
    b'"finishReason":"STOP"}]}',
}


@pytest.mark.parametrize("name", NAMES)
def test_a_question_can_be_read_and_offers_no_tools(name: Dialect) -> None:
    request = COMPLETIONS[name].write(model="m", instructions="be brief", message="what?", max_tokens=9)
    body = json.loads(request.body)
    assert not body.keys() & {"tools", "functions", "tool_choice", "stream"}
    assert "9" in request.body.decode()
    if name != "gemini":  # there the model stands in the path
        assert DIALECTS[name].read_request(request.body).model == "m"
    else:
        assert request.path == "/v1beta/models/m:generateContent"


def test_openais_own_rules_are_kept() -> None:
    for model, member in (("gpt-4o", "max_tokens"), ("openai/gpt-5-mini", "max_completion_tokens"), ("o3", None)):
        body = json.loads(
            COMPLETIONS["openai_chat"].write(model=model, instructions="i", message="m", max_tokens=9).body
        )
        assert check(body) is None
        assert (member or "max_completion_tokens") in body


def test_keys_go_where_each_host_looks() -> None:
    assert COMPLETIONS["openai_chat"].authorize("k") == [("authorization", "Bearer k")]
    assert COMPLETIONS["anthropic"].authorize("k")[0] == ("x-api-key", "k")
    assert COMPLETIONS["gemini"].authorize("k") == [("x-goog-api-key", "k")]


@pytest.mark.parametrize(("name", "reason"), [(name, reason) for name in NAMES for reason in FINISHES[name]])
def test_an_answer_is_read(name: Dialect, reason: str) -> None:
    answer = read_completion(DIALECTS[name], ANSWERS[name] % reason.encode())
    assert answer == PlainReply(
        text="words",
        finish=FINISHES[name][reason],  # type: ignore[arg-type]
        has_calls=False,
        input_tokens=7,
        output_tokens=3,
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_call_is_noticed(name: Dialect) -> None:
    answer = read_completion(DIALECTS[name], CALLS[name])
    assert (answer.text, answer.has_calls) == ("", True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", b"[]", b'{"choices":[]}', b'{"error":{"message":"no"}}'])
def test_an_unreadable_answer_is_refused(name: Dialect, body: bytes) -> None:
    with pytest.raises(ValueError, match="not a reply"):
        read_completion(DIALECTS[name], body)


def test_model_without_system_text_gets_one_message() -> None:
    write = COMPLETIONS["gemini"].write
    question = write(model="gemma-3-27b-it", instructions="Sum up.", message="All.", max_tokens=9)
    body = json.loads(question.body)
    assert "systemInstruction" not in body
    assert body["contents"] == [{"role": "user", "parts": [{"text": "Sum up."}, {"text": "All."}]}]
