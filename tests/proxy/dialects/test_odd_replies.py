"""Replies of a shape that no provider describes: the client gets the host's bytes, and the store holds every word.

Real hosts do send them: servers that imitate a provider, gateways that answer for it, releases that are newer than we.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import re
import secrets
from base64 import b64encode
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tersely.fakellm.strict import (
    anthropic as strict_anthropic,
)
from tersely.fakellm.strict import (
    gemini as strict_gemini,
)
from tersely.fakellm.strict import (
    openai_chat as strict,
)
from tersely.fakellm.strict import (
    openai_responses as strict_responses,
)
from tests.conftest import Database
from tests.dialects.recordings import WIRE
from tests.support.http import Answered, body_of, post, wire
from tests.support.services import FROM_THE_START, Service, serve
from tests.support.upstreams import RawRequest, RawUpstream, http_head

EXAMPLES = int(os.environ.get("TERSELY_TEST_EXAMPLES", "150"))
TOOL = {"type": "object", "properties": {}}
GEMINI = {
    "contents": [{"role": "user", "parts": [{"text": "hello"}]}],
    "tools": [{"functionDeclarations": [{"name": "look", "description": "d", "parameters": TOOL}]}],
}
ASKED: dict[str, dict[str, Any]] = {
    "openai_chat": {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "tools": [{"type": "function", "function": {"name": "look", "parameters": TOOL}}],
    },
    "openai_responses": {
        "model": "m",
        "input": "hello",
        "tools": [{"type": "function", "name": "look", "parameters": TOOL}],
    },
    "anthropic": {
        "model": "m",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "hello"}],
        "tools": [{"name": "look", "input_schema": TOOL}],
    },
    "gemini": GEMINI,
    "gemini_gca": {"model": "m", "project": "p", "request": GEMINI},
}
PATHS = {
    "openai_chat": "/v1/chat/completions",
    "openai_responses": "/v1/responses",
    "anthropic": "/v1/messages",
    "gemini": "/v1beta/models/m:generateContent",
    "gemini_gca": "/v1internal:generateContent",
}
STREAMED = {
    "gemini": "/v1beta/models/m:streamGenerateContent?alt=sse",
    "gemini_gca": "/v1internal:streamGenerateContent?alt=sse",
}
CHECKS: dict[str, Callable[[dict[str, Any]], object]] = {
    "openai_chat": strict.check,
    "openai_responses": strict_responses.check,
    "anthropic": strict_anthropic.check,
    "gemini": strict_gemini.check,
    "gemini_gca": strict_gemini.check,
}
# Where the model's words are, and members in which a host may put what it likes without saying anything.
WORDS = frozenset({"content", "text", "arguments", "refusal", "reasoning_content", "thinking", "input", "name", "code"})
DEEP = json.loads("[" * 200 + '"deep"' + "]" * 200)
ODD_VALUES: list[Any] = [5, 1.5, -1, True, None, "none", "", {}, [], [[]], [5], {"a": {"b": 1}}, {"text": 5}, DEEP]
EVENT = re.compile(rb".*?(?:\r\n\r\n|\n\n|\r\r|\Z)", re.DOTALL)


def chat(**message: Any) -> bytes:
    return json.dumps({"id": 7, "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()


def chunked(*deltas: Any) -> bytes:
    chunks = [{"id": 7, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    return b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in chunks) + b"data: [DONE]\n\n"


def events(*objects: Any) -> bytes:
    return b"".join(
        b"event: " + str(each.get("type")).encode() + b"\ndata: " + json.dumps(each).encode() + b"\n\n"
        if isinstance(each, dict)
        else b"data: " + json.dumps(each).encode() + b"\n\n"
        for each in objects
    )


def data(*objects: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(each).encode() + b"\r\n\r\n" for each in objects)


CALL = {"id": 12, "type": "function", "function": {"name": "look", "arguments": {"q": "xylophone"}}}
CALL_OF_OURS = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "manage_scratchpad", "arguments": '{"action": "read"}'},
}
USE_OF_OURS = {"type": "tool_use", "id": "toolu_1", "name": "manage_scratchpad", "input": {"action": "read"}}
PART_OF_OURS = {
    "candidates": [
        {
            "content": {
                "role": "model",
                "parts": [{"functionCall": {"name": "manage_scratchpad", "args": {"action": "read"}}}],
            },
            "finishReason": "STOP",
        }
    ]
}
ITEM_OF_OURS = {
    "type": "function_call",
    "id": "fc_1",
    "call_id": "call_1",
    "name": "manage_scratchpad",
    "arguments": '{"action": "read"}',
    "status": "completed",
}
WHOLE: dict[str, list[bytes]] = {
    "openai_chat": [
        chat(role="assistant", content=5),
        chat(role="assistant", content={}),
        chat(role="assistant", content={"text": "xylophone"}),
        chat(role=None, content="xylophone"),
        chat(role="user", content="xylophone"),
        chat(role=5, content="xylophone"),
        chat(role="assistant", content="xylophone", tool_calls={}),
        chat(role="assistant", content="xylophone", tool_calls="none"),
        chat(role="assistant", content="xylophone", tool_calls=[5, "x"]),
        chat(role="assistant", content=None, tool_calls=[CALL]),
        chat(role="assistant", content=[{"type": 5, "text": "xylophone"}, 7, ["xylophone"]]),
        chat(role="assistant", content="xylophone", refusal=5, audio=[], function_call="xylophone"),
        b'{"choices":"xylophone"}',
        b'{"choices":{"message":{"content":"xylophone"}}}',
        b'{"choices":[{"text":"xylophone"}]}',
        b'{"choices":[{"message":["xylophone"]}]}',
        b'[{"choices":[{"message":{"role":"assistant","content":"xylophone"}}]}]',
    ],
    "openai_responses": [
        b'{"id":5,"output":"xylophone"}',
        b'{"id":"r","output":[5,"xylophone"],"status":"completed"}',
        b'{"id":"r","output":[{"type":"message","role":"assistant","content":5},{"type":"message","role":null,'
        b'"content":[{"type":"output_text","text":"xylophone"}]}]}',
        b'{"id":"r","output":[{"type":"function_call","call_id":7,"name":5,"arguments":"xylophone"}]}',
        b'{"id":"r","output":{"type":"message","content":"xylophone"}}',
        b'{"id":"r","output_text":"xylophone"}',
        b'{"id":"r","output":[{"type":"reasoning","summary":{},"content":[["xylophone"]]}]}',
    ],
    "anthropic": [
        b'{"id":5,"role":"assistant","content":5,"x":"xylophone"}',
        b'{"id":"m","role":"assistant","content":"xylophone"}',
        b'{"id":"m","role":null,"content":[{"type":"text","text":"xylophone"}]}',
        b'{"id":"m","role":"user","content":[{"type":"text","text":"xylophone"}]}',
        b'{"id":"m","role":"assistant","content":[{"type":"text","text":5},{"type":"text","text":"xylophone"}]}',
        b'{"id":"m","role":"assistant","content":[{"type":5,"text":"xylophone"}],"stop_reason":7}',
        b'{"id":"m","role":"assistant","content":[{"type":"tool_use","id":5,"name":{},"input":"xylophone"}]}',
        b'{"id":"m","role":"assistant","content":{"type":"text","text":"xylophone"}}',
        b'{"id":"m","role":"assistant","content":["xylophone"]}',
    ],
    "gemini": [
        b'{"candidates":"xylophone"}',
        b'{"candidates":{"content":{"role":"model","parts":[{"text":"xylophone"}]}}}',
        b'{"candidates":[{"content":{"role":null,"parts":[{"text":"xylophone"}]}}]}',
        b'{"candidates":[{"content":{"role":"user","parts":[{"text":"xylophone"}]},"finishReason":5}]}',
        b'{"candidates":[{"content":{"role":"model","parts":[5,{"text":"xylophone"}]},"finishReason":"STOP"}]}',
        b'{"candidates":[{"content":{"role":"model","parts":[{"text":7},{"text":["xylophone"]}]}}]}',
        b'{"candidates":[{"content":{"role":"model","parts":[{"functionCall":"xylophone"}]}}]}',
        b'{"candidates":[{"content":{"role":"model","parts":[{"functionCall":{"name":5,"args":"xylophone"}}]}}]}',
        b'{"candidates":[{"content":"xylophone"}]}',
        b'{"candidates":["xylophone"]}',
        b'{"text":"xylophone"}',
    ],
}
EVERYWHERE = [
    b'"xylophone"',
    b"xylophone, in plain words",
    b"<html>xylophone</html>",
    b'{"unknown":"xylophone"}',
    b'["xylophone"]',
    b"\xff\xfexylophone",
    b"\xef\xbb\xbf{} xylophone",
    b'{"choices":[{"message":{"content":' + b"[" * 3000 + b'"xylophone"' + b"]" * 3000 + b"}}]}",
    b'{"xylophone": NaN}',
    b'{"cut off": "xylophone',
]
STREAMS: dict[str, list[bytes]] = {
    "openai_chat": [
        chunked({"role": None, "content": "xylophone"}),
        chunked({"content": 5}, {"content": {"a": "xylophone"}}),
        chunked({"content": "abc"}, "xylophone", {"content": "def"}),
        chunked({"content": "xylophone", "tool_calls": {}}),
        chunked({"content": "xylophone", "tool_calls": "none"}),
        chunked({"tool_calls": [{"index": 0, "id": 5, "function": {"name": "look", "arguments": "xylophone"}}]}),
        chunked({"tool_calls": [{"index": "0", "function": "xylophone"}]}),
        b'data: {"choices":{"0":"xylophone"}}\n\n' + chunked({"content": "abc"}),
        b'data: ["xylophone"]\n\ndata: [DONE]\n\n',
    ],
    "openai_responses": [
        events({"type": "response.output_text.delta", "delta": {"a": "xylophone"}}),
        events({"type": "response.completed", "response": "xylophone"}),
        events({"type": "response.completed", "response": {"id": 5, "output": ["xylophone"]}}),
        events({"type": "response.output_item.done", "output_index": "0", "item": "xylophone"}),
        events(["xylophone"], "xylophone", 5),
    ],
    "anthropic": [
        events({"type": "message_start", "message": "xylophone"}),
        events(
            {"type": "message_start", "message": {"role": "assistant"}},
            {"type": "content_block_start", "index": 0},
            ["xylophone"],
        ),
        events({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "xylophone"}}),
        events(
            {"type": "message_start", "message": {"role": None, "content": 5}},
            {"type": "content_block_start", "index": "0", "content_block": {"type": "text", "text": "xylophone"}},
            {"type": "content_block_delta", "index": 0, "delta": "xylophone"},
            {"type": "message_stop"},
        ),
        events(
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": 5}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "xylophone"}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": ["xylophone"]}},
        ),
    ],
    "gemini": [
        data({"candidates": "xylophone"}),
        data({"candidates": [{"content": {"parts": "xylophone"}}]}),
        data({"candidates": [{"content": {"parts": [{"text": "abc"}]}}]}, ["xylophone"]),
        data({"candidates": [{"content": ["xylophone"]}, {"index": "x", "content": {"parts": [{"text": "abc"}]}}]}),
    ],
}


def _wrapped(body: bytes) -> bytes:
    return b'{"response":' + body + b"}"


WHOLE["gemini_gca"] = [_wrapped(body) for body in WHOLE["gemini"]]
STREAMS["gemini_gca"] = [re.sub(rb"data: ([^\r\n]*)", rb'data: {"response":\1}', each) for each in STREAMS["gemini"]]
CASES = [
    pytest.param(dialect, body, streams, id=f"{dialect}-{'stream' if streams else 'whole'}-{number}")
    for dialect in PATHS
    for streams, bodies in ((False, WHOLE[dialect] + EVERYWHERE), (True, STREAMS[dialect]))
    for number, body in enumerate(bodies)
]


@pytest.fixture(scope="module")
def slim(store: Database, raw: RawUpstream) -> Iterator[Service]:
    """The default: looks for tags and offers tools."""
    with serve(store, raw.url) as running:
        yield running


@pytest.fixture(scope="module")
def window(store: Database, raw: RawUpstream) -> Iterator[Service]:
    with serve(store, raw.url, strategy="window", epoch=FROM_THE_START) as running:
        yield running


async def ask(service: Service, dialect: str, session: str, *, streams: bool, **more: Any) -> Answered:
    path = STREAMED.get(dialect, PATHS[dialect]) if streams else PATHS[dialect]
    request = ASKED[dialect] | ({"stream": True} if streams and dialect not in STREAMED else {}) | more
    if streams and dialect == "openai_chat":
        request["stream_options"] = {"include_usage": True}
    return await post(service, json.dumps(request).encode(), path=path, X_Tersely_Session=session)


async def stored(service: Service, session: str) -> list[dict[str, Any]]:
    """The session's replies over REST."""
    answer = await post(service, b"", method="GET", path=f"/api/sessions/{session}/messages?view=all")
    assert answer.status == 200, answer.body
    return [item for item in answer.json["items"] if item["role"] == "assistant"]


