"""Replies of the same words: kept together from before the cut, each is the one that was said there."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tersely.fakellm.scripted import ScriptedReply
from tests.support.responses_talks import MODEL, client_of
from tests.support.services import Service
from tests.support.upstreams import Model

LITERAL = {"X-Tersely-Strategy": '{"name": "slim", "recent_turns": 1}', "X-Tersely-Epoch": "every_request"}


async def test_each_keeps_its_own_id(service: Service, model: Model, key: str) -> None:
    model.script(key, *[ScriptedReply(message={"content": "Done."})] * 7)
    history: list[Any] = []
    replies: list[Any] = []
    session = ""
    with client_of(service) as client:
        for number in range(7):
            words = f"Question {number}?" if number in {0, 6} else "Go on."
            history.append({"role": "user", "content": words})
            answer = client.responses.with_raw_response.create(
                model=MODEL, input=history, user=key, extra_headers=LITERAL, stream=False
            )
            session = answer.headers["x-tersely-session"]
            output = answer.parse().output
            history += [item.model_dump(exclude_none=True) for item in output]
            replies.append(output[0])
            if number in {2, 3, 4}:
                # The newest message is the reply.
                pinned = httpx.post(f"{service.url}/api/sessions/{session}/messages/{2 * number + 2}/pin")
                assert pinned.status_code < 300, pinned.text
    sent = json.loads(model.requests(key)[-1].body)["input"]
    ids = [item["id"] for item in sent if "id" in item]
    assert ids == [replies[number].id for number in (2, 3, 4)]
