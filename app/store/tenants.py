"""Tenants: forgetting one."""

from __future__ import annotations

from app.store.connection import Database
from app.store.sessions import WITHOUT_KEY

SESSIONS = "DELETE FROM sessions WHERE tenant_id = $1"
MEMORY = "DELETE FROM memory WHERE tenant_id = $1"
BREAKERS = "DELETE FROM breakers WHERE tenant_id = $1"
KEYS = "DELETE FROM keys WHERE tenant_id = $1"
TENANT = "DELETE FROM tenants WHERE tenant_id = $1"


async def forget(database: Database, tenant: str) -> None:
    """Remove a tenant with everything that is its own. Takes as long as it has sessions."""
    async with database.transaction(tenant, limit=300) as connection:
        rest = [f"DELETE FROM {table} WHERE tenant_id = $1" for table in WITHOUT_KEY]
        for statement in (SESSIONS, *rest, MEMORY, BREAKERS, KEYS, TENANT):
            await connection.execute(statement, tenant)
