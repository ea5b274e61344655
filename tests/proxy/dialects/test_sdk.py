"""The official client against the service: what works without it works through it."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tersely.fakellm.scripted import ScriptedReply
from tests.conftest import Database
from tests.support.http import STORED
from tests.support.rows import messages_by_number
from tests.support.services import Service, serve
from tests.support.upstreams import MODEL, Model

ERRORS = [
    (400, openai.BadRequestError),
    (401, openai.AuthenticationError),
    (403, openai.PermissionDeniedError),
    (404, openai.NotFoundError),
    (409, openai.ConflictError),
    (422, openai.UnprocessableEntityError),
    (429, openai.RateLimitError),
    (500, openai.InternalServerError),
    (503, openai.InternalServerError),
]
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


async def test_sync_call_is_answered_and_stored(client: openai.OpenAI, service: Service, key: str):
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "good morning"}],
        extra_headers={"X-Tersely-Session": key},
    )

    text = answer.choices[0].message.content
    assert text is not None
    assert text.startswith("I was sent")
    assert "terse" not in text
    assert [each.role for each in await messages_by_number(service, key)] == ["user", "assistant"]
    assert (await messages_by_number(service, key))[1].text == text


async def test_async_call_with_raw_response_carries_the_headers(async_client: openai.AsyncOpenAI, key: str):
    raw = await async_client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hello"}],
        extra_headers={"X-Tersely-Session": key},
    )

    headers = raw.headers
    assert headers["x-tersely-session"] == key
    assert headers["x-tersely-session-source"] == "header"
    assert headers["x-tersely-strategy"] == "slim"
    assert headers["x-tersely-context"] in STORED
    assert int(headers["x-tersely-epoch"]) >= 1
    assert int(headers["x-tersely-tokens-before"]) > 0
    assert int(headers["x-tersely-tokens-after"]) > 0
    assert 0 <= float(headers["x-tersely-overhead-ms"]) < 5000
    assert headers["x-request-id"].startswith("req_")
    assert raw.parse().choices[0].finish_reason == "stop"


async def test_sync_stream(client: openai.OpenAI, service: Service, model: Model, key: str):
    model.script(key, ScriptedReply(message={"content": "one two three<terse>counted</terse>"}, chunk_chars=3))

    stream = client.chat.completions.create(
        model=MODEL,
        user=key,
        messages=[{"role": "user", "content": "count"}],
        stream=True,
        extra_headers={"X-Tersely-Session": key},
    )
    chunks = list(stream)

    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "one two three"
    assert all(chunk.choices for chunk in chunks), "the usage was not asked for by the client"
    assert json.loads(model.requests(key)[0].body)["stream_options"] == {"include_usage": True}
    assert [each.text for each in await messages_by_number(service, key)] == ["count", "one two three"]


async def test_async_stream_with_usage(async_client: openai.AsyncOpenAI, key: str):
    stream = await async_client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hello there"}],
        stream=True,
        stream_options={"include_usage": True},
        extra_headers={"X-Tersely-Session": key},
    )
    chunks = [chunk async for chunk in stream]

    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens > 0
    assert [chunk for chunk in chunks if chunk.usage] == chunks[-1:]


@pytest.mark.parametrize("streams", [False, True])
async def test_tools_over_several_turns(client: openai.OpenAI, service: Service, model: Model, key: str, streams: bool):
    messages: list[Any] = [{"role": "system", "content": "You add."}]
    for number in range(3):
        messages.append({"role": "user", "content": f'call add {{"a": {number}}}'})
        message = _ask(client, messages, key, streams)
        assert message["tool_calls"][0]["function"]["name"] == "add"
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": number}
        messages += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": str(number)}]
        message = _ask(client, messages, key, streams)
        assert f"The tool answered: {number}" in message["content"]
        messages.append(message)

    stored = await messages_by_number(service, key)
    assert [each.role for each in stored] == ["system", *(["user", "assistant", "tool", "assistant"] * 3)]
    assert [each.turn for each in stored] == [0, *(turn for turn in (1, 2, 3) for _ in range(4))]
    assert {each.status for each in stored} == {"live"}


def _ask(client: openai.OpenAI, messages: list[Any], key: str, streams: bool) -> dict[str, Any]:
    more: dict[str, Any] = {"tools": [TOOL], "extra_headers": {"X-Tersely-Session": key}, "user": key}
    if not streams:
        answer = client.chat.completions.create(model=MODEL, messages=messages, **more)
        return dict(answer.choices[0].message.model_dump(exclude_none=True))
    with client.chat.completions.stream(model=MODEL, messages=messages, **more) as stream:
        final = stream.get_final_completion().choices[0].message
    plain: dict[str, Any] = {"role": "assistant", "content": final.content}
    if final.tool_calls:
        plain["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.function.name, "arguments": c.function.arguments}}
            for c in final.tool_calls
        ]
    return {name: value for name, value in plain.items() if value is not None}


@pytest.mark.parametrize("streams", [False, True])
async def test_parallel_tool_calls(client: openai.OpenAI, service: Service, model: Model, key: str, streams: bool):
    calls: list[Any] = [
        {"id": f"call_{n}", "type": "function", "function": {"name": "add", "arguments": f'{{"a": {n}}}'}}
        for n in range(3)
    ]
    model.script(key, ScriptedReply(message={"tool_calls": calls}))
    messages: list[Any] = [{"role": "user", "content": "add a lot"}]

    message = _ask(client, messages, key, streams)
    assert [(c["id"], c["function"]["arguments"]) for c in message["tool_calls"]] == [
        (c["id"], c["function"]["arguments"]) for c in calls
    ]
    messages += [message, *({"role": "tool", "tool_call_id": f"call_{n}", "content": str(n)} for n in (2, 0, 1))]
    _ask(client, messages, key, streams)

    stored = await messages_by_number(service, key)
    assert [each.role for each in stored] == ["user", "assistant", "tool", "tool", "tool", "assistant"]
    assert {each.turn for each in stored} == {1}


@pytest.mark.parametrize("streams", [False, True])
async def test_two_choices(client: openai.OpenAI, service: Service, model: Model, key: str, streams: bool):
    model.script(key, ScriptedReply(message={"content": "twice the same<terse>x</terse>"}))
    more: dict[str, Any] = {"n": 2, "user": key, "extra_headers": {"X-Tersely-Session": key}}
    messages: list[Any] = [{"role": "user", "content": "twice"}]
    texts = ["", ""]
    if streams:
        for piece in client.chat.completions.create(model=MODEL, messages=messages, stream=True, **more):
            for choice in piece.choices:
                texts[choice.index] += choice.delta.content or ""
    else:
        answer = client.chat.completions.create(model=MODEL, messages=messages, **more)
        texts = [choice.message.content or "" for choice in answer.choices]

    assert texts == ["twice the same", "twice the same"]
    stored = await messages_by_number(service, key)
    assert [(each.role, each.status) for each in stored] == [
        ("user", "live"),
        ("assistant", "live"),
        ("assistant", "superseded"),
    ]


async def test_unknown_fields_survive(client: openai.OpenAI, model: Model, key: str):
    parts: list[Any] = [
        {"type": "text", "text": "look and listen"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo=", "detail": "low"}},
        {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
        {"type": "file", "file": {"file_id": "file-1"}},
    ]
    messages: list[Any] = [{"role": "user", "content": parts, "x_note": {"kept": [1, 1.0, -0.0]}}]
    client.chat.completions.create(
        model=MODEL,
        user=key,
        messages=messages,
        logprobs=True,
        top_logprobs=3,
        seed=12345678901234567890,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"type": "object", "additionalProperties": False}},
        },
        modalities=["text", "audio"],
        extra_body={"x_unknown": {"z": 1, "a": None}},
    )

    body = model.requests(key)[0].body
    for member in (
        json.dumps(parts, separators=(",", ":"), ensure_ascii=False),
        '"logprobs":true',
        '"top_logprobs":3',
        '"seed":12345678901234567890',
        '"additionalProperties":false',
        '"modalities":["text","audio"]',
        '"x_unknown":{"z":1,"a":null}',
        '"x_note":{"kept":[1,1.0,-0.0]}',
    ):
        assert member.encode() in body


@pytest.mark.parametrize(("status", "exception"), ERRORS)
@pytest.mark.parametrize("streams", [False, True])
async def test_errors_of_the_model_host_come_back_as_they_are(
    client: openai.OpenAI, model: Model, key: str, status: int, exception: type[openai.APIStatusError], streams: bool
):
    body = json.dumps({"error": {"message": f"no: {key}", "type": "t", "param": "p", "code": "c"}, "more": 1}).encode()
    headers = {"retry-after": "17", "x-ratelimit-remaining-requests": "0", "x-request-id": f"req-{key}"}
    model.script(key, ScriptedReply(status=status, body=body, headers=headers))

    with pytest.raises(exception) as caught:
        client.chat.completions.create(
            model=MODEL, user=key, messages=[{"role": "user", "content": "hi"}], stream=streams
        )

    assert type(caught.value) is exception
    assert caught.value.response.content == body
    assert caught.value.request_id == f"req-{key}"
    assert caught.value.response.headers["retry-after"] == "17"
    assert caught.value.response.headers["x-ratelimit-remaining-requests"] == "0"
    assert caught.value.code == "c"


async def test_the_client_retries_a_rate_limit_and_that_is_one_turn(service: Service, model: Model, key: str):
    refused = ScriptedReply(status=429, body=b'{"error":{"message":"slow"}}', headers={"retry-after-ms": "20"})
    model.script(key, refused, refused, ScriptedReply(message={"content": "now it works, after a while"}))
    with openai.OpenAI(base_url=service.base_url, api_key="sk", max_retries=3) as client:
        answer = client.chat.completions.create(
            model=MODEL,
            user=key,
            messages=[{"role": "user", "content": "patience"}],
            extra_headers={"X-Tersely-Session": key},
        )

    assert answer.choices[0].message.content == "now it works, after a while"
    assert [each.role for each in await messages_by_number(service, key)] == ["user", "assistant"]


async def test_models_are_listed(client: openai.OpenAI):
    assert [each.id for each in client.models.list()] == ["scripted"]


async def test_an_upstream_that_is_not_there(store: Database):
    with serve(store, "http://127.0.0.1:9/v1") as nowhere:
        client = openai.OpenAI(base_url=nowhere.base_url, api_key="sk", max_retries=0)
        with client, pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])

    assert caught.value.status_code == 502
    assert caught.value.code == "upstream_unavailable"