@pytest.mark.parametrize("way", ["plain_behind_raw", "slim", "window"])
@pytest.mark.parametrize(("dialect", "body", "streams"), CASES)
async def test_an_odd_reply_passes_and_is_stored(
    request: pytest.FixtureRequest, raw: RawUpstream, key: str, dialect: str, body: bytes, way: str, *, streams: bool
) -> None:
    service = request.getfixturevalue(way)
    raw.answer(http_head("text/event-stream" if streams else "application/json"), body)

    answer = await ask(service, dialect, key, streams=streams)

    assert (answer.status, answer.body) == (200, body)
    messages = await stored(service, key)
    assert messages, "nothing is stored"
    words = json.dumps([each["raw"] for each in messages])
    assert "xylophone" in words or b64encode(body).decode() in words or b"xylophone" not in body


@pytest.mark.parametrize("way", ["plain_behind_raw", "slim"])
@pytest.mark.parametrize("dialect", PATHS)
async def test_session_continues_with_valid_requests_after_an_odd_reply(
    request: pytest.FixtureRequest, raw: RawUpstream, key: str, dialect: str, way: str
) -> None:
    """Replies that cannot be understood are in no context, and nothing that reads the session fails at them."""
    service = request.getfixturevalue(way)
    for body in (*WHOLE[dialect], *EVERYWHERE):
        raw.answer(http_head("application/json"), body)
        assert (await ask(service, dialect, key, streams=False)).body == body
    raw.answer(http_head("application/json"), WHOLE[dialect][0])

    await ask(service, dialect, key, streams=False)

    sent = json.loads(raw.requests[-1].body)
    refusal = CHECKS[dialect](sent.get("request", sent) | {"model": "m"})
    assert refusal is None, refusal
    for method, path, content in (
        ("GET", "messages?view=client", None),
        ("GET", "messages?view=model", None),
        ("GET", "turns", None),
        ("GET", "export", None),
        ("GET", "stats", None),
        ("POST", "context", {"dialect": dialect}),
        ("POST", "search", {"mode": "search", "query": "hello"}),
        ("POST", "search", {"mode": "relevant", "query": "hello"}),
        ("POST", "query", {"sql": "SELECT * FROM messages"}),
    ):
        body = json.dumps(content).encode() if content is not None else b""
        answer = await post(service, body, method=method, path=f"/api/sessions/{key}/{path}")
        assert answer.status == 200, (path, answer.body[:500])
    exported = await post(service, b"", method="GET", path=f"/api/sessions/{key}/export")
    copied = exported.json | {"id": f"{key}-copy", "dialect": dialect}
    taken = await post(service, json.dumps(copied).encode(), path="/api/sessions/import")
    assert taken.status == 201, taken.body[:500]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("dialect", PATHS)
