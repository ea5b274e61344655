"""Marks on single messages: pinned, and how important."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from msgspec import structs

from tersely.domain.history.sessions import Session
from tersely.store.db.connection import Connection
from tersely.store.history.sessions import write_epoch

HERE = "tenant_id = $1 AND session_id = $2 AND seq = $3"
PIN = f"UPDATE messages SET pinned = $4 WHERE {HERE}"
SET_PRIORITY = f"UPDATE messages SET priority = $4 WHERE {HERE}"
TOUCH = """
UPDATE sessions SET edited = edited OR $4 = 1, edits = edits + $4::integer, version = version + 1, updated_at = $3
WHERE tenant_id = $1 AND id = $2
"""
KEEP = "UPDATE sessions SET plan = $3 WHERE tenant_id = $1 AND id = $2"


async def pin(connection: Connection, tenant: str, session: Session, seq: int, now: datetime, *, pinned: bool) -> None:
    """Pin a message, or let it go. The session must be locked."""
    await connection.execute(PIN, tenant, session.id, seq, pinned)
    await connection.execute(TOUCH, tenant, session.id, now, 1)


async def keep(connection: Connection, tenant: str, session: Session, seqs: Iterable[int]) -> None:
    """The messages before the cut that the next epoch looks at. The session must be locked, and have an epoch."""
    assert session.plan is not None
    plan = structs.replace(session.plan, kept=tuple(sorted(seqs)))
    await connection.execute(KEEP, tenant, session.id, write_epoch(plan))


async def set_priority(
    connection: Connection, tenant: str, session: Session, seq: int, priority: int, now: datetime, *, edits: bool
) -> None:
    """Set the priority of a message. ``edits``: contexts must change. The session must be locked."""
    await connection.execute(SET_PRIORITY, tenant, session.id, seq, priority)
    await connection.execute(TOUCH, tenant, session.id, now, int(edits))
