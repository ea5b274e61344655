"""A reply with nothing in it does not cost the session: who says more goes on where nothing was answered."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from tersely.fakellm.scripted import ScriptedReply
from tests.conftest import Database
from tests.support.http import Answered, body_of, post, request_bytes, wire
from tests.support.rows import messages_by_number
from tests.support.services import Service, serve
from tests.support.upstreams import MODEL, Model, RawUpstream, http_head, sse

EMPTY = {"choices": [{"index": 0, "message": {"role": "assistant", "content": ""}, "finish_reason": "content_filter"}]}
REFUSED = {"type": "message", "id": "m", "role": "assistant", "model": "x", "content": [], "stop_reason": "refusal"}
BLOCKED = {"promptFeedback": {"blockReason": "PROHIBITED_CONTENT"}}
IN = {
    "chat": ("/v1/chat/completions", EMPTY),
    "anthropic": ("/v1/messages", REFUSED),
    "gemini": ("/v1beta/models/gemini-x:generateContent", BLOCKED),
}


def body(dialect: str, *texts: str) -> bytes:
    if dialect == "gemini":
        contents = [{"role": "user", "parts": [{"text": each}]} for each in texts]
        return json.dumps({"contents": contents}).encode()
    messages = [{"role": "user", "content": each} for each in texts]
    return json.dumps({"model": "m", "max_tokens": 9, "messages": messages}).encode()


async def ask(service: Service, raw: RawUpstream, dialect: str, *texts: str, **headers: str) -> Answered:
    path, reply = IN[dialect]
    wire = json.dumps(reply).encode()
    raw.answer(http_head("application/json", content_length=str(len(wire))) + wire)
    answer = await post(service, body(dialect, *texts), path=path, **headers)
    assert answer.status == 200, answer.body
    return answer


@pytest.mark.parametrize("dialect", IN)
async def test_session_continues_after_an_empty_reply(
    behind_raw: Service, raw: RawUpstream, key: str, dialect: str
) -> None:
    first = await ask(behind_raw, raw, dialect, f"one {key}")
    second = await ask(behind_raw, raw, dialect, f"one {key}", "two")
    third = await ask(behind_raw, raw, dialect, f"one {key}", "two", "three")
    assert first.session == second.session == third.session
    assert second.headers["x-tersely-session-source"] == "lineage"
    assert [each.turn for each in await messages_by_number(behind_raw, first.session)] == [1, 2, 3]


async def test_resent_empty_reply_counts_as_no_answer(service: Service, model: Model, key: str) -> None:
    model.script(key, ScriptedReply(message={"content": ""}))

    def chat(*messages: dict[str, Any]) -> bytes:
        return json.dumps({"model": MODEL, "user": key, "messages": messages}).encode()

    one, two = {"role": "user", "content": f"one {key}"}, {"role": "user", "content": "two"}
    first = await post(service, chat(one))
    second = await post(service, chat(one, {"role": "assistant", "content": ""}, two))
    assert second.status == 200, second.body
    assert second.session == first.session


async def test_ambiguous_unanswered_beginning_starts_a_new_session(
    behind_raw: Service, raw: RawUpstream, key: str
) -> None:
    wire = json.dumps(EMPTY).encode()
    raw.answer(0.3, http_head("application/json", content_length=str(len(wire))) + wire)
    begun = await asyncio.gather(*(post(behind_raw, body("chat", f"one {key}")) for _ in range(2)))
    assert len({each.session for each in begun}) == 2
    later = await ask(behind_raw, raw, "chat", f"one {key}", "two")
    assert later.session not in {each.session for each in begun}


async def test_an_answered_question_is_not_continued(service: Service, key: str) -> None:
    one, two = {"role": "user", "content": f"one {key}"}, {"role": "user", "content": "two"}
    first = await post(service, json.dumps({"model": MODEL, "messages": [one]}).encode())
    second = await post(service, json.dumps({"model": MODEL, "messages": [one, two]}).encode())
    assert second.session != first.session


@pytest.mark.parametrize("dialect", IN)
async def test_questions_sent_again_in_a_named_session_are_not_doubled(
    behind_raw: Service, raw: RawUpstream, key: str, dialect: str
) -> None:
    for texts in (["one"], ["one", "two"], ["one", "two", "three"], ["three", "four"]):
        await ask(behind_raw, raw, dialect, *texts, x_tersely_session=key)
    assert re.findall(rb'"((?:one|two|three|four))"', raw.requests[-1].body) == [b"one", b"two", b"three", b"four"]
    assert [each.turn for each in await messages_by_number(behind_raw, key)] == [1, 2, 3, 4]


async def test_question_whose_reply_the_client_left_is_not_doubled(
    behind_raw: Service, raw: RawUpstream, key: str
) -> None:
    raw.answer(http_head(), sse("An answer", role=True), 10.0)
    async with wire(behind_raw) as there:
        await there.send(request_bytes(body_of("one", stream=True), x_tersely_session=key))
        await there.until(b"An answer")
    async with asyncio.timeout(10):
        while len(await messages_by_number(behind_raw, key)) < 2:
            await asyncio.sleep(0.02)
    for texts in (["one", "two"], ["three"]):
        await ask(behind_raw, raw, "chat", *texts, x_tersely_session=key)
    assert re.findall(rb'"content": ?"([^"]+)"', raw.requests[-1].body) == [b"one", b"two", b"three"]
    assert [each.status for each in await messages_by_number(behind_raw, key)] == [
        "live",
        "superseded",
        "live",
        "live",
    ]


@pytest.mark.parametrize("live_sessions", ["64", "off"])
async def test_delta_that_begins_with_a_failed_question_is_appended_behind_it(
    store: Database, model: Model, key: str, live_sessions: str
) -> None:
    def delta(*texts: str) -> bytes:
        return body_of(*texts, user=key)

    with serve(store, model.url, live_sessions=live_sessions) as service:
        await post(service, delta("one"), x_tersely_session=key)
        await post(service, delta("two"), x_tersely_session=key)
        model.script(key, ScriptedReply(status=500, body=b'{"error":{"message":"busy"}}'))
        assert (await post(service, delta("three"), x_tersely_session=key)).status == 500
        assert (await post(service, delta("three", "four"), x_tersely_session=key)).status == 200
        # The same words behind a reply are new.
        assert (await post(service, delta("four", "five"), x_tersely_session=key)).status == 200
    asked = [each["content"] for each in model.bodies(key)[-1]["messages"] if each["role"] == "user"]
    assert asked == ["one", "two", "three", "four", "four", "five"]


@pytest.mark.parametrize("is_appended", [False, True])
async def test_delta_with_words_that_no_call_asked_alone_is_new(
    service: Service, model: Model, key: str, is_appended: bool
) -> None:
    """A message in front of the question of a call, or one that was appended over REST, has no reply of its own."""
    first = ["Go on.", "one"]
    if is_appended:
        note = json.dumps({"messages": [{"role": "user", "content": first.pop(0)}]}).encode()
        assert (await post(service, note, path=f"/api/sessions/{key}/messages")).status == 201
    for texts in (first, ["two"], ["Go on."]):
        assert (await post(service, body_of(*texts, user=key), x_tersely_session=key)).status == 200
    asked = [each["content"] for each in model.bodies(key)[-1]["messages"] if each["role"] == "user"]
    assert asked == ["Go on.", "one", "two", "Go on."]
    assert [each.role for each in await messages_by_number(service, key)][-4:] == ["user", "assistant"] * 2


async def test_delta_of_instructions_alone_follows_unanswered_questions(
    service: Service, model: Model, key: str
) -> None:
    model.script(key, ScriptedReply(status=500, body=b'{"error":{"message":"busy"}}'))
    assert (await post(service, body_of("one", "two", user=key), x_tersely_session=key)).status == 500
    rules = body_of({"role": "system", "content": "Be brief."}, user=key)
    assert (await post(service, rules, x_tersely_session=key)).status == 200
    assert [each["content"] for each in model.bodies(key)[-1]["messages"]] == ["Be brief.", "one", "two"]
