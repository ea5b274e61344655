"""Memory entries that are due to be written. They are stored with their cause and deleted when the entry is written.

The process that stores a row writes the entry soon after. If that process dies or has no capacity, another process
claims the row when it is due.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

import msgspec

from tersely.domain.history.runs import Run
from tersely.store.db.connection import Connection, Database
from tersely.store.db.statements import INSERTS, Record, as_arrays

# For this time a row is left to the process that stored it. Each attempt doubles the time until the next one.
GRACE = timedelta(minutes=1)
# After so many tries, about four hours, a row is left alone until its session is deleted.
MOST_TRIES = 8

HERE = "tenant_id = $1 AND session_id = $2"
LIST = "SET LOCAL app.list_pending_memory = 'on'"
DUE = """
SELECT tenant_id, session_id, epoch, first_seq, last_seq, runs, strategy, dialect, model, host, due_at
FROM pending_memory WHERE due_at <= $1 AND tries < $2 ORDER BY due_at LIMIT $3
"""
_ENTRY = f"{HERE} AND epoch = $3 AND first_seq = $4 AND last_seq = $5"
HOLD_DUE = f"SELECT tries FROM pending_memory WHERE {_ENTRY} AND due_at <= $6 FOR UPDATE"
TAKE_OVER = f"UPDATE pending_memory SET tries = $6, due_at = $7 WHERE {_ENTRY}"
DELETE_OF_EPOCH = f"DELETE FROM pending_memory WHERE {HERE} AND epoch = $3"
DELETE_OF_RUNS = f"DELETE FROM pending_memory WHERE {HERE} AND epoch = 0 AND first_seq = $3 AND last_seq = $4"


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingMemory:
    """A memory entry to be written about messages ``first_seq`` to ``last_seq``.

    ``epoch`` is the number of the epoch that cut them; 0: ``runs`` are the messages. ``strategy`` is a strategy's name;
    ``model`` (empty: unknown), ``host`` and ``dialect`` are those of the session's calls.
    """

    first_seq: int
    last_seq: int
    strategy: str
    dialect: str = "openai_chat"
    model: str = ""
    host: str = ""
    epoch: int = 0
    runs: tuple[Run, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DueMemory:
    """An entry that was not written in time, with its session."""

    tenant: str
    session_id: str
    entry: PendingMemory
    due_at: datetime


def record(session_id: str, entry: PendingMemory, now: datetime) -> Record:
    """Return the row of an entry, with the columns of `tersely.store.db.statements`."""
    return (
        session_id, entry.epoch, entry.first_seq, entry.last_seq,
        msgspec.json.encode(entry.runs) if entry.runs else None, entry.strategy, entry.dialect, entry.model,
        now + GRACE, entry.host,
    )  # fmt: skip


async def add(
    connection: Connection, tenant: str, session_id: str, entries: Iterable[PendingMemory], now: datetime
) -> None:
    """Store entries to be written; existing ones stay unchanged."""
    rows = [record(session_id, entry, now) for entry in entries]
    if rows:
        await connection.execute(INSERTS["pending_memory"], tenant, *as_arrays(rows))


async def delete(connection: Connection, tenant: str, session_id: str, epoch: int, first: int, last: int) -> None:
    """Delete an entry that is written, or that no longer covers any message."""
    if epoch:
        await connection.execute(DELETE_OF_EPOCH, tenant, session_id, epoch)
    else:
        await connection.execute(DELETE_OF_RUNS, tenant, session_id, first, last)


async def due(database: Database, now: datetime, *, limit: int) -> list[DueMemory]:
    """Return due entries of all tenants, longest waiting first."""
    async with database.transaction("") as connection:
        await connection.execute(LIST)
        records = await connection.fetch(DUE, now, MOST_TRIES, limit)
    return [
        DueMemory(
            tenant=r["tenant_id"],
            session_id=r["session_id"],
            entry=PendingMemory(
                first_seq=r["first_seq"],
                last_seq=r["last_seq"],
                epoch=r["epoch"],
                runs=msgspec.json.decode(r["runs"], type=tuple[Run, ...]) if r["runs"] is not None else (),
                strategy=r["strategy"],
                dialect=r["dialect"],
                model=r["model"],
                host=r["host"] or "",
            ),
            due_at=r["due_at"],
        )
        for r in records
    ]


async def take_over(connection: Connection, each: DueMemory, now: datetime) -> bool:
    """Claim a due entry, in a transaction; False if it has been written or claimed meanwhile."""
    entry = each.entry
    key = (each.tenant, each.session_id, entry.epoch, entry.first_seq, entry.last_seq)
    tries = await connection.fetchval(HOLD_DUE, *key, now)
    if tries is None:
        return False
    await connection.execute(TAKE_OVER, *key, tries + 1, now + GRACE * 2**tries)
    return True
