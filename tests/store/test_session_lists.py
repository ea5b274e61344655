"""Pages of many sessions: each session once, in every order, and a page costs the same wherever it is."""

from __future__ import annotations

from typing import get_args

import asyncpg
import pytest

from tersely.store.db.connection import Database as Store
from tersely.store.history import session_lists
from tersely.store.history.session_lists import SessionCursor, SessionFilter, Sort
from tests.conftest import Database

SESSIONS = 20_000
FILL = """
INSERT INTO sessions (tenant_id, id, metadata, last_seq, turns, tokens, version, edits, edited, calls, epoch, cut,
    created_at, updated_at, last_call_at, call_hour, tokens_saved, saved_rank, tokens_rank)
SELECT 'default', 's' || n, '{}', 0, 0, n * 7919 % 100003, 0, 0, false, 1, 0, 1, at, at, called,
    date_trunc('hour', called), saved, floor(2 * ln(1 + saved::float8))::smallint,
    floor(2 * ln(1 + (n * 7919 % 100003)::float8))::smallint
FROM generate_series(1, $1::bigint) AS n,
    LATERAL (SELECT timestamptz '2026-01-01 00:00Z' + n * interval '1 minute' AS at,
        CASE WHEN n % 10 = 0 THEN NULL ELSE timestamptz '2026-02-01 00:00Z' + n * 37 % 20011 * interval '1 minute' END
        AS called, n * 104729 % 50021 AS saved) AS made
"""


@pytest.mark.parametrize("sort", get_args(Sort))
async def test_pages_hold_each_session_once_in_order(database: Database, sort: Sort) -> None:
    admin = await asyncpg.connect(database.admin_dsn)
    await admin.execute("SET session_replication_role = replica")
    await admin.execute(FILL.replace("$1::bigint", str(SESSIONS)))
    await admin.execute("ANALYZE sessions")
    await admin.close()
    store = Store(dsn=database.dsn)
    await store.open()
    try:
        seen: list[str] = []
        values: list[object] = []
        cursor: SessionCursor | None = None
        async with store.reading("default") as connection:
            while True:
                page = await session_lists.page(
                    connection, "default", SessionFilter(), sort=sort, after=cursor, limit=1000
                )
                seen += [each.session.id for each in page]
                values += [each.value for each in page if each.value is not None]
                if len(page) < 1000:
                    break
                cursor = SessionCursor(rank=page[-1].rank, value=page[-1].value, id=page[-1].session.id)
    finally:
        await store.close()
    assert len(seen) == len(set(seen)) == SESSIONS
    assert values == sorted(values, reverse=True)  # type: ignore[type-var]
