"""Gemini signs the first of several calls and wants it back so: also where that one was ours, and is not shown."""

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

SIGNED = "c2lnbmVk"
DECLARED = [{"functionDeclarations": [{"name": "calc", "parameters": {"type": "object", "properties": {}}}]}]
OURS = {"functionCall": {"name": "query_db", "args": {"sql": "SELECT 1"}}, "thoughtSignature": SIGNED}
THEIRS = {"functionCall": {"name": "calc", "args": {"a": 1}}}
RESULT: dict[str, Any] = {
    "role": "user",
    "parts": [{"functionResponse": {"name": "calc", "response": {"output": "2"}}}],
}


@pytest.fixture(scope="module")
def offering(store: Database, model: Model) -> Iterator[Service]:
    with serve(store, model.url, strategy="window", epoch=FROM_THE_START) as running:
        yield running


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("streams", [False, True])
async def test_the_first_call_shown_is_signed_and_the_model_gets_its_own_back(
    offering: Service, model: Model, key: str, streams: bool, wrapped: bool
) -> None:
    verb = "streamGenerateContent?alt=sse" if streams else "generateContent"
    path = f"/v1internal:{verb}" if wrapped else f"/v1beta/models/gemini-3-pro:{verb}"

    async def ask(*contents: Any) -> list[dict[str, Any]]:
        request: dict[str, Any] = {"contents": contents, "tools": DECLARED}
        if wrapped:
            request = {"model": "gemini-3-pro", "project": "p", "request": request}
        answer = await post(offering, json.dumps(request).encode(), path=path, X_Tersely_Session=key, X_Script=key)
        assert answer.status == 200, answer.body
        events = [json.loads(line[6:]) for line in answer.body.splitlines() if line.startswith(b"data: ")]
        bodies = [each["response"] if wrapped else each for each in events or [answer.json]]
        return [part for body in bodies for part in body["candidates"][0]["content"]["parts"]]

    model.script(key, ScriptedReply(message={"parts": [{"text": "So."}, OURS, THEIRS, THEIRS]}))
    words = {"role": "user", "parts": [{"text": f"go {key}"}]}
    parts = await ask(words)
    assert [part for part in parts if "functionCall" in part] == [{**THEIRS, "thoughtSignature": SIGNED}, THEIRS]

    results = {**RESULT, "parts": RESULT["parts"] * 2}
    model.script(key, ScriptedReply(message={"parts": [{"text": "Two."}]}))
    await ask(words, {"role": "model", "parts": parts}, results)
    request = json.loads(model.last.body)
    contents = request["request"]["contents"] if wrapped else request["contents"]
    assert [part for part in contents[1]["parts"] if "functionCall" in part] == [OURS, THEIRS, THEIRS]
    assert len(contents[2]["parts"]) == 3


async def test_each_round_has_signatures_of_its_own(offering: Service, model: Model, key: str) -> None:
    own = {**THEIRS, "thoughtSignature": "b3du"}
    model.script(key, ScriptedReply(message={"parts": [OURS]}), ScriptedReply(message={"parts": [own]}))
    body = {"contents": [{"role": "user", "parts": [{"text": f"go {key}"}]}], "tools": DECLARED}
    path = "/v1beta/models/gemini-3-pro:generateContent"
    answer = await post(offering, json.dumps(body).encode(), path=path, X_Tersely_Session=key, X_Script=key)
    assert [part for part in answer.json["candidates"][0]["content"]["parts"] if "functionCall" in part] == [own]


async def test_the_strict_model_refuses_a_call_that_is_not_signed(service: Service, model: Model, key: str) -> None:
    contents = [{"role": "user", "parts": [{"text": "go"}]}, {"role": "model", "parts": [THEIRS]}, RESULT]
    for name, status in (("gemini-3-pro", 400), ("gemini-2.5-pro", 200)):
        answer = await post(
            service,
            json.dumps({"contents": contents, "tools": DECLARED}).encode(),
            path=f"/v1beta/models/{name}:generateContent",
            X_Tersely_Session=f"{key}-{name}",
        )
        assert answer.status == status, answer.body
        assert (b"thought_signature" in answer.body) is (status == 400)
