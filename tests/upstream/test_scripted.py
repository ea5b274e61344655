"""The built-in model server, through real sockets and the official client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import openai
import pytest

from tersely.fakellm.scripted import Queues, ReceivedRequest, ScriptedModel, ScriptedReply, run_scripted
from tersely.fakellm.strict.openai_chat import check, check_pairing

TOOLS: Any = [{"type": "function", "function": {"name": "ls", "parameters": {"type": "object", "properties": {}}}}]


def _call(*ids: str) -> dict[str, Any]:
    calls = [{"id": each, "type": "function", "function": {"name": "ls", "arguments": "{}"}} for each in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def _result(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "ok"}


USER: Any = {"role": "user", "content": "hello there"}


async def test_answers_the_official_client():
    async with run_scripted() as server, openai.AsyncOpenAI(base_url=server.base_url, api_key="x") as client:
        reply: Any = await client.chat.completions.create(model="m", messages=[USER])
        assert reply.choices[0].message.content == "I was sent 1 messages. You said: hello there"
        assert reply.usage.prompt_tokens > 0
        stream = await client.chat.completions.create(
            model="m", messages=[USER], stream=True, n=2, stream_options={"include_usage": True}
        )
        texts: dict[int, str] = {0: "", 1: ""}
        usage: Any = None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert set(texts.values()) == {"I was sent 1 messages. You said: hello there"}
        assert usage.completion_tokens > 0
        assert [model.id async for model in client.models.list()] == ["scripted"]
        with pytest.raises(openai.NotFoundError, match="Invalid URL"):
            await client.embeddings.create(model="m", input="x")


async def test_scripted_model_calls_tools_and_writes_tags_on_request():
    async with run_scripted() as server, openai.AsyncOpenAI(base_url=server.base_url, api_key="x") as client:
        system = {"role": "system", "content": "End with <terse>...</terse>."}
        messages: list[Any] = [system, {"role": "user", "content": 'call ls {"path": "."}'}]
        async with client.chat.completions.stream(model="m", messages=messages, tools=TOOLS) as stream:
            reply: Any = (await stream.get_final_completion()).choices[0]
        assert reply.finish_reason == "tool_calls"
        (call,) = reply.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("ls", '{"path": "."}')
        messages += [reply.message.model_dump(include={"role", "content", "tool_calls"}), _result(call.id)]
        for made in messages[2]["tool_calls"]:
            made["function"] = {"name": "ls", "arguments": made["function"]["arguments"]}
            made.pop("index", None)
        after = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        assert after.choices[0].message.content == (
            "I was sent 4 messages. The tool answered: ok\n<terse>answered: ok</terse>"
        )


@pytest.mark.parametrize(
    ("content", "called"),
    [
        ("CALL ls", ("ls", "{}")),
        ('It is Monday.\n"call ls {"path": "."}"\nBe brief.', ("ls", '{"path": "."}')),
        ('call other {"a": 1}\n call ls {"path": "a"}', ("ls", '{"path": "a"}')),
        ('call ls {"path": ', ("ls", '{"path":')),
        ("to call ls {}", None),
    ],
)
async def test_finds_the_line_that_asks_for_a_call(content: str, called: tuple[str, str] | None):
    async with run_scripted() as server, openai.AsyncOpenAI(base_url=server.base_url, api_key="x") as client:
        messages: Any = [
            {"role": "user", "content": [{"type": "text", "text": "Today."}, {"type": "text", "text": content}]}
        ]
        reply = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        calls: Any = reply.choices[0].message.tool_calls or []
        assert [(call.function.name, call.function.arguments) for call in calls] == ([called] if called else [])


SCHEMA = {"type": "object", "properties": {"score": {"type": "integer"}, "why": {"type": "string"}}}
ASKED: Any = {"messages": [{"role": "user", "content": "Rate it."}]}


@pytest.mark.parametrize(
    ("path", "request_"),
    [
        ("/v1/chat/completions", ASKED | {"response_format": {"json_schema": {"schema": SCHEMA}}}),
        ("/v1/responses", {"input": "Rate it.", "text": {"format": {"schema": SCHEMA}}}),
        ("/v1/messages", ASKED | {"max_tokens": 9, "output_config": {"format": {"schema": SCHEMA}}}),
        (
            "/v1beta/models/m:generateContent",
            {"contents": [{"role": "user", "parts": [{"text": "x"}]}], "generationConfig": {"responseSchema": SCHEMA}},
        ),
    ],
)
async def test_scripted_model_answers_in_the_requested_shape(path: str, request_: Any):
    async with run_scripted() as server, aiohttp.ClientSession(server.root) as http:
        answer = await (await http.post(path, json={"model": "m", **request_})).text()
        assert json.dumps('{"score":1,"why":"scripted"}') in answer


async def test_counts_the_common_beginning_as_cached():
    async with run_scripted() as server, openai.AsyncOpenAI(base_url=server.base_url, api_key="x") as client:

        async def cached(*texts: str) -> tuple[int, int]:
            messages: Any = [{"role": "user", "content": text} for text in texts]
            usage: Any = (await client.chat.completions.create(model="m", messages=messages)).usage
            return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens

        first, nothing = await cached("a" * 400, "b" * 400)
        assert nothing == 0
        assert await cached("a" * 400, "b" * 400) == (first, first)
        longer, known = await cached("a" * 400, "b" * 400, "c" * 400)
        assert known == first < longer
        assert await cached("c" * 400, "a" * 400, "b" * 400) == (longer, 0)


async def test_refuses_over_the_window_with_openais_error():
    model = ScriptedModel(window=50)
    async with (
        run_scripted(model=model) as server,
        openai.AsyncOpenAI(base_url=server.base_url, api_key="x") as client,
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x" * 400}])
    assert caught.value.code == "context_length_exceeded"
    assert "maximum context length is 50 tokens" in caught.value.message


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([], "empty array"),
        ([{"role": "wizard", "content": "x"}], "Invalid value: 'wizard'"),
        ([{"role": "user", "content": None}], "expected a string, got null"),
        ([{"role": "user", "content": ""}], "must not be empty"),
        ([{"role": "user", "content": []}], "empty array"),
        ([{"role": "user", "content": 5}], "but got an integer"),
        ([{"role": "user", "content": [{"type": "hologram"}]}], "Invalid value: 'hologram'"),
        ([USER, {"role": "assistant", "content": None}], "expected a string, got null"),
        ([USER, {"role": "assistant", "content": "", "tool_calls": []}], "empty array"),
        ([USER, _call("a")], "did not have response messages: a"),
        ([USER, _call("a", "b"), _result("a"), USER], "did not have response messages: b"),
        ([USER, _result("a")], "must be a response to a preceeding message"),
        ([USER, _call("a"), _result("a"), USER, _result("a")], "must be a response to a preceeding message"),
        ([USER, _call("a"), _result("a"), _result("a")], "Duplicate value"),
        ([USER, _call("a", "a"), _result("a")], "Duplicate value"),
        ([USER, {"role": "tool", "content": "x"}], "tool_call_id"),
        (["x"], "expected an object"),
    ],
)
def test_strict_model_refuses_requests_that_the_provider_refuses(messages: list[Any], text: str):
    refusal = check({"model": "m", "messages": messages})
    assert refusal is not None
    assert text in refusal.message
    assert json.loads(refusal.body())["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "messages",
    [
        [USER],
        [USER, _call("a", "b"), _result("b"), _result("a"), USER],
        [USER, _call("a"), _result("a"), _call("a"), _result("a")],
        [
            {"role": "developer", "content": [{"type": "text", "text": "x"}]},
            USER,
            {"role": "assistant", "content": "y"},
        ],
        [
            USER,
            {"role": "assistant", "content": "", "tool_calls": _call("a")["tool_calls"]},
            {**_result("a"), "content": ""},
        ],
    ],
)
def test_strict_model_accepts_requests_that_the_provider_accepts(messages: list[Any]):
    assert check({"model": "m", "messages": messages}) is None
    assert check_pairing(messages) is None


@pytest.mark.parametrize(
    ("request_members", "text"),
    [
        ({}, "you must provide a model"),
        ({"model": "m"}, "Missing required parameter: 'messages'"),
        ({"model": "m", "messages": "x"}, "expected an array of objects, but got a string"),
        ({"model": "m", "messages": [USER], "stream": 1}, "'stream': expected a boolean"),
        ({"model": "m", "messages": [USER], "n": True}, "'n': expected an integer"),
    ],
)
def test_refuses_wrong_types(request_members: dict[str, Any], text: str):
    refusal = check(request_members)
    assert refusal is not None
    assert text in refusal.message


async def test_a_queue_decides_and_everything_received_is_kept_within_bounds():
    queues = Queues()
    queues.push("m", ScriptedReply(message={"content": "one"}), ScriptedReply(message={"content": "two"}))
    model = ScriptedModel(script=queues, keep=2)
    async with (
        run_scripted(model=model) as server,
        openai.AsyncOpenAI(base_url=server.base_url, api_key="x") as client,
    ):
        texts = [
            (await client.chat.completions.create(model="m", messages=[USER])).choices[0].message.content
            for _ in range(3)
        ]
    assert texts == ["one", "two", "I was sent 1 messages. You said: hello there"]
    assert [received.number for received in model.received] == [2, 3]
    assert model.received[0].request == {"model": "m", "messages": [USER]}


async def _raw(reply: ScriptedReply) -> bytes:
    async def script(received: ReceivedRequest) -> ScriptedReply:
        assert received.path == "/v1/chat/completions"
        return reply

    async with (
        run_scripted(model=ScriptedModel(script=script)) as server,
        aiohttp.ClientSession() as session,
        session.post(
            f"{server.base_url}/chat/completions", json={"model": "m", "messages": [USER], "stream": True}
        ) as response,
    ):
        assert response.headers["x-request-id"].startswith("req_")
        return await response.read()


async def test_streams_that_break_in_all_ways():
    whole = await _raw(ScriptedReply(message={"content": "abcdef"}, chunk_chars=2))
    assert whole.endswith(b"data: [DONE]\n\n")
    assert b"DONE" not in await _raw(ScriptedReply(message={"content": "x"}, has_done=False))
    crlf = await _raw(ScriptedReply(message={"content": "x"}, crlf=True))
    assert crlf.count(b"\n") == crlf.count(b"\r\n") == 2 * crlf.count(b"data: ")
    broken = await _raw(ScriptedReply(message={"content": "abcdef"}, break_after=2))
    assert broken.count(b"data: ") == 3
    assert b"server_error" in broken
    pieces = await _raw(ScriptedReply(message={"content": "abc"}, pieces=["a", "bc"]))
    assert b'{"content":"bc"}' in pieces
    with pytest.raises(aiohttp.ClientPayloadError):
        await _raw(ScriptedReply(message={"content": "abcdef"}, break_after=2, break_with="disconnect", delay=0.01))


async def test_a_client_that_leaves_is_noticed():
    model = ScriptedModel(script=lambda _: ScriptedReply(message={"content": "x"}, break_after=1, break_with="stall"))
    async with run_scripted(model=model) as server, aiohttp.ClientSession() as session:
        body = {"model": "m", "messages": [USER], "stream": True}
        async with session.post(f"{server.base_url}/chat/completions", json=body) as response:
            await response.content.readany()
        for _ in range(100):
            if model.disconnects:
                break
            await asyncio.sleep(0.02)
    assert model.disconnects == 1


async def test_errors_as_scripted_and_malformed_bodies():
    script = Queues()
    script.push("m", ScriptedReply(status=503, body=b"busy", headers={"retry-after": "7"}))
    async with run_scripted(model=ScriptedModel(script=script)) as server, aiohttp.ClientSession() as session:
        url = f"{server.base_url}/chat/completions"
        async with session.post(url, json={"model": "m", "messages": [USER]}) as response:
            assert (response.status, response.headers["retry-after"], await response.read()) == (503, "7", b"busy")
        for body in (b"{", b"[1]", b"\xff", b"[" * 200_000, b""):
            async with session.post(url, data=body) as response:
                assert response.status == 400
                assert "could not parse" in (await response.json())["error"]["message"]
        surrogate = b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}'
        async with session.post(url, data=surrogate) as response:
            assert response.status == 200
