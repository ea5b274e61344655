"""The real service, killed: what a client saw the end of is stored, once, and the service starts again."""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import aiohttp
import asyncpg
import psutil
import pytest

from tersely.embedded_postgres import open_embedded_postgres
from tersely.fakellm.scripted import ReceivedRequest, ScriptedReply
from tests.support.http import body_of
from tests.support.loops import until
from tests.support.processes import Launch, children, postgres_of, postmaster
from tests.support.upstreams import Model, scripted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    """A model that speaks for about 40 ms."""
    with scripted() as running:

        def answer(received: ReceivedRequest) -> ScriptedReply:
            word = (received.request or {}).get("user", "")
            return ScriptedReply(message={"content": f"the answer to {word}, at some length"}, delay=0.004)

        running.state.script = answer
        yield running


class Load:
    """Clients that hold conversations, streamed, and remember what they saw the end of."""

    def __init__(self, url: str, *, clients: int = 12) -> None:
        self.url = url
        self.acknowledged: dict[str, list[str]] = {}
        self.failures = 0
        self._stopping = False
        self._clients = clients
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def count(self) -> int:
        return sum(map(len, self.acknowledged.values()))

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(self._talk()) for _ in range(self._clients)]

    async def stop(self) -> None:
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def goes_on(self, more: int) -> None:
        """Wait for so many more turns to end."""
        aim = self.count + more
        await until(lambda: self.count >= aim, 90)

    async def _talk(self) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as http:
            while not self._stopping:
                await self._converse(http)

    async def _converse(self, http: aiohttp.ClientSession) -> None:
        """Some turns of one session, until one fails."""
        session = f"s{secrets.token_hex(8)}"
        history: list[dict[str, str]] = []
        for number in range(5):
            if self._stopping:
                return
            word = f"{session}-{number}"
            history.append({"role": "user", "content": f"question {word}"})
            try:
                reply = await self._ask(http, session, history, word)
            except (aiohttp.ClientError, OSError, TimeoutError):
                reply = None
            if reply is None:
                self.failures += 1
                await asyncio.sleep(0.05)
                return
            history.append({"role": "assistant", "content": reply})
            self.acknowledged.setdefault(session, []).append(word)

    async def _ask(
        self, http: aiohttp.ClientSession, session: str, history: list[dict[str, str]], word: str
    ) -> str | None:
        body = body_of(*history, stream=True, user=word)
        headers = {"X-Tersely-Session": session, "Content-Type": "application/json"}
        async with http.post(f"{self.url}/v1/chat/completions", data=body, headers=headers) as response:
            if response.status != 200:
                await response.read()
                return None
            text, has_ended = "", False
            async for line in response.content:
                if line.startswith(b"data: [DONE]"):
                    has_ended = True
                elif line.startswith(b"data: {"):
                    for choice in json.loads(line[6:]).get("choices", ()):
                        text += choice["delta"].get("content") or ""
            return text if has_ended else None


async def check(data_dir: Path, load: Load) -> None:
    """Everything acknowledged is there, once; numbers have no gaps; no turn is half known."""
    with open_embedded_postgres(data_dir) as postgres:
        connection = await asyncpg.connect(postgres.admin_dsn)
        rows = await connection.fetch(
            "SELECT session_id, seq, role, convert_from(raw, 'UTF8') AS raw FROM messages ORDER BY session_id, seq"
        )
        counters = await connection.fetch("SELECT id, last_seq FROM sessions")
        await connection.close()
    stored: dict[str, list[asyncpg.Record]] = {}
    for row in rows:
        stored.setdefault(row["session_id"], []).append(row)
    for session, messages in stored.items():
        assert [row["seq"] for row in messages] == list(range(1, len(messages) + 1)), f"gaps in {session}"
    assert {row["id"]: row["last_seq"] for row in counters} == {key: len(value) for key, value in stored.items()}
    assert load.count > 50
    for session, words in load.acknowledged.items():
        for word in words:
            questions = [row for row in stored[session] if row["role"] == "user" and f"question {word}" in row["raw"]]
            answers = [row for row in stored[session] if row["role"] == "assistant" and f"to {word}," in row["raw"]]
            assert (len(questions), len(answers)) == (1, 1), word


