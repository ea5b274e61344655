"""A new epoch's log has the newest entries whose messages are live, whatever else the session holds."""

from __future__ import annotations

from datetime import UTC, datetime

import asyncpg
import pytest

from tersely.domain.history.history import LOG_ENTRIES
from tersely.store.db.connection import Database
from tersely.store.history import terse
from tests import conftest
from tests.store.test_lookup_plans import FILL_SESSIONS
from tests.store.test_statement_plans import FILL_MESSAGES, FILL_TERSE

TENANT = "north"
TURNS = 500


@pytest.mark.parametrize(
    ("superseded", "restored"),
    [
        pytest.param([], [], id="all live"),
        pytest.param([1000, 998, 700], [], id="some superseded"),
        pytest.param([1000, 998, 700], [998], id="one of them restored"),
        pytest.param([2, 4, 6], [], id="superseded before the log begins"),
        pytest.param(list(range(2, 1001, 2)), [], id="all superseded"),
    ],
)
async def test_the_log_shows_the_newest_live_entries(
    database: conftest.Database, superseded: list[int], restored: list[int]
) -> None:
    admin = await asyncpg.connect(database.admin_dsn)
    try:
        now = datetime(2026, 1, 1, tzinfo=UTC)
        await admin.execute(FILL_SESSIONS, TENANT, now, 1)
        await admin.execute(FILL_MESSAGES, TENANT, now, 2 * TURNS)
        await admin.execute(FILL_TERSE, TENANT, now, 2 * TURNS)
        await admin.execute("UPDATE messages SET status = 'superseded' WHERE seq = ANY($1::bigint[])", superseded)
    finally:
        await admin.close()
    store = Database(dsn=database.dsn, size=1)
    await store.open()
    try:
        async with store.reading(TENANT) as connection:
            found = await terse.log_inputs(connection, TENANT, "s1", restored=restored)
    finally:
        await store.close()
    shown = [seq for seq in range(2, 2 * TURNS + 1, 2) if seq not in superseded or seq in restored]
    newest = shown[-LOG_ENTRIES:]
    assert [entry.seq for entry in found.terse] == newest
    assert found.older_turns == (newest[0] // 2 - 1 if len(newest) == LOG_ENTRIES else 0)
