"""Connections to one Postgres server: made when they are needed, kept while they are, shared between tenants."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import asyncpg
import msgspec
from asyncpg import Record

if TYPE_CHECKING:
    Connection = asyncpg.Connection[Record]
else:  # generic in the stubs alone
    Connection = asyncpg.Connection

# The share of connections that one tenant may hold, so that its slow transactions leave some for others.
TENANT_SHARE = 0.8
# Seconds between attempts while the server has no free connection, unless one of our own becomes free.
CONNECT_EVERY = 0.1


class ServerFull(ConnectionError):
    """The server, or the pooler in front of it, has no connection left for us."""


class Slot(msgspec.Struct, eq=False):
    """A connection. ``is_own``: it is not shared through a pooler, so settings persist, and ``tenant`` is the tenant of
    its visible rows. Otherwise nothing may outlive a transaction. ``holder``: the tenant that used it last.
    """

    connection: Connection
    is_own: bool
    tenant: str = ""
    holder: str = ""


class ConnectionWait(msgspec.Struct):
    """A wait for a connection. ``for_pool``: for one of our own that others use, not for the server. ``is_over``: a
    connection is available.
    """

    for_pool: bool = False
    is_over: bool = False


class _Share(msgspec.Struct):
    """The connections that one tenant may hold. ``users``: how many transactions hold one or wait for one."""

    free: asyncio.Semaphore
    users: int = 0


class Pool:
    """Connections, made when they are needed and kept while they are.

    Taking one needs no task and no round trip, unlike a general pool's return: there is nothing to reset.
    """

    def __init__(self, connect: Callable[[], Awaitable[Slot]], size: int) -> None:
        self._connect = connect
        self._free = asyncio.Semaphore(size)
        self._share = max(1, int(size * TENANT_SHARE))
        self._shares: dict[str, _Share] = {}
        self._idle: list[Slot] = []
        self._busy: set[Slot] = set()
        self._returned = asyncio.Event()

    async def take(self, tenant: str, wait: ConnectionWait) -> Slot:
        """Return a connection for ``tenant``, preferably one that sees its rows already. Wait while all connections or
        the tenant's share are busy, and while the server has none left.
        """
        wait.for_pool = True
        share = self._shares.get(tenant)
        if share is None:
            share = self._shares[tenant] = _Share(asyncio.Semaphore(self._share))
        share.users += 1
        try:
            await share.free.acquire()
            try:
                await self._free.acquire()
                try:
                    slot = await self._take_or_connect(tenant, wait)
                except BaseException:
                    self._free.release()
                    raise
            except BaseException:
                share.free.release()
                raise
        except BaseException:
            self._leave(tenant, share)
            raise
        slot.holder = tenant
        self._busy.add(slot)
        wait.is_over = True
        return slot

    def _leave(self, tenant: str, share: _Share) -> None:
        share.users -= 1
        if not share.users:
            del self._shares[tenant]

    async def _take_or_connect(self, tenant: str, wait: ConnectionWait) -> Slot:
        while True:
            wait.for_pool = False
            slot = self._living(tenant)
            if slot is not None:
                return slot
            try:
                return await self._connect()
            except ServerFull:
                wait.for_pool = True
                self._returned.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(CONNECT_EVERY):
                        await self._returned.wait()

    def _living(self, tenant: str) -> Slot | None:
        for index in range(len(self._idle) - 1, -1, -1):
            if self._idle[index].tenant == tenant:
                slot = self._idle.pop(index)
                if not slot.connection.is_closed():
                    return slot
        while self._idle:
            slot = self._idle.pop()
            if not slot.connection.is_closed():
                return slot
        return None

    def give_back(self, slot: Slot) -> None:
        """Return a connection to the pool; one that is still in a transaction is closed."""
        self._busy.discard(slot)
        connection = slot.connection
        if not connection.is_closed():
            if connection.is_in_transaction():
                connection.terminate()
            else:
                self._idle.append(slot)
                self._returned.set()
        self._free.release()
        share = self._shares[slot.holder]
        share.free.release()
        self._leave(slot.holder, share)

    def drop_idle(self) -> None:
        """Throw idle connections away."""
        while self._idle:
            self._idle.pop().connection.terminate()

    async def close(self) -> None:
        """Close idle connections, and terminate the others."""
        for slot in self._busy:
            slot.connection.terminate()
        while self._idle:
            await self._idle.pop().connection.close(timeout=1)

    def sizes(self) -> tuple[int, int]:
        """Connections: (busy, idle)."""
        return len(self._busy), len(self._idle)
