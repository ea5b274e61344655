"""The service's lifespan: open its parts in order, keep them running, close them in reverse."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import gc
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

from asyncpg import PostgresError
from fastapi import FastAPI
from sqlalchemy.exc import DBAPIError

from tersely.domain.errors import StoreUnavailable
from tersely.service.common.metrics import Metrics
from tersely.service.common.vocabulary import load_encoding
from tersely.store.db.connection import Database
from tersely.store.db.migrations import is_outdated, migrate

_log = logging.getLogger(__name__)

RETRY_SECONDS = 2.0
POOL_SECONDS = 5.0
REFUSAL_SECONDS = 60.0
# Between an unexpected error of background work and its next start.
AGAIN_SECONDS = 30.0
# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
REFUSALS = frozenset({"InvalidAuthorizationSpecificationError", "InvalidPasswordError", "InsufficientPrivilegeError"})


class ServicePart(NamedTuple):
    """A part of the service with the functions that open it (None: it opens itself on first use) and close it."""

    open: Callable[[], Awaitable[None]] | None
    close: Callable[[], Awaitable[None]]


def lifespan(
    parts: Sequence[ServicePart], keeping: Sequence[Callable[[], Coroutine[Any, Any, None]]]
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """Return a lifespan: ``parts`` in their order, then the endless tasks of ``keeping``."""

    @asynccontextmanager
    async def living(_: FastAPI) -> AsyncIterator[None]:
        _tune_allocator()
        # Loading a vocabulary takes some tenths of a second, which no request should wait for.
        encoding = await asyncio.to_thread(load_encoding, "o200k_base")
        # The encoder's regular expressions belong to the thread that uses them first, so this comes before everything
        # that may count in a thread. Other threads take a lock at each word, which takes half as long again.
        encoding.encode_ordinary("warm")
        async with AsyncExitStack() as stack:
            for part in parts:
                if part.open is not None:
                    await part.open()
                stack.push_async_callback(part.close)
            for keep in keeping:
                stack.callback(asyncio.get_running_loop().create_task(_keep(keep)).cancel)
            _tune_gc()
            yield

    return living


async def _keep(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run background work until it ends or is cancelled. An unexpected error must not end it for good."""
    while True:
        try:
            return await work()
        except Exception:  # noqa: BLE001 whatever it is, the work is still to be done
            _log.exception("background work failed: it starts again in %d seconds", AGAIN_SECONDS)
            await asyncio.sleep(AGAIN_SECONDS)


async def migrate_when_there(database: Database, url: str) -> None:
    """Migrate the database as soon as it is available. The service starts without it."""
    last_report = -REFUSAL_SECONDS
    while True:
        try:
            if not is_outdated(await database.read_revision()):
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
            elif time.monotonic() - last_report >= REFUSAL_SECONDS:
                last_report = time.monotonic()
                _log.warning("the database refused the login (%s): check the authorization in DATABASE_URL", refused)
            await asyncio.sleep(RETRY_SECONDS)


async def report_pool(sizes: Callable[[], tuple[int, int]], metrics: Metrics) -> None:
    """Keep the gauges of this worker's pool current: another worker may be asked for the metrics of all."""
    while True:
        metrics.set_pool(*sizes())
        await asyncio.sleep(POOL_SECONDS)


def _names(error: BaseException | None) -> list[str]:
    """Return the class names of an error and of the errors that it wraps."""
    names: list[str] = []
    while error is not None:
        names += [kind.__name__ for kind in type(error).__mro__]
        error = error.__cause__
    return names


@functools.cache
def _tune_gc() -> None:
    """Exempt long-lived objects from garbage collection, and collect less often.

    Reference counts free nearly all objects of a request. Scanning the others takes a tenth of the CPU. A process does
    it once: a service that is frozen is never collected, which matters where one process serves several in turn.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def _tune_allocator() -> None:
    """Have glibc give each block of 1 MiB and more back to the system when it is freed.

    By default it keeps freed blocks of up to 32 MiB once one was freed, and an area of its own for each thread: between
    small blocks that live on, the memory of large bodies stays with the process. A process does it before it starts
    threads. Other C libraries lack the call.
    """
    mallopt = _libc_function("mallopt")
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, 1 << 20)
        mallopt(_M_TRIM_THRESHOLD, 8 << 20)


def return_freed_memory() -> None:
    """Have the C library's allocator return freed memory to the system; takes some milliseconds.

    By default glibc keeps most of the memory of large bodies after they are freed. Other C libraries lack the call.
    Garbage of a large request is young, and would be collected late (`_tune_gc`).
    """
    gc.collect(1)
    trim = _libc_function("malloc_trim")
    if trim is not None:
        trim(0)


def _libc_function(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None) if os.name == "posix" else None
