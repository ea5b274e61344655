"""Limits of tenants and of keys, what has been used of them, and how long tenants' idle sessions are kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from datetime import datetime

from asyncpg import Record

from tersely.domain.limits import LIMIT_NAMES, Grant, Limits, TotalUse, UseRequest, grant
from tersely.store.db.connection import Database, to_json
from tersely.store.history import model_views

# Across tenants: with this setting a transaction may see these rows, and nothing else.
LIST = "SET LOCAL app.list_limits = 'on'"
ALL = "SELECT tenant_id, retention_days FROM tenant_limits WHERE retention_days IS NOT NULL ORDER BY tenant_id"
SET = """
INSERT INTO tenant_limits (tenant_id, retention_days, updated_at) VALUES ($1, $2, $3)
ON CONFLICT (tenant_id) DO UPDATE SET retention_days = excluded.retention_days, updated_at = excluded.updated_at
"""
_COLUMNS = ", ".join(LIMIT_NAMES)
LIMITS = f"SELECT tenant_id, key_id, {_COLUMNS} FROM limits"
SET_LIMITS = f"""
INSERT INTO limits (tenant_id, key_id, {_COLUMNS}, updated_at) VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
ON CONFLICT (tenant_id, key_id) DO UPDATE SET {", ".join(f"{name} = excluded.{name}" for name in LIMIT_NAMES)},
    updated_at = excluded.updated_at
"""
UNSET_LIMITS = "DELETE FROM limits WHERE tenant_id = $1 AND key_id = $2"
HELD_USE = "SELECT record FROM limit_use WHERE tenant_id = $1 AND key_id = $2 FOR UPDATE"
# The first transaction creates the row; others find it.
NEW_USE = "INSERT INTO limit_use (tenant_id, key_id, record, updated_at) VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING"
SET_USE = "UPDATE limit_use SET record = $3, updated_at = $4 WHERE tenant_id = $1 AND key_id = $2"
USE_OF_MANY = "SELECT tenant_id, key_id, record FROM limit_use WHERE tenant_id = ANY ($1)"
RETENTIONS_OF_MANY = """
SELECT tenant_id, retention_days FROM tenant_limits WHERE tenant_id = ANY ($1) AND retention_days IS NOT NULL
"""
TENANTS = """
SELECT tenant_id, created_at FROM tenants WHERE tenant_id > $1 ORDER BY tenant_id LIMIT $2
"""
TENANT = "SELECT created_at FROM tenants WHERE tenant_id = $1"
ADD_TENANT = "INSERT INTO tenants (tenant_id, created_at) VALUES ($1, $2) ON CONFLICT DO NOTHING RETURNING tenant_id"
# Only lengths are read, not values. All other stored data is small in comparison.
STORED = f"""
SELECT (SELECT coalesce(sum(octet_length(raw) + coalesce({model_views.model_size()}, 0)), 0) FROM messages
        WHERE tenant_id = $1)
     + (SELECT coalesce(sum(octet_length(raw)), 0) FROM attributes WHERE tenant_id = $1)
"""
# How long measuring what a tenant has stored may take, in seconds.
MEASURE_LIMIT = 60.0


@dataclass(frozen=True, slots=True, order=True)
class LimitHolder:
    """The holder of limits: a tenant, or one of its keys. ``key_id`` is empty for the tenant itself."""

    tenant: str
    key_id: str = ""


async def retentions(database: Database) -> dict[str, int]:
    """Return the days after which each tenant's idle sessions go; tenants without a number of their own are absent."""
    async with database.transaction("", is_anywhere=True) as connection:
        await connection.execute(LIST)
        return {row["tenant_id"]: row["retention_days"] for row in await connection.fetch(ALL)}


async def set_retention(database: Database, tenant: str, days: int | None, now: datetime) -> None:
    """Set a tenant's retention; None: as the service is configured."""
    async with database.transaction(tenant, is_everywhere=True) as connection:
        await connection.execute(SET, tenant, days, now)


def _limits(row: Record) -> Limits:
    return Limits(**{name: row[name] for name in LIMIT_NAMES})


async def read_all(database: Database) -> dict[LimitHolder, Limits]:
    """Return the limits of everybody who has some. O(their number)."""
    async with database.transaction("", is_anywhere=True) as connection:
        await connection.execute(LIST)
        return {LimitHolder(row["tenant_id"], row["key_id"]): _limits(row) for row in await connection.fetch(LIMITS)}


