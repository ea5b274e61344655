"""The first turns of a session are counted, whatever began it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tersely.fakellm.scripted import ScriptedReply
from tests.conftest import Database
from tests.support.services import Service, serve
from tests.support.upstreams import scripted


@pytest.fixture(params=["off", "64"])
def service(request: pytest.FixtureRequest, store: Database) -> Iterator[Service]:
    with scripted() as model, serve(store, model.url, live_sessions=request.param) as running:
        model.state.script = lambda _: ScriptedReply(message={"content": "It is done. The next step is yours."})
        yield running


def test_each_question_after_a_reply_to_instructions_alone_begins_a_turn(service: Service) -> None:
    history: list[dict[str, Any]] = [{"role": "system", "content": "Greet the user, then wait for questions."}]
    with httpx.Client(base_url=service.url, headers={"X-Tersely-Strategy": "full"}, timeout=30) as http:
        session = ""
        for number in range(4):
            answer = http.post("/v1/chat/completions", json={"model": "gpt-4o", "messages": history})
            assert answer.status_code == 200
            history += [answer.json()["choices"][0]["message"], {"role": "user", "content": f"question {number}"}]
            session = answer.headers["x-tersely-session"]
        turns = http.get(f"/api/sessions/{session}/turns").json()["items"]
    # The first reply is an opening of the first question's turn.
    assert [(turn["turn"], turn["messages"]) for turn in turns] == [("t1", 3), ("t2", 2), ("t3", 2)]
