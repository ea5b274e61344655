"""Promises of `tiered` beside its contexts: figures that say what came back, and instructions that always stay."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

from tests.api.conftest import Api
from tests.domain.past_topics import conversation

TIERED = {"name": "tiered", "total_budget": 6_000, "session_budget": 1_000, "working_budget": 2_000}


async def fill(api: Api, *last: dict[str, str]) -> None:
    start = datetime.now(UTC) - timedelta(hours=8)
    messages = [{"role": "system", "content": "You never delete a table."}, *conversation(), *last]
    times = [(start + timedelta(minutes=number)).isoformat() for number in range(len(messages))]
    await api.http.post("/api/sessions", json={"id": "s", "strategy": TIERED, "epoch": "every_request"})
    done = await api.http.post("/api/sessions/s/messages", json={"messages": messages, "created_at": times})
    assert done.status_code == 201, done.text


async def test_statistics_name_levels_retrieved_turns_and_last_compression(api: Api) -> None:
    await fill(api, {"role": "user", "content": "back to the payments service deploy: which step failed?"})
    stats = (await api.http.get("/api/sessions/s/stats")).json()
    made = (await api.http.post("/api/sessions/s/context", json={})).json()
    assert "MARK-PAYMENTS" in json.dumps(made["messages"])
    assert "t1" in stats["tiered"]["retrieved"]
    levels = {level["name"]: level["tokens"] for level in stats["tiered"]["levels"]}
    assert all(levels[name] > 0 for name in ("permanent", "session", "working", "volatile"))
    assert sum(levels.values()) == stats["tiered"]["tokens"] == made["report"]["tokens_after"]
    assert stats["tiered"]["tokens"] <= stats["tiered"]["budget"]
    before = datetime.now(UTC)
    assert (await api.http.post("/api/sessions/s/compact", json={"strategy": "compact"})).status_code == 200
    summaries = (await api.http.get("/api/sessions/s/stats")).json()["summaries"]
    assert datetime.fromisoformat(summaries["last_at"]) >= before
    assert summaries["compression_ratio"] > 1


async def test_system_prompts_are_in_every_context_however_much_is_cut(api: Api) -> None:
    await fill(api)
    for turn in range(3):
        question = {"role": "user", "content": f"chore {turn} " + "word " * 900}
        await api.append("s", question, {"role": "assistant", "content": "ok"})
        made = (await api.http.post("/api/sessions/s/context", json={})).json()
        assert made["report"]["tokens_after"] < made["report"]["tokens_before"]
        assert made["instruction_messages"][0]["content"].startswith("You never delete a table.")
