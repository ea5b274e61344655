"""Many at once: connections that say little or nothing, floods of headers, and a tenant with very many sessions.

``TERSELY_TEST_CROWD=20`` makes them 2,000 slow connections, 400 floods and 1,000 sessions.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil
import pytest

from tests.conftest import Database
from tests.limits.conftest import ADMIN_KEY, make_tenant
from tests.support.http import STORED, body_of
from tests.support.processes import greeting, start
from tests.support.tenants import Tenant
from tests.support.upstreams import Model

CROWD = int(os.environ.get("TERSELY_TEST_CROWD", "1"))
SLOW, FLOODS, SESSIONS = 100 * CROWD, 20 * CROWD, 50 * CROWD
CALLS = 40
MIB = 1024 * 1024

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240 + 60 * CROWD)]


@dataclass(frozen=True, slots=True)
class Process:
    """A service process."""

    url: str
    port: int
    process: psutil.Process

    def mib(self) -> float:
        return float(self.process.memory_info().rss) / MIB


@pytest.fixture
def process(database: Database, model: Model, tmp_path: Path) -> Iterator[Process]:
    started = start(
        "--port", "0", DATABASE_URL=database.dsn, TERSELY_DATA_DIR=str(tmp_path), TERSELY_OPENAI_BASE_URL=model.url,
        TERSELY_AUTH="keys", TERSELY_ADMIN_KEY=ADMIN_KEY, TERSELY_DATABASE_TIMEOUT="30", TERSELY_HEADER_TIMEOUT="60",
        TERSELY_BODY_TIMEOUT="60", TERSELY_LOG_LEVEL="error",
    )  # fmt: skip
    try:
        found = re.search(r"http://127\.0\.0\.1:(\d+)", greeting(started))
        assert found is not None
        yield Process(found[0], int(found[1]), psutil.Process(started.pid))
    finally:
        started.send_signal(signal.SIGKILL)
        started.communicate()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session


async def ask(http: aiohttp.ClientSession, process: Process, tenant: Tenant, session: str, text: str) -> float:
    """One call, which must be stored; seconds."""
    began = time.perf_counter()
    headers = {"X-Tersely-Key": tenant.key, "X-Tersely-Session": session, "content-type": "application/json"}
    async with http.post(f"{process.url}/v1/chat/completions", data=body_of(text), headers=headers) as answer:
        await answer.read()
        assert (answer.status, answer.headers.get("x-tersely-context")) in {(200, each) for each in STORED}
    return time.perf_counter() - began


async def median_of(http: aiohttp.ClientSession, process: Process, tenant: Tenant, name: str) -> float:
    times = [await ask(http, process, tenant, f"{name}-{n % 4}", f"question {n}") for n in range(CALLS)]
    return statistics.median(times)


@asynccontextmanager
async def slow_connections(process: Process, key: str, count: int) -> AsyncIterator[list[asyncio.StreamWriter]]:
    """A third says nothing, a third stops within its headers, a third within its body."""
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\nX-Tersely-Key: {key}\r\ncontent-type: application/json\r\n"
    )
    beginnings = (b"", b"POST /v1/chat/comp", f'{head}content-length: 90000\r\n\r\n{{"mod'.encode())
    writers: list[asyncio.StreamWriter] = []
    try:
        for number in range(count):
            _, writer = await asyncio.open_connection("127.0.0.1", process.port)
            writer.write(beginnings[number % 3])
            writers.append(writer)
        yield writers
    finally:
        for writer in writers:
            writer.transport.abort()


async def test_calls_are_served_beside_slow_connections(process: Process, http: aiohttp.ClientSession) -> None:
    tenant, slow = [await make_tenant(http, process.url) for _ in range(2)]
    await median_of(http, process, tenant, "warm")
    alone, before = await median_of(http, process, tenant, "alone"), process.mib()
    async with slow_connections(process, slow.key, SLOW):
        beside = await median_of(http, process, tenant, "beside")
        held = process.mib() - before
    print(f"{SLOW} slow connections: p50 {1000 * alone:.1f} ms alone, {1000 * beside:.1f} ms beside, {held:.1f} MiB")
    assert beside < 3 * alone + 0.1
    assert held < 20 + 0.1 * SLOW


async def test_floods_of_headers_keep_nobody_waiting(process: Process, http: aiohttp.ClientSession) -> None:
    tenant = await make_tenant(http, process.url)
    await median_of(http, process, tenant, "warm")
    alone, before = await median_of(http, process, tenant, "alone"), process.mib()
    refused = 0

    async def flood(number: int) -> None:
        nonlocal refused
        reader, writer = await asyncio.open_connection("127.0.0.1", process.port)
        line = b"x-%d: " % number + random.Random(number).randbytes(400).hex().encode() + b"\r\n"
        answer = b""
        try:
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\n" + line * 2000)
            answer = await asyncio.wait_for(reader.read(), 60)
        except ConnectionError:
            answer = b" 431 "
        finally:
            writer.transport.abort()
        refused += b" 431 " in answer

    flooding = asyncio.gather(*(flood(number) for number in range(FLOODS)))
    beside = await median_of(http, process, tenant, "beside")
    await flooding
    print(f"{FLOODS} floods: p50 {1000 * alone:.1f} ms alone, {1000 * beside:.1f} ms beside, {refused} refused")
    assert refused == FLOODS
    assert process.mib() - before < 40
    assert await median_of(http, process, tenant, "after") < 3 * alone + 0.02


async def test_very_many_sessions_of_one_tenant_leave_room_for_another(
    process: Process, http: aiohttp.ClientSession
) -> None:
    """Each of them sends its next question once it has its answer and has thought for a while."""
    quiet, crowd = [await make_tenant(http, process.url) for _ in range(2)]
    await median_of(http, process, quiet, "warm")
    alone = await median_of(http, process, quiet, "alone")
    over = asyncio.Event()
    calls = 0

    async def talk(number: int) -> None:
        nonlocal calls
        rng = random.Random(number)
        while not over.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), rng.uniform(0, 20))
            if not over.is_set():
                await ask(http, process, crowd, f"crowd-{number}", f"question {calls}")
                calls += 1

    talking = [asyncio.create_task(talk(number)) for number in range(SESSIONS)]
    await asyncio.sleep(1)
    began = time.monotonic()
    beside = await median_of(http, process, quiet, "beside")
    rate = calls / (time.monotonic() - began + 1)
    over.set()
    await asyncio.gather(*talking)
    print(f"{SESSIONS} sessions, {rate:.0f} calls/s: p50 {1000 * alone:.1f} ms alone, {1000 * beside:.1f} ms beside")
    assert calls > SESSIONS / 50
    assert beside < 3 * alone + 0.1
