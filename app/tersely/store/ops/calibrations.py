"""The calibrations of models, shared by all workers: each row is what one tenant's calls taught."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import asyncpg

from tersely.store.db.connection import Database, refusal

SAVE = """
INSERT INTO calibrations (tenant_id, model, ratio, samples, updated_at)
SELECT $1, model, ratio, samples, $5 FROM unnest($2::text[], $3::float8[], $4::bigint[]) AS n (model, ratio, samples)
ON CONFLICT (tenant_id, model) DO UPDATE
SET ratio = excluded.ratio, samples = excluded.samples, updated_at = excluded.updated_at
"""
CHANGED = """
SELECT tenant_id, model, ratio, samples, updated_at FROM calibrations
WHERE updated_at > $1 ORDER BY updated_at DESC LIMIT $2
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCalibration:
    """A model's calibration by the calls of a tenant."""

    tenant: str
    model: str
    ratio: float
    samples: int
    updated_at: datetime


async def save(database: Database, tenant: str, learnt: Sequence[StoredCalibration], now: datetime) -> None:
    """Store what a tenant's calls taught. Raises `StoreUnavailable`, `StoreRefused`."""
    ordered = sorted(learnt, key=lambda each: each.model)
    models, ratios = [each.model for each in ordered], [each.ratio for each in ordered]
    try:
        async with database.transaction(tenant) as connection:
            await connection.execute(SAVE, tenant, models, ratios, [each.samples for each in ordered], now)
    except asyncpg.PostgresError as error:
        raise refusal(error) from error


async def changed_since(database: Database, since: datetime, *, limit: int) -> list[StoredCalibration]:
    """Return what was stored since then, for all tenants, the newest first. Raises as `save`."""
    try:
        async with database.transaction("") as connection:
            await connection.execute("SET LOCAL app.list_calibrations = 'on'")
            records = await connection.fetch(CHANGED, since, limit)
    except asyncpg.PostgresError as error:  # a schema that is not migrated yet
        raise refusal(error) from error
    return [
        StoredCalibration(
            tenant=each["tenant_id"],
            model=each["model"],
            ratio=each["ratio"],
            samples=each["samples"],
            updated_at=each["updated_at"],
        )
        for each in records
    ]
