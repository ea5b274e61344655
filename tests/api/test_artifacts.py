"""Spilled tool outputs, fetched whole (tiancaiamao/ai, "Tool Output Processing", order 1)."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

import asyncpg
import httpx
import pytest

from tersely.domain.text.tool_output import LEAST_SPILLED, normalize
from tersely.fakellm.scripted import ScriptedReply
from tests.api.conftest import Api, NewKey, serve
from tests.conftest import Database
from tests.support.upstreams import MODEL, scripted

LARGE = "".join(f"line {number} é\n" for number in range(20_000))
SHA = sha256(LARGE.encode()).hexdigest()


def exchange(text: str, call_id: str = "c") -> list[dict[str, Any]]:
    call = {"id": call_id, "type": "function", "function": {"name": "read", "arguments": "{}"}}
    return [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": text},
    ]


async def rows(database: Database) -> list[asyncpg.Record]:
    admin = await asyncpg.connect(database.admin_dsn)
    try:
        return await admin.fetch("SELECT * FROM artifacts ORDER BY session_id, seq")
    finally:
        await admin.close()


async def fetch(api: Api, sha: str = SHA, **headers: str) -> httpx.Response:
    return await api.http.get(f"/api/artifacts/{sha}", headers=headers)


async def test_an_output_over_the_threshold_is_fetched_whole_by_the_sha_of_its_notice(api: Api) -> None:
    assert (await api.append("s", *exchange(LARGE))).status_code == 201
    sha = normalize(LARGE).spilled_sha256
    assert sha == SHA
    answer = await fetch(api)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.headers["content-length"] == str(len(LARGE.encode()))
    assert answer.content == LARGE.encode()


async def test_large_values_alone_are_stored_as_pointers(api: Api, database: Database) -> None:
    at_most = "x" * LEAST_SPILLED
    await api.append("s", *exchange(at_most), *exchange(LARGE), {"role": "user", "content": "y" * 300_000})
    (row,) = await rows(database)
    assert (row["session_id"], row["seq"], row["call_id"], row["chars"]) == ("s", 6, b"c", len(LARGE))
    assert row["sha256"].hex() == SHA
    assert sum(len(str(value)) for value in row.values()) < 400
    assert (await fetch(api, sha256(at_most.encode()).hexdigest())).status_code == 404


async def test_lone_surrogates_come_as_their_three_bytes(api: Api) -> None:
    text = "a\ud800" * 110_000
    body = json.dumps({"messages": exchange(text)}).encode()
    assert (await api.post_raw("/api/sessions/s/messages", body)).status_code == 201
    content = text.encode("utf-8", "surrogatepass")
    answer = await fetch(api, sha256(content).hexdigest())
    assert answer.content == content


async def test_artifact_is_deleted_with_its_session_or_turn(api: Api, database: Database) -> None:
    await api.append("one", *exchange(LARGE))
    await api.append("two", *exchange(LARGE))
    assert (await api.http.delete("/api/sessions/two")).status_code == 204
    assert (await fetch(api)).status_code == 200
    assert (await api.http.delete("/api/sessions/one/turns/t1")).status_code == 204
    assert await rows(database) == []
    assert (await fetch(api)).status_code == 404


async def test_a_dropped_turn_keeps_its_output(api: Api) -> None:
    await api.append("s", *exchange(LARGE))
    await api.http.post("/api/sessions/s/turns/t1/drop")
    assert (await fetch(api)).status_code == 200


async def test_the_same_output_twice(api: Api, database: Database) -> None:
    await api.append("s", *exchange(LARGE), *exchange(LARGE, "d"))
    assert [row["seq"] for row in await rows(database)] == [3, 6]
    assert (await fetch(api)).content == LARGE.encode()


async def test_an_imported_session_has_its_outputs(api: Api, database: Database) -> None:
    await api.append("s", *exchange(LARGE))
    document = (await api.http.get("/api/sessions/s/export")).json()
    await api.http.delete("/api/sessions/s")
    assert (await fetch(api)).status_code == 404
    assert (await api.http.post("/api/sessions/import", json={**document, "id": "again"})).status_code == 201
    assert (await fetch(api)).content == LARGE.encode()


async def test_a_proxied_request_leaves_its_outputs_to_be_fetched(database: Database) -> None:
    with scripted() as model:
        async with serve(database.dsn, upstream=model.url) as api:
            for _ in range(2):
                model.script("u", ScriptedReply(message={"content": "seen"}))
                body = {"model": MODEL, "user": "u", "messages": exchange(LARGE)}
                sent = await api.http.post(
                    "/v1/chat/completions", json=body, headers={"x-tersely-session": "s"}, timeout=30
                )
                assert sent.status_code == 200
            assert (await fetch(api)).content == LARGE.encode()
    assert {row["seq"] for row in await rows(database)} >= {3}


@pytest.mark.parametrize("sha", ["abc", SHA.upper(), SHA + "0", "g" * 64])
async def test_a_sha256_has_its_form(api: Api, sha: str) -> None:
    refused = await fetch(api, sha)
    assert (refused.status_code, refused.json()["field"]) == (422, "sha256")


async def test_unknown_artifacts_and_another_tenants_are_not_found(guarded: Api, new_tenant: NewKey) -> None:
    ours, theirs = await new_tenant("ours"), await new_tenant("theirs")
    assert (await fetch(guarded)).status_code == 401
    assert (await guarded.append("s", *exchange(LARGE), **ours)).status_code == 201
    assert (await fetch(guarded, **theirs)).status_code == 404
    assert (await fetch(guarded, "0" * 64, **ours)).status_code == 404
    assert (await fetch(guarded, **ours)).status_code == 200


async def test_deleted_output_is_nowhere_any_more(api: Api) -> None:
    for session in ("s", "other"):
        assert (await api.append(session, *exchange(LARGE), {"role": "user", "content": "and now?"})).status_code == 201
    before = (await api.http.get("/api/sessions/s")).json()["tokens"]
    assert (await api.http.delete(f"/api/artifacts/{SHA}")).status_code == 204
    assert (await fetch(api)).status_code == 404
    assert (await api.http.delete(f"/api/artifacts/{SHA}")).status_code == 404
    for session in ("s", "other"):
        listed = (await api.http.get(f"/api/sessions/{session}/messages?view=all")).json()["items"]
        assert [each["role"] for each in listed] == ["user", "assistant", "tool", "user"]
        assert listed[2]["raw"]["content"] == f"[Tool output of {len(LARGE):,} characters: deleted]"
        assert listed[2]["raw"]["tool_call_id"] == "c"
        shown = (await api.http.post(f"/api/sessions/{session}/context", json={"strategy": "full"})).text
        assert "deleted]" in shown
        assert "line 7 " not in shown
        found = await api.http.post(f"/api/sessions/{session}/search", json={"mode": "search", "query": "line 7"})
        assert found.json()["excerpts"] == []
    assert (await api.http.get("/api/sessions/s")).json()["tokens"] < before / 10


async def test_client_that_resends_a_deleted_output_continues_its_session(api: Api, database: Database) -> None:
    history = exchange(LARGE)
    with scripted() as model:
        async with serve(database.dsn, upstream=model.url) as api:
            body = {"model": MODEL, "messages": history}
            first = await api.http.post("/v1/chat/completions", json=body, timeout=30)
            session = first.headers["x-tersely-session"]
            assert (await api.http.delete(f"/api/artifacts/{SHA}")).status_code == 204
            reply = first.json()["choices"][0]["message"]
            body["messages"] = [*history, reply, {"role": "user", "content": "go on"}]
            again = await api.http.post("/v1/chat/completions", json=body, timeout=30)
            assert again.status_code == 200
            assert again.headers["x-tersely-session"] == session
            stored = (await api.http.get(f"/api/sessions/{session}/messages")).json()["items"]
    roles = ["user", "assistant", "tool", "assistant", "user", "assistant"]
    assert [each["role"] for each in stored] == roles
    # The scripted model repeats the beginning of what it was sent.
    assert "line 7 " not in json.dumps([each for each in stored if each["role"] != "assistant"])
