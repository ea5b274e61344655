"""The only way to a transaction: with one tenant's rows, under a role that owns no table, where these rows are."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar

import asyncpg

from tersely.domain.errors import StoreUnavailable
from tersely.store.db.cluster import HAS_EXTENSION, IS_DISTRIBUTED, VERSION, Address, Cluster, plan_cache_mode
from tersely.store.db.pool import Connection
from tersely.store.db.server import TENANT, DatabaseServer, Pooler, ServerKind, refusal

__all__ = ["TENANT", "Connection", "Database", "refusal", "to_json"]

T = TypeVar("T")

# Writes what this process holds back of a tenant's session (None: of all its sessions), and waits for it.
Flush = Callable[[str, str | None], Awaitable[None]]


class Database:
    """Postgres: one server, or a distributed one (`tersely.store.db.cluster`), which the first transaction finds out.

    Transactions and their time limits are those of `tersely.store.db.server.Server`.
    """

    def __init__(self, *, dsn: str, size: int = 10, timeout: float = 5.0, pooler: Pooler = "off") -> None:
        """``size``: connections to each server."""
        self._dsn = dsn
        self._size = size
        self._timeout = timeout
        self._pooler = pooler
        self._server = self._connect(ServerKind.ALONE, None)
        self._cluster: Cluster | None = None
        self._is_alone = False
        self._asking: asyncio.Task[None] | None = None
        self._plan_cache_mode = ""
        self._changes: Counter[str] = Counter()
        self._flush: Flush | None = None

    def _connect(self, kind: ServerKind, address: Address) -> DatabaseServer:
        return DatabaseServer(
            dsn=self._dsn,
            size=self._size,
            timeout=self._timeout,
            pooler=self._pooler,
            kind=kind,
            address=address,
            plan_cache_mode=self._plan_cache_mode if kind is ServerKind.NODE else "",
        )

    async def open(self) -> None:
        """Get ready. Needs no database."""
        self._server.open()

    async def close(self) -> None:
        """Close all connections."""
        if self._asking is not None:
            self._asking.cancel()
        await self._server.close()
        if self._cluster is not None:
            await self._cluster.close()

    @property
    def timeout(self) -> float:
        """Return the limit of a transaction, in seconds."""
        return self._timeout

    async def is_distributed(self) -> bool:
        """Return whether a node of a distributed Postgres stores each tenant's rows. There statements that are executed
        often must be simple: one table, the tenant among the conditions. Raises `StoreUnavailable`.
        """
        return await self._find_out() is not None

    def is_away(self, tenant: str = "") -> bool:
        """Return whether transactions of the tenant fail at once at the moment; without a tenant, those of nobody in
        particular.
        """
        return self._known_server(tenant).is_away

    async def wait_until_back(self, seconds: float, tenant: str = "") -> bool:
        """Wait at most this long for a database that is known to be unavailable. Return whether to try again."""
        return await self._known_server(tenant).wait_until_back(seconds)

    async def seconds_since_outage(self, tenant: str = "") -> float:
        """Return how long ago the tenant's server was away or started again."""
        return await self._known_server(tenant).seconds_since_outage()

    def group_of(self, tenant: str) -> object:
        """Return what fails together with the tenant's rows."""
        return self._known_server(tenant)

    def _known_server(self, tenant: str) -> DatabaseServer:
        if self._cluster is None:
            return self._server
        return (self._cluster.known_server(tenant) if tenant else None) or self._cluster.coordinator

    def sizes(self) -> tuple[int, int]:
        """Connections: (busy, idle)."""
        servers = [self._server] if self._cluster is None else list(self._cluster.servers())
        busy, idle = zip(*(server.sizes() for server in servers), strict=True)
        return sum(busy), sum(idle)

    async def ping(self) -> None:
        """Raise `StoreUnavailable` unless the database answers."""
        async with self._routed("", "", None, is_one=True, is_everywhere=False) as connection:
            await connection.execute("SELECT 1")

    async def read_revision(self) -> str | None:
        """Return the revision of the database's schema; None for one that is too old to be queried.

        Raises `StoreUnavailable` unless the database answers and has Tersely's tables.
        """
        try:
            async with self._routed("", "", None, is_one=True, is_everywhere=False, is_anywhere=True) as connection:
                found = await connection.fetchval("SELECT version_num FROM alembic_version")
        except asyncpg.InsufficientPrivilegeError:
            return None
        return None if found is None else str(found)

    async def run(
        self, work: Callable[[Connection], Awaitable[T]], *, tenant: str = "", limit: float | None = None
    ) -> T:
        """Run ``work`` in one transaction that sees only ``tenant``'s rows. See `transaction`."""
        async with self.transaction(tenant, limit=limit) as connection:
            return await work(connection)

    @asynccontextmanager
    async def transaction(
        self,
        tenant: str,
        *,
        key_id: str = "",
        limit: float | None = None,
        is_everywhere: bool = False,
        is_anywhere: bool = False,
    ) -> AsyncIterator[Connection]:
        """Return a transaction that sees ``tenant``'s rows alone, committed on leaving, rolled back on an error.

        Every node of a distributed Postgres stores tenants, keys and limits: ``is_everywhere`` writes such rows, and
        ``is_anywhere`` reads no others.

        Raises `StoreUnavailable` when the database is away, or not done within ``limit`` seconds.
        """
        try:
            use = self._transaction(
                tenant, key_id=key_id, limit=limit, is_everywhere=is_everywhere, is_anywhere=is_anywhere
            )
            async with use as connection:
                yield connection
        finally:
            self._changes[tenant] += 1

    def flush_with(self, flush: Flush) -> None:
        """Have ``flush`` called before each edit."""
        self._flush = flush

    async def flush(self, tenant: str, session_id: str | None) -> None:
        """Return when everything that this process has received of a session (None: of all of the tenant's) is in the
        database, or cannot be written. To be called before a session is read for an edit.
        """
        if self._flush is not None:
            await self._flush(tenant, session_id)

    @asynccontextmanager
    async def edit(self, tenant: str, session_id: str, *, limit: float | None = None) -> AsyncIterator[Connection]:
        """Return a `transaction` for an edit of a session, after a `flush`: the edit finds the messages of calls that
        are under way.
        """
        await self.flush(tenant, session_id)
        async with self.transaction(tenant, limit=limit) as connection:
            yield connection

    def changes(self, tenant: str) -> int:
        """Return a number that is another one after each transaction of this process that may have changed a row of
        ``tenant``, but for `group_commit`.
        """
        return self._changes[tenant] + self._changes[""]

    def group_commit(self, tenant: str) -> AbstractAsyncContextManager[Connection]:
        """Return a `transaction` in which each change of a session is conditional on its version."""
        return self._transaction(tenant)

    def _transaction(
        self,
        tenant: str,
        *,
        key_id: str = "",
        limit: float | None = None,
        is_everywhere: bool = False,
        is_anywhere: bool = False,
    ) -> AbstractAsyncContextManager[Connection]:
        if self._is_alone:
            return self._server.use(tenant, key_id, limit, is_one=True)
        return self._routed(tenant, key_id, limit, is_one=True, is_everywhere=is_everywhere, is_anywhere=is_anywhere)

    def statements(self, tenant: str, *, limit: float | None = None) -> AbstractAsyncContextManager[Connection]:
        """Like `transaction`, for statements that need no common transaction. Each is committed at the latest at the
        end of the block, and sees what was committed before it. On a connection of our own this saves the round trips
        that begin and end a transaction.
        """
        if self._is_alone:
            return self._server.use(tenant, "", limit, is_one=False)
        return self._routed(tenant, "", limit, is_one=False, is_everywhere=False)

    reading = statements

    @asynccontextmanager
    async def _routed(
        self,
        tenant: str,
        key_id: str,
        limit: float | None,
        *,
        is_one: bool,
        is_everywhere: bool,
        is_anywhere: bool = False,
    ) -> AsyncIterator[Connection]:
        """Hold a connection to the server that has the tenant's rows. ``is_anywhere``: any server has what is read."""
        cluster = await self._find_out()
        if cluster is None:
            server = self._server
        elif is_anywhere:
            server = cluster.any_server()
        elif is_everywhere or not tenant:
            server = cluster.coordinator
        else:
            server = await cluster.server_of(tenant)
        try:
            async with server.use(tenant, key_id, limit, is_one=is_one) as connection:
                yield connection
        except StoreUnavailable:
            if cluster is not None and tenant:
                cluster.doubt(tenant)
            raise

    async def _find_out(self) -> Cluster | None:
        """Return the nodes of a distributed Postgres; None for a plain one."""
        if self._cluster is None and not self._is_alone:
            if self._asking is None or self._asking.done():
                self._asking = asyncio.get_running_loop().create_task(self._ask())
                self._asking.add_done_callback(_look_at_failure)
            await asyncio.shield(self._asking)
        return self._cluster

    async def _ask(self) -> None:
        async with self._server.use("", "", None, is_one=True) as connection:
            if not await _has_rows(connection, HAS_EXTENSION) or not await _has_rows(connection, IS_DISTRIBUTED):
                self._is_alone = True
                return
            record = await connection.fetchrow(VERSION)
        assert record is not None
        if self._cluster is None:  # nobody else was quicker
            self._plan_cache_mode = plan_cache_mode(record["version"])
            self._cluster = Cluster(self._connect)
            self._server.drop_idle()


def _look_at_failure(task: asyncio.Task[None]) -> None:
    """A failure is reported by whoever waits; nobody may be waiting any more."""
    if not task.cancelled():
        task.exception()


async def _has_rows(connection: Connection, statement: str) -> bool:
    return (await connection.execute(statement)) != "SELECT 0"


def to_json(value: object) -> bytes:
    """Compact JSON bytes for a column that Postgres need not look into (jsonb refuses U+0000)."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True).encode()