@pytest.mark.parametrize(
    "content_type", ["text/plain", "text/html; charset=utf-8", "application/json", "text/event-stream", "image/png"]
)
@pytest.mark.parametrize("body", [b"", b'{"xylophone":1}', b"xylophone"])
async def test_any_content_type_passes(
    plain_behind_raw: Service,
    raw: RawUpstream,
    key: str,
    dialect: str,
    content_type: str,
    body: bytes,
    *,
    streams: bool,
) -> None:
    raw.answer(http_head(content_type), body)

    answer = await ask(plain_behind_raw, dialect, key, streams=streams)

    assert (answer.status, answer.headers["content-type"], answer.body) == (200, content_type, body)
    assert bool(await stored(plain_behind_raw, key)) == bool(body)


@pytest.mark.parametrize("way", ["plain_behind_raw", "slim"])
@pytest.mark.parametrize("again", [["one"], ["one", "two"]])
async def test_session_continues_after_an_unreadable_reply(
    request: pytest.FixtureRequest, raw: RawUpstream, key: str, way: str, again: list[str]
) -> None:
    """As after an empty reply: the client says the same once more, or more than that."""
    service = request.getfixturevalue(way)
    raw.answer(http_head("application/json"), b'{"choices":"xylophone"}')
    first = await post(service, body_of(f"one {key}"))
    raw.answer(http_head("application/json"), chat(role="assistant", content="understood"))

    texts = [f"{each} {key}" if each == "one" else each for each in again]
    headers = {"x_stainless_retry_count": "1"} if again == ["one"] else {}
    second = await post(service, body_of(*texts), **headers)

    assert second.session == first.session
    assert len(await stored(service, first.session)) == 2


