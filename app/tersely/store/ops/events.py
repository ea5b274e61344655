"""Events of a session that its messages do not show. Counts and names, never content."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from tersely.domain.errors import StoreUnavailable
from tersely.store.db.connection import Connection, to_json

HERE = "tenant_id = $1 AND session_id = $2"
ADD = f"""
INSERT INTO events (tenant_id, session_id, number, kind, created_at, body)
SELECT $1, $2, (SELECT coalesce(max(number), 0) + 1 FROM events WHERE {HERE}), $3, $4, $5
ON CONFLICT DO NOTHING RETURNING number
"""
AFTER = f"SELECT number, kind, created_at, body FROM events WHERE {HERE} AND number > $3 ORDER BY number LIMIT $4"

# Two events may want the same number; the later one takes the next.
TRIES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """``number`` counts a session's events from 1; ``body`` is the event's data."""

    number: int
    kind: str
    created_at: datetime
    body: dict[str, Any]


async def add(
    connection: Connection, tenant: str, session_id: str, kind: str, body: Mapping[str, object], now: datetime
) -> int:
    """Add an event; its number."""
    for _ in range(TRIES):
        number: int | None = await connection.fetchval(ADD, tenant, session_id, kind, now, to_json(body))
        if number is not None:
            return number
    raise StoreUnavailable("too many events at once")


async def after(connection: Connection, tenant: str, session_id: str, number: int, *, limit: int) -> list[Event]:
    """Events after that number, in order."""
    return [
        Event(
            number=record["number"],
            kind=record["kind"],
            created_at=record["created_at"],
            body=msgspec.json.decode(record["body"]),
        )
        for record in await connection.fetch(AFTER, tenant, session_id, number, limit)
    ]
