"""Ids of objects that a tenant created at a provider. Tenants of a shared account may only name their own."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from tersely.store.db.connection import Connection

KNOWN = """
SELECT id FROM reply_ids WHERE tenant_id = $1 AND id = ANY($2::text[])
UNION SELECT id FROM provider_ids WHERE tenant_id = $1 AND id = ANY($2::text[])
"""
ADD = """
INSERT INTO provider_ids (tenant_id, id, created_at) SELECT $1, given.id, $3 FROM unnest($2::text[]) AS given (id)
ON CONFLICT DO NOTHING
"""


async def known(connection: Connection, tenant: str, ids: Sequence[str]) -> set[str]:
    """Return those of ``ids`` that belong to the tenant."""
    return {row["id"] for row in await connection.fetch(KNOWN, tenant, list(ids))}


async def add(connection: Connection, tenant: str, ids: Sequence[str], now: datetime) -> None:
    """Store ``ids`` as the tenant's."""
    await connection.execute(ADD, tenant, list(ids), now)
