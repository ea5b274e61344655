"""What is done while the service lives: opened in an order, kept up, and closed in the reverse of it."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

from asyncpg import PostgresError
from fastapi import FastAPI
from sqlalchemy.exc import DBAPIError

from app.domain.errors import StoreUnavailable
from app.service import tokens
from app.store.connection import Database
from app.store.migrations import migrate

_log = logging.getLogger(__name__)

RETRY_SECONDS = 2.0
REFUSAL_SECONDS = 60.0
REFUSALS = frozenset({"InvalidAuthorizationSpecificationError", "InvalidPasswordError", "InsufficientPrivilegeError"})


class Part(NamedTuple):
    """How a part of the service is opened (None: it opens itself when it is needed), and how it is closed."""

    open: Callable[[], Awaitable[None]] | None
    close: Callable[[], Awaitable[None]]


def lifespan(
    parts: Sequence[Part], keeping: Sequence[Callable[[], Coroutine[Any, Any, None]]]
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """A lifespan: ``parts`` in their order, then the endless tasks of ``keeping``."""

    @asynccontextmanager
    async def living(_: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for part in parts:
                if part.open is not None:
                    await part.open()
                stack.push_async_callback(part.close)
            # Reading a vocabulary takes some tenths of a second, which no request should wait for.
            await asyncio.to_thread(tokens.count_text, "warm", "o200k_base")
            for keep in keeping:
                stack.callback(asyncio.get_running_loop().create_task(keep()).cancel)
            _spare_the_collector()
            yield

    return living


async def migrate_when_there(database: Database, url: str) -> None:
    """The service starts without its database; when that comes, it may be one that has to be migrated first."""
    told = -REFUSAL_SECONDS
    while True:
        try:
            await database.check_schema()
            return
        except StoreUnavailable:
            pass
        try:
            await migrate(url)
        except (OSError, DBAPIError, PostgresError, TimeoutError) as error:
            cause = getattr(error, "orig", error)
            refused = next((name for name in _names(cause) if name in REFUSALS), None)
            if refused is None:
                _log.info("the database is still away: %s", type(error).__name__)
            elif time.monotonic() - told >= REFUSAL_SECONDS:
                told = time.monotonic()
                _log.warning("the database refuses us (%s): check the authorization in DATABASE_URL", refused)
            await asyncio.sleep(RETRY_SECONDS)


def _names(error: BaseException | None) -> list[str]:
    """The classes of an error, and of what it wraps."""
    names: list[str] = []
    while error is not None:
        names += [kind.__name__ for kind in type(error).__mro__]
        error = error.__cause__
    return names


def _spare_the_collector() -> None:
    """Take what lives as long as the process out of the garbage collector's rounds, and make these rarer.

    Nearly everything that a request makes is freed by reference counts; scanning the rest costs a tenth of the CPU.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
