"""A whole session written at once: for imports, whose turns and times are given."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import count

import msgspec

from tersely.store.commit.rows import portions
from tersely.store.db.connection import Connection
from tersely.store.db.statements import INSERTS, Record, as_arrays
from tersely.store.history import artifacts, model_views, sessions, turn_rows
from tersely.store.history.artifacts import Artifact
from tersely.store.history.sessions import Configuration

COUNTERS = """
UPDATE sessions SET last_seq = $3, turns = $4, tokens = $5, version = 1 WHERE tenant_id = $1 AND id = $2
"""


class ImportedMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message at its turn; its sequence number is its place in the list, from 1 on."""

    turn: int
    tokens: int
    role: str
    dialect: str
    digest: bytes
    created_at: datetime
    raw: bytes
    model_raw: bytes | None
    artifacts: Sequence[Artifact] = ()


class ImportedEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A terse entry, and the message that carried it."""

    turn: int
    seq: int
    number: int
    role: str
    source: str
    created_at: datetime
    text: str


class ImportedSession(msgspec.Struct, frozen=True, kw_only=True):
    """An imported session with its messages and log."""

    id: str
    parent: str | None
    configuration: Configuration
    messages: Sequence[ImportedMessage]
    terse: Sequence[ImportedEntry]


async def write_import(connection: Connection, tenant: str, session: ImportedSession, now: datetime) -> bool:
    """Store the session. Return False if its id is taken."""
    if not await sessions.add(connection, tenant, session.id, session.parent, session.configuration, now):
        return False
    newest = turn_rows.newest_turns(message.turn for message in session.messages)
    rows = (_message(session.id, *row) for row in zip(count(1), session.messages, newest, strict=False))
    await _insert(connection, "messages", tenant, rows)
    numbered = enumerate(session.messages, 1)
    pointers = (artifacts.row(session.id, seq, a, m.created_at) for seq, m in numbered for a in m.artifacts)
    await _insert(connection, "artifacts", tenant, pointers)
    await _insert(connection, "terse", tenant, (_entry(session.id, entry) for entry in session.terse))
    await connection.execute(COUNTERS, tenant, session.id, *await asyncio.to_thread(_count, session.messages))
    return True


def _count(messages: Sequence[ImportedMessage]) -> tuple[int, int, int]:
    """Return how many messages, turns and tokens there are."""
    turns = max((message.turn for message in messages), default=0)
    return len(messages), turns, sum(message.tokens for message in messages)


async def _insert(connection: Connection, table: str, tenant: str, rows: Iterable[Record]) -> None:
    """Insert rows in portions. They are made in a thread, since there may be very many."""
    for portion in await asyncio.to_thread(lambda: [as_arrays(each) for each in portions(rows)]):
        await connection.fetch(INSERTS[table], tenant, *portion)


def _message(session_id: str, seq: int, message: ImportedMessage, newest_turn: int | None) -> tuple[object, ...]:
    """In the order of the columns of the statement."""
    return (
        session_id,
        seq,
        message.turn,
        message.tokens,
        float(seq),
        message.role,
        "live",
        message.dialect,
        True,
        True,
        False,
        None,
        0,
        message.digest,
        None,
        message.created_at,
        message.raw,
        *model_views.columns_of(message.raw, message.model_raw),
        seq - 1,
        None,
        newest_turn,
    )


def _entry(session_id: str, entry: ImportedEntry) -> tuple[object, ...]:
    text = entry.text.encode("utf-8", "replace")
    return (session_id, entry.turn, entry.seq, entry.number, entry.role, entry.source, entry.created_at, text)
