"""The application in this process, on the configured database, for commands that find no service running."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeVar

import httpx

from tersely.composition.application import build
from tersely.server.database import database_of, plainly, up_to_date
from tersely.server.embedded_server import serving
from tersely.server.run import log_as_json
from tersely.settings import load_settings

T = TypeVar("T")


def run_in_process(
    run: Callable[[httpx.AsyncClient], Awaitable[T]],
    *,
    headers: Mapping[bytes, bytes],
    url: str,
    limits: httpx.Timeout,
    upstream: str | None,
) -> T:
    """Return the result of ``run`` with a client of the application, which calls itself ``url``. Raises `Refused`.

    ``upstream`` is the model host in place of the configured one, ``limits`` are the client's time limits.
    """
    with plainly():
        settings = load_settings()
        # With a key the command works on its tenant's data; otherwise on that of the only tenant without keys.
        settings = settings.model_copy(update={"auth": "keys" if headers else "off"})
        log_as_json("error")
        with database_of(settings) as database_url, tempfile.TemporaryDirectory(prefix="tersely-") as directory:

            async def against_own_server() -> T:
                await up_to_date(database_url)
                application = build(settings, database_url=database_url, openai_base_url=upstream)
                # In a directory of this user's alone.
                path = str(Path(directory) / "socket")
                async with (
                    serving(application, path=path),
                    httpx.AsyncClient(
                        transport=httpx.AsyncHTTPTransport(uds=path, verify=False),
                        base_url=url,
                        headers=headers,
                        timeout=limits,
                    ) as http,
                ):
                    return await run(http)

            return asyncio.run(against_own_server())
