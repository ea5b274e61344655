"""Search pages are built in the background, after the commits that fill them."""

from __future__ import annotations

import asyncio
from time import monotonic

import asyncpg
import httpx
import pytest

from tersely.service.search.page_builder import PageBuilder
from tests.conftest import Database
from tests.support.services import serve
from tests.support.upstreams import scripted

PAGES = "SELECT (SELECT count(*) FROM search_pages) AS texts, (SELECT count(*) FROM term_pages) AS terms"


async def test_full_pages_are_built_without_a_search(database: Database) -> None:
    admin = await asyncpg.connect(database.admin_dsn)
    try:
        with scripted() as model, serve(database, model.url) as service:
            async with httpx.AsyncClient(base_url=service.url, timeout=150) as http:
                for start in range(0, 640, 160):
                    messages = [
                        {"role": "assistant" if n % 2 else "user", "content": f"number{n} of the words"}
                        for n in range(start, start + 160)
                    ]
                    (await http.post("/api/sessions/long/messages", json={"messages": messages})).raise_for_status()
                deadline = monotonic() + 150
                while min(await admin.fetchrow(PAGES) or (0,)) < 4 and monotonic() < deadline:
                    await asyncio.sleep(0.1)
                found = await admin.fetchrow(PAGES)
                assert found is not None
                assert found["texts"] >= 4
                assert found["terms"] >= 4
                for mode in ("search", "relevant"):
                    answer = await http.post("/api/sessions/long/search", json={"mode": mode, "query": "number333"})
                    assert "number333" in answer.json()["text"]
    finally:
        await admin.close()


async def until(condition: asyncio.Event) -> None:
    async with asyncio.timeout(10):
        await condition.wait()


@pytest.mark.parametrize(("pages", "quiet"), [([1, 1, 2], 1_000.0), ([1], 0.01)])
async def test_a_session_is_built_when_pages_gather_or_it_rests(pages: list[int], quiet: float) -> None:
    built: list[tuple[str, str]] = []
    done = asyncio.Event()

    async def build(tenant: str, session_id: str) -> None:
        built.append((tenant, session_id))
        done.set()

    builder = PageBuilder(build, pages=4, quiet=quiet)
    await builder.open()
    try:
        for count in pages:
            assert not built
            builder.schedule("north", "s1", count)
        await until(done)
        assert built == [("north", "s1")]
    finally:
        await builder.close()


async def test_a_session_that_fails_does_not_stop_the_others() -> None:
    done = asyncio.Event()
    tried: list[str] = []

    async def build(tenant: str, session_id: str) -> None:
        tried.append(session_id)
        if session_id == "bad":
            raise ValueError
        done.set()

    builder = PageBuilder(build, pages=1)
    await builder.open()
    try:
        builder.schedule("north", "bad", 1)
        builder.schedule("north", "good", 1)
        await until(done)
        assert sorted(tried) == ["bad", "good"]
    finally:
        await builder.close()


@pytest.mark.parametrize("live_sessions", ["off", "256"])
async def test_a_question_that_fills_a_page_has_it_built(
    database: Database, monkeypatch: pytest.MonkeyPatch, live_sessions: str
) -> None:
    filled: list[int] = []
    monkeypatch.setattr(PageBuilder, "schedule", lambda _self, _tenant, _session, pages: filled.append(pages))
    # Two questions at the end: from here on questions have even numbers.
    messages = [{"role": "assistant" if n % 2 else "user", "content": f"number{n} of the words"} for n in range(125)]
    messages.append({"role": "user", "content": "and the next"})
    with scripted() as model, serve(database, model.url, live_sessions=live_sessions) as service:
        async with httpx.AsyncClient(base_url=service.base_url, timeout=60) as http:
            for _ in range(3):
                body = {"model": "gpt-4o", "messages": messages}
                reply = (await http.post("/chat/completions", json=body)).raise_for_status().json()
                messages += [reply["choices"][0]["message"], {"role": "user", "content": "go on"}]
    assert filled == [1]
