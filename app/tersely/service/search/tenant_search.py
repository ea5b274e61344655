"""Search over all sessions of a tenant: each session by its own search, the latest called first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from tersely.domain.errors import InvalidRequest, NotFound
from tersely.domain.messages import searchable_text
from tersely.domain.search.excerpts import ExcerptRow, RelevanceSearch, TextSearch
from tersely.service.search.session_search import LookupResult, Searcher, fold
from tersely.store.db.connection import Database
from tersely.store.history import session_lists
from tersely.store.history.session_lists import SessionCursor, SessionFilter

SearchMode = Literal["search", "relevant"]
MAX_QUERY = 2_000
SECONDS = 5.0
"""So long sessions are searched; then the answer says how many were."""
PAGE = 100
EXCERPT = 300
NEIGHBOUR_LENGTH = 160
"""Characters of a message beside a hit."""
AROUND = 1
"""Messages that are shown before and after each hit."""
PER_SESSION = 5
MOST_RELEVANT = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class PassageMessage:
    """A message of a passage. ``is_hit``: it was found, and ``excerpt`` is the text around the first match; otherwise
    it stands beside one that was, and ``excerpt`` is its beginning.
    """

    seq: int
    turn: int
    role: str
    excerpt: str
    is_hit: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """Consecutive messages of a session: hits and the messages beside them."""

    session_id: str
    title: str | None
    messages: tuple[PassageMessage, ...]

    @property
    def hits(self) -> int:
        """Return how many of its messages were found."""
        return sum(message.is_hit for message in self.messages)

    def first(self, hits: int) -> Passage:
        """Return the passage with its first ``hits`` hits and the messages beside these; all if it has no more."""
        found = [at for at, message in enumerate(self.messages) if message.is_hit]
        if len(found) <= hits:
            return self
        end = min(found[hits - 1] + 1 + AROUND, found[hits])
        return replace(self, messages=self.messages[:end])


@dataclass(frozen=True, slots=True, kw_only=True)
class Hits:
    """The hits in ``searched`` sessions. ``is_whole``: there are no others."""

    passages: tuple[Passage, ...]
    searched: int
    is_whole: bool

    @property
    def count(self) -> int:
        """Return how many messages were found."""
        return sum(passage.hits for passage in self.passages)


class TenantSearch:
    """Searches the sessions of a tenant."""

    def __init__(self, database: Database, searcher: Searcher, *, monotonic: Callable[[], float]) -> None:
        self._database = database
        self._searcher = searcher
        self._monotonic = monotonic

    async def search(self, tenant: str, query: str, *, mode: SearchMode = "search", limit: int = 20) -> Hits:
        """Raises `InvalidRequest` for an empty or overlong query."""
        query = query.strip()
        if not 0 < len(query) <= MAX_QUERY:
            raise InvalidRequest(f"query must have 1 to {MAX_QUERY} characters", field="query")
        lookup = _lookup(query, mode, first=PER_SESSION)
        end = self._monotonic() + SECONDS
        passages: list[Passage] = []
        searched = hits = 0
        cursor: SessionCursor | None = None
        while True:
            async with self._database.reading(tenant) as connection:
                page = await session_lists.page(
                    connection, tenant, SessionFilter(), sort="last_call", after=cursor, limit=PAGE
                )
            for listed in page:
                if hits >= limit or self._monotonic() > end:
                    return Hits(passages=_first(passages, limit), searched=searched, is_whole=False)
                found = await self._within(tenant, listed.session.id, listed.title, lookup)
                passages += found
                hits += sum(passage.hits for passage in found)
                searched += 1
            if len(page) < PAGE:
                return Hits(passages=_first(passages, limit), searched=searched, is_whole=hits <= limit)
            last = page[-1]
            cursor = SessionCursor(rank=last.rank, value=last.value, id=last.session.id)

    async def search_session(
        self, tenant: str, session_id: str, query: str, *, mode: SearchMode = "search", limit: int = 50
    ) -> Hits:
        """Search one session. Raises `InvalidRequest` for an empty or overlong query, `NotFound`."""
        query = query.strip()
        if not 0 < len(query) <= MAX_QUERY:
            raise InvalidRequest(f"query must have 1 to {MAX_QUERY} characters", field="query")
        lookup = _lookup(query, mode, first=min(limit, MOST_RELEVANT))
        passages = _passages(await self._searcher.search(tenant, session_id, lookup), session_id, None, lookup)
        hits = sum(passage.hits for passage in passages)
        return Hits(passages=_first(passages, limit), searched=1, is_whole=hits <= limit)

    async def _within(
        self, tenant: str, session_id: str, title: str | None, lookup: TextSearch | RelevanceSearch
    ) -> tuple[Passage, ...]:
        try:
            found = await self._searcher.search(tenant, session_id, lookup)
        except NotFound:  # deleted meanwhile
            return ()
        return _first(_passages(found, session_id, title, lookup), PER_SESSION)


def _lookup(query: str, mode: SearchMode, *, first: int) -> TextSearch | RelevanceSearch:
    if mode == "search":
        return TextSearch(query=query, before=AROUND, after=AROUND)
    return RelevanceSearch(query=query, first=first, before=AROUND, after=AROUND)


def _first(passages: Iterable[Passage], hits: int) -> tuple[Passage, ...]:
    """Return the passages with the first ``hits`` hits of all of them."""
    found: list[Passage] = []
    for passage in passages:
        if hits <= 0:
            break
        found.append(passage.first(hits))
        hits -= found[-1].hits
    return tuple(found)


def _passages(
    found: LookupResult, session_id: str, title: str | None, lookup: TextSearch | RelevanceSearch
) -> list[Passage]:
    return [
        Passage(
            session_id=session_id,
            title=title,
            messages=tuple(_message(row, seq, lookup) for row, seq in zip(excerpt.rows, excerpt.seqs, strict=True)),
        )
        for excerpt in found.excerpts
    ]


def _message(row: ExcerptRow, seq: int, lookup: TextSearch | RelevanceSearch) -> PassageMessage:
    text = searchable_text(row.message)
    is_hit = row.rank > 0 if isinstance(lookup, RelevanceSearch) else fold(lookup.query) in fold(text)
    return PassageMessage(
        seq=seq,
        turn=row.turn,
        role=row.message.role,
        excerpt=excerpt_around(text, lookup.query) if is_hit else _beginning(text),
        is_hit=is_hit,
    )


def _beginning(text: str) -> str:
    return text[:NEIGHBOUR_LENGTH] + (" …" if len(text) > NEIGHBOUR_LENGTH else "")


def excerpt_around(text: str, query: str) -> str:
    """Return the text around the first match of ``query`` or of one of its words; without a match the beginning."""
    folded = fold(text)
    words = [fold(query), *sorted((fold(word) for word in query.split()), key=len, reverse=True)]
    at = next((index for word in words if word and (index := folded.find(word)) >= 0), 0)
    start = max(0, at - EXCERPT // 3)
    piece = text[start : start + EXCERPT]
    return ("… " if start else "") + piece + (" …" if start + EXCERPT < len(text) else "")
