"""Summaries and embeddings for a tenant count towards its limits."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from tests.conftest import Database
from tests.limits.conftest import ADMIN_KEY, admin, make_tenant
from tests.support.services import Worker, run_worker
from tests.support.tenants import Tenant
from tests.support.upstreams import Model

pytestmark = pytest.mark.usefixtures("quick_accounts")
LIMIT = 1_000_000
# A worker has read new limits after so many seconds.
FOLLOWED = 1.0


async def used(worker: Worker, tenant: Tenant, limit: str = "tokens_per_day") -> float:
    """Tokens of the day, or USD of the month, that the tenant's record has."""
    found = await admin(worker.http, worker.base_url, "GET", f"/tenants/{tenant.name}")
    return float(found["used"][limit] or 0)


async def fill(worker: Worker, tenant: Tenant) -> None:
    """Store a session, without any model call."""
    messages = [
        {"role": role, "content": f"{role} says {n} " * 60} for n in range(20) for role in ("user", "assistant")
    ]
    path = f"{worker.base_url}/api/sessions/s/messages"
    async with worker.http.post(path, json={"messages": messages}, headers={"X-Tersely-Key": tenant.key}) as answer:
        assert answer.status == 201, await answer.text()


async def test_tokens_of_a_summary_count_for_its_tenant(store: Database, model: Model) -> None:
    settings = {"summarizer_model": "gpt-4o", "summarizer_base_url": model.url, "summarizer_api_key": "k"}
    async with run_worker(store, model.url, auth="keys", admin_key=ADMIN_KEY, **settings) as worker:
        tenant = await make_tenant(worker.http, worker.base_url, tokens_per_day=LIMIT, money_per_month=LIMIT)
        other = await make_tenant(worker.http, worker.base_url, tokens_per_day=LIMIT)
        await asyncio.sleep(FOLLOWED)
        await fill(worker, tenant)
        body = {"strategy": "compact"}
        path = f"{worker.base_url}/api/sessions/s/compact"
        async with worker.http.post(path, json=body, headers={"X-Tersely-Key": tenant.key}) as answer:
            assert answer.status == 200, await answer.text()
            assert "model" in str((await answer.json())["summary"])
        async with asyncio.timeout(30):
            while await used(worker, tenant) < 1_000:
                await asyncio.sleep(0.2)
        assert await used(worker, tenant) < 100_000
        # 2.50 USD per million tokens of input; no price of the summarizer is configured.
        assert await used(worker, tenant, "money_per_month") > 1_000 * 2.5e-6
        assert await used(worker, other) == 0


@pytest.mark.parametrize("reported", [700, None, -700, "many"])
async def test_tokens_of_embeddings_count_for_their_tenant(store: Database, model: Model, reported: object) -> None:
    """They are estimated where the host reports none, or an impossible number."""

    async def embed(request: web.Request) -> web.Response:
        texts = (await request.json())["input"]
        data = [{"index": n, "embedding": [1.0, 0.5]} for n in range(len(texts))]
        total = reported * len(texts) if isinstance(reported, int) else reported
        return web.json_response({"data": data, "usage": {} if total is None else {"total_tokens": total}})

    app = web.Application()
    app.router.add_post("/v1/embeddings", embed)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    settings = {"embeddings_base_url": url, "embeddings_model": "little"}
    try:
        async with run_worker(store, model.url, auth="keys", admin_key=ADMIN_KEY, **settings) as worker:
            tenant = await make_tenant(worker.http, worker.base_url, tokens_per_day=LIMIT)
            await asyncio.sleep(FOLLOWED)
            await fill(worker, tenant)
            path = f"{worker.base_url}/api/sessions/s/search"
            query = {"mode": "relevant", "query": "says"}
            async with worker.http.post(path, json=query, headers={"X-Tersely-Key": tenant.key}) as answer:
                assert answer.status == 200, await answer.text()
            # 40 messages and the query, of 700 tokens each as the host says, or of about 200.
            least, most = (40 * 700, 42 * 700) if reported == 700 else (40 * 150, 42 * 300)
            async with asyncio.timeout(30):
                while await used(worker, tenant) < least:
                    await asyncio.sleep(0.2)
            assert await used(worker, tenant) <= most
    finally:
        await runner.cleanup()
