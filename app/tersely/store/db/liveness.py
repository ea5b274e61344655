"""End long work on a database that has stopped answering.

A migration or a backup may take hours, so its statements have no time limit. A server that is frozen, or whose network
drops packets, would hold such work for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
from asyncpg import Record

from tersely.store.db.pool import Connection

# Seconds between questions, and without an answer until the work is ended.
ASK_EVERY, SILENT_SECONDS = 5.0, 30.0


@asynccontextmanager
async def ended_when_silent(dsn: str, connection: Connection) -> AsyncIterator[None]:
    """Terminate ``connection`` when the server at ``dsn`` has not answered a new connection for `SILENT_SECONDS`.

    Raises `TimeoutError` then.
    """
    is_silent = False

    async def watch() -> None:
        nonlocal is_silent
        loop = asyncio.get_running_loop()
        answered_at = loop.time()
        while loop.time() - answered_at < SILENT_SECONDS:
            await asyncio.sleep(ASK_EVERY)
            if await _answers(dsn):
                answered_at = loop.time()
        is_silent = True
        connection.terminate()

    watcher = asyncio.get_running_loop().create_task(watch())
    try:
        yield
    except Exception as error:  # whatever the driver, or what is around it, makes of the lost connection
        if is_silent:
            raise TimeoutError(f"the database has not answered for {SILENT_SECONDS:.0f} s") from error
        raise
    finally:
        watcher.cancel()


async def _answers(dsn: str) -> bool:
    """Return whether the server answers a new connection, be it with an error.

    A login is enough. Behind a pooler, a statement would wait while all its connections to the server are in use, be it
    by the long work itself. A frozen server accepts no login. But a pooler accepts logins for it, so a server that
    freezes behind a pooler is not noticed.
    """
    connection: asyncpg.Connection[Record] | None = None
    try:
        async with asyncio.timeout(ASK_EVERY):
            connection = await asyncpg.connect(dsn, statement_cache_size=0)
    except (asyncpg.PostgresError, asyncpg.TargetServerAttributeNotMatched):
        return True
    except Exception:  # noqa: BLE001 whatever it is, the watcher must go on
        return False
    finally:
        if connection is not None:
            connection.terminate()
    return True
