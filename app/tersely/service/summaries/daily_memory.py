"""The daily memory of a tenant, summaries of messages that left contexts: list, search, export, delete."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import date

from tersely.domain.errors import InvalidRequest
from tersely.domain.history.sessions import check_session_id
from tersely.domain.search.relevance import rank_by_terms
from tersely.domain.search.terms import tokenize
from tersely.store.db.connection import Database
from tersely.store.notes import daily_memory as memory
from tersely.store.notes.daily_memory import Key, MemoryCursor, MemoryEntry, MemoryHit

# Of more entries that share a word with a query, the newest are ranked; of a longer query, the first words count.
CANDIDATES = 20_000
WORDS = 16
# Entries that an export reads at once.
PAGE = 100
# Seconds.
LIMIT = 15.0


class DailyMemory:
    """The verbs on the memory, within a tenant. Days are those of UTC."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def page(
        self, tenant: str, *, day: date | None, session_id: str | None, after: MemoryCursor | None, limit: int
    ) -> tuple[list[MemoryEntry], MemoryCursor | None]:
        """Return the newest entries after a cursor, of a day and of a session if given; and the next cursor.

        Here and below raises `InvalidRequest` for what cannot be a session's id.
        """
        _check(session_id)
        async with self._database.reading(tenant, limit=LIMIT) as connection:
            found = await memory.newest(
                connection, tenant, day=day, session_id=session_id, before=after, limit=limit + 1
            )
        return found[:limit], cursor_of(found[limit - 1]) if len(found) > limit else None

    async def search(
        self, tenant: str, *, query: str, day: date | None = None, session_id: str | None = None, limit: int
    ) -> list[MemoryEntry]:
        """Return the entries about ``query``, best first.

        Stop words are ignored. Raises `InvalidRequest`.
        """
        if not query.strip():
            raise InvalidRequest("query must not be empty", field="query")
        _check(session_id)
        terms = list(dict.fromkeys(tokenize(query)))[:WORDS]
        if not terms:
            return []
        async with self._database.reading(tenant, limit=LIMIT) as connection:
            hits = await memory.with_any(connection, tenant, terms, day=day, session_id=session_id, limit=CANDIDATES)
        best = await asyncio.to_thread(_rank, hits, terms, limit)
        async with self._database.reading(tenant, limit=LIMIT) as connection:
            return await memory.at(connection, tenant, best)

    async def export(self, tenant: str) -> AsyncIterator[MemoryEntry]:
        """Yield all of it, the newest first."""
        cursor: MemoryCursor | None = None
        while True:
            found, cursor = await self.page(tenant, day=None, session_id=None, after=cursor, limit=PAGE)
            for entry in found:
                yield entry
            if cursor is None:
                return

    async def forget(self, tenant: str, *, day: date | None, session_id: str | None) -> int:
        """Delete the entries of a day, of a session, or of a session's day; how many. Raises `InvalidRequest`."""
        if day is None and session_id is None:
            raise InvalidRequest("day or session must be given", field="day")
        _check(session_id)
        async with self._database.transaction(tenant, limit=LIMIT) as connection:
            return await memory.forget(connection, tenant, day=day, session_id=session_id)


def _rank(hits: Sequence[MemoryHit], terms: Sequence[str], limit: int) -> list[Key]:
    """Return the keys of the best hits; ties: the newer first."""
    having = {term: [n for n, hit in enumerate(hits) if hit.found[index]] for index, term in enumerate(terms)}
    found = rank_by_terms([hit.size for hit in hits], having, limit=limit)
    return [hits[number].key for number in found]


def _check(session_id: str | None) -> None:
    if session_id is not None:
        check_session_id(session_id, "session")


def cursor_of(entry: MemoryEntry) -> MemoryCursor:
    """Return an entry's position in the list."""
    return entry.created_at, entry.session_id, entry.first_seq, entry.last_seq


def read_day(text: str, *, field: str = "day") -> date:
    """Return a day from ``YYYY-MM-DD``. Raises `InvalidRequest`."""
    try:
        day = date.fromisoformat(text)
    except ValueError:
        day = None
    if day is None or day.isoformat() != text:
        raise InvalidRequest(f"{field} must be a day as YYYY-MM-DD, not {text[:40]!r}", field=field)
    return day
