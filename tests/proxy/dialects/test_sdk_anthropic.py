"""Anthropic's own client against the service: what works without it works through it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import pytest

from tersely.fakellm.scripted import ScriptedReply
from tests.support.rows import messages_by_number
from tests.support.services import FROM_THE_START, Service
from tests.support.upstreams import Model

MODEL = "claude-opus-test"
TOOL: Any = {
    "name": "add",
    "description": "adds",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
ERRORS = [
    (400, anthropic.BadRequestError),
    (401, anthropic.AuthenticationError),
    (404, anthropic.NotFoundError),
    (413, anthropic.RequestTooLargeError),
    (429, anthropic.RateLimitError),
    (529, anthropic.OverloadedError),
]


@pytest.fixture
def client(service: Service) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=service.url, api_key="sk-upstream", max_retries=0) as made:
        yield made


@pytest.fixture
async def async_client(service: Service) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=service.url, api_key="sk-upstream", max_retries=0) as made:
        yield made


def session(key: str) -> dict[str, str]:
    return {"X-Tersely-Session": key, "X-Script": key}


async def test_sync_call_is_answered_and_stored(
    client: anthropic.Anthropic, service: Service, model: Model, key: str
) -> None:
    raw = client.messages.with_raw_response.create(
        model=MODEL,
        max_tokens=100,
        system="You are kind.",
        messages=[{"role": "user", "content": "good morning"}],
        extra_headers=session(key) | {"X-Tersely-Epoch": FROM_THE_START},
    )

    answer = raw.parse()
    (block,) = answer.content
    assert block.type == "text"
    assert block.text.startswith("I was sent")
    assert "terse" not in block.text
    assert raw.headers["x-tersely-session"] == key
    assert raw.headers["x-tersely-context"] == "built"
    assert [each.role for each in await messages_by_number(service, key)] == ["system", "user", "assistant"]
    sent = json.loads(model.last.body)
    assert sent["system"][-1]["text"].startswith("You are kind.\n\n")
    assert sent["system"][-1]["cache_control"] == {"type": "ephemeral"}
    assert sent["messages"][-1]["content"][-1]["cache_control"] == {"type": "ephemeral"}
    assert model.last.headers["x-api-key"] == "sk-upstream"


def test_tools_and_instructions_stay_marked_in_each_epoch(client: anthropic.Anthropic, model: Model, key: str) -> None:
    tools: Any = [{"name": "add", "input_schema": {"type": "object", "properties": {}}}]
    headers = session(key) | {"X-Tersely-Epoch": "every_request", "X-Tersely-Strategy": '{"name": "slim"}'}
    talk: list[Any] = []
    for number in range(6):
        talk.append({"role": "user", "content": f"question {number}"})
        answer = client.messages.create(
            model=MODEL, max_tokens=100, system="Be kind.", tools=tools, messages=talk, extra_headers=headers
        )
        talk.append({"role": "assistant", "content": "".join(getattr(each, "text", "") for each in answer.content)})

    sent = [json.loads(each.body) for each in model.state.received if each.headers.get("X-Script") == key]
    marked = [[n for n, each in enumerate(one["messages"]) if "cache_control" in json.dumps(each)] for one in sent]
    assert marked[0] == [0]
    assert marked[-1] == [1, len(sent[-1]["messages"]) - 1]
    assert all("cache_control" in one["tools"][-1] and "cache_control" in one["system"][-1] for one in sent)
    assert sent[-1]["messages"][0] != sent[-2]["messages"][0]
    assert [sent[-1]["tools"], sent[-1]["system"]] == [sent[-2]["tools"], sent[-2]["system"]]


async def test_async_stream(async_client: anthropic.AsyncAnthropic, service: Service, model: Model, key: str) -> None:
    model.script(key, ScriptedReply(message={"content": "one two three<terse>counted</terse>"}, chunk_chars=3))

    async with async_client.messages.stream(
        model=MODEL, max_tokens=100, messages=[{"role": "user", "content": "count"}], extra_headers=session(key)
    ) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()

    assert text == "one two three"
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens > 0
    stored = await messages_by_number(service, key)
    assert [(each.role, each.finish) for each in stored] == [("user", None), ("assistant", "end_turn")]


@pytest.mark.parametrize("streams", [False, True])
async def test_tools_over_several_turns(client: anthropic.Anthropic, service: Service, key: str, streams: bool) -> None:
    messages: list[Any] = []
    for number in range(3):
        messages.append({"role": "user", "content": f'call add {{"a": {number}}}'})
        reply = _ask(client, messages, key, streams)
        (call,) = [block for block in reply.content if block.type == "tool_use"]
        assert (call.name, call.input) == ("add", {"a": number})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": str(number)}
        messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": [result]}]
        reply = _ask(client, messages, key, streams)
        assert f"The tool answered: {number}" in reply.content[0].text
        messages.append({"role": "assistant", "content": reply.content})

    stored = await messages_by_number(service, key)
    assert [each.role for each in stored] == ["system", *(["user", "assistant", "tool", "assistant"] * 3)]
    assert [each.turn for each in stored] == [0, *(turn for turn in (1, 2, 3) for _ in range(4))]
    assert {each.status for each in stored} == {"live"}


def _ask(client: anthropic.Anthropic, messages: list[Any], key: str, streams: bool) -> Any:
    more: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 100,
        "system": [{"type": "text", "text": "You add."}],
        "tools": [TOOL],
        "extra_headers": session(key),
    }
    if not streams:
        return client.messages.create(messages=messages, **more)
    with client.messages.stream(messages=messages, **more) as stream:
        return stream.get_final_message()


@pytest.mark.parametrize("streams", [False, True])
async def test_thinking_comes_back_as_it_was_signed(
    client: anthropic.Anthropic, model: Model, key: str, streams: bool
) -> None:
    thought = {"type": "thinking", "thinking": "Let me see.", "signature": "c2lnbmF0dXJl"}
    words = {"type": "text", "text": "Seen.<terse>saw it</terse>"}
    model.script(key, ScriptedReply(message={"content": [thought, words]}), ScriptedReply(message={"content": "Yes."}))
    messages: list[Any] = [{"role": "user", "content": "look"}]

    answer = _ask(client, messages, key, streams)
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.content[1].text == "Seen."
    _ask(
        client,
        [*messages, {"role": "assistant", "content": answer.content}, {"role": "user", "content": "?"}],
        key,
        streams,
    )

    echoed = json.loads(model.last.body)["messages"][1]["content"]
    assert {key: echoed[0][key] for key in thought} == thought
    assert echoed[1]["text"] == "Seen.<terse>saw it</terse>"


async def test_other_calls_pass(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": "how long is this?"}])
    assert counted.input_tokens > 0
    assert [each.id for each in client.models.list()] == ["scripted"]


@pytest.mark.parametrize(("status", "exception"), ERRORS)
@pytest.mark.parametrize("streams", [False, True])
async def test_errors_come_back_as_they_are(
    client: anthropic.Anthropic,
    model: Model,
    key: str,
    status: int,
    exception: type[anthropic.APIStatusError],
    streams: bool,
) -> None:
    body = json.dumps({"type": "error", "error": {"type": "t", "message": f"no: {key}"}}).encode()
    model.script(key, ScriptedReply(status=status, body=body, headers={"retry-after": "17"}))

    with pytest.raises(exception) as caught:
        client.messages.create(
            model=MODEL,
            max_tokens=9,
            messages=[{"role": "user", "content": "hi"}],
            stream=streams,
            extra_headers={"X-Script": key},
        )

    assert caught.value.response.content == body
    assert caught.value.response.headers["retry-after"] == "17"


async def test_own_errors_have_anthropics_shape(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(
            model=MODEL,
            max_tokens=9,
            messages=[{"role": "user", "content": "hi"}],
            extra_headers={"X-Tersely-Strategy": "none such"},
        )

    body = caught.value.response.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
