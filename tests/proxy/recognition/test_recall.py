"""A response that is asked for again by its id: as its client was given it, not as the host has it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tersely.fakellm.scripted import ScriptedReply
from tests.conftest import Database
from tests.support.http import post
from tests.support.relay import relay
from tests.support.responses_talks import MODEL, TOOL
from tests.support.services import Service, serve
from tests.support.upstreams import Model, RawUpstream, http_head


@pytest.fixture(scope="module", params=["slim", "window"])
def running(store: Database, model: Model, request: pytest.FixtureRequest) -> Iterator[Service]:
    with serve(store, model.url, strategy=request.param, tools="query_db,context_search") as made:
        yield made


@pytest.fixture
def client(running: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=running.base_url, api_key="sk-upstream", max_retries=0) as made:
        yield made


def words(name: str, text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": f"msg_{name}", "role": "assistant", "status": "completed", "content": [part]}


def called(name: str, tool: str, arguments: str) -> dict[str, Any]:
    head = {"type": "function_call", "id": f"fc_{name}", "call_id": name, "status": "completed"}
    return {**head, "name": tool, "arguments": arguments}


def reply_of(*items: dict[str, Any]) -> ScriptedReply:
    return ScriptedReply(message={"output": list(items)})


TAGGED = "It is four.\n\n<terse>added</terse>\n\n### STATE\nGoal: add\n"
OUTPUTS = [
    pytest.param((lambda key: [reply_of(words(key, TAGGED))]), id="tags"),
    pytest.param(
        (
            lambda key: [
                reply_of(called(f"q{key}", "query_db", '{"sql":"SELECT 1"}')),
                reply_of(words(key, "It is one."), called(f"c{key}", "add", '{"a":1}')),
            ]
        ),
        id="rounds",
    ),
    pytest.param((lambda key: [reply_of(words(key, "Nothing to take out."))]), id="plain"),
    pytest.param(
        (
            lambda key: [
                reply_of(called(f"q{key}", "query_db", '{"sql":"SELECT 1"}')),
                ScriptedReply(message={"output": [words(key, "It is")]}, finish_reason="length"),
            ]
        ),
        id="a later round is cut off",
    ),
]


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("own", ["Be brief.", None])
def test_stored_response_equals_the_delivered_one(
    client: openai.OpenAI, model: Model, key: str, output: Any, streams: bool, own: str | None
) -> None:
    model.script(key, *output(key))
    request: Any = {"model": MODEL, "input": f"add {key}", "tools": [TOOL], "user": key}
    if own:
        request["instructions"] = own
    if streams:
        given = next(each.response for each in client.responses.create(**request, stream=True) if is_end(each))
    else:
        given = client.responses.create(**request)

    again = client.responses.retrieve(given.id)

    assert again.to_dict() == given.to_dict()  # usage of all rounds too, of which the host counts the first alone
    assert again.instructions == own
    assert again.output_text != TAGGED
    at_host = model.state.kept.replies[given.id].body
    assert b"query_db" in at_host  # else there was nothing to hide
    assert "query_db" not in again.to_json()


def is_end(event: Any) -> bool:
    return event.type in {"response.completed", "response.incomplete"}


async def test_another_s_reply_is_as_the_host_has_it(running: Service, model: Model, key: str) -> None:
    """A reply that Tersely did not relay is not changed, blanks and all; nor is a history that is asked for past it."""
    model.script(key, reply_of(words(key, TAGGED)))
    body = json.dumps({"model": MODEL, "input": f"hello {key}", "user": key}).encode()
    relayed = await post(running, body, path="/v1/responses")
    passed = await post(running, body, path="/v1/responses", X_Tersely_Bypass="true")
    for name, bypass in ((passed.json["id"], "false"), (relayed.json["id"], "true")):
        path = f"/v1/responses/{name}?include%5B%5D=message.output_text.logprobs"
        answer = await post(running, b"", method="GET", path=path, X_Tersely_Bypass=bypass)
        assert answer.body == model.state.kept.replies[name].body
        assert model.last.path == path


async def test_a_reply_without_tags_keeps_its_bytes(store: Database, raw: RawUpstream) -> None:
    odd = b'{ "id":"resp_odd", "object":"response","status" : "completed","output":[ {"type":"message",' + (
        b'"id":"m","role":"assistant","content":[{"type":"output_text","text":"h\\u0069","annotations":[]}]}],'
        b'"tools":[], "x":1.0}\n'
    )
    raw.answer(http_head("application/json", content_length=str(len(odd))) + odd)
    with serve(store, raw.url) as running:
        answer = await post(running, b'{"model":"m","input":"hello odd"}', path="/v1/responses")
        again = await post(running, b"", method="GET", path="/v1/responses/resp_odd")
        assert answer.body == again.body == odd
        raw.answer(http_head("application/json", content_length="7") + b"no JSON")
        assert (await post(running, b"", method="GET", path="/v1/responses/resp_odd")).body == b"no JSON"
        refusal = b'{"error":{"message":"Response not found"}}'
        raw.answer(http_head("application/json", status="404 Not Found", content_length=str(len(refusal))) + refusal)
        gone = await post(running, b"", method="GET", path="/v1/responses/resp_odd")
        assert (gone.status, gone.body) == (404, refusal)


@pytest.mark.parametrize(("fail_open", "status"), [("on", 200), ("off", 503)])
async def test_with_the_database_away(store: Database, model: Model, key: str, fail_open: str, status: int) -> None:
    model.script(key, reply_of(words(key, TAGGED)))
    request = json.dumps({"model": MODEL, "input": f"hello {key}", "user": key}).encode()
    with (
        relay(store) as way,
        serve(store, model.url, dsn=way.dsn, database_timeout=1.0, fail_open=fail_open) as running,
    ):
        name = (await post(running, request, path="/v1/responses")).json["id"]
        way.cut()
        answer = await post(running, b"", method="GET", path=f"/v1/responses/{name}")
    assert answer.status == status
    assert (answer.body == model.state.kept.replies[name].body) is (status == 200)
    assert status == 200 or "error" in answer.json
