"""The terse log: one line or more about each turn."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from asyncpg import Record

from tersely.domain.history.history import LOG_ENTRIES, EpochInputs, TerseEntry
from tersely.store.db.connection import Connection
from tersely.store.history.messages import HERE, IS_EXCEPTION

# An entry shares the status of its message. There is no join, which could be planned as a scan of all messages.
STATUS = "(SELECT m.status FROM messages m WHERE m.tenant_id = $1 AND m.session_id = $2 AND m.seq = t.seq)"
ENTRIES = """
SELECT t.turn, t.seq, t.number, t.role, t.source, t.created_at, t.text FROM terse t
WHERE t.tenant_id = $1 AND t.session_id = $2
"""
NEWEST_OF_ALL = f"{ENTRIES} ORDER BY t.turn DESC, t.seq DESC, t.number DESC LIMIT $3"
# Of few messages the status is another one than live, and these have an index: looking each entry's message up takes
# longer than all else that an epoch reads.
ONE_OF_OTHERS = f"""
SELECT seq FROM messages WHERE {HERE} AND seq BETWEEN $3 AND $4 AND {IS_EXCEPTION} AND status <> 'live' LIMIT 1
"""
NEWEST_ENTRIES = f"""
{ENTRIES} AND (t.seq = ANY($4::bigint[]) OR {STATUS} = 'live')
ORDER BY t.turn DESC, t.seq DESC, t.number DESC LIMIT $3
"""
TOLD = f"""
SELECT DISTINCT seq FROM terse WHERE {HERE} AND turn = ANY($3::int[]) AND seq = ANY($4::bigint[])
"""
ALL_ENTRIES = f"""
{ENTRIES} AND {STATUS} = 'live' AND (t.turn, t.seq, t.number) > ($3, $4, $5) AND t.turn <= $7
ORDER BY t.turn, t.seq, t.number LIMIT $6
"""


def _entry(record: Record) -> TerseEntry:
    return TerseEntry(
        turn=record["turn"],
        seq=record["seq"],
        role=record["role"],
        text=record["text"].decode("utf-8", "replace"),
        source=record["source"],
        created_at=record["created_at"],
    )


async def log_inputs(
    connection: Connection, tenant: str, session_id: str, *, restored: Collection[int] = ()
) -> EpochInputs:
    """Return the log's inputs for a new epoch: the newest entries, and how many turns precede them.

    ``restored`` are superseded messages that a request under way returns to the history: their entries count too.
    """
    records = await connection.fetch(NEWEST_OF_ALL, tenant, session_id, LOG_ENTRIES)
    if not records:
        return EpochInputs()
    seqs = [record["seq"] for record in records]
    if await connection.fetchval(ONE_OF_OTHERS, tenant, session_id, min(seqs), max(seqs)) is not None:
        records = await connection.fetch(NEWEST_ENTRIES, tenant, session_id, LOG_ENTRIES, list(restored))
    entries = tuple(_entry(record) for record in reversed(records))
    if len(entries) < LOG_ENTRIES:
        return EpochInputs(terse=entries)
    return EpochInputs(terse=entries, older_turns=max(0, entries[0].turn - 1), oldest_at=entries[0].created_at)


async def told(connection: Connection, tenant: str, session_id: str, seqs: Mapping[int, int]) -> set[int]:
    """Return which messages, by turn, have entries."""
    records = await connection.fetch(TOLD, tenant, session_id, list(seqs), list(seqs.values()))
    return {record["seq"] for record in records}


# Turn, sequence number, number within the message: where an entry stands in the log.
LogCursor = tuple[int, int, int]


async def log_page(
    connection: Connection, tenant: str, session_id: str, *, after: LogCursor, limit: int, last_turn: int
) -> list[tuple[LogCursor, TerseEntry]]:
    """Return live entries in order with their cursors, after the one at ``after``, of turns up to ``last_turn``."""
    records = await connection.fetch(ALL_ENTRIES, tenant, session_id, *after, limit, last_turn)
    return [((record["turn"], record["seq"], record["number"]), _entry(record)) for record in records]
