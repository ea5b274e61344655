"""The memos of a tenant: save, list, search by tags and words, delete."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from datetime import datetime

from tersely.domain.errors import InvalidRequest, NotFound, TooLarge
from tersely.domain.memos import Memo
from tersely.domain.search.relevance import rank_documents
from tersely.domain.search.terms import tokenize
from tersely.service.common.offload import run_in_thread_if_large
from tersely.store.db.connection import Connection, Database
from tersely.store.history import sessions
from tersely.store.notes import memos
from tersely.store.notes.memos import MemoCursor

MAX_CONTENT = 8_000
"""Characters of a memo."""
MAX_TAGS = 20
MAX_TAG = 64
# Of more memos that share a word with a text, only the newest are ranked.
CANDIDATES = 500
# Characters of a text that are compared: longer texts are files or logs, and their beginning shows the subject.
LOOKED_AT = 20_000
# Bytes of a memo, about.
SIZE = 500
# What a model is given unasked.
RELEVANT = 5
# Memos that an export reads at once.
PAGE = 100

_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")


class Memos:
    """The verbs on memos, within a tenant; `NotFound` for what is not there, or not the tenant's."""

    def __init__(self, database: Database, *, clock: Callable[[], datetime], new_id: Callable[[], str]) -> None:
        self._database = database
        self._clock = clock
        self._new_id = new_id

    async def save(self, tenant: str, *, content: str, tags: Sequence[str], session_id: str | None) -> Memo:
        """Save a memo, perhaps from a session of the tenant's. Raises `InvalidRequest`, `TooLarge`."""
        if not content.strip():
            raise InvalidRequest("content must not be empty", field="content")
        if len(content) > MAX_CONTENT:
            raise TooLarge(f"a memo has at most {MAX_CONTENT} characters, not {len(content)}", field="content")
        memo = Memo(
            id=self._new_id(), content=content, tags=read_tags(tags), session_id=session_id, created_at=self._clock()
        )
        terms = sorted(set(tokenize(_searchable(memo))))
        async with self._database.transaction(tenant) as connection:
            if session_id is not None and await sessions.get(connection, tenant, session_id) is None:
                raise InvalidRequest("session: there is no such session", field="session")
            await memos.add(connection, tenant, memo, terms)
        return memo

    async def change(self, tenant: str, memo_id: str, *, content: str, tags: Sequence[str]) -> Memo:
        """Replace the content and the tags of a memo. Raises `InvalidRequest`, `TooLarge`."""
        if not content.strip():
            raise InvalidRequest("content must not be empty", field="content")
        if len(content) > MAX_CONTENT:
            raise TooLarge(f"a memo has at most {MAX_CONTENT} characters, not {len(content)}", field="content")
        known = await self.get(tenant, memo_id)
        memo = replace(known, content=content, tags=read_tags(tags))
        terms = sorted(set(tokenize(_searchable(memo))))
        async with self._database.transaction(tenant) as connection:
            if not await memos.delete(connection, tenant, memo_id):
                raise NotFound("there is no such memo")
            await memos.add(connection, tenant, memo, terms)
        return memo

    async def get(self, tenant: str, memo_id: str) -> Memo:
        """Return the memo."""
        memo = None
        if _ID.fullmatch(memo_id):
            async with self._database.reading(tenant) as connection:
                memo = await memos.get(connection, tenant, memo_id)
        if memo is None:
            raise NotFound("there is no such memo")
        return memo

    async def delete(self, tenant: str, memo_id: str) -> None:
        """Delete the memo."""
        async with self._database.transaction(tenant) as connection:
            if not (_ID.fullmatch(memo_id) and await memos.delete(connection, tenant, memo_id)):
                raise NotFound("there is no such memo")

    async def export(self, tenant: str, *, tags: Sequence[str] | None) -> AsyncIterator[Memo]:
        """Yield all memos, or those with any of ``tags``, the newest first."""
        cursor: MemoCursor | None = None
        while True:
            found, cursor = await self.page(tenant, after=cursor, tags=tags, limit=PAGE)
            for memo in found:
                yield memo
            if cursor is None:
                return

    async def forget(self, tenant: str, *, tags: Sequence[str] | None, is_all: bool) -> int:
        """Delete the memos with any of ``tags``, or with ``is_all`` all memos. Return their number. Raises
        `InvalidRequest` unless one of the two is given.
        """
        if is_all == bool(tags):
            raise InvalidRequest("tag or all=true must be given, and not both", field="tag")
        async with self._database.transaction(tenant) as connection:
            return await memos.delete_all(connection, tenant, tags=read_tags(tags) if tags else None)

    async def page(
        self, tenant: str, *, after: MemoCursor | None, tags: Sequence[str] | None, limit: int
    ) -> tuple[list[Memo], MemoCursor | None]:
        """Return the newest memos after a cursor.

        With any of ``tags`` if some are given; and the next cursor.
        """
        wanted = None if tags is None else read_tags(tags)
        async with self._database.reading(tenant) as connection:
            found = await memos.newest(connection, tenant, before=after, tags=wanted, limit=limit + 1)
        last = found[limit - 1] if len(found) > limit else None
        return found[:limit], None if last is None else (last.created_at, last.id)

    async def search(self, tenant: str, *, tags: Sequence[str], query: str | None, limit: int) -> list[Memo]:
        """Return memos with any of ``tags``, newest first; with a ``query`` those that share words with it, best first.

        Raises `InvalidRequest` without both.
        """
        if query is None and not tags:
            raise InvalidRequest("query or tags must be given", field="query")
        wanted = read_tags(tags) or None
        async with self._database.reading(tenant) as connection:
            if query is None:
                return await memos.newest(connection, tenant, tags=wanted, limit=limit)
            (found,) = await _ranked(connection, tenant, [query], tags=wanted, limit=limit, is_asked=True)
        return found