# After a round in which the model called a tool of ours

OURS: dict[str, tuple[bytes, bytes]] = {
    "openai_chat": (
        chat(role="assistant", content="Looking.", tool_calls=[CALL_OF_OURS]),
        chunked({"role": "assistant", "content": "Looking."}, {"tool_calls": [{"index": 0, **CALL_OF_OURS}]}).replace(
            b"data: [DONE]",
            b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"tool_calls"}]}\n\ndata: [DONE]',
        ),
    ),
    "anthropic": (
        json.dumps({"id": "m", "role": "assistant", "content": [USE_OF_OURS], "stop_reason": "tool_use"}).encode(),
        events(
            {"type": "message_start", "message": {"id": "m", "role": "assistant", "content": []}},
            {"type": "content_block_start", "index": 0, "content_block": USE_OF_OURS | {"input": {}}},
            {
                "type": "content_block_delta",
                "index": 0,
                "delta": {"type": "input_json_delta", "partial_json": json.dumps(USE_OF_OURS["input"])},
            },
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": {"stop_reason": "tool_use"}},
            {"type": "message_stop"},
        ),
    ),
    "gemini": (
        json.dumps(PART_OF_OURS).encode(),
        data(PART_OF_OURS),
    ),
    "openai_responses": (
        json.dumps({"id": "r", "status": "completed", "output": [ITEM_OF_OURS]}).encode(),
        events(
            {"type": "response.created", "response": {"id": "r", "output": []}},
            {"type": "response.output_item.added", "output_index": 0, "item": ITEM_OF_OURS},
            {"type": "response.output_item.done", "output_index": 0, "item": ITEM_OF_OURS},
            {"type": "response.completed", "response": {"id": "r", "status": "completed", "output": [ITEM_OF_OURS]}},
        ),
    ),
}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("dialect", OURS)
async def test_an_odd_last_round_passes_and_is_stored(
    window: Service, raw: RawUpstream, key: str, dialect: str, *, streams: bool
) -> None:
    kind = "text/event-stream" if streams else "application/json"
    odd = [body for body in (STREAMS if streams else WHOLE)[dialect] if b"xylophone" in body]
    for number, body in enumerate(odd):
        rounds = iter([OURS[dialect][streams], body])

        async def handler(_: RawRequest, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(http_head(kind) + next(rounds))  # noqa: B023 - the test waits for it

        raw.handler = handler
        before = len(raw.requests)
        session = f"{key}-{number}"
        answer = await ask(window, dialect, session, streams=streams)

        assert len(raw.requests) == before + 2, "the model was not asked again"
        assert (answer.status, b"xylophone" in answer.body) == (200, True), (body, answer.body)
        assert "xylophone" in json.dumps([each["raw"] for each in await stored(window, session)]), body


# Statuses


@pytest.mark.parametrize("way", ["plain_behind_raw", "slim"])
@pytest.mark.parametrize(
    ("sent", "shown"),
    [(999, 999), (600, 600), (599, 599), (299, 299), (300, 300), (418, 418), (99, 502), (0, 502), (7, 502)],
)
@pytest.mark.parametrize("streams", [False, True])
async def test_any_status_comes_through(
    request: pytest.FixtureRequest, raw: RawUpstream, key: str, way: str, sent: int, shown: int, *, streams: bool
) -> None:
    """A bare connection: what HTTP libraries make of such a status differs."""
    service = request.getfixturevalue(way)
    body = chat(role="assistant", content="xylophone")
    raw.answer(http_head("application/json", status=f"{sent:03} Odd", content_length=str(len(body))), body)
    sent_body = body_of("hello", stream=streams)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\nx-tersely-session: {key}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(sent_body)}\r\n"

    async with wire(service) as bare:
        await bare.send(f"{head}connection: close\r\n\r\n".encode() + sent_body)
        got = await bare.to_end()

    assert got.startswith(b"HTTP/1.1 %d " % shown), got[:200]
    assert got.endswith(b"\r\n\r\n" + body)
    if shown < 400:
        assert await stored(service, key)


