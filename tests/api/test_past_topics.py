"""Under `tiered`, a reference to a past topic brings that topic back, however it is worded (Fifth, "Retrieval")."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from tests.api.conftest import Api
from tests.domain.past_topics import HELD_OUT, MARKS, REFERENCES, conversation

START = datetime(2026, 1, 5, 9, tzinfo=UTC)
TIERED = {"name": "tiered", "total_budget": 6_000, "session_budget": 1_000, "working_budget": 2_000}


@pytest.fixture
async def filled(api: Api) -> Api:
    """A session of a working day, of which the topics were an hour or more ago."""
    messages = conversation()
    times = [(START + timedelta(minutes=number)).isoformat() for number in range(len(messages))]
    await api.http.post("/api/sessions", json={"id": "s", "strategy": TIERED})
    done = await api.http.post("/api/sessions/s/messages", json={"messages": messages, "created_at": times})
    assert done.status_code == 201, done.text
    return api


# Of other topics so many come along, on average of all references.
OTHERS = 0.2


async def test_every_reference_brings_its_topic_back_and_hardly_another(filled: Api) -> None:
    missing, others = [], 0
    for reference, topic in (*REFERENCES, *HELD_OUT):
        options = {"epoch": "every_request", "messages": [{"role": "user", "content": reference}]}
        answer = await filled.http.post("/api/sessions/s/context", json=options)
        assert answer.status_code == 200, answer.text
        shown = json.dumps(answer.json()["messages"])
        found = {name for name, mark in MARKS.items() if mark in shown}
        if topic not in found:
            missing.append(reference)
        others += len(found - {topic})
    assert missing == []
    assert others <= OTHERS * (len(REFERENCES) + len(HELD_OUT))


async def test_short_follow_up_retrieves_no_topic_and_keeps_the_last_turns(filled: Api) -> None:
    for text in ("continue", "yes", "go on", "Please fix that"):
        options = {"epoch": "every_request", "messages": [{"role": "user", "content": text}]}
        answer = await filled.http.post("/api/sessions/s/context", json=options)
        shown = json.dumps(answer.json()["messages"])
        assert not any(mark in shown for mark in MARKS.values())
