"""Requests that name the reply they go on from: OpenAI's own client, before hosts that keep replies and one that keeps
none.
"""

from __future__ import annotations

import json

import openai
import pytest

from tersely.fakellm.scripted import ScriptedReply
from tests.support.http import post
from tests.support.responses_talks import MODEL, TOOL, Talk, calls_in, client_of, upstream_input, whole_input, words
from tests.support.rows import messages_by_number
from tests.support.services import Service
from tests.support.upstreams import Model


@pytest.mark.parametrize("streams", [False, True])
async def test_a_conversation_by_ids_with_tools(host: tuple[Service, Model], key: str, streams: bool) -> None:
    service, _ = host
    talk = Talk(service, key, streams=streams, tools=[TOOL])
    for number in range(3):
        called = talk.say(f'call add {{"a": {number}}}')
        (call,) = calls_in(called)
        assert (call.name, json.loads(call.arguments)) == ("add", {"a": number})
        reply = talk.say([{"type": "function_call_output", "call_id": call.call_id, "output": str(number)}])
        assert f"The tool answered: {number}" in reply.output_text
        if number:
            assert talk.source == "body"

    stored = await talk.stored()
    assert [each.role for each in stored] == ["user", "assistant", "tool", "assistant"] * 3
    assert [each.turn for each in stored] == [turn for turn in (1, 2, 3) for _ in range(4)]
    assert {each.status for each in stored} == {"live"}


# Where it goes on


async def test_ids_sent_upstream_are_ours_and_ids_returned_are_the_clients(
    service: Service, model: Model, key: str
) -> None:
    talk = Talk(service, key)
    first = talk.say("one", instructions="Be kind.")
    second = talk.say("two", instructions="Be brief.", store=False)

    sent = json.loads(model.requests(key)[-1].body)
    assert "previous_response_id" not in sent
    assert sent["store"] is False
    assert sent["instructions"].startswith("Be brief.")
    assert "kind" not in sent["instructions"]
    assert words(sent["input"]) == ["one", "-", "two"]
    assert (second.previous_response_id, second.instructions) == (first.id, "Be brief.")
    third = talk.say("three")
    assert third.instructions is None
    assert b"brief" not in model.requests(key)[-1].body
    assert len({each.text for each in await messages_by_number(service, talk.session)}) > 0
    stored = await messages_by_number(service, talk.session)
    assert [each.status for each in stored if not each.turn] == ["superseded", "superseded"]


async def test_branches_leave_each_other_and_come_back(host: tuple[Service, Model], key: str) -> None:
    service, model = host
    talk = Talk(service, key)
    root = talk.say("root")
    left = talk.say("left")
    talk.last = root
    right = talk.say("right")
    assert talk.source == "body"
    assert words(whole_input(model, key)) == ["root", "-", "right"]
    assert [each.status for each in await talk.stored()] == [*["live"] * 2, *["superseded"] * 2, *["live"] * 2]
    session = talk.session

    talk.last = left
    talk.say("left again")
    assert talk.session == session
    assert words(whole_input(model, key)) == ["root", "-", "left", "-", "left again"]
    live = [each for each in await talk.stored() if each.status == "live"]
    assert [each.seq for each in live] == [1, 2, 3, 4, 7, 8]

    talk.last = right
    talk.say("right again")
    assert words(whole_input(model, key)) == ["root", "-", "right", "-", "right again"]
    live = [each for each in await talk.stored() if each.status == "live"]
    assert [each.seq for each in live] == [1, 2, 5, 6, 9, 10]


async def test_a_failed_call_that_is_repeated_is_the_same_turn(host: tuple[Service, Model], key: str) -> None:
    service, model = host
    talk = Talk(service, key)
    first = talk.say("one")
    failed = ScriptedReply(status=500, body=b'{"error":{"message":"down"}}')
    model.script(key, failed)
    with pytest.raises(openai.InternalServerError):
        talk.say("two")
    second = talk.say("two")
    assert second.previous_response_id == first.id
    stored = await talk.stored()
    assert [(each.role, each.turn, each.status) for each in stored] == [
        ("user", 1, "live"),
        ("assistant", 1, "live"),
        ("user", 2, "live"),
        ("assistant", 2, "live"),
    ]
    talk.last = first
    talk.say("two")
    live = [each for each in await talk.stored() if each.status == "live"]
    assert [(each.role, each.turn) for each in live] == [("user", 1), ("assistant", 1), ("user", 2), ("assistant", 2)]


