"""The lookups on the way of every request use their indexes: the service's role, row security, big tables."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from typing import Any

import asyncpg
import pytest

from tersely.store.commit import epochs, late_writes, turns
from tersely.store.history import messages, sessions, terse
from tersely.store.history.sessions import in_flight
from tests.conftest import Database
from tests.store.test_distribution import on_one_server

# A node of a distributed one keeps its plans to itself.
pytestmark = on_one_server

TENANT = "north"
CHAIN = b"chain of one row"
NOW = datetime(2026, 1, 1, tzinfo=UTC)

FILL_SESSIONS = """
INSERT INTO sessions (tenant_id, id, parent, client_id, strategy, epoch_policy, metadata, last_seq, turns, tokens,
    version, edits, edited, calls, epoch, cut, plan, open_chain, last_call_at, created_at, updated_at)
SELECT $1, 's' || n, NULL, CASE WHEN n % 3 = 0 THEN 'client' || n END, NULL, NULL, '{}', 30, 15, 300,
    30, 0, false, 15, 0, 1, NULL, CASE WHEN n % 2 = 0 THEN decode(md5('open' || n), 'hex') END, NULL, $2, $2
FROM generate_series(1, $3) AS n
"""
FILL_MESSAGES = """
INSERT INTO messages (tenant_id, session_id, seq, turn, tokens, place, role, status, dialect, client_visible,
    model_visible, pinned, finish, call, digest, chain, created_at, raw, model_raw)
SELECT $1, 's' || n, seq, CASE WHEN seq = 1 THEN 0 ELSE seq / 2 END, 10, seq,
    CASE WHEN seq = 1 THEN 'system' WHEN seq % 2 = 0 THEN 'user' ELSE 'assistant' END, 'live', 'openai_chat', true,
    true, false, NULL, 0, decode(md5('digest' || n || ' ' || seq), 'hex'),
    CASE WHEN seq > 1 AND seq % 2 = 1 THEN decode(md5('chain' || n || ' ' || seq), 'hex') END, $2, '{}', NULL
FROM generate_series(1, $3) AS n, generate_series(1, 30) AS seq
"""
FILL_SIDE_REPLIES = """
INSERT INTO side_replies (tenant_id, session_id, anchor, created_at)
SELECT $1, 's' || n, decode(md5('anchor' || n), 'hex'), $2 FROM generate_series(1, $3) AS n
"""

LOOKUPS: dict[str, tuple[str, tuple[Any, ...], str]] = {
    "by chain": (sessions.BY_CHAIN, ([CHAIN] * 8, None), "messages_chain_newest"),
    "by chain, with a client's id": (sessions.BY_CHAIN, ([CHAIN] * 8, "client3"), "messages_chain_newest"),
    "by a long history": (sessions.BY_CHAIN, ([CHAIN] * 1024, None), "messages_chain_newest"),
    "by reply": (sessions.BY_REPLY, (CHAIN, None), "messages_reply"),
    "by side reply": (sessions.BY_SIDE_REPLY, ([CHAIN] * 4, NOW, CHAIN), "side_replies_anchor"),
    "by open chain": (sessions.BY_OPEN_CHAIN, ([CHAIN, in_flight(CHAIN)], NOW, None), "sessions_open"),
    "by client's id": (sessions.BY_CLIENT_ID, ("client3",), "sessions_client"),
    "by id": (sessions.GET, ("s3",), "sessions_pkey"),
    "the tail": (messages.TAIL_ROWS, ("s3", 25), "messages_pkey"),
    "by a reply that a client brought": (late_writes.FIND_SINCE, (NOW, "client3", 64, CHAIN), "messages_resent"),
    "a reply's chain": (messages.CHAIN_OF, ("s3", 25), "messages_pkey"),
}


@pytest.fixture
async def connection(database: Database) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    """A big database, seen as the service sees it."""
    connection = await asyncpg.connect(database.admin_dsn)
    try:
        for tenant, count in ((TENANT, 2_000), ("south", 100)):
            for fill in (FILL_SESSIONS, FILL_MESSAGES, FILL_SIDE_REPLIES):
                await connection.execute(fill, tenant, NOW, count)
        await connection.execute("ANALYZE")
        async with connection.transaction():
            await connection.execute(f"SET LOCAL ROLE tersely_app; SET LOCAL app.tenant = '{TENANT}'")
            yield connection
    finally:
        await connection.close()


async def test_every_lookup_uses_its_index(connection: asyncpg.Connection[asyncpg.Record]) -> None:
    assert await connection.fetchval("SELECT count(*) FROM messages") == 60_000, "the other tenant's are not seen"
    # The service prepares its statements: after a few runs the server plans them without looking at the values.
    for mode in ("force_custom_plan", "force_generic_plan"):
        await connection.execute(f"SET LOCAL plan_cache_mode = {mode}")
        for number, (name, (sql, args, index)) in enumerate(LOOKUPS.items()):
            statement = f"{mode}_{number}"
            await connection.execute(f"PREPARE {statement} AS {sql}")
            values = ", ".join(_literal(each) for each in (TENANT, *args))
            explained = await connection.fetchval(f"EXPLAIN (FORMAT JSON) EXECUTE {statement} ({values})")
            nodes = list(plan_nodes(json.loads(explained)[0]["Plan"]))
            assert index in {node.get("Index Name") for node in nodes}, (name, mode, nodes)
            scanned = {node["Relation Name"] for node in nodes if node["Node Type"] == "Seq Scan"}
            assert "messages" not in scanned, (name, mode)


def _literal(value: object) -> str:
    match value:
        case None:
            return "NULL"
        case bytes():
            return f"'\\x{value.hex()}'::bytea"
        case list():
            return f"ARRAY[{', '.join(_literal(each) for each in value)}]"
        case int():
            return str(value)
        case _:
            return f"'{value}'"


def plan_nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the nodes of a plan, each before those below it."""
    yield plan
    for child in plan.get("Plans", ()):
        yield from plan_nodes(child)


