"""Leases: one replica at a time works on a session. A lease is a row that expires; times are parameters."""

from __future__ import annotations

from datetime import datetime

from tersely.store.db.connection import Connection

# Grants the lease to the first that asks, to its holder, or to anybody once it has expired. None without a session.
TAKE = """
INSERT INTO leases (tenant_id, session_id, holder, until)
SELECT tenant_id, id, $3, $4 FROM sessions WHERE tenant_id = $1 AND id = $2
ON CONFLICT (tenant_id, session_id) DO UPDATE SET holder = excluded.holder, until = excluded.until
WHERE leases.holder = excluded.holder OR leases.until <= $5
RETURNING holder
"""
GIVE_BACK = "DELETE FROM leases WHERE tenant_id = $1 AND session_id = $2 AND holder = $3"


async def take(
    connection: Connection, tenant: str, session_id: str, holder: str, *, until: datetime, now: datetime
) -> bool:
    """Take or prolong a session's lease; False while another holds it, or when the session is not there."""
    return await connection.fetchval(TAKE, tenant, session_id, holder, until, now) is not None


async def give_back(connection: Connection, tenant: str, session_id: str, holder: str) -> None:
    """End a lease. A lease that another holder has by now stays."""
    await connection.execute(GIVE_BACK, tenant, session_id, holder)
