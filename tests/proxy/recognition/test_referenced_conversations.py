"""Requests that are part of a conversation which the host keeps, or does not."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tersely.fakellm.scripted import ScriptedReply
from tests.support.http import STORED, post
from tests.support.responses_talks import MODEL, TOOL, client_of, upstream_input, words
from tests.support.rows import messages_by_number
from tests.support.services import Service
from tests.support.upstreams import Model


def say(service: Service, key: str, conversation: Any, given: Any, *, streams: bool = False, **more: Any) -> Any:
    """The reply, and the headers that it came with."""
    request: dict[str, Any] = {"model": MODEL, "input": given, "user": key, "conversation": conversation, **more}
    with client_of(service) as client:
        if not streams:
            raw = client.responses.with_raw_response.create(**request)
            return raw.parse(), raw.headers
        with client.responses.with_streaming_response.create(stream=True, **request) as response:
            return list(response.parse())[-1].response, response.headers


def open_at(model: Model) -> str:
    with openai.OpenAI(base_url=model.url, api_key="x", max_retries=0) as direct:
        return direct.conversations.create(items=[{"role": "user", "content": "long ago"}]).id


@pytest.mark.parametrize("streams", [False, True])
async def test_the_hosts_conversation_stays_its_own(service: Service, model: Model, key: str, streams: bool) -> None:
    name = open_at(model)
    called, headers = say(service, key, name, 'call add {"a": 1}', streams=streams, tools=[TOOL])
    assert headers["x-tersely-context"] == "passthrough"
    assert (headers["x-tersely-session"], headers["x-tersely-session-source"]) == (name, "body")
    (call,) = [item for item in called.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
    reply, headers = say(service, key, {"id": name}, [result], streams=streams, tools=[TOOL])
    assert "The tool answered: 2" in reply.output_text
    assert headers["x-tersely-session"] == name

    sent = [json.loads(each.body) for each in model.requests(key)]
    assert [each["conversation"] for each in sent] == [name, {"id": name}]
    assert sent[1]["input"] == [result]
    assert "instructions" not in sent[0]
    kept_there = model.state.kept.conversations[name]
    assert [item.get("type", item.get("role")) for item in kept_there] == [
        "user", "message", "function_call", "function_call_output", "message",
    ]  # fmt: skip
    stored = await messages_by_number(service, name)
    assert [(each.role, each.turn, each.status) for each in stored] == [
        ("user", 1, "live"),
        ("assistant", 1, "live"),
        ("tool", 1, "live"),
        ("assistant", 1, "live"),
    ]


async def test_reply_of_a_conversation_continues_at_the_host(service: Service, model: Model, key: str) -> None:
    """The host may have more of it than ever came by here."""
    name = open_at(model)
    reply, _ = say(service, key, name, "one")
    body = json.dumps({"model": MODEL, "user": key, "input": "two", "previous_response_id": reply.id}).encode()
    answer = await post(service, body, path="/v1/responses")
    assert (answer.status, answer.session) == (200, name)
    assert model.requests(key)[-1].body == body


@pytest.mark.parametrize("streams", [False, True])
async def test_conversation_unknown_to_the_host_is_rebuilt_locally(
    before_forgetful: Service, forgetful: Model, key: str, streams: bool
) -> None:
    name = f"conv_{key}"
    for text in ("one", "two", "three"):
        reply, headers = say(before_forgetful, key, name, text, streams=streams)
        assert headers["x-tersely-session"] == name
        assert headers["x-tersely-context"] in STORED
        assert reply.output_text
    sent = [json.loads(each.body) for each in forgetful.requests(key)]
    assert ["conversation" in each for each in sent] == [True, False, False, False]
    assert words(upstream_input(forgetful, key)) == ["one", "-", "two", "-", "three"]
    assert [each.role for each in await messages_by_number(before_forgetful, name) if each.turn] == [
        "user",
        "assistant",
    ] * 3


async def test_a_failed_call_is_no_part_of_a_conversation(service: Service, model: Model, key: str) -> None:
    name = open_at(model)
    say(service, key, name, "one")
    for words_again in ("two", "two", "three"):
        failed = ScriptedReply(status=500, body=b'{"error":{"message":"down"}}')
        model.script(key, *[failed] * (words_again != "three"))
        try:
            say(service, key, name, words_again)
        except openai.InternalServerError:
            assert words_again == "two"
    stored = await messages_by_number(service, name)
    assert [(each.role, each.text, each.status) for each in stored if each.role == "user"] == [
        ("user", "one", "live"),
        ("user", "two", "superseded"),
        ("user", "three", "live"),
    ]


async def test_both_names_at_once_are_the_hosts_to_refuse(service: Service, model: Model, key: str) -> None:
    name = open_at(model)
    reply, _ = say(service, key, name, "one")
    body = {"model": MODEL, "user": key, "input": "x", "previous_response_id": reply.id, "conversation": name}
    answer = await post(service, json.dumps(body).encode(), path="/v1/responses")
    assert answer.status == 400
    assert answer.context == "passthrough"