async def test_the_tail_query_reads_the_tail_alone(connection: asyncpg.Connection[asyncpg.Record]) -> None:
    explained = await connection.fetchval(
        "EXPLAIN (ANALYZE, FORMAT JSON) "
        + messages.TAIL_ROWS.replace("$1", "'north'").replace("$2", "'s3'").replace("$3", "25")
    )
    nodes = list(plan_nodes(json.loads(explained)[0]["Plan"]))
    read = [node for node in nodes if "Index Name" in node]
    assert {node["Index Name"] for node in read} == {"messages_pkey", "messages_instructions"}
    assert sum(node["Actual Rows"] + node.get("Rows Removed by Filter", 0) for node in read) <= 8


OF_ONE_SESSION: dict[str, tuple[str, tuple[Any, ...], str]] = {
    "the tail": (messages.TAIL_ROWS, ("s3", 25), "seq"),
    "the live tail": (messages.LIVE_FROM, ("s3", 25), "seq"),
    "a reply's chain": (messages.CHAIN_OF, ("s3", 25), "seq"),
    "content": (messages.CONTENT, ("s3", [25, 26]), "seq"),
    "the size of the tail": (epochs.TAIL_SIZE, ("s3", 25, [3, 7]), "seq"),
    "the pause before a message": (epochs.TIMES, ("s3", 25), "seq"),
    "the newest message": (messages.NEWEST_AT, ("s3",), ""),
    "the last link": (messages.LAST_LINK, ("s3",), ""),
    "the log": (terse.NEWEST_ENTRIES, ("s3", 5, [3]), "seq"),
}
OF_TURNS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "the messages of turns": (turns.GROUPS, ("s3", 3, 4, 7, 11)),
    "the messages of a turn": (turns.OF_TURN, ("s3", 3, 3, 7, 9)),
    "the ends of turns": (turns.ENDS, ("s3", [3, 9], [7, 19], [9, 21])),
}


async def test_a_session_is_read_by_its_tail_in_a_database_that_was_never_analysed(database: Database) -> None:
    connection = await asyncpg.connect(database.admin_dsn)
    try:
        for fill in (FILL_SESSIONS, FILL_MESSAGES):
            await connection.execute(fill, TENANT, NOW, 5)
        async with connection.transaction():
            await connection.execute(f"SET LOCAL ROLE tersely_app; SET LOCAL app.tenant = '{TENANT}'")
            await connection.execute("SET LOCAL plan_cache_mode = force_generic_plan")
            for number, (name, (sql, args, column)) in enumerate(OF_ONE_SESSION.items()):
                await connection.execute(f"PREPARE cold_{number} AS {sql}")
                values = ", ".join(_literal(each) for each in (TENANT, *args))
                explained = await connection.fetchval(f"EXPLAIN (FORMAT JSON) EXECUTE cold_{number} ({values})")
                nodes = [
                    n for n in plan_nodes(json.loads(explained)[0]["Plan"]) if n.get("Relation Name") == "messages"
                ]
                assert nodes[0]["Index Name"] == "messages_pkey", name
                assert column in nodes[0]["Index Cond"], (name, nodes[0]["Index Cond"])
    finally:
        await connection.close()


@pytest.mark.parametrize("analysed", [False, True])
async def test_turns_are_found_by_sequence_number_and_in_the_index_of_the_others(
    database: Database, analysed: bool
) -> None:
    connection = await asyncpg.connect(database.admin_dsn)
    try:
        for fill in (FILL_SESSIONS, FILL_MESSAGES):
            await connection.execute(fill, TENANT, NOW, 2_000 if analysed else 5)
        await connection.execute("UPDATE messages SET newest_turn = NULL")
        if analysed:
            await connection.execute("ANALYZE")
        async with connection.transaction():
            await connection.execute(f"SET LOCAL ROLE tersely_app; SET LOCAL app.tenant = '{TENANT}'")
            for mode in ("force_custom_plan", "force_generic_plan"):
                await connection.execute(f"SET LOCAL plan_cache_mode = {mode}")
                for number, (name, (sql, args)) in enumerate(OF_TURNS.items()):
                    statement = f"{mode}_{number}"
                    await connection.execute(f"PREPARE {statement} AS {sql}")
                    values = ", ".join(_literal(each) for each in (TENANT, *args))
                    explained = await connection.fetchval(f"EXPLAIN (FORMAT JSON) EXECUTE {statement} ({values})")
                    found = {
                        node["Index Name"]: node["Index Cond"]
                        for node in plan_nodes(json.loads(explained)[0]["Plan"])
                        if node.get("Relation Name") == "messages"
                    }
                    assert set(found) == {"messages_pkey", "messages_out_of_turn"}, (name, mode)
                    assert "seq" in found["messages_pkey"], (name, mode)
                    assert "turn" in found["messages_out_of_turn"], (name, mode)
    finally:
        await connection.close()
