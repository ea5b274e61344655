"""Ids of objects that a tenant created at a provider. Tenants of a shared account may only name their own.

Ids of a client's own choice are stored as well, as marks that they are not the tenant's by having been listed. A mark
is stored for the tenant while its call runs, and then for the call's session, with which it is deleted. Marks of calls
without a session stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from tersely.store.db.connection import Connection

KNOWN = """
SELECT id FROM reply_ids WHERE tenant_id = $1 AND id = ANY($2::text[])
UNION SELECT id FROM provider_ids WHERE tenant_id = $1 AND id = ANY($2::text[])
UNION SELECT id FROM session_provider_ids WHERE tenant_id = $1 AND id = ANY($2::text[])
"""
ADD = """
INSERT INTO provider_ids (tenant_id, id, created_at) SELECT $1, given.id, $3 FROM unnest($2::text[]) AS given (id)
ON CONFLICT DO NOTHING
"""
OF_SESSIONS = """
SELECT DISTINCT s.id FROM reply_ids r JOIN session_provider_ids s ON s.tenant_id = $1 AND s.session_id = r.session_id
WHERE r.tenant_id = $1 AND r.id = ANY($2::text[])
"""
# A session that is being deleted keeps the marks from being moved to it.
LOCK = "SELECT true FROM sessions WHERE tenant_id = $1 AND id = $2 FOR KEY SHARE"
ADD_TO_SESSION = """
INSERT INTO session_provider_ids (tenant_id, session_id, id)
SELECT $1, $2, given.id FROM unnest($3::text[]) AS given (id)
ON CONFLICT DO NOTHING
"""
DELETE = "DELETE FROM provider_ids WHERE tenant_id = $1 AND id = ANY($2::text[])"


async def known(connection: Connection, tenant: str, ids: Sequence[str]) -> set[str]:
    """Return those of ``ids`` that belong to the tenant."""
    return {row["id"] for row in await connection.fetch(KNOWN, tenant, list(ids))}


async def add(connection: Connection, tenant: str, ids: Sequence[str], now: datetime) -> None:
    """Store ``ids`` as the tenant's."""
    await connection.execute(ADD, tenant, list(ids), now)


async def of_sessions(connection: Connection, tenant: str, reply_ids: Sequence[str]) -> list[str]:
    """Return the ids that belong to the sessions of these replies."""
    return [row["id"] for row in await connection.fetch(OF_SESSIONS, tenant, list(reply_ids))]


async def move_to_session(connection: Connection, tenant: str, session_id: str, ids: Sequence[str]) -> bool:
    """Store ``ids`` as the session's instead of the tenant's; False if there is no such session."""
    if await connection.fetchval(LOCK, tenant, session_id) is None:
        return False
    await connection.execute(ADD_TO_SESSION, tenant, session_id, list(ids))
    await connection.execute(DELETE, tenant, list(ids))
    return True