# Recorded replies with something wrong in them


@cache
def recordings() -> list[tuple[str, bool, bytes]]:
    """Dialect, whether it is a stream, body: of recorded replies of moderate size, and the well-formed ones here."""
    index = WIRE / "index.jsonl"
    lines = [json.loads(line) for line in index.read_text().splitlines()] if index.exists() else []
    apis = {
        "openai.chat": "openai_chat",
        "openai-compat.chat": "openai_chat",
        "openai.responses": "openai_responses",
        "anthropic.messages": "anthropic",
    }
    found = [
        (apis.get(line["api"], "gemini"), line["stream"], (WIRE / line["file"]).read_bytes())
        for line in lines
        if line["bytes"] < 20_000 and not (line["stream"] and "text/event-stream" not in line["content_type"])
    ]
    found += [(dialect, False, body) for dialect in WHOLE for body in WHOLE[dialect]]
    found += [(dialect, True, body) for dialect in STREAMS for body in STREAMS[dialect]]
    return sorted(found)


def _nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    yield path
    for name, inner in list(pairs)[:40]:
        yield from _nodes(inner, (*path, name))


def _change(value: Any, path: tuple[Any, ...], how: Callable[[Any], Any], *, deletes: bool) -> Any:
    """``value`` with what is at ``path`` changed, or gone."""
    if not path:
        return how(value)
    changed = copy.deepcopy(value)
    holder = changed
    for step in path[:-1]:
        holder = holder[step]
    if deletes:
        del holder[path[-1]]
    else:
        holder[path[-1]] = how(holder[path[-1]])
    return changed


