"""Find and delete sessions that have been idle for long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from tersely.store.db.connection import Database
from tersely.store.history.sessions import WITHOUT_KEY

# Across tenants: with this setting a transaction may see the sessions' rows, and nothing else.
LIST = "SET LOCAL app.list_sessions = 'on'"
# From one tenant to the next by the primary key, whatever the number of sessions.
TENANTS = """
WITH RECURSIVE t AS (
    (SELECT tenant_id FROM sessions ORDER BY tenant_id LIMIT 1)
    UNION ALL
    SELECT (SELECT s.tenant_id FROM sessions s WHERE s.tenant_id > t.tenant_id ORDER BY s.tenant_id LIMIT 1)
    FROM t WHERE t.tenant_id IS NOT NULL
)
SELECT tenant_id FROM t WHERE tenant_id IS NOT NULL
"""
# A distributed Postgres has no recursion over tenants.
TENANTS_OF_NODES = "SELECT DISTINCT tenant_id FROM sessions ORDER BY tenant_id"
# A session idle since then is at least that old: the index by age finds it without an update at each call.
IDLE = """
SELECT id, COALESCE(strategy, last_strategy) AS strategy, updated_at, created_at FROM sessions
WHERE tenant_id = $1 AND created_at < $2 AND (created_at, id) < ($3, $4) AND updated_at < $2
ORDER BY created_at DESC, id DESC LIMIT $5
"""
STILL_IDLE = """
SELECT id FROM sessions WHERE tenant_id = $1 AND id = ANY ($2) AND updated_at < $3 ORDER BY id FOR UPDATE SKIP LOCKED
"""
ORPHAN = "UPDATE sessions SET parent = NULL, version = version + 1 WHERE tenant_id = $1 AND parent = ANY ($2)"
DELETE = "DELETE FROM sessions WHERE tenant_id = $1 AND id = ANY ($2)"
# Grants the lease to the first that asks, to its holder, or to anybody once it has expired.
TAKE_LEASE = """
INSERT INTO service_leases (name, holder, until) VALUES ($1, $2, $3)
ON CONFLICT (name) DO UPDATE SET holder = excluded.holder, until = excluded.until
WHERE service_leases.holder = excluded.holder OR service_leases.until <= $4
RETURNING holder
"""
# Nobody's lease: it keeps the next cleanup from starting too early.
END_LEASE = "UPDATE service_leases SET holder = '', until = $3 WHERE name = $1 AND holder = $2"
DELETE_LIMIT = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleSession:
    """A session and the time of its last write. ``strategy``: its own, or that of its last call's headers."""

    id: str
    strategy: str | None
    updated_at: datetime
    created_at: datetime


async def tenants(database: Database) -> list[str]:
    """Return every tenant that has sessions."""
    is_distributed = await database.is_distributed()
    async with database.transaction("", limit=DELETE_LIMIT if is_distributed else None) as connection:
        await connection.execute(LIST)
        return [row["tenant_id"] for row in await connection.fetch(TENANTS_OF_NODES if is_distributed else TENANTS)]


async def idle(
    database: Database, tenant: str, before: datetime, *, older_than: tuple[datetime, str], limit: int
) -> list[IdleSession]:
    """Return a tenant's sessions without a write since ``before``, youngest first.

    ``older_than``: creation time and id of the session after which the list continues.
    """
    async with database.transaction(tenant, limit=DELETE_LIMIT) as connection:
        records = await connection.fetch(IDLE, tenant, before, *older_than, limit)
    return [
        IdleSession(id=r["id"], strategy=r["strategy"], updated_at=r["updated_at"], created_at=r["created_at"])
        for r in records
    ]


async def delete_idle(database: Database, tenant: str, ids: Sequence[str], before: datetime) -> int:
    """Delete those sessions that have not been used meanwhile, with all their data. Return their number."""
    async with database.transaction(tenant, limit=DELETE_LIMIT) as connection:
        still = [row["id"] for row in await connection.fetch(STILL_IDLE, tenant, ids, before)]
        if still:
            for table in WITHOUT_KEY:
                statement = f"DELETE FROM {table} WHERE tenant_id = $1 AND session_id = ANY ($2)"
                await connection.execute(statement, tenant, still)
            await connection.execute(DELETE, tenant, still)
            await connection.execute(ORPHAN, tenant, still)
    return len(still)


async def take_lease(database: Database, holder: str, *, until: datetime, now: datetime) -> bool:
    """Take or prolong the cleaner's lease; False while another replica holds it."""
    async with database.transaction("") as connection:
        return await connection.fetchval(TAKE_LEASE, "cleanup", holder, until, now) is not None


async def end_lease(database: Database, holder: str, *, until: datetime) -> None:
    """End the cleaner's lease: nobody gets it before ``until``. A lease that another holds by now stays."""
    async with database.transaction("") as connection:
        await connection.execute(END_LEASE, "cleanup", holder, until)
