"""Search over all sessions of a tenant: each session by its own search, the latest called first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tersely.domain.errors import InvalidRequest, NotFound
from tersely.domain.messages import searchable_text
from tersely.domain.search.excerpts import Lookup, RelevanceSearch, TextSearch
from tersely.service.search.session_search import Findings, Searcher, fold
from tersely.store.db.connection import Database
from tersely.store.history import session_lists
from tersely.store.history.session_lists import Narrowing, Place

Mode = Literal["search", "relevant"]
MAX_QUERY = 2_000
SECONDS = 5.0
"""So long sessions are searched; then the answer says how many were."""
PAGE = 100
EXCERPT = 300
PER_SESSION = 5
MOST_RELEVANT = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A message that was found. ``excerpt`` is the text around the first match."""

    session_id: str
    title: str | None
    seq: int
    turn: int
    role: str
    excerpt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hits:
    """What was found in ``searched`` sessions. ``is_whole``: there are no others."""

    hits: tuple[Hit, ...]
    searched: int
    is_whole: bool


class TenantSearch:
    """Searches the sessions of a tenant."""

    def __init__(self, database: Database, searcher: Searcher, *, monotonic: Callable[[], float]) -> None:
        self._database = database
        self._searcher = searcher
        self._monotonic = monotonic

    async def search(self, tenant: str, query: str, *, mode: Mode = "search", limit: int = 20) -> Hits:
        """Raises `InvalidRequest` for an empty or overlong query."""
        query = query.strip()
        if not 0 < len(query) <= MAX_QUERY:
            raise InvalidRequest(f"query must have 1 to {MAX_QUERY} characters", field="query")
        lookup: Lookup = (
            TextSearch(query=query, before=0, after=0)
            if mode == "search"
            else RelevanceSearch(query=query, first=PER_SESSION)
        )
        end = self._monotonic() + SECONDS
        hits: list[Hit] = []
        searched = 0
        place: Place | None = None
        while True:
            async with self._database.reading(tenant) as connection:
                page = await session_lists.page(
                    connection, tenant, Narrowing(), sort="last_call", after=place, limit=PAGE
                )
            for listed in page:
                if len(hits) >= limit or self._monotonic() > end:
                    return Hits(hits=tuple(hits[:limit]), searched=searched, is_whole=False)
                hits += await self._within(tenant, listed.session.id, listed.title, query, lookup)
                searched += 1
            if len(page) < PAGE:
                return Hits(hits=tuple(hits[:limit]), searched=searched, is_whole=len(hits) <= limit)
            last = page[-1]
            place = Place(rank=last.rank, value=last.value, id=last.session.id)

    async def search_session(
        self, tenant: str, session_id: str, query: str, *, mode: Mode = "search", limit: int = 50
    ) -> Hits:
        """Search one session. Raises `InvalidRequest` for an empty or overlong query, `NotFound`."""
        query = query.strip()
        if not 0 < len(query) <= MAX_QUERY:
            raise InvalidRequest(f"query must have 1 to {MAX_QUERY} characters", field="query")
        lookup: Lookup = (
            TextSearch(query=query, before=0, after=0)
            if mode == "search"
            else RelevanceSearch(query=query, first=min(limit, MOST_RELEVANT))
        )
        found = await self._searcher.search(tenant, session_id, lookup)
        hits = _hits(found, session_id, None, query)
        return Hits(hits=tuple(hits[:limit]), searched=1, is_whole=len(hits) <= limit)

    async def _within(self, tenant: str, session_id: str, title: str | None, query: str, lookup: Lookup) -> list[Hit]:
        try:
            found = await self._searcher.search(tenant, session_id, lookup)
        except NotFound:  # deleted meanwhile
            return []
        return _hits(found, session_id, title, query)[:PER_SESSION]


def _hits(found: Findings, session_id: str, title: str | None, query: str) -> list[Hit]:
    pairs = [pair for excerpt in found.excerpts for pair in zip(excerpt.rows, excerpt.seqs, strict=True)]
    return [
        Hit(
            session_id=session_id,
            title=title,
            seq=seq,
            turn=row.turn,
            role=row.message.role,
            excerpt=excerpt_around(searchable_text(row.message), query),
        )
        for row, seq in pairs
    ]


def excerpt_around(text: str, query: str) -> str:
    """Return the text around the first match of ``query`` or of one of its words; without a match the beginning."""
    folded = fold(text)
    words = [fold(query), *sorted((fold(word) for word in query.split()), key=len, reverse=True)]
    at = next((place for word in words if word and (place := folded.find(word)) >= 0), 0)
    start = max(0, at - EXCERPT // 3)
    piece = text[start : start + EXCERPT]
    return ("… " if start else "") + piece + (" …" if start + EXCERPT < len(text) else "")
