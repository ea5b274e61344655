"""`tersely forget`: everything of a tenant, a session or a user goes, and the receipt says what."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest
from typer.testing import CliRunner

from tersely.cli import program as commands
from tersely.service.common.replay_tenants import replay_tenant
from tersely.store.commit.spool import SpoolFile, spool_directory
from tests.conftest import Database
from tests.support.services import serve
from tests.support.upstreams import scripted

Run = Callable[..., Awaitable[tuple[int, str]]]


@pytest.fixture
def run(database: Database, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.setenv("DATABASE_URL", database.dsn)
    monkeypatch.setenv("TERSELY_DATA_DIR", str(tmp_path))

    async def invoke(*arguments: str) -> tuple[int, str]:
        done = await asyncio.to_thread(CliRunner().invoke, commands.app, list(arguments))
        return done.exit_code, done.output or str(done.exception)

    return invoke


async def rows(database: Database, tenant: str) -> dict[str, int]:
    """Table -> rows of the tenant, in whatever table has a tenant, as a superuser counts them."""
    admin = await asyncpg.connect(database.admin_dsn)
    try:
        tables = await admin.fetch(
            "SELECT table_name AS name FROM information_schema.columns "
            "WHERE column_name = 'tenant_id' AND table_schema = 'public'"
        )
        counts = {
            t["name"]: await admin.fetchval(f"SELECT count(*) FROM {t['name']} WHERE tenant_id = $1", tenant)
            for t in tables
        }
        return {name: count for name, count in counts.items() if count}
    finally:
        await admin.close()


@pytest.mark.parametrize("user", ["Jörg", "漢字", "🎉", 'a"b\\c', "line\nbreak", "\x7f", "lone \ud800"])
@pytest.mark.parametrize("beside", ["", "\ud800"])
async def test_users_of_any_name_are_found(database: Database, run: Run, user: str, beside: str):
    body = json.dumps({"id": "theirs", "metadata": {"user": user, "note": beside}})
    with scripted() as model, serve(database, model.url) as service, httpx.Client(base_url=service.url) as http:
        answer = http.post("/api/sessions", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 201, answer.text
        http.post("/api/sessions", json={"id": "other", "metadata": {"user": "Jorg"}}).raise_for_status()
    code, text = await run("forget", "--user", user, "--yes")
    assert (code, json.loads(text)["sessions"]) == (0, ["theirs"])


def talk(http: httpx.Client, session: str, **more: Any) -> None:
    http.post("/api/sessions", json={"id": session, **more}).raise_for_status()
    history: list[dict[str, Any]] = []
    for number in range(2):
        history.append({"role": "user", "content": f"{session} asks {number}"})
        answer = http.post(
            "/v1/chat/completions", json={"model": "m", "messages": history}, headers={"x-tersely-session": session}
        )
        assert answer.status_code == 200
        history.append(answer.json()["choices"][0]["message"])
    http.put(f"/api/sessions/{session}/scratchpad", json={"text": "notes"}).raise_for_status()
    http.post(f"/api/sessions/{session}/compact").raise_for_status()
    http.post(f"/api/sessions/{session}/search", json={"mode": "search", "query": "asks"}).raise_for_status()


async def test_sessions_users_and_tenants_are_forgotten(database: Database, run: Run):
    keys = {name: (await run("keys", "create", "--tenant", name))[1].strip() for name in ("north", "south")}
    with scripted() as model, serve(database, model.url, auth="keys") as service:
        for name, key in keys.items():
            with httpx.Client(base_url=service.url, headers={"x-tersely-key": key}, timeout=30) as http:
                talk(http, "one", metadata={"user": "ann"})
                talk(http, "child", parent="one")
                talk(http, "two", metadata={"user": "bob", "note": "not ann"})
                talk(http, "three", metadata={"user_id": "ann"})
                http.post("/api/memos", json={"content": f"{name} remembers", "tags": ["a"]}).raise_for_status()
    untouched = await rows(database, "south")
    assert {"messages", "sessions", "calls", "scratchpads", "memos", "keys"} <= set(untouched)

    code, text = await run("forget", "--tenant", "north", "--user", "ann", "--dry-run")
    assert code == 0
    assert json.loads(text)["sessions"] == ["child", "one", "three"]
    assert await rows(database, "north") == untouched
    code, text = await run("forget", "--tenant", "north", "--user", "ann", "--yes")
    receipt = json.loads(text)
    assert (code, receipt["rows"]["sessions"], receipt["left"]) == (0, 3, {})
    assert (await rows(database, "north"))["sessions"] == 1
    assert (await run("forget", "--tenant", "north", "--user", "ann", "--yes"))[0] == 1
    assert (await run("forget", "--tenant", "north", "--user", "an", "--yes"))[0] == 1

    code, text = await run("forget", "--tenant", "north", "--session", "two", "--yes")
    assert (code, json.loads(text)["sessions"]) == (0, ["two"])
    assert set(await rows(database, "north")) <= {"keys", "memos", "tenants", "tenant_limits"}

    assert (await run("tenants", "retention", "north", "--days", "7"))[0] == 0
    code, text = await run("forget", "--tenant", "north", "--yes")
    assert (code, json.loads(text)["left"]) == (0, {})
    assert await rows(database, "north") == {}
    assert await rows(database, "south") == untouched
    assert (await run("forget", "--tenant", "north", "--yes"))[0] == 1


# Type -> a value, for rows that are only to be there.
VALUES = {
    "text": "'x'", "bytea": "'\\x00'", "bigint": "1", "integer": "1", "smallint": "1", "boolean": "false",
    "timestamp with time zone": "now()", "double precision": "1", "real": "1", "date": "now()::date", "ARRAY": "'{}'",
}  # fmt: skip


async def fill_every_table(database: Database, tenant: str, session: str) -> tuple[set[str], set[str]]:
    """Give the tenant a row in each table that has tenants, for the session where it has sessions. Return the tables
    with sessions, and those without.
    """
    admin = await asyncpg.connect(database.admin_dsn)
    try:
        await admin.execute("SET session_replication_role = replica")  # a row needs no other rows
        columns = await admin.fetch(
            "SELECT c.table_name AS table, c.column_name AS name, c.data_type AS type "
            "FROM information_schema.columns c JOIN information_schema.tables t "
            "USING (table_schema, table_name) WHERE c.table_schema = 'public' "
            "AND t.table_type = 'BASE TABLE' AND (c.is_nullable = 'NO' OR c.column_name IN ('tenant_id', 'session_id'))"
        )
        tables: dict[str, dict[str, str]] = {}
        for column in columns:
            tables.setdefault(column["table"], {})[column["name"]] = column["type"]
        given = {name: each for name, each in tables.items() if "tenant_id" in each}
        own: dict[str, str] = {"tenant_id": f"'{tenant}'", "session_id": f"'{session}'"}
        for table, types in given.items():
            values = {name: own.get(name) or VALUES[kind] for name, kind in types.items()}
            if table == "sessions":
                values["id"] = own["session_id"]
            names, row = ", ".join(values), ", ".join(values.values())
            await admin.execute(f"INSERT INTO {table} ({names}) VALUES ({row}) ON CONFLICT DO NOTHING")
    finally:
        await admin.close()
    with_session = {name for name, each in given.items() if "session_id" in each and name != "memos"} | {"sessions"}
    return with_session, set(given) - with_session


async def test_rows_of_every_table_are_forgotten(database: Database, run: Run):
    """A table that is added later is emptied too, or this fails."""
    with (
        scripted() as model,
        serve(database, model.url) as service,
        httpx.Client(base_url=service.url, timeout=30) as http,
    ):
        talk(http, "one")
        talk(http, "other")
    kept = await rows(database, "default")
    with_session, others = await fill_every_table(database, "default", "one")
    filled = await rows(database, "default")
    assert set(filled) == with_session | others
    assert {"artifacts", "embeddings", "attributes", "messages", "terse"} <= with_session
    code, text = await run("forget", "--session", "one", "--yes")
    receipt = json.loads(text)
    assert (code, receipt["left"]) == (0, {})
    left = await rows(database, "default")
    for table in with_session:
        # What is left belongs to the other session, of which there was as much as of this one.
        assert left.get(table, 0) * 2 <= kept.get(table, 0), table
        assert receipt["rows"].get(table, 0) == filled[table] - left.get(table, 0), table
    code, text = await run("forget", "--tenant", "default", "--yes")
    assert (code, json.loads(text)["left"]) == (0, {})
    assert await rows(database, "default") == {}


async def test_a_tenant_s_replayed_transcripts_are_forgotten_with_it(database: Database, run: Run):
    key = (await run("keys", "create", "--tenant", "north"))[1].strip()
    with (
        scripted() as model,
        serve(database, model.url, auth="keys") as service,
        httpx.Client(base_url=service.url, timeout=60, follow_redirects=True) as http,
    ):
        http.post("/console/login", data={"key": key}).raise_for_status()
        token = form_token(http.get("/console/replay").text)
        http.post("/console/replay/demo", data={"token": token}).raise_for_status()
    assert (await rows(database, replay_tenant("north")))["calls"] > 0

    code, text = await run("forget", "--tenant", "north", "--yes")

    receipt = json.loads(text)
    assert (code, receipt["left"]) == (0, {})
    assert receipt["rows"]["calls"] > 0
    assert await rows(database, replay_tenant("north")) == {}


def form_token(page: str) -> str:
    """The token that a form of the console carries."""
    found = re.search(r'name="token" value="([^"]+)"', page)
    assert found is not None, page[:500]
    return found[1]


async def test_forget_requires_a_tenant_session_or_user(run: Run):
    assert (await run("forget", "--yes"))[0] == 2
    assert (await run("forget", "--session", "a", "--user", "b", "--yes"))[0] == 2
    assert (await run("tenants", "retention", "north", "--days", "3", "--default"))[0] == 2


async def test_forget_waits_until_the_spool_is_stored(database: Database, run: Run, tmp_path: Path):
    directory = spool_directory(tmp_path, database.dsn)
    file = SpoolFile.create(directory, "s1")
    file.append([b"a record"])
    code, text = await run("forget", "--session", "a", "--yes")
    assert (code, "spool" in text) == (1, True)
