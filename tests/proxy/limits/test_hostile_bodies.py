"""Hostile bodies, in every dialect: a clear refusal in the dialect's own shape, or the model host gets the client's own
bytes and judges them. Never an error of ours, never a lost byte.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from tests.conftest import Database
from tests.dialects.recordings import client_requests, requests
from tests.support.http import Answered, post
from tests.support.rows import query
from tests.support.services import Service, serve
from tests.support.upstreams import RawRequest, RawUpstream, http_head

PATHS = {
    "openai_chat": "/v1/chat/completions",
    "openai_responses": "/v1/responses",
    "anthropic": "/v1/messages",
    "gemini": "/v1beta/models/gemini-test:generateContent",
    "gemini_gca": "/v1internal:generateContent",
}
SAID = {"role": "user", "content": "hello"}
CONTENTS = [
    {"role": "user", "parts": [{"text": "hello"}, {"inlineData": {"mimeType": "image/png", "data": "aGk="}}]},
    {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {"a": 1}}, "thoughtSignature": "c2ln"}]},
    {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"output": "2"}}}]},
]
OWN: dict[str, dict[str, Any]] = {
    "openai_chat": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "2"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "tool_choice": "auto",
        "stop": ["x"],
        "user": "u",
        "metadata": {"user_id": "u"},
    },
    "openai_responses": {
        "model": "m",
        "instructions": "Be brief.",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
            {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "x"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "2"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "reasoning": {"effort": "low"},
        "prompt_cache_key": "k",
    },
    "anthropic": {
        "model": "m",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            SAID,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "2"}]}],
            },
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "metadata": {"user_id": "u"},
    },
    "gemini": {
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "contents": CONTENTS,
        "tools": [{"functionDeclarations": [{"name": "f", "parameters": {"type": "object"}}]}],
        "generationConfig": {"maxOutputTokens": 9},
    },
    "gemini_gca": {"model": "m", "project": "p", "user_prompt_id": "u", "request": {"contents": CONTENTS}},
}
ODD: list[Any] = [
    None, True, 0, -1, 10**400, 1.5, "", "x", "\ud800", "\0", "a" * 5000, [], {}, [[]], [None], [1, "x", {}],
    {"type": 5}, {"text": None}, {"type": "text", "text": {}}, {"role": "user"}, {"content": {"content": []}},
]  # fmt: skip
REPLY = b'{"judged":true}'
by_dialect = pytest.mark.parametrize("dialect", PATHS)


@pytest.fixture(scope="module")
def slim(store: Database, raw: RawUpstream) -> Iterator[Service]:
    """With all that is there: instructions, tools, tags."""
    with serve(store, raw.url) as running:
        yield running


@pytest.fixture(scope="module")
def judge(raw: RawUpstream) -> RawUpstream:
    """A host that answers anything, with what is no reply."""
    raw.answer(http_head("application/json", x_request_id="judged"), REPLY)
    return raw


@cache
def recorded(dialect: str) -> tuple[dict[str, Any], ...]:
    """Requests of real clients and of recorded tests, where they are there."""
    api = {"openai_chat": "openai.chat", "anthropic": "anthropic.messages", "openai_responses": "openai.responses"}
    wire = requests(api.get(dialect, "enerateContent")) if dialect != "gemini_gca" else []
    bodies = [json.loads(path.read_bytes()) for path in wire]
    if dialect in api:
        bodies += [body for _, _, body in client_requests(PATHS[dialect])]
    return (OWN[dialect], *(body for body in bodies if len(json.dumps(body)) < 60_000))


def check(answer: Answered, forwarded: list[RawRequest], body: bytes, dialect: str) -> None:
    """A refusal of ours, or the host's word on the client's own bytes."""
    if not forwarded:
        assert 400 <= answer.status < 500, answer.body
        check_error(answer, dialect)
        return
    assert len(forwarded) == 1
    assert (answer.status, answer.body, answer.headers["x-request-id"]) == (200, REPLY, "judged")
    if answer.context == "passthrough":
        assert forwarded[0].body == body
    else:
        json.loads(forwarded[0].body)


def check_error(answer: Answered, dialect: str) -> None:
    """Check that an error has the dialect's own shape."""
    assert answer.headers["content-type"] == "application/json"
    error = answer.json["error"]
    assert error["message"]
    match dialect:
        case "anthropic":
            assert answer.json["type"] == "error"
            assert error["type"]
        case "gemini" | "gemini_gca":
            assert error["code"] == answer.status
            assert error["status"].isupper()
        case _:
            assert error["type"]


async def send(service: Service, judge: RawUpstream, dialect: str, body: bytes, **headers: str) -> list[RawRequest]:
    """Send a body and look at what comes of it; what was forwarded."""
    before = len(judge.requests)
    answer = await post(service, body, path=PATHS[dialect], **headers)
    forwarded = judge.requests[before:]
    check(answer, forwarded, body, dialect)
    return forwarded


