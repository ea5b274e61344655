"""A reply with nothing in it does not cost the session: who says more goes on where nothing was answered."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tersely.fakellm.scripted import ScriptedReply
from tests.support.http import Answered, post
from tests.support.rows import messages_by_number
from tests.support.services import Service
from tests.support.upstreams import MODEL, Model, RawUpstream, http_head

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


async def ask(service: Service, raw: RawUpstream, dialect: str, *texts: str) -> Answered:
    path, reply = IN[dialect]
    wire = json.dumps(reply).encode()
    raw.answer(http_head("application/json", content_length=str(len(wire))) + wire)
    answer = await post(service, body(dialect, *texts), path=path)
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
