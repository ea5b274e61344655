"""Sessions over REST: made, listed, changed, deleted."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from tests.api.conftest import Api


async def test_created_session_is_returned_unchanged(api: Api) -> None:
    parent = (await api.http.post("/api/sessions", json={})).json()
    made = await api.http.post(
        "/api/sessions",
        json={
            "id": "mine",
            "strategy": {"name": "slim", "recent_turns": 5},
            "epoch": "every_request",
            "metadata": {"b": 1.0, "a": [None, "ü"]},
            "parent": parent["id"],
        },
    )
    assert made.status_code == 201
    session = made.json()
    assert session == (await api.http.get("/api/sessions/mine")).json()
    created = session.pop("created_at")
    assert session.pop("updated_at") == created
    assert created.endswith("Z")
    assert session == {
        "id": "mine",
        "parent": parent["id"],
        "client_id": None,
        "strategy": {"name": "slim", "recent_turns": 5},
        "epoch": "every_request",
        "last_call_strategy": None,
        "last_call_epoch": None,
        "metadata": {"b": 1.0, "a": [None, "ü"]},
        "turns": 0,
        "messages": 0,
        "tokens": 0,
        "title": None,
        "client": None,
        "models": [],
        "host": None,
        "calls": 0,
        "tokens_saved": 0,
        "reported": {"input": 0, "cached": 0, "output": 0},
        "cache_hit_share": None,
        "money": None,
        "last_call_at": None,
        "live": False,
    }
    assert parent["strategy"] == "slim"
    assert parent["epoch"] == "auto"


async def test_ids_are_not_given_twice(api: Api) -> None:
    assert (await api.http.post("/api/sessions", json={"id": "x"})).status_code == 201
    again = await api.http.post("/api/sessions", json={"id": "x"})
    assert again.status_code == 409
    assert again.json()["field"] == "id"
    generated = {(await api.http.post("/api/sessions", json={})).json()["id"] for _ in range(3)}
    assert len(generated) == 3


@pytest.mark.parametrize("session_id", ["a/b", "a/b/", "/", "%2F", "ä ö", "a?b#c", "turns/t1", "a//b", "..x", "日本"])
async def test_an_id_may_hold_anything_printable(api: Api, session_id: str) -> None:
    made = await api.http.post("/api/sessions", json={"id": session_id})
    assert made.status_code == 201, made.text
    path = f"/api/sessions/{quote(session_id, safe='')}"
    assert (await api.http.get(path)).json()["id"] == session_id
    await api.append(quote(session_id, safe=""), {"role": "user", "content": "hello"})
    turn = await api.http.get(f"{path}/turns/t1")
    assert turn.json()["turn"] == "t1"
    assert (await api.http.delete(path)).status_code == 204
    assert (await api.http.get(path)).status_code == 404


@pytest.mark.parametrize("session_id", ["", " a", "a\n", "a\x00", "x" * 257, ".", "..", "\ud800", "\x01", 7])
async def test_unusable_ids_are_refused(api: Api, session_id: object) -> None:
    import json

    refused = await api.post_raw("/api/sessions", json.dumps({"id": session_id}).encode())
    assert refused.status_code == 422
    assert refused.json()["field"] == "id"


async def test_lists_are_paged_and_narrowed_down(api: Api) -> None:
    for number in range(5):
        await api.http.post("/api/sessions", json={"id": f"s{number}"})
    for number in range(2):
        await api.http.post("/api/sessions", json={"id": f"c{number}", "parent": "s1"})
    seen: list[str] = []
    after: str | None = None
    for _ in range(10):
        query: dict[str, str] = {"limit": "3", **({"after": after} if after else {})}
        page = (await api.http.get("/api/sessions", params=query)).json()
        seen += [item["id"] for item in page["items"]]
        after = page["next"]
        if after is None:
            break
    assert seen == ["c1", "c0", "s4", "s3", "s2", "s1", "s0"]
    children = (await api.http.get("/api/sessions", params={"parent": "s1"})).json()
    assert [item["id"] for item in children["items"]] == ["c1", "c0"]
    nobody = (await api.http.get("/api/sessions", params={"client_id": "codex"})).json()
    assert nobody == {"items": [], "next": None}


async def test_patch_keeps_fields_that_it_does_not_name(api: Api) -> None:
    await api.http.post("/api/sessions", json={"id": "p", "strategy": "full", "metadata": {"a": 1}})
    changed = (await api.http.patch("/api/sessions/p", json={"epoch": {"stride": 4}})).json()
    assert (changed["strategy"], changed["epoch"], changed["metadata"]) == ("full", {"stride": 4}, {"a": 1})
    back = (await api.http.patch("/api/sessions/p", json={"strategy": None, "metadata": {}})).json()
    assert (back["strategy"], back["epoch"], back["metadata"]) == ("slim", {"stride": 4}, {})


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"strategy": "window9"}, "strategy"),
        ({"strategy": {"name": "slim", "recent_turns": 11}}, "strategy"),
        ({"strategy": 3}, "strategy"),
        ({"epoch": {"stride": 0}}, "epoch"),
        ({"epoch": "sometimes"}, "epoch"),
        ({"metadata": []}, "metadata"),
        ({"metadata": {"x": "y" * 20_000}}, "metadata"),
        ({"parent": "nobody"}, "parent"),
        ({"colour": "red"}, "colour"),
    ],
)
async def test_bad_values_are_named(api: Api, body: dict[str, object], field: str) -> None:
    refused = await api.http.post("/api/sessions", json=body)
    assert refused.status_code == 422
    assert refused.headers["content-type"] == "application/problem+json"
    assert refused.json()["field"] == field
    assert (await api.http.get("/api/sessions")).json()["items"] == []


async def test_deleting_takes_everything(api: Api, database) -> None:
    import asyncpg

    await api.append("gone", {"role": "user", "content": "a"}, {"role": "assistant", "content": "b <terse>c</terse>"})
    assert (await api.http.delete("/api/sessions/gone")).status_code == 204
    assert (await api.http.delete("/api/sessions/gone")).status_code == 404
    admin = await asyncpg.connect(database.admin_dsn)
    try:
        for table in ("sessions", "messages", "terse"):
            assert await admin.fetchval(f"SELECT count(*) FROM {table}") == 0
    finally:
        await admin.close()
    again = await api.append("gone", {"role": "user", "content": "a"})
    assert again.json() == {"first_seq": 1, "last_seq": 1, "turn": "t1"}
