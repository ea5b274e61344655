"""Requests that refer to items of replies by their ids: OpenAI's own client, as the AI SDK's provider uses the API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.responses_talks import MODEL, client_of
from tests.support.rows import messages_by_number
from tests.support.services import Service
from tests.support.upstreams import Model


@pytest.mark.parametrize("streams", [False, True])
async def test_a_conversation_by_references(service: Service, model: Model, key: str, streams: bool) -> None:
    history: list[Any] = []
    sessions: list[str] = []
    with client_of(service) as client:
        for number in range(3):
            history.append({"role": "user", "content": f"Question {number}?"})
            answer = client.responses.with_raw_response.create(
                model=MODEL,
                input=history,
                user=key,
                stream=streams,
            )
            sessions.append(answer.headers["x-tersely-session"])
            reply: Any = answer.parse()
            if streams:
                reply = next(event.response for event in reply if event.type == "response.completed")
            history.append({"type": "item_reference", "id": reply.output[0].id})
    assert len(set(sessions)) == 1
    stored = [each for each in await messages_by_number(service, sessions[0]) if each.turn]
    assert [(each.role, each.turn) for each in stored] == [
        (role, turn) for turn in (1, 2, 3) for role in ("user", "assistant")
    ]
    sent = json.loads(model.requests(key)[-1].body)["input"]
    assert [item.get("type", "message") for item in sent] == ["message"] * 5


async def test_an_unknown_item_stays_a_reference(service: Service, model: Model, key: str) -> None:
    history: Any = [
        {"role": "user", "content": "One?"},
        {"type": "item_reference", "id": "msg_elsewhere"},
        {"role": "user", "content": "Two?"},
    ]
    with client_of(service) as client:
        client.responses.create(model=MODEL, input=history, user=key)
    assert json.loads(model.requests(key)[-1].body)["input"][1] == history[1]
