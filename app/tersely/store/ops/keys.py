"""Tersely's own keys. Only the SHA-256 of a secret is stored: the secret is random, so no slower hash is needed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from asyncpg import Record

from tersely.store.db.connection import TENANT, Database


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key without its secret. ``scope``: what it permits, None: everything. ``expires_at`` None: never. ``client``:
    the only client that may use it.
    """

    id: str
    tenant: str
    label: str
    secret_hash: bytes
    created_at: datetime
    revoked_at: datetime | None
    scope: str | None = None
    expires_at: datetime | None = None
    client: str | None = None

    def is_valid(self, now: datetime) -> bool:
        """Return whether the key is neither revoked nor expired."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


COLUMNS = "id, tenant_id, label, secret_hash, created_at, revoked_at, scope, expires_at, client"
FIND = f"SELECT {COLUMNS} FROM keys WHERE id = $1"
LIST = f"SELECT {COLUMNS} FROM keys WHERE tenant_id = $1 ORDER BY created_at, id"
LIST_ALL = f"SELECT {COLUMNS} FROM keys ORDER BY tenant_id, created_at, id"
VALID_AMONG = "SELECT id FROM keys WHERE id = ANY($1::text[]) AND revoked_at IS NULL"
REVOKE = "UPDATE keys SET revoked_at = $3 WHERE tenant_id = $1 AND id = $2 AND revoked_at IS NULL RETURNING id"
ADD_TENANT = "INSERT INTO tenants (tenant_id, created_at) VALUES ($1, $2) ON CONFLICT DO NOTHING"
ADD = """
INSERT INTO keys (tenant_id, id, secret_hash, label, created_at, scope, expires_at, client)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
"""


def _key(record: Record) -> ApiKey:
    return ApiKey(
        id=record["id"],
        tenant=record["tenant_id"],
        label=record["label"],
        secret_hash=record["secret_hash"],
        created_at=record["created_at"],
        revoked_at=record["revoked_at"],
        scope=record["scope"],
        expires_at=record["expires_at"],
        client=record["client"],
    )


async def find(database: Database, key_id: str) -> ApiKey | None:
    """Return the key with that id, of any tenant: a request's key is looked up before its tenant is known."""
    async with database.transaction("", key_id=key_id, is_anywhere=True) as connection:
        record = await connection.fetchrow(FIND, key_id)
    return None if record is None else _key(record)


async def valid_among(database: Database, key_ids: Collection[str]) -> set[str]:
    """Return those ids whose keys are there and not revoked, of any tenant."""
    async with database.transaction("", is_anywhere=True) as connection:
        await connection.execute("SET LOCAL app.list_keys = 'on'")
        return {record["id"] for record in await connection.fetch(VALID_AMONG, list(key_ids))}


async def add(database: Database, key: ApiKey) -> None:
    """Store a new key, and its tenant with its first one."""
    async with database.transaction(key.tenant, is_everywhere=True) as connection:
        await connection.execute(ADD_TENANT, key.tenant, key.created_at)
        narrowed = (key.scope, key.expires_at, key.client)
        await connection.execute(ADD, key.tenant, key.id, key.secret_hash, key.label, key.created_at, *narrowed)


async def of_tenant(database: Database, tenant: str) -> list[ApiKey]:
    """Return a tenant's keys, oldest first."""
    async with database.transaction(tenant) as connection:
        return [_key(record) for record in await connection.fetch(LIST, tenant)]


async def of_all_tenants(database: Database) -> list[ApiKey]:
    """Everybody's keys, by tenant, oldest first. For the operator's command alone."""
    async with database.transaction("") as connection:
        await connection.execute("SET LOCAL app.list_keys = 'on'")
        return [_key(record) for record in await connection.fetch(LIST_ALL)]


async def tenant_of(database: Database, key_id: str) -> str | None:
    """Return the tenant of a key."""
    key = await find(database, key_id) if TENANT.fullmatch(key_id) else None
    return None if key is None else key.tenant


async def revoke(database: Database, tenant: str, key_id: str, now: datetime) -> bool:
    """Revoke a key; False when the tenant has no such valid key."""
    async with database.transaction(tenant, is_everywhere=True) as connection:
        return await connection.fetchval(REVOKE, tenant, key_id, now) is not None
