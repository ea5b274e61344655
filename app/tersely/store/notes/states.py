"""State blocks: the session's state as written by the model, or by a client in its place.

A state shares the status of its message. If that was superseded, dropped or undone, the state before it is the newest
again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

from asyncpg import Record

from tersely.domain.text.state import StateBlock, StateSource
from tersely.store.db.connection import Connection

# Late replies stand between older messages, so the last states are sorted by position. The search starts at the end, so
# that it costs the same in every session.
NEWEST = """
SELECT seq, source, created_at, text FROM (
    SELECT s.seq, s.number, s.source, s.created_at, s.text, COALESCE(m.place, 0) AS place
    FROM states s
    LEFT JOIN messages m ON m.tenant_id = s.tenant_id AND m.session_id = s.session_id AND m.seq = s.seq
    WHERE s.tenant_id = $1 AND s.session_id = $2
      AND (s.seq = 0 OR (m.status = 'live' AND s.seq <> ALL ($3::bigint[])) OR s.seq = ANY ($4::bigint[]))
      AND (s.source <> 'rebuilt' OR NOT s.seq >= ANY ($3::bigint[]))
    ORDER BY s.seq DESC, s.number DESC LIMIT 64
) AS last ORDER BY place DESC, seq DESC, number DESC LIMIT 1
"""
HISTORY = """
SELECT s.seq, s.number, s.source, s.created_at, s.text, COALESCE(m.status = 'live', true) AS is_live
FROM states s
LEFT JOIN messages m ON m.tenant_id = s.tenant_id AND m.session_id = s.session_id AND m.seq = s.seq
WHERE s.tenant_id = $1 AND s.session_id = $2 AND (s.seq, s.number) > ($3, $4)
ORDER BY s.seq, s.number LIMIT $5
"""
LAST_LIVE = """
SELECT COALESCE(max(seq), 0) FROM (
    SELECT seq FROM messages WHERE tenant_id = $1 AND session_id = $2 AND status = 'live' ORDER BY seq DESC LIMIT 1
) AS newest
"""
ADD = """
INSERT INTO states (tenant_id, session_id, seq, number, source, created_at, text)
SELECT $1, $2, $3, COALESCE(max(number) + 1, 0), $4, $5, $6 FROM states
WHERE tenant_id = $1 AND session_id = $2 AND seq = $3
"""
ADD_FOUND = """
INSERT INTO states (tenant_id, session_id, seq, number, source, created_at, text)
SELECT $1, $2, u.seq, 0, u.source, u.created_at, u.text
FROM unnest($3::bigint[], $4::text[], $5::timestamptz[], $6::bytea[]) AS u (seq, source, created_at, text)
ON CONFLICT DO NOTHING
"""
FORGET_REBUILT = """
DELETE FROM states WHERE tenant_id = $1 AND session_id = $2 AND source = 'rebuilt' AND seq >= $3
"""
FORGET = "DELETE FROM states WHERE tenant_id = $1 AND session_id = $2 AND seq = ANY($3::bigint[])"

# Sequence number, number within the message: where a state stands in the history.
StateCursor = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PastState:
    """A state of the history; ``is_live``: its message still counts."""

    state: StateBlock
    position: StateCursor
    is_live: bool


async def newest(
    connection: Connection,
    tenant: str,
    session_id: str,
    *,
    without: Collection[int] = (),
    restored: Collection[int] = (),
) -> StateBlock | None:
    """Return the newest state that counts; its text may be empty where a client took the state away.

    ``without`` and ``restored`` are messages that a request under way hides and shows again.
    """
    record = await connection.fetchrow(NEWEST, tenant, session_id, list(without), list(restored))
    return None if record is None else _state(record)


async def history(
    connection: Connection, tenant: str, session_id: str, *, after: StateCursor = (-1, 0), limit: int
) -> list[PastState]:
    """Return all states in order, after the one at ``after``."""
    records = await connection.fetch(HISTORY, tenant, session_id, *after, limit)
    return [
        PastState(state=_state(record), position=(record["seq"], record["number"]), is_live=record["is_live"])
        for record in records
    ]


async def add(
    connection: Connection, tenant: str, session_id: str, text: str, source: StateSource, now: datetime
) -> StateBlock:
    """Add a state to the session's last live message. The session must be locked."""
    seq = await connection.fetchval(LAST_LIVE, tenant, session_id)
    await connection.execute(ADD, tenant, session_id, seq, source, now, text.encode("utf-8", "replace"))
    return StateBlock(text=text, seq=seq, source=source, created_at=now)


async def forget(connection: Connection, tenant: str, session_id: str, seqs: Sequence[int]) -> None:
    """Delete the states of these messages."""
    await connection.execute(FORGET, tenant, session_id, list(seqs))


async def add_found(connection: Connection, tenant: str, session_id: str, found: Sequence[StateBlock]) -> None:
    """Add states to messages that have none yet."""
    if not found:
        return
    columns = (
        [each.seq for each in found],
        [each.source for each in found],
        [each.created_at for each in found],
        [each.text.encode("utf-8", "replace") for each in found],
    )
    await connection.execute(ADD_FOUND, tenant, session_id, *columns)


async def forget_rebuilt(connection: Connection, tenant: str, session_id: str, since: int) -> None:
    """Delete the states that were made of the history, the message ``since`` perhaps included."""
    await connection.execute(FORGET_REBUILT, tenant, session_id, since)


def _state(record: Record) -> StateBlock:
    return StateBlock(
        text=record["text"].decode("utf-8", "replace"),
        seq=record["seq"],
        source=record["source"],
        created_at=record["created_at"],
    )
