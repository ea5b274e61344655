"""The whole service on a real socket, in this process.

Tests that need a process of its own use `tests.support.processes`; tests of the REST API that need no socket use
`tests.api.conftest`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import aiohttp
import uvicorn
from typing_extensions import override

from tersely.api.transport.protocol import DeadlineProtocol
from tersely.composition.application import build
from tersely.server import run as serving
from tersely.settings import Settings
from tests.conftest import Database, data_directory
from tests.support.http import Answered
from tests.support.loops import background, wait_until

# The policy under which instructions and tools are added from the first request of a session on.
FROM_THE_START = '{"instructions_at": 0}'

# Seconds that calls under way may take at the end of a service.
LAST_SECONDS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A running service. ``url`` has no path. ``thread`` is that of its event loop; 0: in another process."""

    url: str
    port: int
    database: Database
    thread: int = 0

    @property
    def base_url(self) -> str:
        """Return the base URL for OpenAI clients."""
        return f"{self.url}/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A running service with a client of its own. ``base_url`` has no path."""

    base_url: str
    http: aiohttp.ClientSession

    async def post(self, body: Mapping[str, Any] | bytes, **headers: str) -> Answered:
        """Call the chat route; underscores in header names stand for hyphens."""
        return await self.send(body, {name.replace("_", "-"): value for name, value in headers.items()})

    async def send(self, body: Mapping[str, Any] | bytes, headers: Mapping[str, str]) -> Answered:
        """Call the chat route with headers as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"content-type": "application/json", **headers}
        began = time.monotonic()
        async with self.http.post(f"{self.base_url}/v1/chat/completions", data=data, headers=sent) as response:
            names = {name.lower(): value for name, value in response.headers.items()}
            read = await response.read()
            return Answered(status=response.status, headers=names, body=read, seconds=time.monotonic() - began)


class _Server(uvicorn.Server):
    """Ends as soon as it is told to. uvicorn looks every tenth of a second, and then waits as long once more."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._is_told = asyncio.Event()

    def leave(self) -> None:
        """Begin to end; to be called in the server's own loop."""
        self.should_exit = True
        self._is_told.set()

    @override
    async def main_loop(self) -> None:
        ticks = itertools.count()
        while not await self.on_tick(next(ticks)):
            with suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await self._is_told.wait()

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listening in (*self.servers, *(sockets or ())):
            listening.close()
        state, end = self.server_state, time.monotonic() + LAST_SECONDS
        for connection in list(state.connections):
            connection.shutdown()
        while (state.connections or state.tasks) and time.monotonic() < end:
            await asyncio.sleep(0.005)
        for task in state.tasks:
            task.cancel()
        await self.lifespan.shutdown()


@contextmanager
def serve(database: Database, upstream: str, *, dsn: str | None = None, **settings: Any) -> Iterator[Service]:
    """Serve in a thread with an event loop of its own, so that tests with loops of their own can share the service.

    ``upstream`` (with ``/v1``) is the host of all providers, ``dsn`` the address that the service uses to reach the
    database.
    """
    listener, server = _server(dsn or database.dsn, upstream, settings)
    with background() as there:
        done = asyncio.run_coroutine_threadsafe(server.serve(sockets=[listener]), there.loop)
        wait_until(lambda: server.started or done.done())
        port = listener.getsockname()[1]
        try:
            yield Service(url=f"http://127.0.0.1:{port}", port=port, database=database, thread=there.thread)
        finally:
            there.loop.call_soon_threadsafe(server.leave)
            done.result(30)
            listener.close()


@asynccontextmanager
async def run_worker(database: Database, upstream: str, **settings: Any) -> AsyncIterator[Worker]:
    """Serve in the running event loop, with strategy `full` and no instructions unless ``settings`` say otherwise."""
    plain = {"strategy": "full", "instructions": "off", "fail_open": "off", "database_timeout": 20.0}
    listener, server = _server(database.dsn, upstream, {**plain, **settings})
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started:
            if running.done():
                await running
                raise RuntimeError("the service did not start")
            await asyncio.sleep(0.005)
        async with aiohttp.ClientSession(auto_decompress=False) as http:
            yield Worker(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", http=http)
    finally:
        server.leave()
        await running
        listener.close()


@contextmanager
def many(*contexts: Any) -> Iterator[list[Any]]:
    """Enter several context managers as one."""
    with ExitStack() as stack:
        yield [stack.enter_context(each) for each in contexts]


def _server(dsn: str, upstream: str, settings: Mapping[str, Any]) -> tuple[socket.socket, _Server]:
    """Return a listening socket and the server for it, configured as ``tersely serve`` does it."""
    hosts = ("anthropic_base_url", "gemini_base_url", "gemini_gca_base_url")
    others = dict.fromkeys(hosts, upstream.removesuffix("/v1"))
    config = Settings(_env_file=None, **{**others, "data_dir": data_directory(), **settings})
    application = build(config, database_url=dsn, openai_base_url=upstream)
    given = serving.ServeOptions(host="127.0.0.1", port=0, workers=1, is_scripted=False)
    uvicorn_config = serving._config(application, given)
    limits = ("header_timeout", "header_bytes", "header_count", "header_connections")
    uvicorn_config.http = type("Protocol", (DeadlineProtocol,), {name: getattr(config, name) for name in limits})
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    # uvloop sets this for each connection, asyncio's loop not for those of a given socket: a reply in two parts would
    # wait 40 ms for its client's acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener, _Server(uvicorn_config)
