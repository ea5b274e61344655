"""Have Postgres analyse the tables that it has never analysed.

Most statements are planned while a new database is still empty, and each connection keeps its plans. For an empty table
an index on the tenant alone looks as good as one on tenant and id, and is used: then each statement about one session
reads all sessions of the tenant. Postgres plans anew once it has analysed a table. By itself it does that up to two
minutes after the first rows; after a restore or an upgrade it may not do it for hours.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Final

import asyncpg

from tersely.domain.errors import StoreUnavailable
from tersely.store.db.connection import Database

CHECK_SECONDS: Final = 2.0
CONNECT_SECONDS: Final = 5.0
ANALYZE_SECONDS: Final = 60.0
LOCK_MS: Final = 1000
ENOUGH_BYTES: Final = 32 * 1024
"""A smaller table is read as fast as its indexes."""

MOST_TRIES: Final = 10
"""Rows that are not committed yet, or gone, leave a table as if it had never been analysed."""

_log = logging.getLogger(__name__)

# Only its owner may have a table analysed.
NEVER_ANALYSED = """
SELECT quote_ident(t.relname) AS name, pg_relation_size(t.oid) >= $1::bigint AS has_rows
FROM pg_class AS m JOIN pg_class AS t ON t.relnamespace = m.relnamespace AND t.relowner = m.relowner
WHERE m.oid = 'messages'::regclass AND t.relkind = 'r' AND t.reltuples <= 0
    AND pg_has_role(session_user, t.relowner, 'USAGE')
"""


async def keep_analysed(database: Database, dsn: str) -> None:
    """Analyse each table as soon as it has rows, unless Postgres was quicker; return when all are analysed.

    A distributed Postgres has the rows on its nodes, which analyse them by themselves.
    """
    tries: Counter[str] = Counter()
    while True:
        await asyncio.sleep(CHECK_SECONDS)
        try:
            if await database.is_distributed():
                return
            async with database.statements("") as connection:
                found = await connection.fetch(NEVER_ANALYSED, ENOUGH_BYTES)
        except (StoreUnavailable, asyncpg.PostgresError):  # it may have no tables yet
            continue
        left = {row["name"]: row["has_rows"] for row in found if tries[row["name"]] < MOST_TRIES}
        if not left:
            return
        if filled := sorted(name for name, has_rows in left.items() if has_rows):
            tries.update(filled)
            try:
                await _analyse(dsn, filled)
            except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, TimeoutError) as error:
                _log.info("tables could not be analysed: %s", type(error).__name__)


async def _analyse(dsn: str, tables: Sequence[str]) -> None:
    """Our own connections have a role that owns no table."""
    connection = await asyncpg.connect(dsn, timeout=CONNECT_SECONDS, statement_cache_size=0)
    try:
        await connection.execute(f"SET lock_timeout = {LOCK_MS}")
        await connection.execute(f"ANALYZE {', '.join(tables)}", timeout=ANALYZE_SECONDS)
    finally:
        await connection.close(timeout=CONNECT_SECONDS)
