"""Sessions that nobody has used for long."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from app.store import sessions
from app.store.connection import Database

# Across tenants: a transaction that says so may see the sessions' rows, and nothing else.
LIST = "SET LOCAL app.list_sessions = 'on'"
IDLE = """
SELECT tenant_id, id, strategy, updated_at FROM sessions
WHERE updated_at < $1 AND (updated_at, tenant_id, id) > ($2, $3, $4)
ORDER BY updated_at, tenant_id, id LIMIT $5
"""
STILL_IDLE = "SELECT id FROM sessions WHERE tenant_id = $1 AND id = $2 AND updated_at < $3 FOR UPDATE"


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleSession:
    """A session and when it was last written to; ``strategy`` is its own setting, if it has one."""

    tenant: str
    id: str
    strategy: str | None
    updated_at: datetime


# Where a list goes on: after the session of that time, tenant and id.
Place = tuple[datetime, str, str]


async def idle(database: Database, before: datetime, *, after: Place, limit: int) -> list[IdleSession]:
    """Sessions of all tenants that were not written to since ``before``, the longest idle ones first."""
    async with database.transaction("") as connection:
        await connection.execute(LIST)
        records = await connection.fetch(IDLE, before, *after, limit)
    return [
        IdleSession(tenant=r["tenant_id"], id=r["id"], strategy=r["strategy"], updated_at=r["updated_at"])
        for r in records
    ]


async def delete_idle(database: Database, session: IdleSession, before: datetime) -> bool:
    """Delete the session with everything of it; False when it has been used meanwhile."""
    async with database.transaction(session.tenant, limit=60) as connection:
        if await connection.fetchval(STILL_IDLE, session.tenant, session.id, before) is None:
            return False
        return await sessions.delete(connection, session.tenant, session.id)