async def test_the_service_is_killed_under_load(launch: Launch, data_dir: Path):
    service = launch()
    load = Load(service.url)
    await load.start()
    await load.goes_on(80)
    service.kill()
    await load.stop()
    assert load.failures

    again = launch()
    after = Load(again.url, clients=2)
    await after.start()
    await after.goes_on(5)
    await after.stop()
    assert after.failures == 0

    await check(data_dir, load)


def is_restarted(data_dir: Path, killed: int) -> bool:
    """Return whether another postmaster has taken the place of the killed one."""
    try:
        return postmaster(data_dir).pid != killed
    except (ValueError, IndexError, OSError, psutil.NoSuchProcess):  # its file is being written
        return False


async def test_postgres_is_killed_under_load(launch: Launch, data_dir: Path):
    service = launch()
    load = Load(service.url)
    await load.start()
    for _ in range(2):
        await load.goes_on(40)
        killed = postmaster(data_dir)
        killed.kill()
        await until(partial(is_restarted, data_dir, killed.pid), 60)
    await load.goes_on(40)
    await load.stop()

    assert service.process.poll() is None
    await check(data_dir, load)


async def test_a_polite_end_lets_streams_finish_and_stops_postgres(launch: Launch, data_dir: Path, model: Model):
    service = launch()
    word = secrets.token_hex(8)
    text = "a long answer " * 20
    usual, model.state.script = model.state.script, lambda _: ScriptedReply(message={"content": text}, delay=0.05)
    try:
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{service.url}/v1/chat/completions", data=body_of(word, stream=True)) as response,
        ):
            got = await response.content.readany()
            service.process.send_signal(signal.SIGTERM)
            got += await response.content.read()
    finally:
        model.state.script = usual

    assert b"data: [DONE]" in got
    await asyncio.to_thread(service.process.wait, 30)
    assert postgres_of(data_dir) == []
    with open_embedded_postgres(data_dir) as postgres:
        connection = await asyncpg.connect(postgres.admin_dsn)
        stored = await connection.fetchval("SELECT convert_from(raw, 'UTF8') FROM messages WHERE role = 'assistant'")
        await connection.close()
    assert text.strip() in stored


async def test_workers_do_not_outlive_their_parent(launch: Launch, data_dir: Path):
    port = _free_port()
    arguments = ("--port", str(port), "--workers", "2")
    service = launch(*arguments)
    load = Load(f"http://127.0.0.1:{port}", clients=6)
    await load.start()
    await load.goes_on(60)
    workers = children(service.process.pid)
    assert len(workers) >= 2
    service.kill()
    await load.stop()
    assert psutil.wait_procs(workers, 10)[1] == []

    launch(*arguments)
    after = Load(f"http://127.0.0.1:{port}", clients=2)
    await after.start()
    await after.goes_on(5)
    await after.stop()
    await check(data_dir, load)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


async def test_a_database_that_does_not_answer_holds_up_neither_start_nor_end(launch: Launch, model: Model):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://somebody:secret@127.0.0.1:{silent.getsockname()[1]}/tersely"
        began = time.monotonic()
        service = launch(DATABASE_URL=url, TERSELY_FAIL_OPEN="on", TERSELY_DATABASE_TIMEOUT="1")
        assert time.monotonic() - began < 20

        async with aiohttp.ClientSession() as http:
            for limit in (4.0, 1.0):
                began = time.monotonic()
                async with http.post(f"{service.url}/v1/chat/completions", data=body_of("anybody?")) as response:
                    assert (response.status, response.headers["x-tersely-context"]) == (200, "fail-open")
                assert time.monotonic() - began < limit

        began = time.monotonic()
        service.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(service.process.wait, 30) == 0
        assert time.monotonic() - began < 15
