"""The application in this process, on the configured database, for commands that find no service running."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar

import httpx
import uvicorn
from typing_extensions import override

from app.cli.refusals import Refused
from app.cli.serving import database_of, log_as_json, plainly, up_to_date
from app.main import build
from app.settings import Settings

T = TypeVar("T")


def work_here(
    run: Callable[[httpx.AsyncClient], Awaitable[T]],
    *,
    headers: Mapping[bytes, bytes],
    url: str,
    patience: float,
    upstream: str | None,
) -> T:
    """The result of ``run`` with a client of the application, which calls itself ``url``. Raises `Refused`.

    ``upstream`` is the model host in place of the configured one, ``patience`` in seconds.
    """
    with plainly():
        settings = Settings()
        # With a key it is its tenant's data; without, that of the one tenant there is without keys.
        settings = settings.model_copy(update={"auth": "keys" if headers else "off"})
        log_as_json("error")
        with database_of(settings) as database_url:

            async def here() -> T:
                await up_to_date(database_url)
                application = build(settings, database_url=database_url, openai_base_url=upstream)
                async with (
                    _served(application) as socket,
                    httpx.AsyncClient(
                        transport=httpx.AsyncHTTPTransport(uds=socket, verify=False),
                        base_url=url,
                        headers=headers,
                        timeout=patience,
                    ) as http,
                ):
                    return await run(http)

            return asyncio.run(here())


class _Server(uvicorn.Server):
    """Leaves the signals to the command; ``is_up`` is set when it listens, or has failed to."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    @override
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    @override
    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        try:
            await super().startup(sockets)  # type: ignore[arg-type]
        finally:
            self.is_up.set()


@asynccontextmanager
async def _served(application: object) -> AsyncIterator[str]:
    """The path of a socket, in a directory of this user's alone, that the application answers at: replies stream."""
    with tempfile.TemporaryDirectory(prefix="tersely-") as directory:
        path = str(Path(directory) / "socket")
        config = uvicorn.Config(
            application,  # type: ignore[arg-type]
            uds=path,
            http="httptools",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=2,
        )
        server = _Server(config)
        serving = asyncio.get_running_loop().create_task(server.serve())
        serving.add_done_callback(lambda _: server.is_up.set())  # or it never will be
        try:
            await server.is_up.wait()
            if not server.started:
                raise Refused("the application does not start")
            yield path
        finally:
            server.should_exit = True
            await serving
