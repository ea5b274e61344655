"""Replies that leave no message: a client may continue from their ids, and ask for them again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from typing import Any

import openai
import pytest

from tersely.fakellm.scripted import ScriptedReply
from tests.conftest import Database, Server, new_database
from tests.support.http import post
from tests.support.responses_talks import MODEL, TOOL, Talk, client_of, upstream_input, words
from tests.support.services import FROM_THE_START, Service, serve
from tests.support.tenants import tenant
from tests.support.upstreams import Model, RawUpstream, http_head, scripted

OWN_CALL = {
    "type": "function_call",
    "id": "fc_own",
    "call_id": "own",
    "status": "completed",
    "name": "manage_scratchpad",
    "arguments": '{"action":"read"}',
}
# Nothing at all; a call of Tersely's that the host cut off; a round of Tersely's, and then nothing.
EMPTY = {
    "nothing": [ScriptedReply(message={"output": []})],
    "cut off": [ScriptedReply(message={"output": [OWN_CALL]}, finish_reason="length")],
    "after a round": [ScriptedReply(message={"output": [OWN_CALL]}), ScriptedReply(message={"output": []})],
}


@pytest.fixture(scope="module", params=[False, True], ids=["host keeps replies", "host keeps none"])
def running(server: Server, request: pytest.FixtureRequest) -> Iterator[tuple[Service, Model]]:
    options: dict[str, Any] = {"strategy": "window", "instructions": "off", "epoch": FROM_THE_START}
    with (
        scripted(is_forgetful=request.param) as model,
        new_database(server) as database,
        serve(database, model.url, **options) as service,
    ):
        yield service, model


def ask(talk: Talk, text: str, *, streams: bool) -> Any:
    """Ask behind the last reply, and return the reply, which may be incomplete."""
    request: Any = {"model": MODEL, "input": text, "user": talk.key, "previous_response_id": talk.last.id, **talk.more}
    with client_of(talk.service) as client:
        if not streams:
            return client.responses.create(**request)
        return list(client.responses.create(stream=True, **request))[-1].response


@pytest.fixture(params=product(EMPTY, ["whole", "streamed"]), ids=" ".join)
def talk(running: tuple[Service, Model], key: str, request: pytest.FixtureRequest) -> Talk:
    """A conversation whose last reply is empty."""
    service, model = running
    kind, form = request.param
    talk = Talk(service, key, tools=[TOOL])
    talk.say("one")
    model.script(key, *EMPTY[kind])
    talk.last = ask(talk, "two", streams=form == "streamed")
    assert talk.last.output == []
    return talk


async def test_a_client_continues_from_an_empty_reply(running: tuple[Service, Model], talk: Talk) -> None:
    service, model = running
    talk.say("three")
    assert words(upstream_input(model, talk.key)) == ["one", "-", "two", "three"]
    talk.say("four")
    assert words(upstream_input(model, talk.key)) == ["one", "-", "two", "three", "-", "four"]

    roles = ["user", "assistant", "user", *["user", "assistant"] * 2]
    assert [each.role for each in await talk.stored()] == roles
    whole: Any = upstream_input(model, talk.key)
    with client_of(service) as client:
        sent = client.responses.with_raw_response.create(model=MODEL, input=whole, user=talk.key, tools=[TOOL])
    assert sent.headers["x-tersely-session"] == talk.session  # the history is known, however it comes


async def test_an_empty_reply_is_returned_again_as_its_client_saw_it(
    running: tuple[Service, Model], talk: Talk
) -> None:
    service, model = running
    given = talk.last.to_dict()
    with client_of(service) as client:
        if talk.last.id not in model.state.kept.replies:
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(talk.last.id)
            return
        again = client.responses.retrieve(talk.last.id).to_dict()
    # The host answered without the reply before it: it was sent the history in its place.
    assert again | {"previous_response_id": None} == given | {"previous_response_id": None}


async def test_a_host_may_give_one_id_to_all_replies(store: Database, raw: RawUpstream) -> None:
    """A question that is sent again is stored with the same id once more."""
    reply = json.dumps({"id": "resp_same", "object": "response", "status": "completed", "output": []}).encode()
    raw.answer(http_head("application/json", content_length=str(len(reply))) + reply)
    with serve(store, raw.url) as service:
        for _ in range(2):
            answer = await post(service, b'{"model":"m","input":"again and again"}', path="/v1/responses")
            assert (answer.status, answer.body) == (200, reply)


async def test_a_question_with_an_empty_reply_stays_in_its_conversation(
    running: tuple[Service, Model], key: str
) -> None:
    service, model = running
    model.script(key, *EMPTY["nothing"])
    with client_of(service) as client:
        for text in ("one", "two", "three"):
            client.responses.create(model=MODEL, input=text, user=key, conversation=f"conv_{key}")
    assert words(upstream_input(model, key)) == ["one", "two", "-", "three"]


async def test_the_id_of_an_empty_reply_is_its_tenants(store: Database, model: Model, keyring: Any, key: str) -> None:
    """With the operator's key, a tenant reaches the replies of its own calls alone."""
    one, other = await tenant(keyring), await tenant(keyring)
    model.script(key, *EMPTY["nothing"])
    body = json.dumps({"model": MODEL, "input": "hello", "user": key}).encode()
    with serve(store, model.url, auth="keys", openai_api_key="sk-operator") as service:
        empty = await post(service, body, path="/v1/responses", X_Tersely_Key=one.key)
        path = f"/v1/responses/{empty.json['id']}"
        mine = await post(service, b"", method="GET", path=path, X_Tersely_Key=one.key)
        theirs = await post(service, b"", method="GET", path=path, X_Tersely_Key=other.key)
    assert (mine.status, theirs.status) == (200, 404)
