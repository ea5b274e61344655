"""A turn that goes on after a clear: the model still gets its question, and results with their calls."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tersely.fakellm.scripted import ScriptedReply
from tests.support.dialect_wires import WIRES, Spoken
from tests.support.http import Answered, post
from tests.support.responses_talks import Talk, upstream_input
from tests.support.services import Service
from tests.support.upstreams import Model

CALL = {"id": "call_1", "type": "function", "function": {"name": "read_file", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "read_file", "parameters": {"type": "object"}}}


def clear(service: Service, session: str) -> None:
    assert httpx.post(f"{service.url}/api/sessions/{session}/clear").status_code == 200


@pytest.fixture(params=["slim", "full", "trim"])
def strategy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("dialect", WIRES)
async def test_the_same_question_is_asked_again(
    service: Service, model: Model, key: str, dialect: str, strategy: str
) -> None:
    wire = WIRES[dialect]
    first = await wire.send(service, f"first {key}", X_Tersely_Strategy=strategy)
    history: list[Spoken] = [("user", f"first {key}"), ("assistant", words_of(first)), ("user", f"second {key}")]
    answered = await wire.send(service, history, X_Tersely_Strategy=strategy)
    clear(service, answered.session)

    again = await wire.send(service, history, X_Tersely_Strategy=strategy)

    assert again.session == answered.session
    sent = model.last.body.decode()
    assert f"second {key}" in sent
    assert f"first {key}" not in sent


def words_of(answer: Answered) -> str:
    """The text of a reply, in any dialect."""
    found: list[str] = []

    def look(value: Any) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                if name in {"content", "text"} and isinstance(inner, str):
                    found.append(inner)
                else:
                    look(inner)
        elif isinstance(value, list):
            for inner in value:
                look(inner)

    look(answer.json)
    return "".join(found)


def request(key: str, messages: list[dict[str, Any]]) -> bytes:
    return json.dumps({"model": "gpt-4o-mini", "user": key, "messages": messages, "tools": [TOOL]}).encode()


@pytest.mark.parametrize("is_delta", [False, True])
async def test_an_open_call_gets_its_result(
    service: Service, model: Model, key: str, strategy: str, is_delta: bool
) -> None:
    """Also in the calls after it: what the turn needs stays."""
    headers: dict[str, Any] = {"X_Tersely_Strategy": strategy}
    if is_delta:
        headers["X_Tersely_Session"] = key
    history: list[dict[str, Any]] = []
    session = ""

    async def say(*new: dict[str, Any]) -> list[dict[str, Any]]:
        nonlocal session
        history.extend(new)
        answer = await post(service, request(key, [*new] if is_delta else history), **headers)
        assert answer.status == 200, answer.body
        session = answer.session
        history.append(answer.json["choices"][0]["message"])
        return [each for each in json.loads(model.requests(key)[-1].body)["messages"] if each["role"] != "system"]

    await say({"role": "user", "content": "What was first?"})
    model.script(key, ScriptedReply(message={"content": None, "tool_calls": [CALL]}))
    await say({"role": "user", "content": "Read it."})
    clear(service, session)

    sent = await say({"role": "tool", "tool_call_id": "call_1", "content": "one line"})
    assert [each["role"] for each in sent] == ["user", "assistant", "tool"]
    assert [sent[0]["content"], sent[2]["content"]] == ["Read it.", "one line"]
    sent = await say({"role": "user", "content": "And now?"})
    assert [each["role"] for each in sent] == ["user", "assistant", "tool", "assistant", "user"]


async def test_a_reply_that_is_named_by_its_id_gets_its_result(
    service: Service, model: Model, key: str, strategy: str
) -> None:
    call = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "add", "arguments": "{}"}
    talk = Talk(service, key)
    talk.say("What was first?")
    model.script(key, ScriptedReply(message={"output": [{**call, "status": "completed"}]}))
    talk.say("Add it.")
    clear(service, talk.session)

    talk.say([{"type": "function_call_output", "call_id": "call_1", "output": "4"}])

    kinds = [item.get("type", item.get("role")) for item in upstream_input(model, key)]
    assert kinds == ["user", "function_call", "function_call_output"]
    talk.say("And now?")
    assert "Add it." in model.requests(key)[-1].body.decode()


@pytest.mark.parametrize("is_delta", [False, True])
async def test_a_plan_of_everything_behind_a_clear_shows_the_turn_that_goes_on(
    service: Service, model: Model, key: str, strategy: str, is_delta: bool
) -> None:
    """Epochs have cut that turn since; a change of the epoch policy looks at all messages behind the clear again."""
    headers = {"X_Tersely_Session": key} if is_delta else {}
    epoch = '{"stride": 1}'
    history: list[dict[str, Any]] = []
    session = ""

    async def say(strategy: str, *new: dict[str, Any]) -> list[dict[str, Any]]:
        nonlocal session
        history.extend(new)
        body = request(key, [*new] if is_delta else history)
        answer = await post(service, body, X_Tersely_Strategy=strategy, X_Tersely_Epoch=epoch, **headers)
        assert answer.status == 200, answer.body
        session = answer.session
        history.append(answer.json["choices"][0]["message"])
        return [each for each in json.loads(model.requests(key)[-1].body)["messages"] if each["role"] != "system"]

    few_turns = '{"name": "slim", "recent_turns": 1}'
    await say(few_turns, {"role": "user", "content": "What was first?"})
    model.script(key, ScriptedReply(message={"content": None, "tool_calls": [CALL]}))
    await say(few_turns, {"role": "user", "content": "Read it."})
    clear(service, session)
    await say(few_turns, {"role": "tool", "tool_call_id": "call_1", "content": "one line"})
    for number in range(5):
        await say(few_turns, {"role": "user", "content": f"Question {number}?"})
    sent = await say(few_turns, {"role": "user", "content": "What is left?"})
    assert "Read it." not in json.dumps(sent)

    epoch = "auto"
    sent = await say(strategy, {"role": "user", "content": "And now?"})
    assert [each["role"] for each in sent[:3]] == ["user", "assistant", "tool"]
    assert [sent[0]["content"], sent[2]["content"]] == ["Read it.", "one line"]
    assert (await say(strategy, {"role": "user", "content": "And then?"}))[: len(sent)] == sent
