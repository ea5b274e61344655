"""The activity in all sessions of a tenant, by time."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import msgspec

from tersely.store.db.connection import Connection
from tersely.store.ops.calls import CallRow, finished_since

# Calls are found by the time of their beginning; so long may one take.
LONGEST = timedelta(hours=1)
EPOCHS = """
SELECT session_id, number, cut, reason, head_tokens, tokens_before, tokens_after, created_at FROM epochs
WHERE tenant_id = $1 AND created_at > $2 ORDER BY created_at LIMIT $3
"""
EVENTS = """
SELECT session_id, number, kind, created_at, body FROM events
WHERE tenant_id = $1 AND created_at > $2 ORDER BY created_at LIMIT $3
"""
RUNNING = """
SELECT s.id AS session_id, s.calls AS number, s.title, s.client, s.last_call_at AS created_at
FROM sessions s
WHERE s.tenant_id = $1 AND s.call_hour >= $3 AND s.last_call_at >= $2 AND s.calls > 0
  AND NOT EXISTS (SELECT FROM calls c WHERE c.tenant_id = $1 AND c.session_id = s.id AND c.number = s.calls)
ORDER BY s.last_call_at DESC LIMIT 100
"""

# A session, a time, and what happened.
ActivityEvent = tuple[str, datetime, dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCall:
    """A call that has begun and not ended."""

    session_id: str
    number: int
    title: str | None
    client: str | None
    created_at: datetime


async def finished(connection: Connection, tenant: str, after: datetime, limit: int) -> list[CallRow]:
    """Return calls that ended after that time."""
    return await finished_since(connection, tenant, begun=after - LONGEST, finished=after, limit=limit)


async def epochs(connection: Connection, tenant: str, after: datetime, limit: int) -> list[ActivityEvent]:
    """Return epochs that started after that time."""
    found = []
    for row in await connection.fetch(EPOCHS, tenant, after, limit):
        body = dict(row)
        session_id, at = body.pop("session_id"), body.pop("created_at")
        found.append((session_id, at, {"type": "epoch", **body}))
    return found


async def events(connection: Connection, tenant: str, after: datetime, limit: int) -> list[ActivityEvent]:
    """Events after that time."""
    return [
        (
            row["session_id"],
            row["created_at"],
            {**msgspec.json.decode(row["body"]), "type": row["kind"], "number": row["number"]},
        )
        for row in await connection.fetch(EVENTS, tenant, after, limit)
    ]


async def running(connection: Connection, tenant: str, since: datetime) -> list[StoredCall]:
    """Calls that began after ``since`` and have not ended."""
    hour = since.replace(minute=0, second=0, microsecond=0)
    return [StoredCall(**dict(row)) for row in await connection.fetch(RUNNING, tenant, since, hour)]
