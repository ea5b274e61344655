"""The memory of a real process under many large bodies: bounded while they are in flight, and given back after."""

from __future__ import annotations

import asyncio
import io
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import psutil
import pytest

from tests.conftest import Database
from tests.support.processes import start
from tests.support.upstreams import RawRequest, RawUpstream, raw_upstream

MIB = 1024 * 1024
BUDGET = 160
BODIES = 20


@pytest.fixture
def slow_host() -> Iterator[RawUpstream]:
    """A model host that takes a second for each call."""
    reply = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "Done."}, "finish_reason": "stop"}]}
    body = json.dumps(reply).encode()

    async def answer(_: RawRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        del reader
        await asyncio.sleep(1)
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()

    with raw_upstream() as upstream:
        upstream.handler = answer
        yield upstream


def body_of(number: int) -> bytes:
    text = f"{number} " + "The worker reads the queue and writes its result to the table. " * 1500
    messages = [{"role": "assistant" if i % 2 else "user", "content": f"{i} {text}"} for i in range(83)]
    return json.dumps({"model": "m", "messages": messages}).encode()


async def send_all(url: str) -> tuple[Counter[int], list[tuple[str, bytes]]]:
    statuses: Counter[int] = Counter()
    refusals: list[tuple[str, bytes]] = []

    async def send(http: aiohttp.ClientSession, number: int) -> None:
        body = io.BytesIO(body_of(number))
        headers = {"content-type": "application/json"}
        async with http.post(f"{url}/v1/chat/completions", data=body, headers=headers) as response:
            statuses[response.status] += 1
            if response.status != 200:
                refusals.append((response.headers.get("retry-after", ""), await response.read()))

    timeout = aiohttp.ClientTimeout(total=100)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
        await asyncio.gather(*(send(http, number) for number in range(BODIES)))
    return statuses, refusals


@pytest.mark.slow
async def test_memory_under_large_bodies_is_bounded_and_given_back(
    database: Database, slow_host: RawUpstream, tmp_path: Path
) -> None:
    process = start(
        "--port",
        "0",
        DATABASE_URL=database.dsn,
        TERSELY_DATA_DIR=str(tmp_path),
        TERSELY_OPENAI_BASE_URL=slow_host.url,
        TERSELY_BODY_MEMORY=str(BUDGET),
        TERSELY_DATABASE_TIMEOUT="30",
    )
    try:
        assert process.stdout is not None
        url = re.search(r"http://[\d.]+:\d+", process.stdout.readline())
        assert url is not None
        own = psutil.Process(process.pid)
        before = own.memory_info().rss / MIB
        peak, is_over = before, threading.Event()

        def watch() -> None:
            nonlocal peak
            while not is_over.wait(0.02):
                peak = max(peak, own.memory_info().rss / MIB)

        watcher = threading.Thread(target=watch)
        watcher.start()
        statuses, refusals = await send_all(url[0])
        is_over.set()
        watcher.join()

        assert statuses[200] >= 2, statuses
        assert statuses[200] + statuses[503] == BODIES, statuses
        assert statuses[503] > 0, "all bodies fitted: the test is too small"
        for retry_after, body in refusals:
            assert retry_after.isdigit()
            assert json.loads(body)["error"]["code"] == "overloaded"
        assert peak - before < BUDGET + 200, (before, peak)
        deadline = time.monotonic() + 20
        while (after := own.memory_info().rss / MIB) - before > 100 and time.monotonic() < deadline:
            await asyncio.sleep(0.5)
        assert after - before <= 100, (before, peak, after)
    finally:
        process.terminate()
        process.communicate(timeout=30)
