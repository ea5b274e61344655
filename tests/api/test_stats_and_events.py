"""Stats and events, from calls and epochs as the proxy records them."""

from __future__ import annotations

from typing import Any

import asyncpg

from tests.api.conftest import Api

CALL = """
INSERT INTO calls (tenant_id, session_id, number, turn, model, strategy, epoch, cut, last_seq, tokens_before,
    tokens_after, input_tokens, cached_tokens, output_tokens, status, created_at, finished_at)
VALUES ('default', 's', $1, $2, 'm', 'slim', 1, 1, 1, $3, $4, $5, $6, $7, $8, now(), now())
"""
EPOCH = """
INSERT INTO epochs (tenant_id, session_id, number, cut, reason, head_tokens, tokens_before, tokens_after,
    created_at, plan)
VALUES ('default', 's', $1, $1 * 10, $2, 5, 100, 40, now(), '')
"""

NO_SUMMARIES: dict[str, Any] = {
    "total": 0,
    "compression_ratio": None,
    "last_at": None,
    "calls": 0,
    "input_tokens": 0,
    "output_tokens": 0,
    "money": None,
    "today": {"calls": 0, "tokens": 0, "max_calls": 200, "max_tokens": 2_000_000, "refused": 0},
}


async def test_figures_of_a_session(api: Api, database) -> None:
    for n in range(3):
        await api.append("s", {"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"a{n}."})
    await api.http.post("/api/sessions/s/undo")
    admin = await asyncpg.connect(database.admin_dsn)
    try:
        await admin.execute(CALL, 1, 1, 1000, 400, 500, 300, 20, 200)
        await admin.execute(CALL, 2, 1, 1000, 600, 700, 0, 30, 200)
        await admin.execute(CALL, 3, 2, 0, 0, 900, None, 40, 200)
        await admin.execute(CALL, 4, 2, 0, 0, None, None, None, 500)
        for number, reason in ((1, "first"), (2, "high_watermark"), (3, "high_watermark")):
            await admin.execute(EPOCH, number, reason)
        await admin.execute("UPDATE sessions SET epoch = 3")
    finally:
        await admin.close()
    stats = (await api.http.get("/api/sessions/s/stats")).json()
    assert stats.pop("tokens") > stats.pop("live_tokens") > 0
    assert stats == {
        "messages": 6,
        "messages_by_status": {"live": 4, "undone": 2},
        "turns": 3,
        "calls": 4,
        "failed_calls": 1,
        "tokens_before": 2000,
        "tokens_after": 1000,
        "saved": 1000,
        "saved_share": 0.5,
        "reported": {"input": 2100, "cached": 300, "output": 90},
        "cache_hit_share": 0.25,
        "epochs": {"total": 3, "current": 3, "by_reason": {"first": 1, "high_watermark": 2}},
        "terse": {},
        "summaries": NO_SUMMARIES,
        "shadow": None,
        "tiered": None,
        "money": None,
    }
    turn = (await api.http.get("/api/sessions/s/turns/t1")).json()
    assert turn["usage"] == {
        "calls": 2, "tokens_before": 2000, "tokens_after": 1000, "input": 1200, "cached": 300, "output": 50,
        "weight": 730,
    }  # fmt: skip
    first = (await api.http.get("/api/sessions/s/events", params={"limit": 2})).json()
    assert [(e["type"], e["number"], e["reason"], e["cut"]) for e in first["items"]] == [
        ("epoch", 1, "first", 10),
        ("epoch", 2, "high_watermark", 20),
    ]
    rest = (await api.http.get("/api/sessions/s/events", params={"after": first["next"]})).json()
    assert ([e["number"] for e in rest["items"]], rest["next"]) == ([3], None)


async def test_an_empty_session_has_figures_too(api: Api) -> None:
    await api.http.post("/api/sessions", json={"id": "s"})
    stats = (await api.http.get("/api/sessions/s/stats")).json()
    assert (stats["messages_by_status"], stats["saved_share"], stats["cache_hit_share"]) == ({"live": 0}, None, None)


async def test_figures_of_tiered(api: Api) -> None:
    await api.http.post("/api/sessions", json={"id": "s", "strategy": "tiered", "epoch": "every_request"})
    for number in range(12):
        await api.append(
            "s",
            {"role": "user", "content": f"Question {number} " + "about the palette " * 300},
            {"role": "assistant", "content": f"Answer {number}. " + "Some words of it. " * 100},
        )
    await api.http.post("/api/sessions/s/messages/1/pin")
    stats = (await api.http.get("/api/sessions/s/stats")).json()
    tiered = stats["tiered"]
    assert [level["name"] for level in tiered["levels"]] == ["permanent", "session", "working", "volatile"]
    assert [level["budget"] for level in tiered["levels"]] == [2_000, 4_000, 8_000, None]
    assert tiered["budget"] == 16_000
    assert sum(level["tokens"] for level in tiered["levels"]) == tiered["tokens"]
    assert 0 < tiered["share"] < 1
    await api.http.patch("/api/sessions/s", json={"strategy": "compact"})
    await api.http.post("/api/sessions/s/compact")
    summaries = (await api.http.get("/api/sessions/s/stats")).json()["summaries"]
    assert summaries["total"] >= 1
    assert summaries["compression_ratio"] > 1
    assert summaries["last_at"] is not None
    await api.append("plain", {"role": "user", "content": "hi"})
    plain = (await api.http.get("/api/sessions/plain/stats")).json()
    assert plain["tiered"] is None
    assert plain["summaries"] == NO_SUMMARIES
