"""A client's release that sends something new: its calls pass, and the metrics say so."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tersely.fakellm.scripted import ScriptedModel
from tests.conftest import Database
from tests.support.dialect_wires import WIRES
from tests.support.http import post
from tests.support.services import FROM_THE_START, Service, serve
from tests.support.upstreams import Model, scripted

NEW = {
    "model": "m",
    "max_tokens": 9,
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"role": "system", "content": "# Environment", "output_config": {"effort": "medium"}},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}, "of_tomorrow": 1}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x", "of_tomorrow": 1}]},
        {"role": "system", "content": [], "output_config": {"effort": "medium"}},
        {"role": "user", "content": [{"type": "text", "text": "go on"}], "of_tomorrow": {}},
    ],
}


@pytest.fixture(scope="module")
def lenient() -> Iterator[Model]:
    """The scripted model as `serve --upstream scripted` runs it."""
    with scripted() as model:
        model.state.takes_unknown = True
        yield model


@pytest.fixture(scope="module", params=["slim", "full"])
def there(request: pytest.FixtureRequest, store: Database, lenient: Model) -> Iterator[Service]:
    with serve(store, lenient.url, strategy=request.param, epoch=FROM_THE_START) as running:
        yield running


async def _counted(service: Service, dialect: str = "anthropic") -> dict[str, float]:
    text = (await post(service, b"", method="GET", path="/metrics")).body.decode()
    found = re.findall(rf'tersely_unknown_fields_total\{{block="([^"]*)",dialect="{dialect}"\}} (\S+)', text)
    return {block: float(count) for block, count in found}


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """A conversation of a dialect with a member ``of_tomorrow`` in every known block; ``counted`` says in which."""

    path: str
    member: str
    messages: list[Any]
    counted: dict[str, int]
    rest: dict[str, Any]
    dialect: str = ""

    def body(self, messages: list[Any]) -> bytes:
        inner = {**self.rest, self.member: messages}
        whole = {"model": "m", "project": "p", "request": inner} if "v1internal" in self.path else inner
        return json.dumps(whole).encode()


NEWER = {"of_tomorrow": {"level": [1, None]}}
_GEMINI: dict[str, Any] = {
    "member": "contents",
    "messages": [
        {"role": "user", "parts": [{"text": "hello", **NEWER}]},
        {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {}}, **NEWER}]},
        {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"a": 1}}, **NEWER}], **NEWER},
    ],
    "counted": {"part": 3, "content": 1},
    "rest": {"tools": [{"functionDeclarations": [{"name": "f", "description": "f"}]}]},
}
TALKS = {
    "openai_chat": Talk(
        path="/v1/chat/completions",
        member="messages",
        messages=[
            {"role": "user", "content": "hello", **NEWER},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}, **NEWER},
                ],
                **NEWER,
            },
            {"role": "tool", "tool_call_id": "c1", "content": "x", **NEWER},
        ],
        counted={"message": 3, "tool_call": 1},
        rest={"model": "m"},
    ),
    "openai_responses": Talk(
        path="/v1/responses",
        member="input",
        messages=[
            {"type": "message", "role": "user", "content": "hello", **NEWER},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "e", **NEWER},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}", **NEWER},
            {"type": "function_call_output", "call_id": "c1", "output": "x", **NEWER},
        ],
        counted={"message": 1, "reasoning": 1, "function_call": 1, "function_call_output": 1},
        rest={"model": "m", "store": False},
    ),
    "anthropic": Talk(
        path="/v1/messages",
        member="messages",
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "hello", **NEWER}], **NEWER},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {}, **NEWER}],
                **NEWER,
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "x", **NEWER}]},
        ],
        counted={"text": 1, "message:user": 1, "tool_use": 1, "message:assistant": 1, "tool_result": 1},
        rest={"model": "m", "max_tokens": 9},
    ),
    "gemini": Talk(path="/v1beta/models/m:generateContent", **_GEMINI),
    "gemini_gca": Talk(path="/v1internal:generateContent", dialect="gemini", **_GEMINI),
}


@pytest.mark.parametrize("dialect", TALKS)
async def test_unknown_fields_of_every_block_pass_and_are_counted(
    there: Service, lenient: Model, key: str, dialect: str
) -> None:
    talk = TALKS[dialect]
    before = await _counted(there, talk.dialect or dialect)
    sent = talk.body(talk.messages)

    answer = await post(there, sent, path=talk.path, X_Tersely_Session=key)

    assert answer.status == 200, answer.body
    after = await _counted(there, talk.dialect or dialect)
    assert {block: after[block] - before[block] for block in after if after[block] > before[block]} == talk.counted
    assert lenient.last.body.count(b'"of_tomorrow"') == sum(talk.counted.values())
    stored = await post(there, b"", method="GET", path=f"/api/sessions/{key}/messages?view=all")
    assert json.dumps([each["raw"] for each in stored.json["items"]]).count('"of_tomorrow"') == sum(
        talk.counted.values()
    )


@pytest.mark.parametrize("dialect", WIRES)
async def test_an_unknown_field_of_a_later_call_is_counted(
    there: Service, lenient: Model, key: str, dialect: str
) -> None:
    """The calls that continue a live session, too."""
    wire = WIRES[dialect]
    counted_as = TALKS[dialect].dialect or dialect
    history = [("user", f"question {key}")]
    counts = []
    for number in range(4):
        body = json.loads(wire.body(history))
        inner = body.get("request", body)
        member = next(name for name in ("messages", "input", "contents") if name in inner)
        for message in inner[member]:
            if message["role"] == "user":
                message["of_tomorrow"] = number
        before = sum((await _counted(there, counted_as)).values())
        answer = await post(there, json.dumps(body).encode(), path=wire.path)
        assert answer.status == 200, answer.body
        counts.append(sum((await _counted(there, counted_as)).values()) - before)
        assert lenient.last.body.count(b'"of_tomorrow"') == number + 1
        history += [("assistant", _text_of(answer.json)), ("user", f"question {number} {key}")]
    assert counts == [1, 1, 1, 1]


def _text_of(reply: Any) -> str:
    """The text of a whole reply of any dialect."""
    reply = reply.get("response", reply)
    if "choices" in reply:
        return str(reply["choices"][0]["message"]["content"])
    if "candidates" in reply:
        return "".join(part.get("text", "") for part in reply["candidates"][0]["content"]["parts"])
    blocks = reply.get("content") or [block for item in reply["output"] for block in item.get("content", ())]
    return "".join(block.get("text", "") for block in blocks)


async def test_unknown_fields_pass_and_are_counted(there: Service, lenient: Model, key: str) -> None:
    before = await _counted(there)
    lenient.state.unknown.clear()

    answer = await post(there, json.dumps(NEW).encode(), path="/v1/messages", X_Tersely_Session=key)

    assert answer.status == 200, answer.body
    after = await _counted(there)
    counted = {block: after[block] - before[block] for block in after if after[block] > before[block]}
    assert counted == {"tool_use": 1, "tool_result": 1, "message:user": 1}
    assert lenient.state.unknown.keys() == {(block, "of_tomorrow") for block in counted}
    sent = json.loads(lenient.last.body)["messages"]
    assert [message.get("output_config") for message in sent if message["role"] == "system"][:1] == [
        {"effort": "medium"}
    ]


async def test_the_strict_model_of_tests_still_refuses_them(plain: Service, model: Model, key: str) -> None:
    assert not ScriptedModel().takes_unknown
    answer = await post(plain, json.dumps(NEW).encode(), path="/v1/messages", X_Tersely_Session=key)
    assert answer.status == 400
    assert b"of_tomorrow: Extra inputs are not permitted" in answer.body
