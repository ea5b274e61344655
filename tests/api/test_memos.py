"""Memos over REST."""

from __future__ import annotations

import json

import pytest

from tersely.service.memos.memos import MAX_CONTENT, MAX_TAG, MAX_TAGS, PAGE
from tests.api.conftest import Api, NewKey


async def save(api: Api, content: str, *tags: str, **more: object):
    return await api.http.post("/api/memos", json={"content": content, "tags": list(tags), **more})


async def search(api: Api, **options: object) -> list[str]:
    answer = await api.http.post("/api/memos/search", json=options)
    assert answer.status_code == 200, answer.text
    return [memo["content"] for memo in answer.json()["items"]]


async def test_saved_listed_read_deleted(api: Api) -> None:
    await api.http.post("/api/sessions", json={"id": "s"})
    saved = await save(api, "Ports are \u0000 fixed", " Gotcha ", "GOTCHA", "net", session="s")
    assert saved.status_code == 201
    memo = saved.json()
    assert (memo["content"], memo["tags"], memo["session"]) == ("Ports are \u0000 fixed", ["gotcha", "net"], "s")
    assert (await api.http.get(f"/api/memos/{memo['id']}")).json() == memo
    # It outlives its session.
    await api.http.delete("/api/sessions/s")
    assert (await api.http.get("/api/memos")).json() == {"items": [memo], "next": None}
    assert (await api.http.delete(f"/api/memos/{memo['id']}")).status_code == 204
    for path, status in ((memo["id"], 404), ("nothing", 404), ("%00", 422), ("a b", 404)):
        assert (await api.http.get(f"/api/memos/{path}")).status_code == status
        assert (await api.http.delete(f"/api/memos/{path}")).status_code == status


async def test_memos_are_listed_in_pages(api: Api) -> None:
    for number in range(5):
        await save(api, f"memo {number}", "even" if number % 2 == 0 else "odd")
    found: list[str] = []
    cursor: str | None = ""
    while cursor is not None:
        answer = (await api.http.get("/api/memos", params={"limit": 2, **({"after": cursor} if cursor else {})})).json()
        found += [memo["content"] for memo in answer["items"]]
        cursor = answer["next"]
    assert found == [f"memo {number}" for number in (4, 3, 2, 1, 0)]
    tagged = (await api.http.get("/api/memos?tag=Even&limit=2")).json()
    assert [memo["content"] for memo in tagged["items"]] == ["memo 4", "memo 2"]
    assert (await api.http.get("/api/memos?after=nonsense")).status_code == 422


async def test_memos_are_searched(api: Api) -> None:
    await save(api, "Migrations run before the first worker starts.", "deploy")
    await save(api, "The palette is kept in palette.css", "arch-decision")
    await save(api, "Workers share nothing but the database.", "arch-decision", "deploy")
    assert await search(api, query="when do the migrations run?") == ["Migrations run before the first worker starts."]
    assert (await search(api, query="palettes"))[0] == "The palette is kept in palette.css"
    assert await search(api, tags=["Deploy"]) == [
        "Workers share nothing but the database.",
        "Migrations run before the first worker starts.",
    ]
    assert await search(api, tags=["arch-decision"], query="workers") == ["Workers share nothing but the database."]
    assert len(await search(api, query="worker", limit=1)) == 1
    # Stop words bring nothing (the lesson of std::slop's removed ranked mode).
    for nothing in ("continue", "go on", "next", "the and of", ""):
        assert await search(api, query=nothing) == []
    # Tags are words, too.
    assert len(await search(api, query="deploy")) == 2


async def test_exported_and_deleted_by_tag_or_all(api: Api) -> None:
    for number in range(PAGE + 3):
        assert (await save(api, f"memo {number}", "even" if number % 2 == 0 else "odd")).status_code == 201
    listed = (await api.http.get("/api/memos?limit=1000")).json()["items"]
    exported = await api.http.get("/api/memos/export")
    assert exported.headers["content-type"].startswith("application/x-ndjson")
    assert [json.loads(line) for line in exported.text.splitlines()] == listed
    odd = [memo for memo in listed if memo["tags"] == ["odd"]]
    tagged = (await api.http.get("/api/memos/export?tag=Odd&tag=none")).text.splitlines()
    assert [json.loads(line) for line in tagged] == odd
    for unclear in ("", "?all=false", "?all=true&tag=odd", "?tag=%00", "?all=maybe"):
        assert (await api.http.delete(f"/api/memos{unclear}")).status_code == 422, unclear
    assert (await api.http.delete("/api/memos?tag=ODD&tag=none")).json() == {"deleted": len(odd)}
    assert (await api.http.delete("/api/memos?tag=odd")).json() == {"deleted": 0}
    assert (await api.http.delete("/api/memos?all=true")).json() == {"deleted": len(listed) - len(odd)}
    assert (await api.http.get("/api/memos/export")).text == ""


async def test_bad_memos_are_refused(api: Api) -> None:
    assert (await save(api, "x" * MAX_CONTENT)).status_code == 201
    for refused, status, field in (
        (await save(api, "x" * (MAX_CONTENT + 1)), 413, "content"),
        (await save(api, " \n"), 422, "content"),
        (await save(api, "x", "t" * (MAX_TAG + 1)), 422, "tags"),
        (await save(api, "x", *map(str, range(MAX_TAGS + 1))), 422, "tags"),
        (await save(api, "x", "\u0000"), 422, "tags"),
        (await save(api, "x", " "), 422, "tags"),
        (await save(api, "x", session="none"), 422, "session"),
        (await save(api, "x", colour="red"), 422, "colour"),
        (await api.http.post("/api/memos/search", json={}), 422, "query"),
        (await api.http.post("/api/memos/search", json={"query": "x", "limit": 0}), 422, "limit"),
    ):
        assert (refused.status_code, refused.json()["field"]) == (status, field)
        assert refused.headers["content-type"] == "application/problem+json"


async def test_another_tenant_s_memos_are_not_there(guarded: Api, new_tenant: NewKey) -> None:
    mine, yours = await new_tenant("mine"), await new_tenant("yours")
    given = {"content": "a secret", "tags": ["t"]}
    memo = (await guarded.http.post("/api/memos", json=given, headers=mine)).json()
    for method in ("GET", "DELETE"):
        assert (await guarded.http.request(method, f"/api/memos/{memo['id']}", headers=yours)).status_code == 404
    assert (await guarded.http.get("/api/memos", headers=yours)).json()["items"] == []
    assert (await guarded.http.get("/api/memos/export", headers=yours)).text == ""
    for which in ("all=true", "tag=t"):
        assert (await guarded.http.delete(f"/api/memos?{which}", headers=yours)).json() == {"deleted": 0}
    for options in ({"query": "secret"}, {"tags": ["t"]}):
        assert (await guarded.http.post("/api/memos/search", json=options, headers=yours)).json()["items"] == []
    assert (await guarded.http.get(f"/api/memos/{memo['id']}", headers=mine)).json() == memo


@pytest.mark.parametrize("text", ["\ud83d", "a\ud83d b"])
async def test_lone_surrogates_do_no_harm(api: Api, text: str) -> None:
    body = b'{"content": "%b"}' % text.encode("ascii", "backslashreplace")
    saved = await api.post_raw("/api/memos", body)
    assert saved.status_code == 201
    assert (await api.http.get(f"/api/memos/{saved.json()['id']}")).json()["content"] == text.replace("\ud83d", "?")
