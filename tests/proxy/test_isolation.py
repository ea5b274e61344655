"""A session that changes its provider in the middle: words cross, tool traffic stays behind, nothing is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import pytest

from tests.proxy.harness import Answered, Model, Service, kept, post


@dataclass(frozen=True, slots=True, kw_only=True)
class Speaker:
    """How a client speaks: ``request`` of messages, a message of a user or of a result, the calls in a reply."""

    path: str
    request: Callable[[list[Any]], dict[str, Any]]
    user: Callable[[str], dict[str, Any]]
    result: Callable[[dict[str, Any], str], dict[str, Any]]
    call: Callable[[dict[str, Any]], dict[str, Any]]
    marks: tuple[str, ...]


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def _generate(messages: list[Any]) -> dict[str, Any]:
    return {
        "contents": messages,
        "tools": [{"functionDeclarations": [{"name": "add", "parametersJsonSchema": SCHEMA}]}],
        "systemInstruction": {"parts": [{"text": "You add."}]},
    }


def _gemini_call(reply: dict[str, Any]) -> dict[str, Any]:
    parts = reply["candidates"][0]["content"]["parts"]
    return next(part["functionCall"] for part in parts if "functionCall" in part)


def _gemini_result(call: dict[str, Any], text: str) -> dict[str, Any]:
    response = {"id": call["id"], "name": "add", "response": {"output": text}}
    return {"role": "user", "parts": [{"functionResponse": response}]}


def _parts(text: str) -> dict[str, Any]:
    return {"role": "user", "parts": [{"text": text}]}


def _said(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


GEMINI_MARKS = ("functionCall", "functionResponse")
SPEAKERS: dict[str, Speaker] = {
    "openai_chat": Speaker(
        path="/v1/chat/completions",
        request=lambda messages: {
            "model": "m",
            "messages": [{"role": "system", "content": "You add."}, *messages],
            "tools": [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}],
        },
        user=_said,
        result=lambda call, text: {"role": "tool", "tool_call_id": call["id"], "content": text},
        call=lambda reply: reply["choices"][0]["message"]["tool_calls"][0],
        marks=("tool_calls", "tool_call_id"),
    ),
    "anthropic": Speaker(
        path="/v1/messages",
        request=lambda messages: {
            "model": "m",
            "max_tokens": 100,
            "system": "You add.",
            "messages": messages,
            "tools": [{"name": "add", "input_schema": SCHEMA}],
        },
        user=_said,
        result=lambda call, text: {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": text}],
        },
        call=lambda reply: next(block for block in reply["content"] if block["type"] == "tool_use"),
        marks=("tool_use", "tool_result"),
    ),
    "openai_responses": Speaker(
        path="/v1/responses",
        request=lambda messages: {
            "model": "m",
            "instructions": "You add.",
            "input": messages,
            "tools": [{"type": "function", "name": "add", "parameters": SCHEMA}],
        },
        user=_said,
        result=lambda call, text: {"type": "function_call_output", "call_id": call["call_id"], "output": text},
        call=lambda reply: next(item for item in reply["output"] if item["type"] == "function_call"),
        marks=("function_call", "function_call_output"),
    ),
    "gemini": Speaker(
        path="/v1beta/models/m:generateContent",
        request=_generate,
        user=_parts,
        result=_gemini_result,
        call=_gemini_call,
        marks=GEMINI_MARKS,
    ),
    "gemini_gca": Speaker(
        path="/v1internal:generateContent",
        request=lambda messages: {"model": "m", "project": "p", "request": _generate(messages)},
        user=_parts,
        result=_gemini_result,
        call=lambda reply: _gemini_call(reply["response"]),
        marks=GEMINI_MARKS,
    ),
}
PAIRS = list(permutations(SPEAKERS, 2))
KIN = {frozenset({"gemini", "gemini_gca"})}


async def ask(service: Service, speaker: Speaker, key: str, message: dict[str, Any]) -> Answered:
    body = json.dumps(speaker.request([message])).encode()
    answer = await post(service, body, path=speaker.path, X_Tersely_Session=key)
    assert answer.status == 200, answer.body
    return answer


async def add(service: Service, speaker: Speaker, key: str, number: int) -> None:
    """A turn in which a tool is called."""
    answer = await ask(service, speaker, key, speaker.user(f'call add {{"a": {number}}}'))
    await ask(service, speaker, key, speaker.result(speaker.call(answer.json), f"sum {number}"))


def sent(model: Model) -> str:
    """What went up last, without the tools that were offered."""
    body = json.loads(model.last.body)
    body.get("request", body).pop("tools", None)
    return json.dumps(body)


@pytest.mark.parametrize(("first", "second"), PAIRS)
async def test_a_session_changes_its_provider(
    service: Service, model: Model, key: str, first: str, second: str
) -> None:
    one, other = SPEAKERS[first], SPEAKERS[second]
    are_kin = frozenset({first, second}) in KIN
    await add(service, one, key, 17)

    await add(service, other, key, 23)
    there = sent(model)
    await ask(service, one, key, one.user("and what now?"))
    back = sent(model)

    for text in (there, back):
        assert "The tool answered: sum 17" in text, "words cross"
        assert 'call add {\\"a\\": 17}' in text
    assert "The tool answered: sum 23" in back
    assert all(mark in there for mark in other.marks), "its own tool traffic is all there"
    assert all(mark in back for mark in one.marks)
    assert there.count('"sum 17"') == are_kin, "the result itself stays behind"
    assert back.count('"sum 23"') == are_kin
    assert back.count('"sum 17"') == 1
    stored = await kept(service, key)
    assert {each.status for each in stored if each.role != "system"} == {"live"}
    assert len({each.turn for each in stored if each.role != "system"}) == 3


@pytest.mark.parametrize(("first", "second"), PAIRS)
async def test_a_call_that_is_answered_in_another_dialect(
    service: Service, model: Model, key: str, first: str, second: str
) -> None:
    """Its call is not there, so neither is the result; what goes up is valid all the same."""
    one, other = SPEAKERS[first], SPEAKERS[second]
    answer = await ask(service, one, key, one.user('call add {"a": 1}'))
    call = one.call(answer.json)
    call_id = call.get("call_id") or call["id"]
    await ask(service, other, key, other.result({"id": call_id, "call_id": call_id, "name": "add"}, "late"))
    await ask(service, other, key, other.user("go on"))

    assert ("late" in sent(model)) is (frozenset({first, second}) in KIN)
