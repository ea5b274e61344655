"""Limits hold for all replicas and workers together, within 5 %, also when one is killed or the database is away."""

from __future__ import annotations

import asyncio
import re
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from itertools import cycle
from typing import Any

import aiohttp
import pytest

from tersely.fakellm.scripted import ScriptedReply
from tests.conftest import Database
from tests.limits.conftest import ADMIN_KEY, admin, make_tenant
from tests.support.http import Answered, body_of, post
from tests.support.processes import greeting, start
from tests.support.relay import relay
from tests.support.services import Worker, run_worker, serve
from tests.support.tenants import Tenant
from tests.support.upstreams import Model

pytestmark = pytest.mark.slow
# Workers read limits that another one set after so many seconds.
FOLLOWED = 3.0
Ask = Callable[[int], Awaitable[Answered]]


@pytest.fixture
async def replicas(store: Database, model: Model) -> AsyncIterator[list[Worker]]:
    """Two services on one database."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(run_worker(store, model.url, auth="keys", admin_key=ADMIN_KEY))
            for _ in range(2)
        ]


async def tenant_of(replicas: list[Worker], **limits: Any) -> Tenant:
    made = await make_tenant(replicas[0].http, replicas[0].base_url, **limits)
    await asyncio.sleep(FOLLOWED)
    return made


async def load(ask: Ask, count: int, *, at_once: int = 16) -> list[Answered]:
    """Make calls, so many at a time."""
    places = asyncio.Semaphore(at_once)

    async def one(n: int) -> Answered:
        async with places:
            return await ask(n)

    return await asyncio.gather(*(one(n) for n in range(count)))


async def test_requests_per_minute_are_exact_over_two_replicas(replicas: list[Worker]) -> None:
    tenant = await tenant_of(replicas, requests_per_minute=200)
    # One gets three times as many as the other.
    turns = cycle([replicas[0], replicas[0], replicas[0], replicas[1]])
    began = time.monotonic()
    answers = await load(lambda n: next(turns).post(body_of(f"question {n}"), X_Tersely_Key=tenant.key), 300)
    assert time.monotonic() - began < 55, "the machine is too slow: requests of the first seconds count no longer"
    admitted = sum(answer.status == 200 for answer in answers)
    assert {answer.status for answer in answers} == {200, 429}
    assert 190 <= admitted <= 200


async def test_tokens_per_day_are_exact_over_two_replicas(replicas: list[Worker], model: Model) -> None:
    tenant = await tenant_of(replicas, tokens_per_day=100_000)
    usage = {"prompt_tokens": 900, "completion_tokens": 100, "total_tokens": 1000}
    script = model.script(tenant.name, *(ScriptedReply(message={"content": "ok"}, usage=usage) for _ in range(200)))
    turns = cycle(replicas)

    async def ask(n: int) -> Answered:
        return await next(turns).post(body_of(f"question {n}"), X_Tersely_Key=tenant.key, X_Script=script)

    answers = await load(ask, 140, at_once=8)
    spent = sum(1000 for answer in answers if answer.status == 200)
    assert 95_000 <= spent <= 105_000
    one = replicas[0]
    used = (await admin(one.http, one.base_url, "GET", f"/tenants/{tenant.name}/limits"))["used"]
    assert abs(used["tokens_per_day"] - spent) <= 5_000


async def test_concurrent_calls_are_exact_over_two_replicas(replicas: list[Worker], model: Model) -> None:
    tenant = await tenant_of(replicas, concurrent=10)
    slow = ScriptedReply(message={"content": "late"}, first_delay=6.0)
    script = model.script(tenant.name, *(slow for _ in range(30)))
    turns = cycle(replicas)

    async def ask(n: int) -> Answered:
        return await next(turns).post(body_of(f"question {n}"), X_Tersely_Key=tenant.key, X_Script=script)

    answers = await load(ask, 30, at_once=30)
    assert sum(answer.status == 200 for answer in answers) == 10


@contextmanager
def process_on(database: Database, upstream: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A service as a process of its own; its URL and the process."""
    process = start(
        "--port", "0", DATABASE_URL=database.dsn, TERSELY_OPENAI_BASE_URL=upstream, TERSELY_AUTH="keys",
        TERSELY_LOG_LEVEL="error",
    )  # fmt: skip
    try:
        found = re.search(r"http://127\.0\.0\.1:\d+", greeting(process))
        assert found is not None
        yield found[0], process
    finally:
        process.kill()
        process.communicate(timeout=60)


async def test_the_slots_of_a_killed_process_come_back(store: Database, model: Model, replicas: list[Worker]) -> None:
    tenant = await tenant_of(replicas, requests_per_minute=1000, concurrent=4)
    slow = ScriptedReply(message={"content": "late"}, first_delay=60.0)
    here = replicas[0]
    with process_on(store, model.url) as (url, process):
        other = Worker(base_url=url, http=here.http)
        script = model.script(tenant.name, *(slow for _ in range(4)))
        held = [
            asyncio.create_task(other.post(body_of(f"slow {n}"), X_Tersely_Key=tenant.key, X_Script=script))
            for n in range(4)
        ]
        async with asyncio.timeout(60):
            while len(model.replies[script]):
                await asyncio.sleep(0.2)
        # Renewed for as long as the calls go on.
        for _ in range(3):
            await asyncio.sleep(5)
            assert (await here.post(body_of("one more"), X_Tersely_Key=tenant.key)).status == 429
        process.kill()
        await asyncio.gather(*held, return_exceptions=True)
        async with asyncio.timeout(30):
            while (await here.post(body_of("elsewhere"), X_Tersely_Key=tenant.key)).status == 429:
                await asyncio.sleep(0.5)


async def test_with_the_database_away_each_worker_counts_by_itself(store: Database, model: Model) -> None:
    with (
        relay(store) as way,
        serve(store, model.url, dsn=way.dsn, auth="keys", admin_key=ADMIN_KEY, database_timeout=1.0) as service,
    ):
        async with aiohttp.ClientSession() as http:
            tenant = await make_tenant(http, service.url, requests_per_minute=20)
            assert (await post(service, body_of("first"), X_Tersely_Key=tenant.key)).status == 200
            way.cut()
            answers = [await post(service, body_of(f"question {n}"), X_Tersely_Key=tenant.key) for n in range(30)]
            admitted = sum(answer.status == 200 for answer in answers)
            assert {answer.status for answer in answers} == {200, 429}
            assert 17 <= admitted <= 20
            way.restore()
            await asyncio.sleep(FOLLOWED)
            assert (await post(service, body_of("later"), X_Tersely_Key=tenant.key)).status == 429
            used = (await admin(http, service.url, "GET", f"/tenants/{tenant.name}/limits"))["used"]
            assert 18 <= used["requests_per_minute"] <= 20


async def test_a_revoked_key_gives_nothing_to_count(replicas: list[Worker]) -> None:
    tenant = await tenant_of(replicas, requests_per_minute=5)
    one, other = replicas
    assert (await one.post(body_of("hello"), X_Tersely_Key=tenant.key)).status == 200
    await admin(one.http, one.base_url, "DELETE", f"/keys/{tenant.key_id}")
    for n in range(10):
        assert (await other.post(body_of(f"question {n}"), X_Tersely_Key=tenant.key)).status == 401
    used = (await admin(one.http, one.base_url, "GET", f"/tenants/{tenant.name}/limits"))["used"]
    assert used["requests_per_minute"] <= 2
