"""Plans that connections made while the database was empty do not stay."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence

import asyncpg
import pytest

from tersely.store.db import statistics
from tersely.store.db.connection import Database as Store
from tersely.store.db.statistics import keep_analysed
from tersely.store.history import sessions
from tests.conftest import Database
from tests.store.test_distribution import on_one_server
from tests.store.test_lookup_plans import FILL_MESSAGES, FILL_SESSIONS, NOW, TENANT, plan_nodes
from tests.support.stores import open_store

pytestmark = on_one_server

STATEMENTS = {
    "by id": (sessions.GET, "'north', 's3'", {"sessions_pkey"}),
    "by reply": (sessions.BY_REPLY, "'north', '\\x01', NULL", {"messages_reply", "sessions_pkey"}),
    "deletion": (sessions.DELETE, "'north', 's3'", {"sessions_pkey"}),
}


@pytest.fixture
async def store(database: Database) -> AsyncIterator[Store]:
    async with open_store(database) as store:
        yield store


@pytest.fixture
async def early(database: Database) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    """A connection that prepared its statements when there was nothing, as the service's connections do."""
    connection = await asyncpg.connect(database.admin_dsn)
    try:
        await connection.execute(f"SET ROLE tersely_app; SET app.tenant = '{TENANT}'")
        await connection.execute("SET plan_cache_mode = force_generic_plan")
        for number, (statement, values, _) in enumerate(STATEMENTS.values()):
            await connection.execute(f"PREPARE early_{number} AS {statement}")
            await connection.fetch(f"EXPLAIN EXECUTE early_{number} ({values})")
        yield connection
    finally:
        await connection.close()


async def _fill(database: Database) -> None:
    connection = await asyncpg.connect(database.admin_dsn)
    try:
        for fill in (FILL_SESSIONS, FILL_MESSAGES):
            await connection.execute(fill, TENANT, NOW, 500)
    finally:
        await connection.close()


async def _indexes(connection: asyncpg.Connection[asyncpg.Record]) -> dict[str, set[str]]:
    found = {}
    for number, (name, (_, values, _)) in enumerate(STATEMENTS.items()):
        plan = await connection.fetchval(f"EXPLAIN (FORMAT JSON) EXECUTE early_{number} ({values})")
        found[name] = {node["Index Name"] for node in plan_nodes(json.loads(plan)[0]["Plan"]) if "Index Name" in node}
    return found


async def test_statements_of_an_empty_database_are_planned_anew(
    database: Database,
    store: Store,
    early: asyncpg.Connection[asyncpg.Record],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(statistics, "CHECK_SECONDS", 0.05)
    keeping = asyncio.create_task(keep_analysed(store, database.dsn))
    try:
        await asyncio.sleep(0.2)
        assert "sessions_pkey" not in (await _indexes(early))["by id"], "this is what the planner does if it is let"
        await _fill(database)
        async with asyncio.timeout(30):
            while await _indexes(early) != {name: indexes for name, (_, _, indexes) in STATEMENTS.items()}:
                await asyncio.sleep(0.05)
        assert not keeping.done(), "other tables are still empty"
    finally:
        keeping.cancel()


async def test_a_table_whose_rows_are_gone_is_not_analysed_for_ever(
    database: Database, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "CHECK_SECONDS", 0.01)
    await _fill(database)
    analysed: Counter[str] = Counter()

    async def note(dsn: str, tables: Sequence[str]) -> None:
        assert dsn == database.dsn
        analysed.update(tables)

    monkeypatch.setattr(statistics, "_analyse", note)
    keeping = asyncio.create_task(keep_analysed(store, database.dsn))
    await asyncio.sleep(1)
    keeping.cancel()
    assert analysed == {"messages": statistics.MOST_TRIES, "sessions": statistics.MOST_TRIES}