def _mutate_json(draw: Any, text: bytes) -> bytes:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    path = draw(st.sampled_from(list(_nodes(value))))
    kind = draw(st.sampled_from(["replace", "delete", "list", "object"]))
    odd = draw(st.sampled_from(ODD_VALUES))
    how = {"list": lambda old: [old], "object": lambda old: {"a": old}}.get(kind, lambda _: odd)
    return json.dumps(_change(value, path, how, deletes=kind == "delete")).encode()


@st.composite
def mutated(draw: Any) -> tuple[str, bool, bytes]:
    """A recorded reply that was changed at a place or two: as JSON, or as bytes."""
    dialect, streams, body = draw(st.sampled_from(recordings()))
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.integers(0, 3)):
            if not streams:
                body = _mutate_json(draw, body)
                continue
            parts = [part for part in EVENT.findall(body) if part]
            number = draw(st.integers(0, max(0, len(parts) - 1)))
            if parts and (match := re.search(rb"(?m)^data: ?(\{.*?)\r?$", parts[number])):
                changed = _mutate_json(draw, match[1])
                parts[number] = parts[number][: match.start(1)] + changed + parts[number][match.end(1) :]
                body = b"".join(parts)
        else:
            at = draw(st.integers(0, len(body)))
            end = at + draw(st.integers(0, 12))
            body = (
                body[:at]
                + draw(st.sampled_from([b"", b"\n", b'"', b"{", b"]", b"\xff", b"\x00", b"\n\n"]))
                + body[end:]
            )
    return dialect, streams, body


