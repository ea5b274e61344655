"""A refusal is something that was said: it goes back to the model, under every strategy. Thoughts alone do not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tersely.fakellm.scripted import ScriptedReply
from tersely.strategies.presets import STRATEGIES
from tests.support.chat_messages import user
from tests.support.http import post
from tests.support.rows import messages_by_number
from tests.support.services import Service
from tests.support.upstreams import MODEL, Model

WORDS = "I am not able to help with that."
PART = {"type": "refusal", "refusal": WORDS}
ITEM = {"type": "message", "role": "assistant", "content": [PART]}
MESSAGES: list[dict[str, Any]] = [
    {"role": "assistant", "content": None, "refusal": WORDS},
    {"role": "assistant", "content": [PART]},
]


def in_chat(key: str, *messages: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"model": MODEL, "user": key, "messages": messages, **more}).encode()


def in_responses(key: str, *items: dict[str, Any]) -> bytes:
    return json.dumps({"model": MODEL, "user": key, "input": items}).encode()


def said_to(model: Model, member: str) -> list[Any]:
    """Return the messages that reached the model, without instructions."""
    return [each for each in json.loads(model.last.body)[member] if each["role"] not in {"system", "developer"}]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("refusal", MESSAGES)
async def test_a_refusal_goes_back_in_chat(
    service: Service, model: Model, key: str, strategy: str, refusal: dict[str, Any]
) -> None:
    sent = [user("do it"), refusal, user("please")]
    answer = await post(service, in_chat(key, *sent), X_Tersely_Strategy=strategy)
    assert answer.status == 200, answer.body
    assert said_to(model, "messages") == sent


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_refusal_goes_back_in_responses(service: Service, model: Model, key: str, strategy: str) -> None:
    sent = [user("do it"), ITEM, user("please")]
    answer = await post(service, in_responses(key, *sent), path="/v1/responses", X_Tersely_Strategy=strategy)
    assert answer.status == 200, answer.body
    assert said_to(model, "input") == sent


async def test_full_changes_no_byte_of_a_history_with_refusals(plain: Service, model: Model, key: str) -> None:
    for body, path in [
        *((in_chat(key, user("do it"), each, user("please")), "/v1/chat/completions") for each in MESSAGES),
        (in_responses(key, user("do it"), ITEM, user("please")), "/v1/responses"),
    ]:
        answer = await post(plain, body, path=path)
        assert answer.status == 200, answer.body
        assert model.last.body == body


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_conversation_continues_after_a_relayed_refusal(
    service: Service, model: Model, key: str, strategy: str, streams: bool
) -> None:
    model.script(key, ScriptedReply(message={"content": None, "refusal": WORDS}))
    first = await post(service, in_chat(key, user("do it"), stream=streams), X_Tersely_Strategy=strategy)
    assert WORDS in first.body.decode()
    (_, reply) = await messages_by_number(service, first.session)
    assert json.loads(reply.raw)["refusal"] == WORDS

    sent = [user("do it"), MESSAGES[0], user("please")]
    second = await post(service, in_chat(key, *sent), X_Tersely_Strategy=strategy)
    assert second.session == first.session
    assert said_to(model, "messages") == sent


async def test_refusal_is_searchable_and_becomes_text_in_other_dialects(
    service: Service, model: Model, key: str
) -> None:
    model.script(key, ScriptedReply(message={"content": None, "refusal": WORDS}))
    await post(service, in_chat(key, user("do it")), X_Tersely_Session=key)
    body = json.dumps({"model": "claude-x", "max_tokens": 9, "messages": [user("please")]}).encode()
    answer = await post(service, body, path="/v1/messages", X_Tersely_Session=key)
    assert answer.status == 200, answer.body
    assert any(WORDS in json.dumps(each) for each in said_to(model, "messages"))
    wanted = json.dumps({"mode": "search", "query": "not able to help"}).encode()
    found = await post(service, wanted, path=f"/api/sessions/{key}/search")
    assert WORDS in found.json["text"]


async def test_a_message_of_thoughts_alone_is_left_out_since_anthropic_refuses_it(
    plain: Service, model: Model, key: str
) -> None:
    thought = {"type": "thinking", "thinking": "Let me see.", "signature": "c2lnbmF0dXJl"}
    sent = [user("look"), {"role": "assistant", "content": [thought]}, user("go on")]
    body = json.dumps({"model": "claude-x", "max_tokens": 9, "messages": sent}).encode()
    bare = await post(plain, body, path="/v1/messages", X_Tersely_Bypass="true")
    assert (bare.status, bare.json["error"]["type"]) == (400, "invalid_request_error")
    answer = await post(plain, body, path="/v1/messages", X_Tersely_Session=key)
    assert answer.status == 200, answer.body
    assert [each["role"] for each in said_to(model, "messages")] == ["user", "user"]
