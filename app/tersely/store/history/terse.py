"""The terse log: one line or more about each turn."""

from __future__ import annotations

from asyncpg import Record

from tersely.domain.history.history import EpochInputs, TerseEntry
from tersely.store.db.connection import Connection

# Of more entries than this, the older ones are counted, not loaded: planning costs the same in every session.
NEWEST = 400

# An entry shares the status of its message. There is no join, which could be planned as a scan of all messages.
LIVE = """
SELECT t.turn, t.seq, t.number, t.role, t.source, t.created_at, t.text FROM terse t
WHERE t.tenant_id = $1 AND t.session_id = $2 AND 'live' = (
    SELECT m.status FROM messages m WHERE m.tenant_id = $1 AND m.session_id = $2 AND m.seq = t.seq
)
"""
NEWEST_ENTRIES = LIVE + " ORDER BY t.turn DESC, t.seq DESC, t.number DESC LIMIT $3"
ALL_ENTRIES = LIVE + " AND (t.turn, t.seq, t.number) > ($3, $4, $5) ORDER BY t.turn, t.seq, t.number LIMIT $6"


def _entry(record: Record) -> TerseEntry:
    return TerseEntry(
        turn=record["turn"],
        seq=record["seq"],
        role=record["role"],
        text=record["text"].decode("utf-8", "replace"),
        source=record["source"],
        created_at=record["created_at"],
    )


async def log_inputs(connection: Connection, tenant: str, session_id: str) -> EpochInputs:
    """Return the log's inputs for a new epoch: the newest entries, and how many turns precede them."""
    records = await connection.fetch(NEWEST_ENTRIES, tenant, session_id, NEWEST)
    entries = tuple(_entry(record) for record in reversed(records))
    if len(entries) < NEWEST:
        return EpochInputs(terse=entries)
    return EpochInputs(terse=entries, older_turns=max(0, entries[0].turn - 1), oldest_at=entries[0].created_at)


# Turn, sequence number, number within the message: where an entry stands in the log.
LogCursor = tuple[int, int, int]


async def log_page(
    connection: Connection, tenant: str, session_id: str, *, after: LogCursor = (0, 0, 0), limit: int
) -> list[tuple[LogCursor, TerseEntry]]:
    """Live entries in order with their cursors, after the one at ``after``."""
    records = await connection.fetch(ALL_ENTRIES, tenant, session_id, *after, limit)
    return [((record["turn"], record["seq"], record["number"]), _entry(record)) for record in records]
