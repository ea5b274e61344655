"""Summaries in the store: what they cost to look up in a long session, and what goes with what they were made of."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest

from tersely.store.commit import turns
from tersely.store.db import leases
from tersely.store.db.connection import Database as Store
from tersely.store.notes import daily_memory as memory
from tersely.store.notes import summaries
from tersely.store.notes.daily_memory import MemoryEntry
from tersely.store.notes.summaries import NewSummary
from tersely.store.ops import events
from tests.conftest import Database
from tests.store.test_distribution import on_one_server
from tests.support.stores import open_store

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LENGTH = 6_000

FILL_SESSION = """
INSERT INTO sessions (tenant_id, id, parent, client_id, strategy, epoch_policy, metadata, last_seq, turns, tokens,
    version, edits, edited, calls, epoch, cut, plan, open_chain, last_call_at, created_at, updated_at)
VALUES ('north', 's1', NULL, NULL, NULL, NULL, '{}', $2, 3000, 0, 1, 0, false, 0, 0, 1, NULL, NULL, NULL, $1, $1)
"""
FILL_MESSAGES = """
INSERT INTO messages (tenant_id, session_id, seq, turn, tokens, place, role, status, dialect, client_visible,
    model_visible, pinned, finish, call, digest, chain, created_at, raw, model_raw)
SELECT 'north', 's1', seq, (seq + 1) / 2, 10, seq, CASE WHEN seq % 2 = 1 THEN 'user' ELSE 'assistant' END,
    CASE WHEN seq % 1000 = 0 THEN 'superseded' ELSE 'live' END, 'openai_chat', true, true, false, NULL, 0, '', NULL,
    $1, '{}', NULL
FROM generate_series(1, $2::bigint) AS seq
"""


@pytest.fixture
async def admin(database: Database) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    """A long session, seen from behind row security."""
    connection = await asyncpg.connect(database.admin_dsn)
    await connection.execute(FILL_SESSION, NOW, LENGTH)
    await connection.execute(FILL_MESSAGES, NOW, LENGTH)
    yield connection
    await connection.close()


@pytest.fixture
async def store(database: Database, admin: asyncpg.Connection[asyncpg.Record]) -> AsyncIterator[Store]:
    async with open_store(database) as opened:
        yield opened


async def add(store: Store, first: int, last: int, *, purpose: str = "checkpoint", text: str | None = "text") -> bool:
    async with store.transaction("north") as connection:
        await leases.take(connection, "north", "s1", "me", until=NOW + timedelta(minutes=1), now=NOW)
        basis = await summaries.basis(connection, "north", "s1", first, last)
        new = NewSummary(
            purpose=purpose, first_seq=first, last_seq=last, basis=basis, text=text, tokens=5, source="extractive"
        )
        return await summaries.add(connection, "north", "s1", new, holder="me", now=NOW)


@on_one_server  # a node of a distributed one keeps its plans to itself
@pytest.mark.parametrize("is_analysed", [False, True])
async def test_current_summaries_are_found_by_the_exceptions_alone(
    store: Store, admin: asyncpg.Connection[asyncpg.Record], is_analysed: bool
) -> None:
    for last in (1_000, 3_000, 5_000):
        assert await add(store, 1, last)
    if is_analysed:
        await admin.execute("ANALYZE")
    async with store.transaction("north") as connection:
        for sql, values in (
            (summaries.BASIS, "('north', 's1', 1, 5000)"),
            (summaries.COUNTING, f"('north', 's1', ARRAY['checkpoint'], {summaries.NO_LIMIT}, 1)"),
        ):
            await connection.execute(f"DEALLOCATE ALL; PREPARE asked AS {sql}")
            plan = await connection.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) EXECUTE asked {values}")
            nodes = [node for node in _nodes(json.loads(plan)[0]["Plan"]) if node.get("Relation Name") == "messages"]
            assert {node["Index Name"] for node in nodes} == {"messages_exceptions"}
            assert sum(node["Actual Rows"] * node["Actual Loops"] for node in nodes) <= 6, "and of one summary alone"


def _nodes(plan):
    yield plan
    for child in plan.get("Plans", ()):
        yield from _nodes(child)


async def test_the_newest_come_in_the_order_of_the_history(store: Store) -> None:
    for first, last, text in ((1, 10, "a"), (11, 20, "b"), (21, 30, None), (21, 40, "c")):
        assert await add(store, first, last, purpose="trim", text=text)
    async with store.transaction("north") as connection:

        async def texts(up_to: int, limit: int) -> list[str]:
            found = await summaries.newest(connection, "north", "s1", ["trim", "task"], up_to=up_to, limit=limit)
            return [summary.text for summary in found]

        assert await texts(100, 9) == ["a", "b", "c"]
        assert await texts(100, 2) == ["b", "c"]
        assert await texts(39, 9) == ["a", "b"]
        assert await texts(5, 9) == []


async def test_without_the_lease_nothing_is_added(store: Store, admin: asyncpg.Connection[asyncpg.Record]) -> None:
    assert await add(store, 1, 10)
    await admin.execute("UPDATE leases SET until = $1, holder = 'you'", NOW + timedelta(hours=1))
    assert not await add(store, 1, 20)


async def test_summaries_of_a_removed_turn_are_removed(store: Store) -> None:
    for first, last in ((1, 10), (11, 20)):
        await add(store, first, last, purpose="trim")
        async with store.transaction("north") as connection:
            entry = MemoryEntry(session_id="s1", first_seq=first, last_seq=last, created_at=NOW, text="text")
            await memory.add(connection, "north", entry)
            await memory.add(connection, "north", entry)
    async with store.transaction("north") as connection:
        session = await turns.lock(connection, "north", "s1")
        assert session is not None
        assert await turns.remove(connection, "north", session, 2, NOW)
        assert await connection.fetchval("SELECT min(first_seq) FROM summaries WHERE tenant_id = 'north'") == 11
        assert [entry.first_seq for entry in await memory.of_day(connection, "north", NOW.date())] == [11]


async def test_events_are_numbered_and_paged(store: Store) -> None:
    async with store.transaction("north") as connection:
        for count in range(1, 4):
            assert await events.add(connection, "north", "s1", "compaction_start", {"count": count}, NOW) == count
        found = await events.after(connection, "north", "s1", 1, limit=1)
        assert [(event.number, event.body) for event in found] == [(2, {"count": 2})]
