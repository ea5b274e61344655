"""Circuit breakers: after repeated failures no replica calls a tenant's model for a while.

``failures`` counts consecutive failures. Each one above the threshold doubles the pause. After the pause the next call
is a trial: another failure extends the pause, a success removes it.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from tersely.store.db.connection import Connection

IS_OPEN = "SELECT open_until > $3 FROM breakers WHERE tenant_id = $1 AND name = $2"
FAIL = """
INSERT INTO breakers AS b (tenant_id, name, failures, open_until, updated_at)
VALUES ($1, $2, 1, NULL, $3)
ON CONFLICT (tenant_id, name) DO UPDATE SET failures = b.failures + 1, updated_at = excluded.updated_at
RETURNING failures
"""
OPEN = """
UPDATE breakers SET open_until = greatest(open_until, $3) WHERE tenant_id = $1 AND name = $2
"""
RESET = "DELETE FROM breakers WHERE tenant_id = $1 AND name = $2"

THRESHOLD = 3
PAUSE = timedelta(minutes=1)
LONGEST = timedelta(hours=1)


async def is_open(connection: Connection, tenant: str, name: str, now: datetime) -> bool:
    """Return whether ``name`` is not to be asked now."""
    return bool(await connection.fetchval(IS_OPEN, tenant, name, now))


async def fail(connection: Connection, tenant: str, name: str, now: datetime) -> bool:
    """Count a failure; whether the breaker is open from here on."""
    failures: int = await connection.fetchval(FAIL, tenant, name, now)
    if failures < THRESHOLD:
        return False
    pause = min(LONGEST, PAUSE * 2 ** min(failures - THRESHOLD, 16))
    await connection.execute(OPEN, tenant, name, now + pause)
    return True


async def reset(connection: Connection, tenant: str, name: str) -> None:
    """Forget the failures after a success."""
    await connection.execute(RESET, tenant, name)