# Who keeps the history


async def test_a_host_that_has_the_history_gets_the_bytes_as_they_came(plain: Service, model: Model, key: str) -> None:
    talk = Talk(plain, key)
    first = talk.say("one")
    body = json.dumps({"model": MODEL, "user": key, "input": "two ", "previous_response_id": first.id}).encode()
    answer = await post(plain, body, path="/v1/responses")
    assert model.requests(key)[-1].body == body
    assert answer.context == "passthrough"
    assert answer.headers["x-tersely-session"] == talk.session
    assert answer.headers["x-tersely-session-source"] == "body"
    talk.last = first.model_copy(update={"id": answer.json["id"]})
    talk.say("three")
    assert [each.role for each in await talk.stored()] == ["user", "assistant"] * 3
    assert len(model.requests(key)) == 3


async def test_host_without_the_history_is_asked_once(
    plain_before_forgetful: Service, forgetful: Model, key: str
) -> None:
    talk = Talk(plain_before_forgetful, key)
    for text in ("one", "two", "three", "four"):
        talk.say(text)
    requests = [json.loads(each.body) for each in forgetful.requests(key)]
    assert [(each.get("previous_response_id") is not None) for each in requests] == [False, True, False, False, False]
    assert words(requests[-1]["input"]) == ["one", "-", "two", "-", "three", "-", "four"]
    assert [each.role for each in await talk.stored()] == ["user", "assistant"] * 4


async def test_a_reply_that_was_not_stored_is_not_looked_up(plain: Service, model: Model, key: str) -> None:
    talk = Talk(plain, key, store=False)
    for text in ("one", "two", "three"):
        talk.say(text)
    requests = [json.loads(each.body) for each in model.requests(key)]
    assert not any("previous_response_id" in each for each in requests)
    assert words(requests[-1]["input"]) == ["one", "-", "two", "-", "three"]


async def test_a_history_that_the_host_was_shown_cut_is_not_left_to_it(
    service: Service, model: Model, key: str
) -> None:
    """Under another strategy the host has what it was sent, which is not all."""
    talk = Talk(service, key)
    talk.say("one")
    talk.say("two")
    talk.more["extra_headers"] = {"X-Tersely-Strategy": "full"}
    talk.say("three")
    assert words(upstream_input(model, key)) == ["one", "-", "two", "-", "three"]


async def test_an_unknown_reply_is_the_hosts_business(service: Service, model: Model, key: str) -> None:
    with openai.OpenAI(base_url=model.url, api_key="x", max_retries=0) as direct:
        elsewhere = direct.responses.create(model=MODEL, input="before", user=key)
    body = json.dumps({"model": MODEL, "user": key, "input": "go on", "previous_response_id": elsewhere.id}).encode()
    answer = await post(service, body, path="/v1/responses")
    assert (answer.status, answer.context) == (200, "passthrough")
    assert "x-tersely-session" not in answer.headers
    assert model.requests(key)[-1].body == body
    refused = await post(service, body.replace(elsewhere.id.encode(), b"resp_none"), path="/v1/responses")
    assert (refused.status, refused.json["error"]["code"]) == (400, "previous_response_not_found")


async def test_replies_are_fetched_and_deleted_at_the_host(service: Service, key: str) -> None:
    first = Talk(service, key).say("one")
    with client_of(service) as client:
        assert client.responses.retrieve(first.id).id == first.id
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)


async def test_a_reply_that_comes_later_is_passed_through(service: Service, model: Model, key: str) -> None:
    first = Talk(service, key).say("one")
    body = json.dumps(
        {"model": MODEL, "user": key, "input": "two", "background": True, "previous_response_id": first.id}
    ).encode()
    answer = await post(service, body, path="/v1/responses")
    assert (answer.status, answer.context) == (200, "passthrough")
    assert model.requests(key)[-1].body == body
