"""The daily memory of a tenant: summaries of messages that left a context (CowAgent's daily memory file).

It belongs to the tenant and outlives its session, unless that is deleted on request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date, datetime

import msgspec
from asyncpg import Record

from tersely.domain.history.runs import Run, overlap
from tersely.domain.search.terms import tokenize
from tersely.store.db.connection import Connection

ADD = """
INSERT INTO memory (tenant_id, session_id, day, first_seq, last_seq, created_at, text, words, runs)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9) ON CONFLICT DO NOTHING
"""
COLUMNS = "session_id, first_seq, last_seq, created_at, text, runs"
OF_DAY = f"""
SELECT {COLUMNS} FROM memory
WHERE tenant_id = $1 AND day = $2 AND NOT forgotten ORDER BY created_at DESC, session_id, last_seq DESC LIMIT $3
"""
NEWEST = f"""
SELECT {COLUMNS} FROM memory
WHERE tenant_id = $1 AND ($2::date IS NULL OR day = $2) AND ($3::text IS NULL OR session_id = $3)
  AND NOT forgotten AND ($4::timestamptz IS NULL OR (created_at, session_id, first_seq, last_seq) < ($4, $5, $6, $7))
ORDER BY created_at DESC, session_id DESC, first_seq DESC, last_seq DESC LIMIT $8
"""
# The terms of an entry, so that a whole memory can be ranked without reading its texts.
WITH_ANY = """
SELECT session_id, day, first_seq, last_seq, size, found
FROM (
    SELECT session_id, day, first_seq, last_seq, created_at, octet_length(words) AS size,
        ARRAY(SELECT strpos(words, q.term) > 0 FROM unnest($2::text[]) AS q (term)) AS found
    FROM memory
    WHERE tenant_id = $1 AND ($3::date IS NULL OR day = $3) AND ($4::text IS NULL OR session_id = $4) AND NOT forgotten
) AS entry
WHERE true = ANY(found)
ORDER BY created_at DESC, session_id DESC, first_seq DESC, last_seq DESC LIMIT $5
"""
AT = f"""
SELECT day, {COLUMNS} FROM memory
WHERE tenant_id = $1 AND (session_id, day, first_seq, last_seq) IN (
    SELECT * FROM unnest($2::text[], $3::date[], $4::bigint[], $5::bigint[])
)
"""
# Deleted entries count too: their messages are not summarised again.
ENTRIES_IN_RANGE = """
SELECT day, first_seq, last_seq, runs, forgotten FROM memory
WHERE tenant_id = $1 AND session_id = $2 AND first_seq <= $4 AND last_seq >= $3
"""
DELETE = "DELETE FROM memory WHERE tenant_id = $1 AND session_id = $2 AND day = $3 AND first_seq = $4 AND last_seq = $5"
FORGET_SESSION = "DELETE FROM memory WHERE tenant_id = $1 AND session_id = $2"
# The row stays without its text, so that the same messages are not summarised again.
FORGET = """
UPDATE memory SET text = '', words = '', forgotten = true
WHERE tenant_id = $1 AND ($2::date IS NULL OR day = $2) AND ($3::text IS NULL OR session_id = $3) AND NOT forgotten
RETURNING 1
"""

# Time, session, first and last sequence number: where an entry stands in the list.
MemoryCursor = tuple[datetime, str, int, int]
# The key of an entry: session, day, first and last sequence number.
Key = tuple[str, date, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEntry:
    """A summary of a session's messages ``first_seq`` to ``last_seq`` that left its context.

    ``runs`` are the covered messages; empty: all of them.
    """

    session_id: str
    first_seq: int
    last_seq: int
    created_at: datetime
    text: str
    runs: tuple[Run, ...] = ()

    @property
    def ranges(self) -> tuple[Run, ...]:
        """Return the runs of messages that the entry covers."""
        return self.runs or ((self.first_seq, self.last_seq),)


async def add(connection: Connection, tenant: str, entry: MemoryEntry) -> None:
    """Write an entry into the memory of its day (UTC); the same range is written once a day."""
    await connection.execute(
        ADD, tenant, entry.session_id, entry.created_at.date(), entry.first_seq, entry.last_seq, entry.created_at,
        entry.text.encode("utf-8", "replace"), _listed(set(tokenize(entry.text))),
        msgspec.json.encode(entry.runs) if entry.runs else None,
    )  # fmt: skip


async def covered_runs(connection: Connection, tenant: str, session_id: str, first: int, last: int) -> list[Run]:
    """Return the runs of messages that entries overlapping ``first`` to ``last`` cover."""
    found = await connection.fetch(ENTRIES_IN_RANGE, tenant, session_id, first, last)
    return [run for record in found for run in _runs(record)]


def _runs(record: Record) -> tuple[Run, ...]:
    if record["runs"] is None:
        return ((record["first_seq"], record["last_seq"]),)
    return msgspec.json.decode(record["runs"], type=tuple[Run, ...])


async def of_day(connection: Connection, tenant: str, day: date, *, limit: int = 100) -> list[MemoryEntry]:
    """Return the newest ``limit`` entries of a day, oldest first."""
    return [_entry(record) for record in reversed(await connection.fetch(OF_DAY, tenant, day, limit))]


async def newest(
    connection: Connection,
    tenant: str,
    *,
    day: date | None = None,
    session_id: str | None = None,
    before: MemoryCursor | None = None,
    limit: int,
) -> list[MemoryEntry]:
    """Return entries after the cursor ``before``, newest first; only of a day (UTC) and of a session, if given."""
    cursor = before or (None, None, None, None)
    return [_entry(record) for record in await connection.fetch(NEWEST, tenant, day, session_id, *cursor, limit)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryHit:
    """An entry with some of the searched terms: ``found`` names them. ``size``: bytes of its text."""

    key: Key
    size: int
    found: Sequence[bool]


async def with_any(
    connection: Connection,
    tenant: str,
    terms: Sequence[str],
    *,
    day: date | None,
    session_id: str | None,
    limit: int,
) -> list[MemoryHit]:
    """Entries with any of ``terms``, the newest first: those of a day (UTC) and of a session, if given."""
    patterns = [_listed([term]) for term in terms]
    records = await connection.fetch(WITH_ANY, tenant, patterns, day, session_id, limit)
    return [
        MemoryHit(key=(session, on, first, last), size=size, found=found)
        for session, on, first, last, size, found in records
    ]


async def at(connection: Connection, tenant: str, keys: Sequence[Key]) -> list[MemoryEntry]:
    """Return the existing entries of these keys, in the order of the keys."""
    columns = [list(column) for column in zip(*keys, strict=True)] or [[], [], [], []]
    records = await connection.fetch(AT, tenant, *columns)
    found = {(r["session_id"], r["day"], r["first_seq"], r["last_seq"]): _entry(r) for r in records}
    return [found[key] for key in keys if key in found]


async def forget_range(
    connection: Connection, tenant: str, session_id: str, first: int, last: int
) -> list[tuple[Run, ...]]:
    """Delete the entries that cover any message from ``first`` to ``last``. Return the runs that each covered."""
    deleted: list[tuple[Run, ...]] = []
    for record in await connection.fetch(ENTRIES_IN_RANGE, tenant, session_id, first, last):
        runs = _runs(record)
        if overlap(runs, first, last) and not record["forgotten"]:
            await connection.execute(DELETE, tenant, session_id, record["day"], record["first_seq"], record["last_seq"])
            deleted.append(runs)
    return deleted


async def forget_session(connection: Connection, tenant: str, session_id: str) -> None:
    """Delete the entries of a session."""
    await connection.execute(FORGET_SESSION, tenant, session_id)


async def forget(connection: Connection, tenant: str, *, day: date | None, session_id: str | None) -> int:
    """Delete the entries of a day and of a session, whichever is given; how many there were."""
    return len(await connection.fetch(FORGET, tenant, day, session_id))


def _listed(terms: Iterable[str]) -> str:
    """Return terms (without blanks) as a text in which each can be searched for."""
    return f" {' '.join(sorted(terms))} "


def _entry(record: Record) -> MemoryEntry:
    return MemoryEntry(
        session_id=record["session_id"],
        first_seq=record["first_seq"],
        last_seq=record["last_seq"],
        created_at=record["created_at"],
        text=record["text"].decode("utf-8", "replace"),
        runs=_runs(record),
    )
