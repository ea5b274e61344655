"""Term indexes of stored sessions: built once, stored in the database in pages, cached in memory while in use.

The cache is bounded, and extended by new messages. A session whose history was edited is read again, from its pages. An
index of more than `LARGE` messages is never loaded as a whole: a search then reads only its own terms.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from weakref import WeakValueDictionary

from tersely.dialects.registry import dialect_named
from tersely.domain.errors import InvalidRequest
from tersely.domain.history.sessions import Session
from tersely.domain.messages import Message
from tersely.domain.search.relevance import document_terms, document_text
from tersely.domain.search.term_index import TermIndex, TermPage, make_page, merge_pages, read_page, write_page
from tersely.service.search.missing_pages import make_missing_pages
from tersely.store.db.connection import Connection, Database
from tersely.store.search import pages as pages
from tersely.store.search import term_pages

# Bytes of memory, about, of all the indexes that are held.
HELD = 64 * 1024 * 1024
LARGE = 250_000
READ_AT_ONCE = 16
MADE_AT_ONCE = 8
# Characters of a message that are indexed: longer texts are files or logs, and their beginning shows the subject.
LOOKED_AT = 50_000
# Seconds for one step. A slow step does not mean that the database is unavailable, so it has its own limit.
LIMIT = 10.0

_Key = tuple[str, str]


class TermIndexes:
    """The indexes of a process, the least recently used ones given up first."""

    def __init__(self, database: Database, *, held: int = HELD, large: int = LARGE) -> None:
        self._database = database
        self._limit = held
        self._large = large
        self._held: OrderedDict[_Key, tuple[datetime, int, TermIndex]] = OrderedDict()
        self._locks: WeakValueDictionary[_Key, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def index_for(self, tenant: str, session: Session, terms: Iterable[str]) -> AsyncIterator[TermIndex]:
        """Return the index of ``session``, or of ``terms`` in it if it is large; it must not be changed."""
        lock = self._locks.setdefault((tenant, session.id), asyncio.Lock())
        async with lock:
            if session.last_seq > self._large:
                index = TermIndex(only=frozenset(terms))
            else:
                index = self._take(tenant, session)
            await self._extend(index, tenant, session)
            yield index
            if session.last_seq <= self._large:
                self._keep(tenant, session, index)

    async def store_pages(self, tenant: str, session_id: str) -> None:
        """Store the pages of a session that are full and missing, and merge those that can be."""
        full = await make_missing_pages(
            self._database,
            tenant,
            session_id,
            find_missing=term_pages.missing,
            make=_written_page,
            add=term_pages.add,
            at_once=MADE_AT_ONCE,
            limit=LIMIT,
        )
        if full is not None and full >= term_pages.MERGED:
            await self._merge(tenant, session_id)

    async def _merge(self, tenant: str, session_id: str) -> None:
        while True:
            async with self._database.reading(tenant, limit=LIMIT) as connection:
                first = await term_pages.unmerged(connection, tenant, session_id)
                if first is None:
                    return
                edits = await pages.edits(connection, tenant, session_id)
                stored = await term_pages.read(connection, tenant, session_id, first, term_pages.MERGED)
            merged = await asyncio.to_thread(_merged_page, stored)
            if merged is None:
                return
            async with self._database.transaction(tenant, limit=LIMIT) as connection:
                # Removed content must not come back in a page.
                if await pages.edits(connection, tenant, session_id, lock=True) == edits:
                    await term_pages.replace(connection, tenant, session_id, first, merged)

    def _take(self, tenant: str, session: Session) -> TermIndex:
        created, edits, index = self._held.pop((tenant, session.id), (None, 0, None))
        is_good = index and created == session.created_at and edits == session.edits
        return index if index and is_good and len(index.lengths) <= session.last_seq else TermIndex()

    def _keep(self, tenant: str, session: Session, index: TermIndex) -> None:
        self._held[tenant, session.id] = (session.created_at, session.edits, index)
        room = self._limit - sum(index.size for _, _, index in self._held.values())
        while room < 0 and self._held:
            _, (_, _, oldest) = self._held.popitem(last=False)
            room += oldest.size

    async def _extend(self, index: TermIndex, tenant: str, session: Session) -> None:
        while session.last_seq - len(index.lengths) >= pages.PAGE:
            async with self._database.reading(tenant, limit=LIMIT) as connection:
                first = len(index.lengths) // pages.PAGE
                stored = await term_pages.read(connection, tenant, session.id, first, READ_AT_ONCE)
            if not stored:
                break
            await asyncio.to_thread(_add_stored, index, stored)
        while len(index.lengths) < session.last_seq:
            await self._make(index, tenant, session)

    async def _make(self, index: TermIndex, tenant: str, session: Session) -> None:
        """Index the next messages; store the pages that they complete."""
        first = len(index.lengths) // pages.PAGE
        last_seq = min(session.last_seq, (first + MADE_AT_ONCE) * pages.PAGE)
        async with self._database.reading(tenant, limit=LIMIT) as connection:
            content = await pages.content(connection, tenant, session.id, first * pages.PAGE + 1, last_seq)
        made = await asyncio.to_thread(_make_pages, index, first * pages.PAGE, content, last_seq)
        full = [(page.first // pages.PAGE, write_page(page)) for page in made if _is_full(page)]
        if full:
            async with self._database.transaction(tenant, limit=LIMIT) as connection:
                # Removed content must not come back in a page.
                if await pages.edits(connection, tenant, session.id, lock=True) == session.edits:
                    await term_pages.add(connection, tenant, session.id, full)


def _add_stored(index: TermIndex, stored: Iterable[bytes]) -> None:
    for page in stored:
        index.add(read_page(page))


def _merged_page(stored: Sequence[bytes]) -> bytes | None:
    """Return pages as one; None if they are not those that are to be merged, since some have gone meanwhile."""
    if len(stored) != term_pages.MERGED:
        return None
    return write_page(merge_pages([read_page(page) for page in stored]))


def _written_page(page: int, content: Sequence[pages.MessageColumns]) -> bytes:
    terms = {each.seq: terms_of(each) for each in content}
    first = page * pages.PAGE
    return write_page(make_page(first, [terms.get(first + n, []) for n in range(1, pages.PAGE + 1)]))


def _make_pages(index: TermIndex, start: int, content: Sequence[pages.MessageColumns], last_seq: int) -> list[TermPage]:
    terms = {each.seq: terms_of(each) for each in content}
    made = []
    for first in range(start, last_seq, pages.PAGE):
        seqs = range(first + 1, min(first + pages.PAGE, last_seq) + 1)
        page = make_page(first, [terms.get(seq, []) for seq in seqs])
        index.add(page)
        made.append(page)
    return made


def _is_full(page: TermPage) -> bool:
    return len(page.lengths) == 4 * pages.PAGE


def terms_of(content: pages.MessageColumns, chars: int = LOOKED_AT) -> list[str]:
    """Return the terms and marks of a message's first ``chars`` characters; none for instructions and unreadable
    messages.
    """
    message = _read(content)
    return [] if message is None else document_terms(message, limit=chars)


def document_words(content: pages.MessageColumns) -> str:
    """Return the text by which a message is found; empty for instructions and unreadable messages."""
    message = _read(content)
    return "" if message is None else document_text(message)[:LOOKED_AT]


def _read(content: pages.MessageColumns) -> Message | None:
    if content.turn == 0 or not content.raw:
        return None
    try:
        return dialect_named(content.dialect).read_reply(content.raw)
    except InvalidRequest:
        return None


async def terms_at(
    connection: Connection, tenant: str, session_id: str, seqs: Sequence[int], chars: int = LOOKED_AT
) -> list[list[str]]:
    """Return the terms of a few messages, in that order."""
    found = await pages.content_of(connection, tenant, session_id, seqs)
    return [terms_of(found[seq], chars) if seq in found else [] for seq in seqs]
