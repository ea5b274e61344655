"""One session has all of a table's rows: no statement reads the whole table for a few of them.

The service's statements are planned without a look at their parameters, and so are these.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime

import asyncpg
import pytest

import tersely.store
from tests.conftest import Database
from tests.store.test_distribution import on_one_server
from tests.store.test_lookup_plans import FILL_SESSIONS, plan_nodes

pytestmark = on_one_server

TENANT = "north"
LONG = 100_000
FILL_MESSAGES = """
INSERT INTO messages (tenant_id, session_id, seq, turn, tokens, place, role, status, dialect, client_visible,
    model_visible, pinned, finish, call, digest, chain, created_at, raw, model_raw)
SELECT $1, 's1', seq, (seq + 1) / 2, 10, seq, CASE WHEN seq % 2 = 1 THEN 'user' ELSE 'assistant' END, 'live',
    'openai_chat', true, true, false, NULL, seq / 2, decode(md5('digest' || seq), 'hex'),
    CASE WHEN seq % 2 = 0 THEN decode(md5('chain' || seq), 'hex') END, $2,
    convert_to(repeat(md5(seq::text), 16), 'UTF8'), NULL
FROM generate_series(1, $3) AS seq
"""
FILL_TERSE = """
INSERT INTO terse (tenant_id, session_id, turn, seq, number, role, source, created_at, text)
SELECT $1, 's1', n, 2 * n, 0, 'assistant', 'derived', $2, '' FROM generate_series(1, $3::integer / 2) AS n
"""
FILL_CALLS = """
INSERT INTO calls (tenant_id, session_id, number, turn, model, strategy, epoch, cut, last_seq, tokens_before,
    tokens_after, status, created_at, finished_at)
SELECT $1, 's1', n, n, 'm', 'slim', 0, 1, 2 * n, 10, 10, 200, $2::timestamptz + n * interval '1 minute',
    $2 + n * interval '1 minute'
FROM generate_series(1, $3::integer / 2) AS n
"""
TABLES = {"messages", "terse", "calls"}
# What concerns a session, or a tenant, as a whole.
OF_THE_WHOLE = {
    "commit.late_writes.FIND_CALL": "a reply that comes late, whose request is not where it was to be",
    "commit.late_writes.FIND_REQUEST": "a reply that comes late, whose request is not where it was to be",
    "commit.late_writes.LEAVE_MESSAGES": "all messages of a session that is left",
    "commit.late_writes.LEAVE_QUESTION": "reads up to the first reply",
    "commit.turns.FORGET_TERSE_OF": "what is removed for good, whatever turn it is noted under",
    "commit.turns.USAGE": "a list of turns; calls have no index of them",
    "history.lookups.OWN_REPLIES": "for a distributed Postgres, whose planner is another one",
    "history.messages.ALL_ROWS": "a history that was edited before its cut",
    "history.messages.LINKS_BEFORE": "compares the whole beginning of a history",
    "history.terse.ENTRIES": "the first part of statements with a limit",
    "ops.calls.COSTS": "a sum over all calls of a session",
    "ops.calls.ROWS": "the outline of a session",
    "ops.calls.SEQS": "the outline of a session",
    "ops.limits.STORED": "what a tenant has stored; measured in the background",
    "ops.stats.CALLS": "a sum over all calls of a session",
    "ops.stats.TERSE": "counts all entries of a session",
}


@pytest.fixture
async def connection(database: Database) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    """The database as the service sees it."""
    now = datetime(2026, 1, 1, tzinfo=UTC)
    connection = await asyncpg.connect(database.admin_dsn, statement_cache_size=0)
    try:
        await connection.execute(FILL_SESSIONS, TENANT, now, 1)
        await connection.execute(FILL_MESSAGES, TENANT, now, LONG)
        await connection.execute(FILL_TERSE, TENANT, now, LONG)
        await connection.execute(FILL_CALLS, TENANT, now, LONG)
        await connection.execute("ANALYZE")
        async with connection.transaction():
            await connection.execute(f"SET LOCAL ROLE tersely_app; SET LOCAL app.tenant = '{TENANT}'")
            yield connection
    finally:
        await connection.close()


def _statements() -> Iterator[tuple[str, str]]:
    """Yield the store's statements about a tenant's rows, by the names of their constants."""
    for found in pkgutil.walk_packages(tersely.store.__path__, "tersely.store."):
        name = found.name.removeprefix("tersely.store.")
        for constant, value in vars(importlib.import_module(found.name)).items():
            if not isinstance(value, str) or not re.match(r"\s*(SELECT|WITH|UPDATE|DELETE)\b", value):
                continue
            if name == "search.embeddings" or "pg_" in value:  # a table that exists where embeddings are used
                continue
            if "tenant_id = $1" in value and not re.search(r"(?<!')\{\w*\}", value):
                yield f"{name}.{constant}", value


async def _scanned(connection: asyncpg.Connection[asyncpg.Record], statement: str) -> set[str]:
    """Return the tables that a statement reads from end to end."""
    explain = "EXPLAIN (GENERIC_PLAN, FORMAT JSON) " + statement.strip().rstrip(";")
    # Without parameters the driver would refuse to execute a statement that has some.
    function = "long_session_plan"
    await connection.execute(
        f"CREATE OR REPLACE FUNCTION pg_temp.{function}() RETURNS json LANGUAGE plpgsql AS "
        f"$body$ DECLARE plan json; BEGIN EXECUTE $query${explain}$query$ INTO plan; "
        "RETURN plan; END $body$"
    )
    (root,) = json.loads(await connection.fetchval(f"SELECT pg_temp.{function}()"))
    return {node["Relation Name"] for node in plan_nodes(root["Plan"]) if node["Node Type"] == "Seq Scan"}


async def test_no_statement_reads_the_table_of_a_long_session(
    connection: asyncpg.Connection[asyncpg.Record],
) -> None:
    open_range = "SELECT place FROM messages WHERE tenant_id = $1 AND session_id = $2 AND seq >= $3 ORDER BY place"
    assert await _scanned(connection, open_range) == {"messages"}, "this is what the planner does if it is let"
    statements = dict(_statements())
    assert len(statements) > 100
    found = {name: await _scanned(connection, statement) & TABLES for name, statement in statements.items()}
    assert {name for name, tables in found.items() if tables} <= OF_THE_WHOLE.keys()
    assert statements.keys() >= OF_THE_WHOLE.keys()