async def relevant(
    connection: Connection, tenant: str, texts: Sequence[str], *, limit: int = RELEVANT
) -> list[list[Memo]]:
    """Return for each of ``texts`` (users' messages) at most ``limit`` memos that are clearly about it, best first."""
    return await _ranked(connection, tenant, texts, tags=None, limit=limit, is_asked=False)


async def _ranked(
    connection: Connection,
    tenant: str,
    texts: Sequence[str],
    *,
    tags: Sequence[str] | None,
    limit: int,
    is_asked: bool,
) -> list[list[Memo]]:
    """For each text at most ``limit`` memos, as in `rank_documents`. Stop words find nothing."""
    chosen: list[list[str]] = []
    for text in texts:
        terms = sorted(set(tokenize(text[:LOOKED_AT])))
        found = await memos.with_any(connection, tenant, terms, tags=tags, limit=CANDIDATES) if terms else []
        found.reverse()
        best = await run_in_thread_if_large(
            len(found) * SIZE, rank_documents, [words for _, words in found], terms, limit=limit, is_asked=is_asked
        )
        chosen.append([found[each.number][0] for each in best])
    wanted = {memo_id for ids in chosen for memo_id in ids}
    known = await memos.by_ids(connection, tenant, sorted(wanted)) if wanted else {}
    return [[known[memo_id] for memo_id in ids if memo_id in known] for ids in chosen]


def read_tags(tags: Sequence[str]) -> tuple[str, ...]:
    """Tags as they are kept: folded, each once, in the order given. Raises `InvalidRequest`."""
    if len(tags) > MAX_TAGS:
        raise InvalidRequest(f"a memo has at most {MAX_TAGS} tags, not {len(tags)}", field="tags")
    found: dict[str, None] = {}
    for tag in tags:
        folded = tag.strip().casefold()
        if not folded or len(folded) > MAX_TAG or not folded.isprintable():
            raise InvalidRequest(f"a tag must be 1 to {MAX_TAG} printable characters", field="tags")
        found[folded] = None
    return tuple(found)


def _searchable(memo: Memo) -> str:
    return " ".join((memo.content, *memo.tags))