async def read_tenants(
    database: Database, tenants: Sequence[str]
) -> tuple[dict[LimitHolder, Limits], dict[LimitHolder, TotalUse], dict[str, int]]:
    """Return limits, use and retentions of several tenants, and of their keys. For the operator alone."""
    async with database.transaction("") as connection:
        await connection.execute(LIST)
        limits = await connection.fetch(LIMITS + " WHERE tenant_id = ANY ($1)", tenants)
        used = await connection.fetch(USE_OF_MANY, tenants)
        kept = await connection.fetch(RETENTIONS_OF_MANY, tenants)
    return (
        {LimitHolder(row["tenant_id"], row["key_id"]): _limits(row) for row in limits},
        {LimitHolder(row["tenant_id"], row["key_id"]): _use(row["record"]) for row in used},
        {row["tenant_id"]: row["retention_days"] for row in kept},
    )


async def write(database: Database, subject: LimitHolder, limits: Limits, now: datetime) -> None:
    """Set the limits of a tenant or of a key."""
    async with database.transaction(subject.tenant, is_everywhere=True) as connection:
        if limits.is_empty:
            await connection.execute(UNSET_LIMITS, subject.tenant, subject.key_id)
        else:
            await connection.execute(SET_LIMITS, subject.tenant, subject.key_id, *astuple(limits), now)


async def take(
    database: Database,
    subject: LimitHolder,
    limits: Limits,
    ask: UseRequest,
    now: datetime,
    *,
    measures: float | None = None,
) -> tuple[Grant, bool]:
    """Take a worker's part of the limits. ``measures``: stored bytes are measured again after this many seconds.

    Return the grant, and whether this worker must now measure the stored bytes.
    """
    async with database.transaction(subject.tenant) as connection:
        record = await connection.fetchval(HELD_USE, subject.tenant, subject.key_id)
        if record is None:
            await connection.execute(NEW_USE, subject.tenant, subject.key_id, to_json(TotalUse().to_json()), now)
            record = await connection.fetchval(HELD_USE, subject.tenant, subject.key_id)
        granted = grant(_use(record), limits, ask, now)
        use = granted.use
        is_due = measures is not None and use.measured + measures <= use.newest and use.measuring <= use.newest
        if is_due:
            use.measuring = use.newest + MEASURE_LIMIT
        await connection.execute(SET_USE, subject.tenant, subject.key_id, to_json(use.to_json()), now)
    return granted, is_due


async def measure_stored(database: Database, tenant: str) -> int:
    """Return the bytes of the messages that are stored of a tenant. O(their number)."""
    async with database.transaction(tenant, limit=MEASURE_LIMIT) as connection:
        return int(await connection.fetchval(STORED, tenant))


async def note_stored(database: Database, subject: LimitHolder, size: int, now: datetime) -> None:
    """Write down what a tenant was found to have stored."""
    async with database.transaction(subject.tenant) as connection:
        record = await connection.fetchval(HELD_USE, subject.tenant, subject.key_id)
        use = (_use(record) if record is not None else TotalUse()).at(now)
        use.stored, use.measured, use.measuring = size, use.newest, 0.0
        if record is None:
            await connection.execute(NEW_USE, subject.tenant, subject.key_id, to_json(use.to_json()), now)
        else:
            await connection.execute(SET_USE, subject.tenant, subject.key_id, to_json(use.to_json()), now)


async def list_tenants(database: Database, after: str, limit: int) -> Sequence[tuple[str, datetime]]:
    """Return the tenants that the operator made, with when, in the order of their names."""
    async with database.transaction("") as connection:
        await connection.execute(LIST)
        return [(row["tenant_id"], row["created_at"]) for row in await connection.fetch(TENANTS, after, limit)]


async def tenant_since(database: Database, tenant: str) -> datetime | None:
    """Return the creation time of a tenant; None if it does not exist."""
    async with database.transaction(tenant) as connection:
        since: datetime | None = await connection.fetchval(TENANT, tenant)
    return since


async def add_tenant(database: Database, tenant: str, now: datetime) -> bool:
    """Make a tenant without keys; False where it is there already."""
    async with database.transaction(tenant, is_everywhere=True) as connection:
        return await connection.fetchval(ADD_TENANT, tenant, now) is not None


def _use(record: bytes) -> TotalUse:
    return TotalUse.from_json(json.loads(record))
