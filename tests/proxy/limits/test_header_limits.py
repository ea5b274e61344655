"""Limits that hold before anybody has shown a key: the bytes and the number of headers, and what surrounds a body."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.conftest import Database
from tests.support.http import Wire, body_of, post, wire
from tests.support.processes import AWAY, greeting, start
from tests.support.services import Service, serve
from tests.support.upstreams import Model

KILO = 1024
START = b"GET /healthz HTTP/1.1\r\nhost: t\r\n"


@pytest.fixture(scope="module")
def patient(store: Database, model: Model) -> Iterator[Service]:
    """A service that waits long for headers: nothing here is refused for its slowness."""
    with serve(store, model.url, header_timeout=30.0, body_timeout=30.0, header_connections=50) as running:
        yield running


async def status_of(line: Wire) -> int:
    await line.until(b"\r\n\r\n")
    return int(line.got.split(b" ", 2)[1])


async def test_headers_up_to_the_limits_pass(patient: Service) -> None:
    for extra in (b"x-long: " + b"a" * (30 * KILO) + b"\r\n", b"".join(b"x-%d: a\r\n" % n for n in range(190))):
        async with wire(patient) as line:
            await line.send(START + extra + b"\r\n")
            assert await status_of(line) == 200


@pytest.mark.parametrize(
    "head",
    [
        START + b"x-long: " + b"a" * (33 * KILO) + b"\r\n\r\n",
        START + b"x" * (33 * KILO) + b": a\r\n\r\n",
        START + b"".join(b"x-%d: a\r\n" % n for n in range(201)) + b"\r\n",
        START + b"".join(b"x-%d: %s\r\n" % (n, b"a" * 900) for n in range(40)) + b"\r\n",
        b"GET /healthz?" + b"a" * (33 * KILO) + b" HTTP/1.1\r\nhost: t\r\n\r\n",
        b"GET /" + b"%41" * (11 * KILO) + b" HTTP/1.1\r\nhost: t\r\n\r\n",
        b"\r\n" * (17 * KILO) + START + b"\r\n",
        START + b"x-folded: a\r\n" + b" more\r\n" * (6 * KILO) + b"\r\n",
    ],
)
@pytest.mark.usefixtures("brief_linger")
async def test_larger_heads_are_refused(patient: Service, head: bytes) -> None:
    async with wire(patient) as line:
        await line.send(head)
        assert await status_of(line) in (431, 400 if b"x-folded" in head else 431)
        body = (await line.to_end()).partition(b"\r\n\r\n")[2]
        assert json.loads(body)["error"]["message"]
        assert b"\r\nx-request-id: " in line.got


async def test_the_refusal_comes_while_headers_still_arrive(patient: Service) -> None:
    async with wire(patient) as line:
        await line.send(START + b"x-long: ")
        for _ in range(40):
            await line.send(b"a" * KILO)
        assert await status_of(line) == 431


async def test_pipelined_requests_are_counted_one_by_one(patient: Service) -> None:
    one = START + b"x-long: " + b"a" * (20 * KILO) + b"\r\n\r\n"
    async with wire(patient) as line:
        await line.send(one * 4)
        async with asyncio.timeout(10):
            while line.got.count(b"HTTP/1.1 200") < 4:
                line.got += await line.reader.read(65536)
        await line.send(START + b"x-long: " + b"a" * (40 * KILO) + b"\r\n\r\n")
        got = await line.until(b"HTTP/1.1 431")
    assert re.findall(rb"HTTP/1\.1 (\d+)", got) == [b"200"] * 4 + [b"431"]


async def test_trailers_are_no_headers(patient: Service, model: Model, key: str) -> None:
    body = body_of("hello", user=key)
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n" % (len(body), body)
    )
    async with wire(patient) as line:
        await line.send(head + b"x-late: yes\r\n\r\n")
        assert await status_of(line) == 200
    assert "x-late" not in {name.lower() for name in model.requests(key)[-1].headers}
    for trailers in (b"x-%d: a\r\n", b"x-%d: " + b"a" * KILO + b"\r\n"):
        async with wire(patient) as line:
            await line.send(head[:-5])
            await line.send(b"0\r\n" + b"".join(trailers % n for n in range(300)) + b"\r\n")
            answer = await line.to_end()
            assert not answer or int(answer.split(b" ", 2)[1]) in (400, 431)


@pytest.mark.parametrize(
    "piece",
    [b"1;" + b"a" * 1000 + b"\r\nx\r\n", b"1\r\nx\r\n", b"1" + b";a" * 5000 + b"\r\nx\r\n"],
    ids=["extensions", "tiny chunks", "many extensions"],
)
async def test_chunk_extensions_and_trailers_are_limited(patient: Service, piece: bytes) -> None:
    block = piece * max(1, 64 * KILO // len(piece))
    sent = 0
    async with wire(patient) as line:
        await line.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):
                while not line.reader.at_eof():
                    await line.send(block)
                    sent += len(block)
                    await asyncio.sleep(0)
        assert sent < 16 * KILO * KILO


async def test_small_chunks_of_an_ordinary_body_pass(patient: Service) -> None:
    body = body_of("word " * 4000)
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    async with wire(patient) as line:
        await line.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
        )
        assert await status_of(line) == 200


async def test_the_oldest_of_too_many_connections_without_headers_goes(patient: Service) -> None:
    lines = [await asyncio.open_connection("127.0.0.1", patient.port) for _ in range(60)]
    for _, writer in lines:
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: ")
    began = time.monotonic()
    answer = await post(patient, b"", path="/healthz", method="GET")
    assert answer.status == 200
    assert time.monotonic() - began < 2
    async with asyncio.timeout(5):
        assert await lines[0][0].read() == b""
    lines[-1][1].write(b"t\r\n\r\n")
    assert b" 200 " in await lines[-1][0].readline()
    for _, writer in lines:
        writer.close()


async def test_busy_and_idle_connections_are_not_among_these(patient: Service) -> None:
    async with wire(patient) as line:
        await line.send(START + b"\r\n")
        await line.until(b"\r\n\r\n")
        others = [await asyncio.open_connection("127.0.0.1", patient.port) for _ in range(60)]
        await asyncio.sleep(0.2)
        line.got = b""
        await line.send(START + b"\r\n")
        assert await status_of(line) == 200
        for _, writer in others:
            writer.close()


@pytest.mark.parametrize("start_with", [b"GET / HTTP/1.1\r\nx: ", b"GET /", b"GET / HTTP/1.1\r\nx"])
def test_endless_headers_take_no_memory(start_with: bytes) -> None:
    process = start("--port", "0", DATABASE_URL=AWAY)
    try:
        found = re.search(r"http://127\.0\.0\.1:(\d+)", greeting(process))
        assert found is not None
        resident = psutil.Process(process.pid).memory_info
        before = resident().rss
        threads = [threading.Thread(target=_pour, args=(int(found[1]), start_with)) for _ in range(2)]
        for each in threads:
            each.start()
        highest = before
        while any(each.is_alive() for each in threads):
            highest = max(highest, resident().rss)
            time.sleep(0.02)
        assert highest - before < 30 * KILO * KILO
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


def _pour(port: int, start_with: bytes) -> None:
    """Send 200 MB of one header, as far as the server takes it."""

    async def run() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(start_with)
        try:
            async with asyncio.timeout(20):
                for _ in range(200):
                    writer.write(b"a" * KILO * KILO)
                    await writer.drain()
        except (ConnectionError, TimeoutError):
            pass
        writer.transport.abort()
        del reader

    asyncio.run(run())
