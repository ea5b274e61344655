"""Three replicas on one Postgres behind nginx, round robin: clients hop, replicas are killed, changes reach all."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from tests.deploy.test_prometheus import program, prometheus
from tests.faults.rig import NGINX, Rig, open_rig
from tests.faults.rounds import stored_of
from tests.limits.conftest import ADMIN_KEY, admin, make_tenant
from tests.support.conversations import KINDS, Conversation, compare
from tests.support.http import body_of
from tests.support.tenants import Tenant

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed (Debian: apt-get install nginx-light)"),
]
CLIENTS = 64
QUESTIONS = 4
# Other replicas know a revoked key after two seconds, changed limits after five; a busy machine may take longer.
SLACK = 3


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig() -> AsyncIterator[Rig]:
    """Three replicas with keys and live sessions: one of two workers, one of one, one behind PgBouncer."""
    options = {"TERSELY_AUTH": "keys", "TERSELY_ADMIN_KEY": ADMIN_KEY, "TERSELY_STRATEGY": "slim"}
    async with open_rig(random.Random(1), **options) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        yield session


def urls(rig: Rig) -> list[str]:
    return [f"http://127.0.0.1:{each.port}" for each in rig.replicas]


async def metric(http: aiohttp.ClientSession, url: str, name: str) -> float:
    """The sum of a metric's series at one replica."""
    async with http.get(f"{url}/metrics") as answer:
        text = await answer.text()
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}[^\n]* ([0-9.e+]+)$", text, re.MULTILINE))


async def test_clients_that_hop_lose_nothing_when_replicas_are_killed(rig: Rig, http: aiohttp.ClientSession) -> None:
    made = [
        Conversation(rig.url_for(kind), kind, headers=rig.headers)
        for kind in (KINDS * (CLIENTS // len(KINDS) + 1))[:CLIENTS]
    ]

    async def talk(conversation: Conversation) -> None:
        while len(conversation.acknowledged) < QUESTIONS:
            got = await conversation.ask(http)
            await asyncio.sleep(0.1 if got.has_ended else 0.5)

    talking = [asyncio.create_task(talk(each)) for each in made]
    for number in (1, 2):
        aim = CLIENTS * QUESTIONS * number // 4
        while sum(len(each.acknowledged) for each in made) < aim:
            await asyncio.sleep(0.05)
        await rig.replicas[number].restart()
        rig.note_start(rig.replicas[number])
    await asyncio.gather(*talking)
    await rig.wait_started()
    await rig.wait_for_spool(60)
    await rig.wait_healthy(60)
    end = time.monotonic() + 30
    while not (compared := await compare(rig.admin_dsn, made)).is_right and time.monotonic() < end:
        await asyncio.sleep(1)
    if not compared.is_right:
        print(compared, await stored_of(rig.admin_dsn, made, compared), rig.refused())
    assert compared.is_right
    assert compared.acknowledged == CLIENTS * QUESTIONS
    for url in urls(rig):
        assert await metric(http, url, "tersely_requests_total") > 0
    live = [await metric(http, url, "tersely_live_calls_total") for url in urls(rig)]
    assert max(live) > 0, "live sessions are on"


async def ask(http: aiohttp.ClientSession, url: str, tenant: Tenant, **headers: str) -> int:
    sent = {"X-Tersely-Key": tenant.key, "content-type": "application/json", **headers}
    async with http.post(f"{url}/v1/chat/completions", data=body_of("hello"), headers=sent) as answer:
        await answer.read()
        return answer.status


async def seconds_until(condition: Callable[[], Awaitable[bool]]) -> float:
    began = time.monotonic()
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.1)
    return time.monotonic() - began


async def test_a_key_that_one_replica_revokes_ends_at_all(rig: Rig, http: aiohttp.ClientSession) -> None:
    first, *others = urls(rig)
    tenant = await make_tenant(http, first)
    for url in (first, *others):
        assert await ask(http, url, tenant) == 200
    await admin(http, first, "DELETE", f"/keys/{tenant.key_id}")

    async def is_out() -> bool:
        return [await ask(http, url, tenant) for url in others] == [401, 401]

    assert await seconds_until(is_out) < 2 * SLACK


async def test_limits_that_one_replica_sets_hold_at_all(rig: Rig, http: aiohttp.ClientSession) -> None:
    first, *others = urls(rig)
    tenant = await make_tenant(http, first)
    for url in (first, *others):
        assert await ask(http, url, tenant) == 200
    await admin(http, first, "PUT", f"/tenants/{tenant.name}/limits", {"requests_per_minute": 0})

    async def is_limited() -> bool:
        return [await ask(http, url, tenant) for url in others] == [429, 429]

    assert await seconds_until(is_limited) < 5 * SLACK


async def test_a_session_that_one_replica_changes_is_changed_at_all(rig: Rig, http: aiohttp.ClientSession) -> None:
    first, *others = urls(rig)
    tenant = await make_tenant(http, first)
    headers = {"X-Tersely-Key": tenant.key}
    for url in (first, *others):
        assert await ask(http, url, tenant, **{"X-Tersely-Session": "shared"}) == 200
    for strategy, url in (("window", first), ("full", others[0])):
        change = {"strategy": strategy}
        async with http.patch(f"{url}/api/sessions/shared", json=change, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
        for other in urls(rig):
            sent = {**headers, "X-Tersely-Session": "shared", "content-type": "application/json"}
            async with http.post(f"{other}/v1/chat/completions", data=body_of("again"), headers=sent) as answer:
                assert answer.headers["x-tersely-strategy"].startswith(strategy)


async def test_prometheus_finds_every_replica(rig: Rig, tmp_path: Path) -> None:
    program("prometheus")
    targets = [f"127.0.0.1:{each.port}" for each in rig.replicas]
    with prometheus(targets, tmp_path) as watcher:

        def up() -> int:
            return int(sum(watcher.values('up{job="tersely"}')))

        async with asyncio.timeout(60):
            while await asyncio.to_thread(up) < len(targets):
                await asyncio.sleep(0.5)
        found = await asyncio.to_thread(watcher.ask, "query", query="tersely_build_info")
        assert {each["metric"]["instance"] for each in found["result"]} == set(targets)
