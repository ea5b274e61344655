"""A session that changes its provider in the middle: words cross, tool traffic stays behind, nothing is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import pytest

from tersely.domain.history.pairing import NO_RESULT
from tersely.fakellm.scripted import ScriptedReply
from tests.support.http import Answered, post
from tests.support.rows import messages_by_number
from tests.support.services import Service
from tests.support.upstreams import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Speaker:
    """A client's dialect: ``request`` of messages, a message of a user or of a result, the calls in a reply."""

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


async def ask(service: Service, speaker: Speaker, key: str, *messages: dict[str, Any], script: str = "") -> Answered:
    body = json.dumps(speaker.request(list(messages))).encode()
    answer = await post(service, body, path=speaker.path, X_Tersely_Session=key, X_Script=script)
    assert answer.status == 200, answer.body
    return answer


async def add(service: Service, speaker: Speaker, key: str, number: int) -> None:
    """A turn in which a tool is called."""
    answer = await ask(service, speaker, key, speaker.user(f'call add {{"a": {number}}}'))
    await ask(service, speaker, key, speaker.result(speaker.call(answer.json), f"sum {number}"))


def sent(model: Model) -> str:
    """Return the last request upstream, without the tools that were offered."""
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
    stored = await messages_by_number(service, key)
    assert {each.status for each in stored if each.role != "system"} == {"live"}
    assert len({each.turn for each in stored if each.role != "system"}) == 3


@pytest.mark.parametrize(("first", "second"), PAIRS)
async def test_a_result_that_is_sent_alone_in_another_dialect(
    service: Service, model: Model, key: str, first: str, second: str
) -> None:
    """Its call is not there: the model is told the result in words, and each time in the same ones."""
    one, other = SPEAKERS[first], SPEAKERS[second]
    are_kin = frozenset({first, second}) in KIN
    answer = await ask(service, one, key, one.user('call add {"a": 1}'))
    await ask(service, other, key, _answer_to(one.call(answer.json), other, "late"))
    at_once = sent(model)
    await ask(service, other, key, other.user("go on"))
    later = sent(model)
    await ask(service, one, key, one.user("and here"))

    as_text = ["Result of the tool add", "late"]
    assert all(text in each for text in as_text[are_kin:] for each in (at_once, later))
    assert (as_text[0] in at_once) is not are_kin
    assert NO_RESULT not in sent(model)
    assert "late" in sent(model)
    assert all(mark in sent(model) for mark in one.marks), "the call is at home there, and has its result"


@pytest.mark.parametrize(("first", "second"), PAIRS)
async def test_parallel_calls_that_are_answered_in_another_dialect(
    service: Service, model: Model, key: str, first: str, second: str
) -> None:
    """A client that keeps the history changes its provider between calls and results, and later sends what is new."""
    one, other = SPEAKERS[first], SPEAKERS[second]
    message = {"role": "assistant", "content": None, "tool_calls": [_called("c1", 1), _called("c2", 2)]}
    model.script(key, ScriptedReply(message=message))
    await ask(service, one, key, one.user("add twice"), script=key)
    calls = [{"id": each, "call_id": each, "name": "add"} for each in ("c1", "c2")]
    results = [other.result(call, f"sum {call['id']}") for call in calls]
    calls_again = CALLS[second](("c1", 1), ("c2", 2))
    await ask(service, other, key, other.user("add twice"), *calls_again, *_joined(second, results))
    assert NO_RESULT not in sent(model)
    await ask(service, other, key, other.user("what now?"))
    there = sent(model)
    await ask(service, one, key, one.user("and here?"))
    back = sent(model)

    for text in (there, back):
        assert NO_RESULT not in text
        assert "sum c1" in text
        assert "sum c2" in text
    assert all(mark in back for mark in one.marks), "calls and results in the form of their dialect"
    assert {each.status for each in await messages_by_number(service, key) if each.role != "system"} == {"live"}


def _called(call_id: str, number: int) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": number})}}


def _answer_to(call: dict[str, Any], other: Speaker, text: str) -> dict[str, Any]:
    call_id = call.get("call_id") or call["id"]
    return other.result({"id": call_id, "call_id": call_id, "name": "add"}, text)


def _joined(dialect: str, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results of parallel calls in one message, where they are said so."""
    member = {"anthropic": "content", "gemini": "parts", "gemini_gca": "parts"}.get(dialect)
    if member is None:
        return results
    return [{**results[0], member: [part for each in results for part in each[member]]}]


def _gemini_calls(*calls: tuple[str, int]) -> list[dict[str, Any]]:
    parts = [{"functionCall": {"id": call_id, "name": "add", "args": {"a": number}}} for call_id, number in calls]
    return [{"role": "model", "parts": parts}]


def _chat_calls(*calls: tuple[str, int]) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": None, "tool_calls": [_called(*call) for call in calls]}]


def _anthropic_calls(*calls: tuple[str, int]) -> list[dict[str, Any]]:
    blocks = [{"type": "tool_use", "id": call_id, "name": "add", "input": {"a": number}} for call_id, number in calls]
    return [{"role": "assistant", "content": blocks}]


def _response_calls(*calls: tuple[str, int]) -> list[dict[str, Any]]:
    return [
        {"type": "function_call", "call_id": call_id, "name": "add", "arguments": json.dumps({"a": number})}
        for call_id, number in calls
    ]


CALLS = {
    "openai_chat": _chat_calls,
    "anthropic": _anthropic_calls,
    "openai_responses": _response_calls,
    "gemini": _gemini_calls,
    "gemini_gca": _gemini_calls,
}
