"""Pages of a session that changes while they are made."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import asyncpg
import pytest

from tersely.service.search.missing_pages import make_missing_pages
from tersely.store.db.connection import Database
from tersely.store.search import pages
from tersely.store.search.pages import MessageColumns
from tests.service.conftest import Fill

EDIT = "UPDATE sessions SET edits = edits + 1 WHERE tenant_id = 'north' AND id = 's1'"
STORED = "SELECT page, text FROM search_pages WHERE tenant_id = 'north' AND session_id = 's1' ORDER BY page"


@pytest.mark.parametrize("at_once", [1, 2, 3])
async def test_a_page_of_content_that_was_edited_meanwhile_is_made_again(
    pool: Database, admin: asyncpg.Connection[asyncpg.Record], fill: Fill, at_once: int
) -> None:
    await fill(turns=pages.PAGE + 1)  # two full pages, and two messages
    loop, made = asyncio.get_running_loop(), 0

    def make(page: int, content: Sequence[MessageColumns]) -> str:
        nonlocal made
        made += 1
        if made == 1:
            asyncio.run_coroutine_threadsafe(admin.execute(EDIT), loop).result(10)
        assert [each.seq for each in content] == list(range(page * pages.PAGE + 1, (page + 1) * pages.PAGE + 1))
        return f"page {page}"

    full = await make_missing_pages(
        pool, "north", "s1", find_missing=pages.missing_pages, make=make, add=pages.add_pages, at_once=at_once, limit=30
    )
    assert full == 2
    assert made == 2 + min(at_once, 2)
    assert [tuple(row) for row in await admin.fetch(STORED)] == [(0, "page 0"), (1, "page 1")]


async def test_a_session_that_is_gone_has_no_pages(pool: Database) -> None:
    full = await make_missing_pages(
        pool,
        "north",
        "s1",
        find_missing=pages.missing_pages,
        make=lambda *_: "",
        add=pages.add_pages,
        at_once=1,
        limit=30,
    )
    assert full is None
