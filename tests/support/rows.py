"""A superuser's look into the store, behind row-level security."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

import asyncpg

from tests.conftest import Database

_COLUMNS = (
    "session_id AS session, seq, turn, place, role, status, call, finish, chain IS NOT NULL AS relayed, raw "
    "FROM messages WHERE $1::text IS NULL OR session_id = $1"
)


class HasDatabase(Protocol):
    """A running service that says which database it uses."""

    @property
    def database(self) -> Database: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMessage:
    """A stored message."""

    session: str
    seq: int
    turn: int
    place: float
    role: str
    status: str
    call: int
    finish: str | None
    relayed: bool
    raw: bytes

    @property
    def message(self) -> dict[str, Any]:
        """Return the client's view of the message."""
        return dict(json.loads(self.raw))

    @property
    def text(self) -> str:
        """Return the content; empty when it is no string."""
        content = self.message.get("content")
        return content if isinstance(content, str) else ""


async def query(where: Database | HasDatabase, sql: str, *args: object) -> list[asyncpg.Record]:
    """Run a query as the superuser."""
    database = where if isinstance(where, Database) else where.database
    connection = await asyncpg.connect(database.admin_dsn)
    try:
        return list(await connection.fetch(sql, *args))
    finally:
        await connection.close()


async def stored_messages(where: Database | HasDatabase, session: str | None = None) -> list[StoredMessage]:
    """Return all messages of ``session`` (None: of all sessions), superseded ones too, in the order of the history."""
    rows = await query(where, f"SELECT {_COLUMNS} ORDER BY session_id, place, seq", session)
    return [StoredMessage(**dict(row)) for row in rows]


async def messages_by_number(where: Database | HasDatabase, session: str) -> list[StoredMessage]:
    """Return the messages of a session by sequence number, and check that the numbers have no gaps."""
    rows = await query(where, f"SELECT {_COLUMNS} ORDER BY seq", session)
    found = [StoredMessage(**dict(row)) for row in rows]
    assert [each.seq for each in found] == list(range(1, len(found) + 1)), "sequence numbers have gaps"
    return found
