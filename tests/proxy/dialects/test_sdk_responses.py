"""OpenAI's own client against the service, speaking responses."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tersely.fakellm.scripted import ScriptedReply
from tests.support.http import post
from tests.support.responses_talks import MODEL, TOOL
from tests.support.rows import messages_by_number
from tests.support.services import FROM_THE_START, Service
from tests.support.upstreams import Model


def session(key: str) -> dict[str, str]:
    return {"X-Tersely-Session": key, "X-Script": key}


async def test_sync_call_is_answered_and_stored(
    client: openai.OpenAI, service: Service, model: Model, key: str
) -> None:
    answer = client.responses.create(
        model=MODEL,
        instructions="You are kind.",
        input="good morning",
        extra_headers=session(key) | {"X-Tersely-Epoch": FROM_THE_START},
    )

    assert answer.output_text.startswith("I was sent")
    assert "terse" not in answer.output_text
    assert answer.instructions == "You are kind."
    assert [each.role for each in await messages_by_number(service, key)] == ["system", "user", "assistant"]
    assert json.loads(model.last.body)["instructions"].startswith("You are kind.\n\n")


async def test_async_stream(async_client: openai.AsyncOpenAI, service: Service, model: Model, key: str) -> None:
    model.script(key, ScriptedReply(message={"content": "one two three<terse>counted</terse>"}, chunk_chars=3))

    async with async_client.responses.stream(model=MODEL, input="count", extra_headers=session(key)) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()

    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == "one two three"
    assert final.output_text == "one two three"
    assert events[-1].type == "response.completed"
    assert [each.role for each in await messages_by_number(service, key)] == ["user", "assistant"]


@pytest.mark.parametrize("streams", [False, True])
async def test_tools_over_several_turns(client: openai.OpenAI, service: Service, key: str, streams: bool) -> None:
    items: list[Any] = []
    for number in range(3):
        items.append({"role": "user", "content": f'call add {{"a": {number}}}'})
        reply = _ask(client, items, key, streams)
        (call,) = [item for item in reply.output if item.type == "function_call"]
        assert (call.name, json.loads(call.arguments)) == ("add", {"a": number})
        items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in reply.output]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": str(number)})
        reply = _ask(client, items, key, streams)
        assert f"The tool answered: {number}" in reply.output_text
        items += [item.model_dump(exclude_none=True) for item in reply.output]
        items[-1]["content"] = [{"type": "output_text", "text": reply.output_text, "annotations": []}]

    stored = await messages_by_number(service, key)
    assert [each.role for each in stored] == ["user", "assistant", "tool", "assistant"] * 3
    assert [each.turn for each in stored] == [turn for turn in (1, 2, 3) for _ in range(4)]
    assert {each.status for each in stored} == {"live"}


def _ask(client: openai.OpenAI, items: list[Any], key: str, streams: bool) -> Any:
    more: dict[str, Any] = {"model": MODEL, "input": items, "tools": [TOOL], "extra_headers": session(key)}
    if not streams:
        return client.responses.create(**more)
    with client.responses.stream(**more) as stream:
        return stream.get_final_response()


@pytest.mark.parametrize("streams", [False, True])
async def test_errors_come_back_as_they_are(client: openai.OpenAI, model: Model, key: str, streams: bool) -> None:
    body = json.dumps({"error": {"message": f"no: {key}", "type": "t", "param": "p", "code": "c"}}).encode()
    model.script(key, ScriptedReply(status=429, body=body, headers={"retry-after": "17"}))

    with pytest.raises(openai.RateLimitError) as caught:
        client.responses.create(model=MODEL, input="hi", stream=streams, extra_headers=session(key))

    assert caught.value.response.content == body
    assert caught.value.response.headers["retry-after"] == "17"


async def test_a_websocket_is_refused(service: Service) -> None:
    answer = await post(service, b"", path="/v1/responses", method="GET", Upgrade="websocket", Connection="Upgrade")
    assert answer.status == 426
    assert "error" in answer.json


async def test_somebody_is_there(service: Service) -> None:
    answer = await post(service, b"", path="/", method="HEAD")
    assert answer.status == 200
