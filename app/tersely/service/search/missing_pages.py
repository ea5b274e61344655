"""Make the pages of a session that are full and missing, a few at a time, so that no transaction is long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from tersely.store.db.connection import Connection, Database
from tersely.store.search import pages

Page = TypeVar("Page")

FindMissing = Callable[[Connection, str, str, int, int], Awaitable[list[int]]]
"""Return the first missing pages: connection, tenant, session, number of full pages, how many at most."""


async def make_missing_pages(
    database: Database,
    tenant: str,
    session_id: str,
    *,
    find_missing: FindMissing,
    make: Callable[[int, Sequence[pages.MessageColumns]], Page],
    add: Callable[[Connection, str, str, Sequence[tuple[int, Page]]], Awaitable[None]],
    at_once: int,
    limit: float,
) -> int | None:
    """Make and store every missing page; return the number of full pages, None if the session does not exist.

    ``make`` computes a page from its number and its messages, in a thread. ``at_once`` pages are made between two
    transactions; ``limit`` is the time limit of one transaction in seconds.
    """
    while True:
        async with database.reading(tenant, limit=limit) as connection:
            found = await pages.last_seq_and_edits(connection, tenant, session_id)
            if found is None:
                return None
            last_seq, edits = found
            full = last_seq // pages.PAGE
            missing = await find_missing(connection, tenant, session_id, full, at_once)
            rows = [(page, await pages.content(connection, tenant, session_id, *span(page))) for page in missing]
        if not rows:
            return full
        made = [(page, await asyncio.to_thread(make, page, content)) for page, content in rows]
        async with database.transaction(tenant, limit=limit) as connection:
            # Removed content must not come back in a page.
            is_unedited = await pages.edits(connection, tenant, session_id, lock=True) == edits
            if is_unedited:
                await add(connection, tenant, session_id, made)
        if is_unedited and len(made) < at_once:
            return full


def span(page: int) -> tuple[int, int]:
    """Return the sequence numbers of the first and the last message of a page."""
    return page * pages.PAGE + 1, (page + 1) * pages.PAGE
