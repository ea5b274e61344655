"""The daily memory when the process that was to write it is killed: another process writes each entry, once."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import signal
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import pytest

from tersely.fakellm.scripted import ReceivedRequest, ScriptedModel, ScriptedReply, run_scripted
from tests.conftest import TERSELY, Database

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

ROOT = Path(__file__).resolve().parents[2]
TURNS = 6
STRATEGY = '{"name": "trim", "max_context_turns": 4}'


class Summarizer:
    """A model that summarises by naming what it was given; while ``stalls``, it says nothing."""

    def __init__(self) -> None:
        self.stalls = True

    def __call__(self, received: ReceivedRequest) -> ScriptedReply:
        text = received.body.decode()
        names = sorted(set(re.findall(r"quokka_\d+", text)))
        return ScriptedReply(message={"content": "- " + " ".join(names)}, first_delay=60 if self.stalls else 0)


@asynccontextmanager
async def summarizing() -> AsyncIterator[tuple[Summarizer, str]]:
    script = Summarizer()
    async with run_scripted(model=ScriptedModel(script=script)) as server:
        yield script, server.base_url


@asynccontextmanager
async def answering() -> AsyncIterator[str]:
    async with run_scripted(model=ScriptedModel()) as server:
        yield server.base_url


@contextmanager
def process(database: Database, model: str, summarizer: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """The service as an operator starts it."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TERSELY", "DATABASE"))}
    with tempfile.TemporaryDirectory() as data:
        started = subprocess.Popen(
            [TERSELY, "serve", "--port", str(port)],
            cwd=ROOT,
            env={
                **clean,
                "DATABASE_URL": database.dsn,
                "TERSELY_DATA_DIR": data,
                "TERSELY_OPENAI_BASE_URL": model,
                "TERSELY_STRATEGY": STRATEGY,
                "TERSELY_SUMMARIZER_MODEL": "m",
                "TERSELY_SUMMARIZER_BASE_URL": summarizer,
                "TERSELY_SUMMARIZER_API_KEY": "k",
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield started
        finally:
            started.send_signal(signal.SIGKILL)
            started.wait(10)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@asynccontextmanager
async def serving(database: Database, model: str, summarizer: str) -> AsyncIterator[tuple[Any, str]]:
    port = free_port()
    with process(database, model, summarizer, port) as started:
        url = f"http://127.0.0.1:{port}"
        async with aiohttp.ClientSession() as http, asyncio.timeout(60):
            while True:
                try:
                    async with http.get(f"{url}/readyz?strict=1") as answer:
                        if answer.status == 200:
                            break
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.05)
        yield started, url


async def send(url: str, path: str, body: Any, **headers: str) -> None:
    async with aiohttp.ClientSession() as http, http.post(f"{url}{path}", json=body, headers=headers) as answer:
        assert answer.status < 300, await answer.text()


def question(number: int) -> dict[str, str]:
    return {"role": "user", "content": f"quokka_{number} is asked for"}


async def call(url: str, session: str) -> None:
    """A conversation through the proxy."""
    for number in range(1, TURNS + 1):
        body = {"model": "gpt-4o-mini", "messages": [question(number)]}
        await send(url, "/v1/chat/completions", body, **{"X-Tersely-Session": session})


async def append(url: str, session: str) -> None:
    """A conversation that is only appended."""
    for number in range(1, TURNS + 1):
        for message in (question(number), {"role": "assistant", "content": "Done."}):
            await send(url, f"/api/sessions/{session}/messages", {"messages": [message]})


async def clear(url: str, session: str) -> None:
    """A conversation that is cleared at the end; nobody waits for the answer."""
    await send(url, "/api/sessions", {"id": session, "strategy": "slim"})
    messages = [
        message for n in range(1, TURNS + 1) for message in (question(n), {"role": "assistant", "content": "D"})
    ]
    await send(url, f"/api/sessions/{session}/messages", {"messages": messages})
    asyncio.get_running_loop().create_task(_clear(url, session))


async def _clear(url: str, session: str) -> None:
    try:
        await send(url, f"/api/sessions/{session}/clear", {})
    except aiohttp.ClientError:
        pass


async def look(database: Database, sql: str, *arguments: object) -> list[asyncpg.Record]:
    connection = await asyncpg.connect(database.admin_dsn)
    try:
        return list(await connection.fetch(sql, *arguments))
    finally:
        await connection.close()


async def until_found(database: Database, sql: str, *arguments: object) -> list[asyncpg.Record]:
    async with asyncio.timeout(30):
        while not (found := await look(database, sql, *arguments)):
            await asyncio.sleep(0.02)
    return found


CUT = "SELECT cut FROM epochs WHERE session_id = $1 AND cut > 1"
MEMORY = "SELECT first_seq, last_seq, convert_from(text, 'UTF8') AS text FROM memory WHERE session_id = $1"


async def age(database: Database) -> None:
    """Have what the killed process held be as it is some minutes later."""
    await look(database, "UPDATE pending_memory SET due_at = due_at - interval '10 minutes'")
    await look(database, "UPDATE leases SET until = until - interval '10 minutes'")


@pytest.mark.parametrize("talk", [call, append, clear])
async def test_memory_of_a_killed_process_is_written_once(database: Database, talk: Any) -> None:
    session = f"s{secrets.token_hex(4)}"
    async with answering() as model, summarizing() as (script, summarizer):
        async with serving(database, model, summarizer) as (killed, url):
            await talk(url, session)
            ((cut,),) = await until_found(database, CUT, session)
            killed.send_signal(signal.SIGKILL)
            killed.wait(10)
        assert await look(database, MEMORY, session) == []
        script.stalls = False
        await age(database)
        async with serving(database, model, summarizer), serving(database, model, summarizer):
            await until_found(database, MEMORY, session)
            await asyncio.sleep(2)
        ((first, last, text),) = await look(database, MEMORY, session)
        assert (first, last) == (1, cut - 1)
        assert set(re.findall(r"quokka_\d+", text)) == {f"quokka_{n}" for n in range(1, (cut - 1) // 2 + 1)}
        assert await look(database, "SELECT * FROM pending_memory") == []
