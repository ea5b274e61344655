"""A superuser's look into the store, behind row-level security."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any, Protocol

import asyncpg

from tests.conftest import Database
from tests.support.loops import Background

# Databases whose connections are kept.
KEPT = 3
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


class _Looks:
    """A superuser's connections, kept open for the next look: making one takes Postgres 5 ms, and tests take thousands
    of looks. They live in a loop of their own, since each test has another one.
    """

    def __init__(self) -> None:
        self._there = Background()
        self._idle: dict[str, list[asyncpg.Connection[asyncpg.Record]]] = {}
        """By address; the one that was used last is the last."""

    async def fetch(self, dsn: str, sql: str, args: tuple[object, ...]) -> list[asyncpg.Record]:
        return await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(self._fetch(dsn, sql, args), self._there.loop)
        )

    def close(self) -> None:
        for idle in self._idle.values():
            for connection in idle:
                self._there.loop.call_soon_threadsafe(connection.terminate)
        self._there.close()

    async def _fetch(self, dsn: str, sql: str, args: tuple[object, ...]) -> list[asyncpg.Record]:
        idle = self._idle.setdefault(dsn, [])
        while idle:
            connection = idle.pop()
            if connection.is_closed():
                continue
            try:
                return await self._use(connection, dsn, sql, args)
            except (OSError, asyncpg.InterfaceError, asyncpg.PostgresConnectionError):
                continue  # the server has ended it meanwhile
        return await self._use(await asyncpg.connect(dsn), dsn, sql, args)

    async def _use(
        self, connection: asyncpg.Connection[asyncpg.Record], dsn: str, sql: str, args: tuple[object, ...]
    ) -> list[asyncpg.Record]:
        try:
            found = list(await connection.fetch(sql, *args))
        except BaseException:
            connection.terminate()
            raise
        kept = self._idle.pop(dsn, [])
        self._idle[dsn] = [*kept, connection]
        while len(self._idle) > KEPT:
            for old in self._idle.pop(next(iter(self._idle))):
                old.terminate()
        return found


_looks: list[_Looks] = []


def close_looks() -> None:
    """Close the connections of `query`."""
    while _looks:
        _looks.pop().close()


async def query(where: Database | HasDatabase, sql: str, *args: object) -> list[asyncpg.Record]:
    """Run a query as the superuser."""
    database = where if isinstance(where, Database) else where.database
    if not _looks:
        _looks.append(_Looks())
    return await _looks[0].fetch(database.admin_dsn, sql, args)


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
