"""Named histories where something else happens too: other tenants, other workers, races, overflows, a database away."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from tersely.fakellm.scripted import ScriptedReply
from tests.conftest import Database
from tests.support.conversations import waits_for_spool
from tests.support.http import Answered, post, request_bytes, wire
from tests.support.relay import relay
from tests.support.responses_talks import MODEL, Talk, client_of, upstream_input, whole_input, words
from tests.support.rows import messages_by_number, query
from tests.support.services import FROM_THE_START, Service, serve
from tests.support.tenants import tenant
from tests.support.upstreams import Model


def body(key: str, given: Any, previous: str | None = None, **more: Any) -> bytes:
    named = {"previous_response_id": previous} if previous else {}
    return json.dumps({"model": MODEL, "user": key, "input": given, **named, **more}).encode()


async def ask(service: Service, key: str, given: Any, previous: str | None = None, **more: Any) -> Answered:
    headers = {name: more.pop(name) for name in list(more) if name[0].isupper()}
    return await post(service, body(key, given, previous, **more), path="/v1/responses", **headers)


async def test_another_tenants_reply_is_unknown(locked: Service, model: Model, keyring: Any, key: str) -> None:
    one, other = await tenant(keyring), await tenant(keyring)
    first = await ask(locked, key, "mine", X_Tersely_Key=one.key)
    assert first.status == 200
    theirs = await ask(locked, key, "and?", first.json["id"], X_Tersely_Key=other.key)
    assert theirs.context == "passthrough"
    assert "x-tersely-session" not in theirs.headers
    assert json.loads(model.requests(key)[-1].body)["previous_response_id"] == first.json["id"]
    named = await ask(locked, key, "and?", conversation=first.session, X_Tersely_Key=other.key)
    assert words(upstream_input(model, key)) == ["and?"]
    owned = "SELECT tenant_id, count(*) AS n FROM messages WHERE session_id = $1 AND turn > 0 GROUP BY tenant_id"
    assert named.session == first.session
    assert {row["tenant_id"]: row["n"] for row in await query(locked, owned, first.session)} == {
        one.name: 2,
        other.name: 2,
    }
    mine = await ask(locked, key, "again", first.json["id"], X_Tersely_Key=one.key)
    assert mine.session == first.session
    assert words(upstream_input(model, key)) == ["mine", "-", "again"]


async def test_after_a_restart_and_at_another_worker(store: Database, model: Model, key: str) -> None:
    with serve(store, model.url) as first:
        talk = Talk(first, key)
        talk.say("one")
    with serve(store, model.url) as second, serve(store, model.url) as third:
        for talk.service, text in ((second, "two"), (third, "three"), (second, "four")):
            talk.say(text)
        assert words(upstream_input(model, key)) == ["one", "-", "two", "-", "three", "-", "four"]
        assert [each.role for each in await talk.stored()] == ["user", "assistant"] * 4


@pytest.mark.parametrize("texts", [("left", "right"), ("same", "same")])
async def test_two_at_once_from_one_reply(service: Service, model: Model, key: str, texts: tuple[str, str]) -> None:
    talk = Talk(service, key)
    root = talk.say("root")
    for _ in texts:
        model.script(key, ScriptedReply(message={"content": "answer"}, first_delay=0.3))
    answers = await asyncio.gather(*(ask(service, key, each, root.id) for each in texts))
    assert [each.status for each in answers] == [200, 200]
    stored = await messages_by_number(service, talk.session)
    live = [each for each in stored if each.status == "live" and each.turn]
    assert [each.role for each in live] == ["user", "assistant"] * 2
    assert sum(each.role == "user" for each in stored) == 1 + len(set(texts))
    assert sum(each.role == "assistant" for each in stored) == 3
    for answer in answers:
        talk.last = root.model_copy(update={"id": answer.json["id"]})
        talk.say("go on")
        assert len(words(upstream_input(model, key))) == 5
        assert words(upstream_input(model, key))[0] == "root"


async def test_client_continues_from_the_part_that_it_received(service: Service, model: Model, key: str) -> None:
    talk = Talk(service, key)
    root = talk.say("root")
    model.script(key, ScriptedReply(message={"content": "one two three four " * 20}, chunk_chars=5, delay=0.05))
    async with wire(service) as there:
        await there.send(request_bytes(body(key, "tell", root.id, stream=True), path="/v1/responses"))
        got = await there.until(b"three")
    name = json.loads(got.split(b"data: ", 1)[1].split(b"\n", 1)[0])["response"]["id"]

    async def interrupted() -> list[Any]:
        return [each for each in await messages_by_number(service, talk.session) if each.finish == "interrupted"]

    for _ in range(100):
        if await interrupted():
            break
        await asyncio.sleep(0.05)
    answer = await ask(service, key, "go on", name)
    assert answer.session == talk.session
    assert words(upstream_input(model, key)) == ["root", "-", "tell", "-", "go on"]


async def test_session_header_beside_a_reference_names_the_session(service: Service, model: Model, key: str) -> None:
    talk = Talk(service, key)
    first = talk.say("one")
    own = await ask(service, key, "two", first.id, X_Tersely_Session=talk.session)
    assert (own.session, own.headers["x-tersely-session-source"]) == (talk.session, "header")
    fork = await ask(service, key, "other", first.id, X_Tersely_Session=f"fork-{key}")
    assert (fork.session, fork.headers["x-tersely-session-source"]) == (f"fork-{key}", "header")
    assert words(upstream_input(model, key)) == ["one", "-", "other"]
    assert [each.role for each in await messages_by_number(service, fork.session) if each.turn] == [
        "user",
        "assistant",
    ] * 2
    assert [each.status for each in await talk.stored()] == ["live"] * 4
    again = await ask(service, key, "more", fork.json["id"])
    assert again.session == fork.session
    assert words(upstream_input(model, key)) == ["one", "-", "other", "-", "more"]


@pytest.mark.parametrize("strategy", ["slim", "full", "trim"])
async def test_an_overflow_is_retried_with_a_smaller_context(
    store: Database, model: Model, key: str, strategy: str
) -> None:
    refusal = {"message": "Your input exceeds the context window of this model.", "code": "context_length_exceeded"}
    overflow = ScriptedReply(status=400, body=json.dumps({"error": refusal}).encode())
    with serve(store, model.url, strategy=strategy, instructions="off", tools="off") as running:
        talk = Talk(running, key)
        for number in range(8):
            talk.say(f"{number} " + "word " * 300)
        model.script(key, overflow, *[overflow] * (strategy == "full"))
        talk.say("last")
        assert words(upstream_input(model, key))[-1] == "last"
        assert "previous_response_id" not in json.loads(model.requests(key)[-1].body)
        assert len(upstream_input(model, key)) < 17
        talk.say("after")
        assert [each.status for each in await talk.stored()] == ["live"] * 20


async def test_reference_is_refused_without_a_database(store: Database, model: Model, key: str) -> None:
    with relay(store) as way, serve(store, model.url, dsn=way.dsn, database_timeout=1.0) as running:
        talk = Talk(running, key)
        first = talk.say("one")
        before = len(model.requests(key))
        way.cut()
        answer = await post(running, body(key, "two", first.id), path="/v1/responses")
        assert (answer.status, answer.headers["retry-after"]) == (503, "2")
        assert len(model.requests(key)) == before
        whole = await post(running, body(key, f"anew {key}"), path="/v1/responses")
        assert (whole.status, whole.context) == (200, "fail-open")
        way.restore()
        await waits_for_spool(running.url)
        later = await post(running, body(key, "three", whole.json["id"]), path="/v1/responses")
        assert later.status == 200
        assert words(whole_input(model, key)) == [f"anew {key}", "-", "three"]


async def test_a_deleted_session_takes_its_ids_along(service: Service, model: Model, key: str) -> None:
    talk = Talk(service, key)
    first = talk.say("one")
    assert (await post(service, b"", method="DELETE", path=f"/api/sessions/{talk.session}")).status == 204
    assert not await query(service, "SELECT FROM reply_ids WHERE session_id = $1", talk.session)
    answer = await ask(service, key, "two", first.id)
    assert answer.context == "passthrough"


# Thoughts


def thought(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "reasoning", "id": f"rs_{name}", "summary": [], **more}


def replied(key: str, name: str, **more: Any) -> ScriptedReply:
    """A thought, what the host looked up by itself, words, and a call that it led to."""
    part = {"type": "output_text", "annotations": [], "logprobs": [], "text": f"words {name}"}
    message = {
        "type": "message",
        "id": f"msg_{name}{key}",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }
    looked_up = {"type": "web_search_call", "id": f"ws_{name}{key}", "status": "completed"}
    return ScriptedReply(message={"output": [thought(f"{name}{key}", **more), looked_up, message]})


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("more", [{}, {"encrypted_content": "gAAAA"}])
async def test_thoughts_are_sent_as_any_host_takes_them(
    host: tuple[Service, Model], key: str, more: dict[str, str], streams: bool
) -> None:
    service, model = host
    talk = Talk(service, key, streams=streams)
    model.script(key, replied(key, "a", **more), replied(key, "b", **more))
    talk.say("one")
    talk.say("two")
    talk.say("three")
    sent = json.loads(model.requests(key)[-1].body)
    if "previous_response_id" not in sent:
        thoughts = [item for item in sent["input"] if item.get("type") == "reasoning"]
        assert len(thoughts) == (2 if more else 0)
        assert [item.get("type") or item["role"] for item in sent["input"] if item.get("type") != "reasoning"] == (
            ["user", *["web_search_call"] * bool(more), "message"] * 2 + ["user"]
        )
    assert [each.role for each in await talk.stored()] == ["user", "assistant"] * 3


# Beside the conversation


async def test_commands_are_answered_in_the_session_that_is_named(store: Database, model: Model, key: str) -> None:
    with serve(store, model.url, chat_commands="on") as running:
        talk = Talk(running, key)
        first = talk.say("one")
        answer = await ask(running, key, "/context", first.id)
        assert (answer.context, answer.session) == ("command", talk.session)
        assert answer.json["id"] == first.id
        talk.say("two")
        assert (await ask(running, key, "/undo", talk.last.id)).session == talk.session
        talk.last = first
        talk.say("three")
        assert words(upstream_input(model, key)) == ["one", "-", "three"]


async def test_refusal_for_another_reason_is_relayed(plain: Service, model: Model, key: str) -> None:
    talk = Talk(plain, key)
    first = talk.say("one")
    for status, words_of_it in (
        (409, "conversation_locked"),
        (400, "Invalid value: 'input[0]'."),
        (404, "no such model"),
    ):
        refusal = json.dumps({"error": {"message": words_of_it, "code": None}}).encode()
        model.script(key, ScriptedReply(status=status, body=refusal))
        before = len(model.requests(key))
        with client_of(plain) as client, pytest.raises(openai.APIStatusError):
            client.responses.create(model=MODEL, input="two", user=key, previous_response_id=first.id)
        assert len(model.requests(key)) == before + 1


FAILING = [
    [{"role": "assistant", "content": "never said"}, {"role": "user", "content": "FAILED"}],
    [
        {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "FAILED"},
    ],
    [
        {"type": "item_reference", "id": "fc_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": "FAILED"},
    ],
]


@pytest.mark.parametrize("live_sessions", ["64", "off"])
@pytest.mark.parametrize("is_branch", [False, True])
@pytest.mark.parametrize("failing", FAILING)
async def test_nothing_of_a_failed_call_returns(
    store: Database, model: Model, key: str, failing: list[dict[str, Any]], is_branch: bool, live_sessions: str
) -> None:
    call = {"id": "fc_1", "type": "function_call", "status": "completed", "call_id": "call_1", "name": "add"}
    conversation = {"conversation": f"conv_{key}"}
    with serve(store, model.url, strategy="full", instructions="off", live_sessions=live_sessions) as service:
        await ask(service, key, "go", **conversation)
        model.script(key, ScriptedReply(message={"output": [{**call, "arguments": "{}"}]}))
        called = await ask(service, key, "add", **conversation)
        model.script(key, ScriptedReply(status=500, body=b'{"error":{"message":"down"}}'))
        more: dict[str, Any] = {"previous": called.json["id"]} if is_branch else conversation
        assert (await ask(service, key, failing, **more)).status >= 400
        model.replies.pop(key, None)
        result = {"type": "function_call_output", "call_id": "call_1", "output": "3"}
        for given in ([result], "and?", "then?"):
            assert (await ask(service, key, given, **conversation)).status == 200
            items = upstream_input(model, key)
            assert "FAILED" not in str(items)
            assert "never said" not in str(items)
            assert [each.get("type") for each in items].count("function_call") == 1


@pytest.mark.parametrize("streams", [False, True])
async def test_own_tool_calls_are_part_of_the_history(store: Database, model: Model, key: str, streams: bool) -> None:
    def call(name: str) -> dict[str, Any]:
        head = {"type": "function_call", "id": f"fc_{name}{key}", "call_id": f"{name}{key}", "status": "completed"}
        return {**head, "name": "manage_scratchpad", "arguments": '{"action": "append", "content": "noted"}'}

    with serve(store, model.url, strategy="window", epoch=FROM_THE_START, instructions="off") as running:
        talk = Talk(running, key, streams=streams)
        talk.say("one")
        model.script(key, ScriptedReply(message={"output": [call("c")]}), ScriptedReply(message={"content": "told"}))
        second = talk.say("two")
        assert second.output_text == "told"
        talk.say("three")
        shown = [item.get("type") or item["role"] for item in upstream_input(model, key)]
        assert shown == [
            "user", "message", "user", "function_call", "function_call_output", "message", "user",
        ]  # fmt: skip
        talk.last = second
        talk.say("other")
        branched = upstream_input(model, key)  # behind the head of an epoch of its own
        assert branched[-1]["content"] == "other"
        assert [item.get("type") or item["role"] for item in branched][-len(shown) :] == shown


TITLE = "You are a title generator. You output ONLY a thread title."


async def test_side_call_gets_the_history_that_it_references(
    before_forgetful: Service, forgetful: Model, plain: Service, model: Model, key: str
) -> None:
    talk = Talk(before_forgetful, key)
    talk.say("one")
    talk.say("two")
    answer = await ask(before_forgetful, key, "A title, please.", talk.last.id, instructions=TITLE)
    assert answer.status == 200
    assert words(upstream_input(forgetful, key)) == ["one", "-", "two", "-", "A title, please."]
    assert json.loads(forgetful.requests(key)[-1].body)["instructions"] == TITLE
    assert [each.role for each in await talk.stored()] == ["user", "assistant"] * 2

    first = Talk(plain, key).say("one")
    sent = body(key, "A title, please.", first.id, instructions=TITLE)
    answer = await post(plain, sent, path="/v1/responses")
    assert (answer.status, answer.context) == (200, "passthrough")
    assert model.requests(key)[-1].body == sent
