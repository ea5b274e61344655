"""Marks that say: a process has exchanges of a tenant in its spool, which the database lacks.

A mark is a row of ``replays`` under an id that no exchange has. It counts until the time that stands in it, so that the
marks of processes that never come back end by themselves.
"""

from __future__ import annotations

from datetime import datetime

from tersely.store.db.connection import Connection

_PREFIX = "waiting:"
MARK = """
INSERT INTO replays (tenant_id, id, session_id, created_at) VALUES ($1, $2, '', $3)
ON CONFLICT (tenant_id, id) DO UPDATE SET created_at = excluded.created_at
"""
UNMARK = "DELETE FROM replays WHERE tenant_id = $1 AND id = $2"
# A range of the primary key: ';' follows ':'.
FIND_OTHERS = """
SELECT id FROM replays
WHERE tenant_id = $1 AND id > 'waiting:' AND id < 'waiting;' AND id <> $2 AND created_at > $3 LIMIT 1
"""

FIND_UNCHANGED = """
SELECT 1 FROM sessions s WHERE s.tenant_id = $1 AND s.id = $2 AND s.version = $3 AND s.created_at = $4
AND NOT EXISTS (
    SELECT FROM replays r
    WHERE r.tenant_id = $1 AND r.id > 'waiting:' AND r.id < 'waiting;' AND r.id <> $5 AND r.created_at > $6
)
"""


async def mark(connection: Connection, tenant: str, process: str, until: datetime) -> None:
    """Mark the tenant until then, in the name of ``process``."""
    await connection.execute(MARK, tenant, _PREFIX + process, until)


async def unmark(connection: Connection, tenant: str, process: str) -> None:
    """Remove the mark of ``process``."""
    await connection.execute(UNMARK, tenant, _PREFIX + process)


async def is_marked_by_others(connection: Connection, tenant: str, process: str, now: datetime) -> bool:
    """Return whether another process than ``process`` has marked the tenant."""
    return await connection.fetchval(FIND_OTHERS, tenant, _PREFIX + process, now) is not None


async def is_unchanged(
    connection: Connection,
    tenant: str,
    session_id: str,
    version: int,
    created_at: datetime,
    process: str,
    now: datetime,
) -> bool:
    """Return whether a session has that version, and no other process than ``process`` has marked the tenant."""
    mark = _PREFIX + process
    return await connection.fetchval(FIND_UNCHANGED, tenant, session_id, version, created_at, mark, now) is not None
