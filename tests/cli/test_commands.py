"""The commands as an operator types them."""

from __future__ import annotations

import asyncio
import json

import asyncpg
import pytest
from typer.testing import CliRunner

from app.cli import commands
from tests.conftest import Database


@pytest.fixture
def run(database: Database, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DATABASE_URL", database.dsn)

    async def invoke(*arguments: str) -> tuple[int, str]:
        done = await asyncio.to_thread(CliRunner().invoke, commands.app, list(arguments))
        return done.exit_code, done.output

    return invoke


async def test_keys_are_listed_and_revoked_whoever_s_they_are(run, database: Database) -> None:
    made = {tenant: (await run("keys", "create", "--tenant", tenant))[1] for tenant in ("one", "two")}
    ids = {tenant: text.split("_")[1] for tenant, text in made.items()}
    code, text = await run("keys", "list", "--json")
    assert code == 0
    assert {row["tenant"]: row["id"] for row in json.loads(text)} == ids
    assert [row["id"] for row in json.loads((await run("keys", "list", "--json", "--tenant", "two"))[1])] == [
        ids["two"]
    ]
    assert (await run("keys", "revoke", ids["one"], "--tenant", "two"))[0] == 1
    assert (await run("keys", "revoke", ids["one"]))[0] == 0
    assert (await run("keys", "revoke", ids["one"]))[0] == 1
    assert (await run("keys", "revoke", "it's none"))[0] == 1
    rows = json.loads((await run("keys", "list", "--json"))[1])
    assert {row["tenant"]: row["revoked_at"] is not None for row in rows} == {"one": True, "two": False}

    plain = await asyncpg.connect(database.dsn)
    try:
        async with plain.transaction():
            await plain.execute("SET LOCAL ROLE tersely_app")
            assert await plain.fetchval("SELECT count(*) FROM keys") == 0
            await plain.execute("SET LOCAL app.list_keys = 'on'")
            assert await plain.fetchval("SELECT count(*) FROM tenants") == 0
            assert await plain.execute("UPDATE keys SET label = 'x'") == "UPDATE 0"
    finally:
        await plain.close()