def mutated(request: dict[str, Any], dice: random.Random) -> dict[str, Any]:
    """A request with something odd at some places."""
    request = copy.deepcopy(request)
    for _ in range(dice.randint(1, 3)):
        holder: Any = request
        depth = dice.randint(0, 7)
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not keys:
                break
            key = dice.choice(keys)
            if depth and isinstance(holder[key], dict | list) and holder[key]:
                holder, depth = holder[key], depth - 1
                continue
            what = dice.random()
            if what < 0.15:
                del holder[key]
            elif what < 0.25 and isinstance(holder, list):
                holder.insert(key, copy.deepcopy(holder[key]))
            elif what < 0.3 and isinstance(holder[key], str):
                holder[key] = holder[key][: len(holder[key]) // 2] + dice.choice(["\ud83d", "\0", "\u2028", "é"])
            else:
                holder[key] = copy.deepcopy(dice.choice(ODD))
            break
    return request


EXAMPLES = int(os.environ.get("TERSELY_TEST_EXAMPLES", "120"))


@by_dialect
@pytest.mark.parametrize("way", ["plain_behind_raw", "slim"])
async def test_odd_value_anywhere_in_a_real_request(
    request: pytest.FixtureRequest, judge: RawUpstream, key: str, dialect: str, way: str
) -> None:
    service = request.getfixturevalue(way)
    judge.answer(http_head("application/json", x_request_id="judged"), REPLY)
    wrong = []
    for number in range(EXAMPLES):
        dice = random.Random(f"{dialect} {number}")
        odd = mutated(dice.choice(recorded(dialect)), dice)
        body = json.dumps(odd, ensure_ascii=dice.random() < 0.8).encode("utf-8", "surrogatepass")
        try:
            await send(service, judge, dialect, body, X_Tersely_Session=f"{key}-{number}")
        except (AssertionError, ValueError) as error:
            wrong.append(f"example {number}: {str(error)[:300]} {body[:1000]!r}")
    assert wrong == []


DEEP = 100_000
HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "a beginning": b"{",
    "no JSON": b"nonsense",
    "no object": b"[]",
    "a null": b"null",
    "zeros": b"\0" * 100,
    "two objects": b"{} {}",
    "open brackets": b"[" * DEEP,
    "deep": b'{"x":' + b"[" * DEEP + b"]" * DEEP + b"}",
    "not UTF-8": b'{"x":"\xff\xfe"}',
}


@by_dialect
@pytest.mark.parametrize("name", HOSTILE)
async def test_json_that_is_no_request_is_refused(slim: Service, judge: RawUpstream, dialect: str, name: str) -> None:
    judge.answer(http_head("application/json", x_request_id="judged"), REPLY)
    before = len(await query(slim, "SELECT FROM sessions"))
    await send(slim, judge, dialect, HOSTILE[name])
    assert len(await query(slim, "SELECT FROM sessions")) == before


@by_dialect
async def test_deep_or_odd_values_in_read_members(
    plain_behind_raw: Service, judge: RawUpstream, key: str, dialect: str
) -> None:
    judge.answer(http_head("application/json", x_request_id="judged"), REPLY)
    plain = json.dumps(OWN[dialect]).encode()
    deep = b"[" * DEEP + b"]" * DEEP
    for number, odd in enumerate(
        (deep, b'{"a":' * DEEP + b"1" + b"}" * DEEP, b'"\\ud800"', b'"\\u0000"', b'"\\ud83d x"')
    ):
        for place in (b'"hello"', b'{"a": 1}', b'"2"', b'"f"', b'"u"'):
            if place in plain:
                body = plain.replace(place, odd, 1)
                forwarded = await send(
                    plain_behind_raw, judge, dialect, body, X_Tersely_Session=f"{key}-{number}-{place.hex()}"
                )
                assert not forwarded or forwarded[0].body == body or number > 1


@by_dialect
async def test_thirty_megabytes(plain_behind_raw: Service, judge: RawUpstream, key: str, dialect: str) -> None:
    judge.answer(http_head("application/json", x_request_id="judged"), REPLY)
    plain = json.dumps(OWN[dialect]).encode()
    body = plain.replace(b'"hello"', b'"' + b"word " * 6_000_000 + b'"', 1)
    forwarded = await send(plain_behind_raw, judge, dialect, body, X_Tersely_Session=key)
    assert [each.body for each in forwarded] == [body]
    over = plain.replace(b'"hello"', b'"' + b"word " * 7_000_000 + b'"', 1)
    before = len(judge.requests)
    answer = await post(plain_behind_raw, over, path=PATHS[dialect])
    assert answer.status == 413
    check_error(answer, dialect)
    assert len(judge.requests) == before


async def test_others_are_served_while_bodies_are_odd(plain_behind_raw: Service, judge: RawUpstream, key: str) -> None:
    judge.answer(http_head("application/json", x_request_id="judged"), REPLY)
    deep = b'{"contents":' + b"[" * DEEP * 20 + b"]" * DEEP * 20 + b"}"
    asking = [asyncio.create_task(post(plain_behind_raw, deep, path=PATHS["gemini"])) for _ in range(4)]
    fine = json.dumps(OWN["anthropic"]).encode()
    served = await post(plain_behind_raw, fine, path=PATHS["anthropic"], X_Tersely_Session=key)
    assert (served.status, served.body) == (200, REPLY)
    assert {each.status for each in await asyncio.gather(*asking)} <= {200, 400}
