"""Turns over REST: hidden, taken back, removed for good."""

from __future__ import annotations

import asyncpg
import pytest

from tests.api.conftest import Api

WORDS = ("alpha", "beta", "gamma")


async def fill(api: Api, session: str = "s") -> None:
    for word in WORDS:
        await api.append(
            session,
            {"role": "user", "content": f"tell me {word}"},
            {"role": "assistant", "content": f"this is {word} <terse>told {word}</terse>"},
        )


async def contents(api: Api, session: str = "s", view: str = "client") -> list[str]:
    items = (await api.http.get(f"/api/sessions/{session}/messages", params={"view": view})).json()["items"]
    return [item["raw"]["content"] for item in items if item["raw"]]


async def context_text(api: Api, session: str = "s", **options: object) -> str:
    built = await api.http.post(f"/api/sessions/{session}/context", json=options)
    assert built.status_code == 200, built.text
    return built.text


async def test_turns_are_listed_with_their_log_and_usage(api: Api) -> None:
    await fill(api)
    listed = (await api.http.get("/api/sessions/s/turns", params={"limit": 2})).json()
    assert listed["next"] == "t2"
    first = listed["items"][0]
    assert (first["turn"], first["status"], first["messages"], first["first_seq"], first["last_seq"]) == (
        "t1", "live", 2, 1, 2,
    )  # fmt: skip
    assert first["terse"] == ["told alpha"]
    assert first["usage"]["calls"] == 0
    assert first["tokens"] > 0
    rest = (await api.http.get("/api/sessions/s/turns", params={"after": "t2"})).json()
    assert ([turn["turn"] for turn in rest["items"]], rest["next"]) == (["t3"], None)
    assert (await api.http.get("/api/sessions/s/turns/t1")).json() == first


async def test_a_dropped_turn_is_in_no_context(api: Api) -> None:
    await fill(api)
    assert "beta" in await context_text(api)
    dropped = await api.http.post("/api/sessions/s/turns/t2/drop")
    assert dropped.json()["status"] == "dropped"
    assert "beta" not in await context_text(api)
    assert not any("beta" in text for text in await contents(api))
    assert any("beta" in text for text in await contents(api, view="all"))
    assert (await api.http.get("/api/sessions/s/terse")).text.count("beta") == 0
    again = await api.http.post("/api/sessions/s/turns/t2/drop")
    assert again.json() == dropped.json()
    assert (await api.append("s", {"role": "user", "content": "next"})).json()["turn"] == "t4"


async def test_undo_takes_turns_back_one_by_one_and_numbers_are_not_reused(api: Api) -> None:
    await fill(api)
    assert (await api.http.post("/api/sessions/s/undo")).json()["turn"] == "t3"
    assert (await api.http.post("/api/sessions/s/undo")).json()["turn"] == "t2"
    assert await contents(api) == ["tell me alpha", "this is alpha "]
    done = await api.append("s", {"role": "assistant", "content": "still t1"}, {"role": "user", "content": "new"})
    assert done.json() == {"first_seq": 7, "last_seq": 8, "turn": "t4"}
    for turn in ("t4", "t1"):
        assert (await api.http.post("/api/sessions/s/undo")).json()["turn"] == turn
    nothing = await api.http.post("/api/sessions/s/undo")
    assert nothing.status_code == 409
    assert await contents(api) == []


async def test_removed_turn_keeps_only_its_numbers(api: Api, database) -> None:
    await fill(api)
    before = (await api.http.get("/api/sessions/s")).json()["tokens"]
    assert (await api.http.delete("/api/sessions/s/turns/t2")).status_code == 204
    for again in (api.http.get, api.http.delete):
        assert (await again("/api/sessions/s/turns/t2")).status_code == 404
    assert [t["turn"] for t in (await api.http.get("/api/sessions/s/turns")).json()["items"]] == ["t1", "t3"]
    assert (await api.http.get("/api/sessions/s")).json()["tokens"] < before
    assert "beta" not in await context_text(api)
    whole = (await api.http.get("/api/sessions/s/messages", params={"view": "all"})).json()["items"]
    assert [m["seq"] for m in whole] == [1, 2, 3, 4, 5, 6]
    assert [m["raw"] for m in whole if m["status"] == "removed"] == [None, None]
    assert (await api.append("s", {"role": "user", "content": "next"})).json() == {
        "first_seq": 7, "last_seq": 7, "turn": "t4",
    }  # fmt: skip
    admin = await asyncpg.connect(database.admin_dsn)
    try:
        for table in ("sessions", "messages", "terse", "epochs", "search_pages", "search_words"):
            rows = await admin.fetch(f"SELECT row_to_json(x)::text AS row FROM {table} x")
            assert not any(b"beta".hex() in row["row"] or "beta" in row["row"] for row in rows), table
        assert (
            await admin.fetchval("SELECT count(*) FROM messages WHERE status = 'removed' AND digest IS NOT NULL") == 2
        )
    finally:
        await admin.close()


async def test_an_edit_counts_as_one_for_the_next_epoch(api: Api, database) -> None:
    await fill(api)
    await api.http.post("/api/sessions/s/undo")
    admin = await asyncpg.connect(database.admin_dsn)
    try:
        row = await admin.fetchrow("SELECT edited, edits, version FROM sessions")
    finally:
        await admin.close()
    assert row is not None
    assert (row["edited"], row["edits"], row["version"]) == (True, 1, 4)


@pytest.mark.parametrize("turn", ["t0", "7", "t-1", "t01", "tt", "t" + "9" * 30])
async def test_a_turn_id_has_its_form(api: Api, turn: str) -> None:
    await fill(api)
    refused = await api.http.get(f"/api/sessions/s/turns/{turn}")
    assert refused.status_code == 422
    assert refused.json()["field"] == "turn"


@pytest.mark.parametrize("turn", ["t4", "t99999999999"])
async def test_a_turn_that_is_not_there(api: Api, turn: str) -> None:
    await fill(api)
    path = f"/api/sessions/s/turns/{turn}"
    for answer in (await api.http.get(path), await api.http.delete(path), await api.http.post(f"{path}/drop")):
        assert answer.status_code == 404