def _words(value: Any, *, is_word: bool = False) -> Iterator[str]:
    """The strings in a reply that are what the model said."""
    if isinstance(value, str) and is_word and len(value.strip()) > 2:
        yield value.strip()
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _words(inner, is_word=name in WORDS)
    elif isinstance(value, list):
        for inner in value:
            yield from _words(inner, is_word=is_word)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _strings(inner)


def _words_of(dialect: str, body: bytes) -> list[str]:
    """Return the words that must be stored of a whole reply; nothing of an error."""
    try:
        reply = json.loads(body)
    except (ValueError, RecursionError):
        return []
    if isinstance(reply, list) and dialect in STREAMED:
        return [word for each in reply for word in _words_of(dialect, json.dumps(each).encode())]
    reply = reply.get("response", reply) if isinstance(reply, dict) else reply
    if isinstance(reply, dict) and reply.get("error") is not None:
        return []
    place = {"openai_chat": "choices", "openai_responses": "output", "anthropic": "content"}.get(dialect, "candidates")
    return list(_words(reply.get(place))) if isinstance(reply, dict) else list(_strings(reply))


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(reply=mutated())
def test_a_mutated_reply_passes_byte_for_byte_and_is_stored(
    plain_behind_raw: Service, raw: RawUpstream, reply: tuple[str, bool, bytes]
) -> None:
    dialect, streams, body = reply
    answer, missing = asyncio.run(_relayed(plain_behind_raw, raw, *reply))
    assert answer.status == 200, answer.body
    if not (streams and dialect in STREAMED):  # Gemini's clients get the data lines alone
        assert answer.body == body
    assert missing == []


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(reply=mutated(), way=st.sampled_from(["slim", "window"]))
def test_a_mutated_reply_passes_where_tags_and_tools_are_looked_for(
    request: pytest.FixtureRequest, raw: RawUpstream, reply: tuple[str, bool, bytes], way: str
) -> None:
    answer, missing = asyncio.run(_relayed(request.getfixturevalue(way), raw, *reply))
    assert answer.status == 200, answer.body
    assert missing == []


async def _relayed(
    service: Service, raw: RawUpstream, dialect: str, streams: bool, body: bytes
) -> tuple[Answered, list[str]]:
    """Relay a reply. Return what the client gets, and which words of a reply that is not streamed are not stored."""
    session = f"m{secrets.token_hex(8)}"
    raw.answer(http_head("text/event-stream" if streams else "application/json"), body)
    answer = await ask(service, dialect, session, streams=streams)
    messages = await stored(service, session)
    if streams:
        return answer, []
    kept = "\n".join(_strings([each["raw"] for each in messages] + [each["model_raw"] for each in messages]))
    kept += json.dumps([each["raw"] for each in messages])
    return answer, [word for word in _words_of(dialect, body) if word not in kept]
