"""Models that could not follow Tersely's own instructions, or would refuse them, get none, and no tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tersely.fakellm.scripted import ScriptedReply
from tests.conftest import Database
from tests.support.http import post
from tests.support.services import FROM_THE_START, Service, serve
from tests.support.upstreams import Model

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CHAT = "/v1/chat/completions"
GENERATE = "/v1beta/models/{}:generateContent"
MARKS = ("query_db", "### STATE")


def _generated(config: dict[str, Any]) -> dict[str, Any]:
    return {"contents": [{"role": "user", "parts": [{"text": "go"}]}], "generationConfig": config}


def _wrapped(model: str, config: dict[str, Any]) -> dict[str, Any]:
    return {"model": model, "project": "p", "request": _generated(config)}


def _chat(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "go"}], **more}


def _message(**more: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "go"}], **more}


def _response(**more: Any) -> dict[str, Any]:
    return {"model": "m", "input": "go", **more}


FORMAT = {"type": "json_schema", "name": "x", "schema": SCHEMA}
JSON = {"responseMimeType": "application/json"}
BARE: list[tuple[str, dict[str, Any]]] = [
    (CHAT, _chat(response_format={"type": "json_object"})),
    (CHAT, _chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}})),
    (CHAT, _chat(modalities=["text", "audio"], audio={"voice": "alloy", "format": "wav"})),
    (CHAT, _chat(model="gemma-3-27b-it")),
    ("/v1/responses", _response(text={"format": FORMAT})),
    ("/v1/messages", _message(output_format={"type": "json_schema", "schema": SCHEMA})),
    ("/v1/messages", _message(output_config={"format": {"type": "json_schema", "schema": SCHEMA}})),
    (GENERATE.format("gemini-2.5-pro"), _generated(JSON)),
    (GENERATE.format("gemini-2.5-pro"), _generated(JSON | {"responseSchema": SCHEMA})),
    (GENERATE.format("gemini-2.5-pro"), _generated({"response_mime_type": "application/json"})),
    (GENERATE.format("gemini-2.5-pro"), _generated({"responseModalities": ["AUDIO"]})),
    (GENERATE.format("gemini-2.5-pro"), _generated({"responseModalities": ["TEXT", "IMAGE"]})),
    (GENERATE.format("gemini-2.5-flash-preview-tts"), _generated({})),
    (GENERATE.format("gemma-3-27b-it"), _generated({})),
    ("/v1internal:generateContent", _wrapped("gemini-2.5-pro", JSON)),
    ("/v1internal:generateContent", _wrapped("gemma-3-27b-it", {})),
]
PLAIN: list[tuple[str, dict[str, Any]]] = [
    (CHAT, _chat()),
    (CHAT, _chat(response_format={"type": "text"}, modalities=["text"])),
    ("/v1/responses", _response(text={"format": {"type": "text"}, "verbosity": "low"})),
    ("/v1/messages", _message(output_config={"effort": "low"})),
    (
        GENERATE.format("gemini-2.5-pro"),
        _generated({"responseMimeType": "text/plain", "responseModalities": ["TEXT"]}),
    ),
    ("/v1internal:generateContent", _wrapped("gemini-2.5-pro", {})),
]


@pytest.fixture(scope="module")
def offering(store: Database, model: Model) -> Iterator[Service]:
    with serve(store, model.url, strategy="window", epoch=FROM_THE_START) as running:
        yield running


@pytest.mark.parametrize(("path", "request_"), BARE, ids=str)
async def test_requests_without_room_for_additions_get_none(
    offering: Service, model: Model, key: str, path: str, request_: dict[str, Any]
) -> None:
    answer = await post(offering, json.dumps(request_).encode(), path=path, X_Tersely_Session=key)
    assert answer.status == 200, answer.body
    assert not any(mark in model.last.body.decode() for mark in MARKS)


@pytest.mark.parametrize(("path", "request_"), PLAIN, ids=str)
async def test_additions_in_other_dialects(
    offering: Service, model: Model, key: str, path: str, request_: dict[str, Any]
) -> None:
    answer = await post(offering, json.dumps(request_).encode(), path=path, X_Tersely_Session=key)
    assert answer.status == 200, answer.body
    assert all(mark in model.last.body.decode() for mark in MARKS)


def _searched() -> dict[str, Any]:
    """A long history of calls, in which old results are shortened, beside a tool of the provider's own."""
    contents: list[dict[str, Any]] = []
    for number in range(8):
        contents += [
            {"role": "user", "parts": [{"text": f"Question {number}?"}]},
            {"role": "model", "parts": [{"functionCall": {"name": "read", "args": {"n": number}}}]},
            {"role": "user", "parts": [{"functionResponse": {"name": "read", "response": {"text": "word " * 2_000}}}]},
            {"role": "model", "parts": [{"text": "Read."}]},
        ]
    return {"contents": [*contents, {"role": "user", "parts": [{"text": "go"}]}], "tools": [{"googleSearch": {}}]}


@pytest.mark.parametrize("is_wrapped", [False, True])
async def test_instructions_omit_tools_that_cannot_be_offered(
    offering: Service, model: Model, key: str, is_wrapped: bool
) -> None:
    path = "/v1internal:generateContent" if is_wrapped else GENERATE.format("gemini-2.5-pro")
    request = {"model": "gemini-2.5-pro", "project": "p", "request": _searched()} if is_wrapped else _searched()
    headers = {"X-Tersely-Session": key, "X-Tersely-Epoch": "every_request"}
    answer = await post(offering, json.dumps(request).encode(), path=path, **headers)
    assert answer.status == 200, answer.body
    sent = model.last.body.decode()
    assert "### STATE" in sent
    assert len(sent) < len(json.dumps(request)) / 2
    assert "query_db" not in sent


async def test_a_session_may_change_between_the_two(offering: Service, model: Model, key: str) -> None:
    """Tags that a model writes from habit are removed from a structured reply as well."""
    plain = _chat(user=key)
    bare = plain | {"response_format": {"type": "json_object"}}
    model.script(key, ScriptedReply(message={"content": '{"a": 1}\n<terse>from habit</terse>'}))
    texts = []
    for request in (bare, plain, bare):
        answer = await post(offering, json.dumps(request).encode(), X_Tersely_Session=key, X_Tersely_Strategy="slim")
        texts.append(answer.json["choices"][0]["message"]["content"])
    assert texts[0].strip() == '{"a": 1}'
    added = ["<terse>" in json.dumps(json.loads(each.body)["messages"][0]) for each in model.requests(key)]
    assert added == [False, True, False]
