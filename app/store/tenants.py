"""Tenants: forgetting one."""

from __future__ import annotations

from app.store.connection import Database

SESSIONS = "DELETE FROM sessions WHERE tenant_id = $1"
MEMORY = "DELETE FROM memory WHERE tenant_id = $1"
BREAKERS = "DELETE FROM breakers WHERE tenant_id = $1"
KEYS = "DELETE FROM keys WHERE tenant_id = $1"
TENANT = "DELETE FROM tenants WHERE tenant_id = $1"


async def forget(database: Database, tenant: str) -> None:
    """Remove a tenant with everything that is its own. Takes as long as it has sessions."""
    async with database.transaction(tenant, limit=300) as connection:
        for statement in (SESSIONS, MEMORY, BREAKERS, KEYS, TENANT):
            await connection.execute(statement, tenant)
