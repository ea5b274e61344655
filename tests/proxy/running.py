"""The whole service in tests: a real uvicorn on a loopback socket, in front of a scripted upstream."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import asyncpg
import uvicorn

from app.main import build
from app.settings import Settings
from tests.conftest import Database


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What the client got: ``text`` is the body as it came, ``headers`` have lower-case names."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def session(self) -> str:
        """The session that the response names; empty for calls that belong to none."""
        return self.headers.get("x-tersely-session", "")

    @property
    def source(self) -> str:
        """How the session was found."""
        return self.headers.get("x-tersely-session-source", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One running service."""

    base_url: str
    http: aiohttp.ClientSession

    async def post(self, body: Mapping[str, Any] | bytes, **headers: str) -> Answered:
        """A call of the chat route; underscores in header names stand for hyphens."""
        return await self.send(body, {name.replace("_", "-"): value for name, value in headers.items()})

    async def send(self, body: Mapping[str, Any] | bytes, headers: Mapping[str, str]) -> Answered:
        """A call of the chat route with headers as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"content-type": "application/json", **headers}
        async with self.http.post(f"{self.base_url}/v1/chat/completions", data=data, headers=sent) as response:
            names = {name.lower(): value for name, value in response.headers.items()}
            return Answered(status=response.status, headers=names, body=await response.read())


@asynccontextmanager
async def run_worker(database: Database, upstream: str, **settings: Any) -> AsyncIterator[Worker]:
    """A service on ``database`` in front of ``upstream`` (with ``/v1``), stopped when the block is left."""
    config = Settings(
        _env_file=None,
        **{"strategy": "full", "instructions": "off", "fail_open": "off", "database_timeout": 20.0, **settings},
    )
    app = build(config, database_url=database.dsn, openai_base_url=upstream)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on", timeout_graceful_shutdown=2))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started:
            if serving.done():
                await serving
                raise RuntimeError("the service did not start")
            await asyncio.sleep(0.005)
        async with aiohttp.ClientSession(auto_decompress=False) as http:
            yield Worker(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", http=http)
    finally:
        server.should_exit = True
        await serving
        listener.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A stored message as a superuser sees it, behind row security."""

    session: str
    seq: int
    turn: int
    place: float
    role: str
    status: str
    call: int
    finish: str | None
    relayed: bool
    raw: bytes

    @property
    def message(self) -> dict[str, Any]:
        """The client's view of it."""
        return dict(json.loads(self.raw))


async def stored_messages(database: Database, session: str | None = None) -> list[Stored]:
    """All messages of ``session`` (or of all sessions), superseded ones too, in their places."""
    connection = await asyncpg.connect(database.admin_dsn)
    try:
        rows = await connection.fetch(
            "SELECT session_id AS session, seq, turn, place, role, status, call, finish, chain IS NOT NULL AS relayed, "
            "raw FROM messages WHERE $1::text IS NULL OR session_id = $1 ORDER BY session_id, place, seq",
            session,
        )
        return [Stored(**dict(row)) for row in rows]
    finally:
        await connection.close()


async def query(database: Database, sql: str, *args: object) -> list[asyncpg.Record]:
    """A superuser's look."""
    connection = await asyncpg.connect(database.admin_dsn)
    try:
        return list(await connection.fetch(sql, *args))
    finally:
        await connection.close()
