"""The application served inside of a command, which keeps the signals to itself."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from typing_extensions import override

from tersely.api.proxy import ProxyRoutes
from tersely.server.errors import CommandError

# Seconds that a connection may idle. A client that sends its next request in the moment in which the server closes the
# connection sees it reset, so clients must be the first to close: those in Go and Rust do after 90.
KEEP_ALIVE = 95


class _EmbeddedServer(uvicorn.Server):
    """``is_up`` is set when it listens, or has failed to."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    @override
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        finally:
            self.is_up.set()


@asynccontextmanager
async def serving(
    application: ProxyRoutes, *, path: str | None = None, sockets: Sequence[socket.socket] = ()
) -> AsyncIterator[None]:
    """Serve the application at the Unix socket ``path`` or at ``sockets`` inside the block. Raises `CommandError`."""
    config = uvicorn.Config(
        application,
        uds=path,
        http="httptools",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=2,
    )
    server = _EmbeddedServer(config)
    running = asyncio.get_running_loop().create_task(server.serve(sockets=list(sockets) or None))
    running.add_done_callback(lambda _: server.is_up.set())  # or it never will be
    try:
        await server.is_up.wait()
        if not server.started:
            raise CommandError("the application does not start")
        yield
    finally:
        server.should_exit = True
        await running
