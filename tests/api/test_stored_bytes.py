"""The bytes that are stored besides the messages stay few."""

from __future__ import annotations

import asyncio
import json
from time import monotonic

import asyncpg
import httpx

from tests.conftest import Database
from tests.support.services import serve
from tests.support.upstreams import scripted

COUNT = 1_280
WORDS = "the proxy stores each message of app/tersely/main.py and src/index.ts with order_total and retry_after once"
SEARCHED = """
SELECT sum(pg_total_relation_size(t)) FROM unnest(ARRAY['search_pages', 'search_words', 'term_pages']::regclass[]) AS t
"""
BUILT = "SELECT (SELECT count(*) FROM search_pages) AS texts, (SELECT count(*) FROM term_pages) AS terms"


async def test_pages_and_past_epochs_take_few_bytes_per_message(database: Database) -> None:
    admin = await asyncpg.connect(database.admin_dsn)
    try:
        with scripted() as model, serve(database, model.url) as service:
            async with httpx.AsyncClient(base_url=service.url, timeout=150) as http:
                for start in range(0, COUNT, 320):
                    messages = [
                        {"role": "assistant" if n % 2 else "user", "content": f"name_{n} {n * 7919} " + f"{WORDS} " * 5}
                        for n in range(start, start + 320)
                    ]
                    (await http.post("/api/sessions/long/messages", json={"messages": messages})).raise_for_status()
                deadline = monotonic() + 150
                while min(await admin.fetchrow(BUILT) or (0,)) < COUNT // 128 and monotonic() < deadline:
                    await asyncio.sleep(0.1)
        assert await admin.fetchval(SEARCHED) / COUNT < 600
        plan = json.loads(await admin.fetchval("SELECT plan FROM sessions WHERE id = 'long'"))
        past = [json.loads(row["plan"]) for row in await admin.fetch("SELECT plan FROM epochs")]
        assert len(plan["references"]) > 100
        assert past
        assert all(each["references"] == [] for each in past)
    finally:
        await admin.close()
