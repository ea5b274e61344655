"""The terse log: one line or more about each turn.

Lines of models are rows of ``terse``, and so are lines that older code made. The others are packed into the rows of
their epochs (`tersely.store.history.packed_log`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from asyncpg import Record

from tersely.domain.history.history import LOG_ENTRIES, EpochInputs, TerseEntry
from tersely.store.db.connection import Connection
from tersely.store.history import packed_log
from tersely.store.history.messages import HERE, IS_EXCEPTION
from tersely.store.history.packed_log import LogCursor, LogLine

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


def _line(record: Record) -> LogLine:
    entry = TerseEntry(
        turn=record["turn"],
        seq=record["seq"],
        role=record["role"],
        text=record["text"].decode("utf-8", "replace"),
        source=record["source"],
        created_at=record["created_at"],
    )
    return (entry.turn, entry.seq, record["number"]), entry


async def log_inputs(
    connection: Connection, tenant: str, session_id: str, *, restored: Collection[int] = ()
) -> EpochInputs:
    """Return the log's inputs for a new epoch: the newest entries, and how many turns precede them.

    ``restored`` are superseded messages that a request under way returns to the history: their entries count too.
    """
    lines = await _newest(connection, tenant, session_id, restored=None)
    if not lines:
        return EpochInputs()
    seqs = [entry.seq for _, entry in lines]
    if await connection.fetchval(ONE_OF_OTHERS, tenant, session_id, min(seqs), max(seqs)) is not None:
        lines = await _newest(connection, tenant, session_id, restored=restored)
    entries = tuple(entry for _, entry in lines)
    if len(entries) < LOG_ENTRIES:
        return EpochInputs(terse=entries)
    return EpochInputs(terse=entries, older_turns=max(0, entries[0].turn - 1), oldest_at=entries[0].created_at)


async def _newest(
    connection: Connection, tenant: str, session_id: str, *, restored: Collection[int] | None
) -> list[LogLine]:
    """Return the newest entries in order: all, or with ``restored`` those of live messages and of these."""
    if restored is None:
        records = await connection.fetch(NEWEST_OF_ALL, tenant, session_id, LOG_ENTRIES)
    else:
        records = await connection.fetch(NEWEST_ENTRIES, tenant, session_id, LOG_ENTRIES, list(restored))
    packed = await packed_log.newest(connection, tenant, session_id, limit=LOG_ENTRIES, restored=restored)
    return packed_log.merge([*map(_line, records), *packed])[-LOG_ENTRIES:]


async def told(connection: Connection, tenant: str, session_id: str, seqs: Mapping[int, int]) -> set[int]:
    """Return which messages, by turn, have entries."""
    if not seqs:
        return set()
    records = await connection.fetch(TOLD, tenant, session_id, list(seqs), list(seqs.values()))
    lines = await packed_log.between(connection, tenant, session_id, min(seqs), max(seqs))
    return {record["seq"] for record in records} | {e.seq for _, e in lines if seqs.get(e.turn) == e.seq}


async def log_page(
    connection: Connection, tenant: str, session_id: str, *, after: LogCursor, limit: int, last_turn: int
) -> list[tuple[LogCursor, TerseEntry]]:
    """Return live entries in order with their cursors, after the one at ``after``, of turns up to ``last_turn``."""

    async def read_rows(start: LogCursor, end: int, most: int) -> list[LogLine]:
        return [_line(r) for r in await connection.fetch(ALL_ENTRIES, tenant, session_id, *start, most, end)]

    async def read_lines(lines: list[LogLine]) -> list[LogLine]:
        left_out = await packed_log.not_live(connection, tenant, session_id, lines)
        return [line for line in lines if line[1].seq not in left_out]

    return await packed_log.page(
        connection, tenant, session_id,
        after=after, limit=limit, last_turn=last_turn, read_rows=read_rows, read_lines=read_lines,
    )  # fmt: skip
