"""The commands as an operator types them."""

from __future__ import annotations

import asyncio
import json

import asyncpg
import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from tersely.cli import program as commands
from tersely.settings import Settings, explain, unknown_settings
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


def test_bad_values_are_named_as_they_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERSELY_HEARTBEAT", "-1")
    monkeypatch.setenv("TERSELY_DATABASE_POOL", "0")
    monkeypatch.setenv("TERSELY_OPENAI_BASE_URL", "nowhere")
    monkeypatch.setenv("TERSELY_AUTH", "maybe")
    with pytest.raises(ValidationError) as caught:
        Settings(_env_file=None)
    complaints = {line.partition(":")[0]: line for line in explain(caught.value).splitlines()}
    assert complaints["TERSELY_HEARTBEAT"] == "TERSELY_HEARTBEAT: Input should be greater than 0, not '-1'"
    assert "'0'" in complaints["TERSELY_DATABASE_POOL"]
    assert "range: >= 1, <= 500" in complaints["TERSELY_DATABASE_POOL"]
    assert "'nowhere'" in complaints["TERSELY_OPENAI_BASE_URL"]
    assert "'maybe'" in complaints["TERSELY_AUTH"]


def test_unknown_variables_are_named() -> None:
    names = ["TERSELY_HEARTBEAT", "TERSELY_DATABASE_URL", "DATABASE_URL", "TERSELY_RUNNING_LOCAL", "PATH"]
    assert unknown_settings(names) == []
    given = ["TERSELY_STRATEGIE", "TERSELY_TOOLS", "TERSELY_CHAT_COMMANDS", "TERSELY_GEMINI_API_KEY"]
    assert unknown_settings(given) == ["TERSELY_STRATEGIE is no setting: ignored"]
