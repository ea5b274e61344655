"""Limits of tenants: how long their idle sessions are kept."""

from __future__ import annotations

from datetime import datetime

from tersely.store.db.connection import Database

# Across tenants: a transaction that says so may see these rows, and nothing else.
LIST = "SET LOCAL app.list_limits = 'on'"
ALL = "SELECT tenant_id, retention_days FROM tenant_limits WHERE retention_days IS NOT NULL ORDER BY tenant_id"
SET = """
INSERT INTO tenant_limits (tenant_id, retention_days, updated_at) VALUES ($1, $2, $3)
ON CONFLICT (tenant_id) DO UPDATE SET retention_days = excluded.retention_days, updated_at = excluded.updated_at
"""


async def retentions(database: Database) -> dict[str, int]:
    """Return the days after which each tenant's idle sessions go; tenants without a number of their own are absent."""
    async with database.transaction("") as connection:
        await connection.execute(LIST)
        return {row["tenant_id"]: row["retention_days"] for row in await connection.fetch(ALL)}


async def set_retention(database: Database, tenant: str, days: int | None, now: datetime) -> None:
    """Set a tenant's retention; None: as the service is configured."""
    async with database.transaction(tenant) as connection:
        await connection.execute(SET, tenant, days, now)
