"""Scratchpads: the free text of a session."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from tersely.store.db.connection import Connection

GET = "SELECT text, updated_at FROM scratchpads WHERE tenant_id = $1 AND session_id = $2"
PUT = """
INSERT INTO scratchpads (tenant_id, session_id, updated_at, text) VALUES ($1, $2, $3, $4)
ON CONFLICT (tenant_id, session_id) DO UPDATE SET updated_at = excluded.updated_at, text = excluded.text
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratchpad:
    """A session's scratchpad, and when it was written. An empty one may never have been written."""

    text: str = ""
    updated_at: datetime | None = None


async def get(connection: Connection, tenant: str, session_id: str) -> Scratchpad:
    """Return the scratchpad of the session."""
    record = await connection.fetchrow(GET, tenant, session_id)
    if record is None:
        return Scratchpad()
    return Scratchpad(text=record["text"].decode("utf-8", "replace"), updated_at=record["updated_at"])


async def put(connection: Connection, tenant: str, session_id: str, text: str, now: datetime) -> Scratchpad:
    """Replace the scratchpad. The session must exist."""
    await connection.execute(PUT, tenant, session_id, now, text.encode("utf-8", "replace"))
    return Scratchpad(text=text, updated_at=now)
