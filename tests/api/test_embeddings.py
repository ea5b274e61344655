"""Search by meaning, against a model host on a real socket that embeds by a small dictionary of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import asyncpg
import pytest
from aiohttp import web

from tersely.service.search import embedder as embedding
from tests.api.conftest import Api, serve

MEANINGS = ({"car", "automobile", "vehicle", "engine"}, {"dog", "puppy", "hound"}, {"money", "budget", "cash"})


def embed(text: str) -> list[float]:
    """A number for each meaning; texts without any point nowhere near them."""
    words = set(text.lower().split())
    numbers = [1.0 if words & meaning else -0.1 for meaning in MEANINGS]
    return [*numbers, -1.0 if any(number > 0 for number in numbers) else 1.0]


@dataclass
class Host:
    """The model host: what it was asked, and how it misbehaves."""

    url: str = ""
    inputs: list[list[str]] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    status: int = 200
    poison: str = ""
    delay: float = 0.0
    released: asyncio.Event = field(default_factory=asyncio.Event)
    body: bytes | None = None

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.inputs.append(body["input"])
        self.keys.add(request.headers.get("Authorization", ""))
        assert (body["model"], body["encoding_format"]) == ("little", "float")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.released.wait(), self.delay)
        if self.body is not None:
            return web.Response(body=self.body)
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        if self.poison and any(self.poison in text for text in body["input"]):
            return web.json_response({"error": {"message": "too long"}}, status=400)
        data = [{"object": "embedding", "index": n, "embedding": embed(t)} for n, t in enumerate(body["input"])]
        return web.json_response({"object": "list", "data": data[::-1], "usage": {"total_tokens": 1}})


@asynccontextmanager
async def hosted(dsn: str) -> AsyncIterator[tuple[Api, Host]]:
    host = Host()
    app = web.Application()
    app.router.add_post("/v1/embeddings", host.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    settings: dict[str, Any] = {
        "embeddings_base_url": host.url,
        "embeddings_model": "little",
        "embeddings_api_key": "secret",
    }
    try:
        async with serve(dsn, **settings) as api:
            yield api, host
    finally:
        await runner.cleanup()


@pytest.fixture(params=["vector", "bytes"])
async def meaning(database, request) -> AsyncIterator[tuple[Api, Host]]:
    """The application and its host; on a database with the extension, where there is one, and on one without."""
    await execute(database, "ALTER TABLE embeddings DROP COLUMN IF EXISTS meaning")
    if request.param == "vector":
        if not await execute(database, "SELECT FROM pg_available_extensions WHERE name = 'vector'"):
            pytest.skip("this Postgres has no vector extension")
        await execute(database, "CREATE EXTENSION IF NOT EXISTS vector")
        await execute(database, "ALTER TABLE embeddings ADD COLUMN meaning vector")
    async with hosted(database.dsn) as running:
        yield running


async def execute(database: Any, statement: str) -> list[asyncpg.Record]:
    admin = await asyncpg.connect(database.admin_dsn)
    try:
        found: list[asyncpg.Record] = await admin.fetch(statement)
        return found
    finally:
        await admin.close()


async def find(api: Api, query: str, **options: object) -> list[int]:
    body = {"mode": "relevant", "query": query, "before": 0, "after": 0, "first": 1, **options}
    answer = await api.http.post("/api/sessions/s/search", json=body)
    assert answer.status_code == 200, answer.text
    return [message["seq"] for excerpt in answer.json()["excerpts"] for message in excerpt["messages"]]


async def eventually(api: Api, query: str, seqs: list[int]) -> None:
    async with asyncio.timeout(20):
        while sorted(await find(api, query, first=len(seqs))) != seqs:
            await asyncio.sleep(0.05)


async def talk(api: Api, *extra: str) -> None:
    texts = ["The automobile is red", "A puppy barks", "Ten euros of cash", *extra]
    await api.append(
        "s", {"role": "system", "content": "money vehicle"}, *({"role": "user", "content": t} for t in texts)
    )


async def rows(database: Any) -> list[tuple[int, bool]]:
    stored = await execute(database, "SELECT seq, signs IS NOT NULL AS has FROM embeddings ORDER BY seq")
    return [(row["seq"], row["has"]) for row in stored]


async def test_a_text_of_the_same_meaning_is_found_without_a_common_word(meaning, database) -> None:
    api, host = meaning
    await talk(api)
    await eventually(api, "vehicle", [2])
    assert await find(api, "hound") == [3]
    assert await rows(database) == [(1, False), (2, True), (3, True), (4, True)]
    assert host.keys == {"Bearer secret"}
    await api.append("s", {"role": "user", "content": "The engine is loud"})
    assert await find(api, "loud") == [5]
    await eventually(api, "engine loud automobile", [5])


async def test_small_talk_is_not_even_embedded(meaning) -> None:
    api, host = meaning
    await talk(api)
    assert await find(api, "please continue") == []
    assert host.inputs == []


@pytest.mark.parametrize(
    "trouble",
    [{"status": 500}, {"status": 429}, {"status": 401}, {"body": b"{"}, {"body": b'{"data":[]}'}, {"delay": 9.0}],
)
async def test_a_host_in_trouble_costs_no_search(meaning, monkeypatch, trouble: dict[str, Any]) -> None:
    monkeypatch.setattr(embedding, "QUERY_LIMIT", 0.2)
    monkeypatch.setattr(embedding, "REST", 0.3)
    api, host = meaning
    await talk(api)
    for name, value in trouble.items():
        setattr(host, name, value)
    assert await find(api, "automobile") == [2]
    assert await find(api, "vehicle") == []
    host.status, host.body, host.delay = 200, None, 0.0
    host.released.set()
    if "delay" not in trouble:
        await eventually(api, "vehicle", [2])


async def test_a_message_that_the_model_refuses_does_not_hold_up_the_others(meaning, database) -> None:
    api, host = meaning
    host.poison = "poison"
    await talk(api, "poison budget", "A vehicle again")
    await eventually(api, "hound", [3])
    assert (5, False) in await rows(database)
    assert (6, True) in await rows(database)


async def test_another_process_continues_started_embeddings(database, monkeypatch) -> None:
    monkeypatch.setattr(embedding, "BATCH", 2)
    async with hosted(database.dsn) as (api, host):
        await talk(api)
        await eventually(api, "vehicle", [2])
        async with asyncio.timeout(20):
            while len(await rows(database)) < 4:
                await asyncio.sleep(0.05)
        assert max(len(texts) for texts in host.inputs) <= 2
    async with hosted(database.dsn) as (api, host):
        await api.append("s", {"role": "user", "content": "My hound"})
        await eventually(api, "puppy", [3])
        await eventually(api, "dog", [3, 5])
        assert [texts for texts in host.inputs if "The automobile is red" in texts] == []


async def test_hidden_and_removed_messages_are_not_found_by_meaning(meaning, database) -> None:
    api, _ = meaning
    await talk(api)
    await eventually(api, "vehicle", [2])
    await api.http.post("/api/sessions/s/turns/t1/drop")
    assert 2 not in await find(api, "vehicle", first=5)
    await api.http.delete("/api/sessions/s/turns/t2")
    assert 3 not in [seq for seq, _ in await rows(database)]
    assert 3 not in await find(api, "hound", first=5)
