"""Clients that try to pay less than they use: they leave early, hide usage, or send calls of very different sizes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import cycle
from typing import Any

import pytest

from tersely.fakellm.scripted import ScriptedReply
from tests.conftest import Database
from tests.limits.conftest import ADMIN_KEY, admin, make_tenant
from tests.support.http import Answered, body_of
from tests.support.services import Worker, run_worker
from tests.support.tenants import Tenant
from tests.support.upstreams import Model

pytestmark = pytest.mark.slow
# Workers read limits that another one set, and give back what they hold, after so many seconds.
FOLLOWED = 3.5


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


async def used(replicas: list[Worker], tenant: Tenant) -> Any:
    one = replicas[0]
    return (await admin(one.http, one.base_url, "GET", f"/tenants/{tenant.name}/limits"))["used"]


async def leave_early(worker: Worker, tenant: Tenant, script: str, text: str) -> None:
    """Start a stream and go away after its first words."""
    headers = {"X-Tersely-Key": tenant.key, "X-Script": script, "content-type": "application/json"}
    path = f"{worker.base_url}/v1/chat/completions"
    async with worker.http.post(path, data=body_of(text, stream=True), headers=headers) as answer:
        if answer.status == 200:
            await answer.content.readany()
            answer.close()


async def test_tokens_of_abandoned_streams_count(replicas: list[Worker], model: Model) -> None:
    tenant = await tenant_of(replicas, tokens_per_day=1_000_000)
    words = ["word "] * 40
    reply = ScriptedReply(message={"content": "".join(words)}, pieces=words, delay=0.05)
    script = model.script(tenant.name, *(reply for _ in range(10)))
    for n, worker in zip(range(10), cycle(replicas), strict=False):
        await leave_early(worker, tenant, script, f"{n} " + "a question of some length " * 200)
    await asyncio.sleep(FOLLOWED)
    assert (await used(replicas, tenant))["tokens_per_day"] >= 10 * 1000


async def test_tokens_count_where_the_host_reports_none(replicas: list[Worker], model: Model) -> None:
    tenant = await tenant_of(replicas, tokens_per_day=1_000_000)
    script = model.script(tenant.name, *(ScriptedReply(usage={}) for _ in range(10)))
    for n, worker in zip(range(10), cycle(replicas), strict=False):
        answer = await worker.post(
            body_of(f"{n} " + "a question of some length " * 200, stream=n % 3 == 0),
            X_Tersely_Key=tenant.key, X_Script=script,
        )  # fmt: skip
        assert answer.status == 200
    await asyncio.sleep(FOLLOWED)
    assert (await used(replicas, tenant))["tokens_per_day"] >= 10 * 1000


async def test_slots_of_clients_that_leave_come_back(replicas: list[Worker], model: Model) -> None:
    tenant = await tenant_of(replicas, concurrent=4)
    words = ["word "] * 100
    slow = ScriptedReply(message={"content": "".join(words)}, pieces=words, delay=0.1)
    script = model.script(tenant.name, *(slow for _ in range(60)))
    turns = cycle(replicas)
    await asyncio.gather(*(leave_early(next(turns), tenant, script, f"question {n}") for n in range(60)))
    await asyncio.sleep(FOLLOWED)
    assert (await used(replicas, tenant))["concurrent"] == 0
    model.replies[script].clear()
    quick = [ScriptedReply(message={"content": "late"}, first_delay=2.0) for _ in range(12)]
    model.script(script, *quick)
    answers = await asyncio.gather(
        *(next(turns).post(body_of(f"again {n}"), X_Tersely_Key=tenant.key, X_Script=script) for n in range(12))
    )
    assert sum(answer.status == 200 for answer in answers) == 4


@pytest.mark.parametrize("limit", ["tokens_per_day", "money_per_month"])
async def test_calls_of_very_different_sizes_meet_the_limit(replicas: list[Worker], model: Model, limit: str) -> None:
    """Most calls are small, one in ten has fifty times the size: 2.5 % of the limit."""
    chance = random.Random(4)
    sizes = [50_000 if chance.random() < 0.1 else 1_000 for _ in range(900)]
    # gpt-4o: 2.50 USD per million tokens of input, 10 of output.
    price = 2.5e-6
    most = 2_000_000 if limit == "tokens_per_day" else 2_000_000 * price
    tenant = await tenant_of(replicas, **{limit: most})
    replies = [
        ScriptedReply(
            message={"content": "ok"}, usage={"prompt_tokens": size, "completion_tokens": 0, "total_tokens": size}
        )
        for size in sizes
    ]
    script = model.script(tenant.name, *replies)
    turns = cycle(replicas)
    spent = 0
    places = asyncio.Semaphore(8)

    async def ask(n: int) -> Answered:
        nonlocal spent
        async with places:
            answer = await next(turns).post(
                body_of(f"question {n}", model="gpt-4o"), X_Tersely_Key=tenant.key, X_Script=script
            )
            if answer.status == 200:
                spent += answer.json["usage"]["total_tokens"]
            return answer

    answers = await asyncio.gather(*(ask(n) for n in range(900)))
    refused = next(answer for answer in answers if answer.status == 429)
    assert int(refused.headers["retry-after"]) >= 1
    assert 0.95 * 2_000_000 <= spent <= 1.05 * 2_000_000
    await asyncio.sleep(FOLLOWED)
    counted = (await used(replicas, tenant))[limit] / (1 if limit == "tokens_per_day" else price)
    assert abs(counted - spent) <= 0.01 * 2_000_000
