"""The pool, and the one way to a transaction: a tenant's rows, under a role that owns no table."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

import asyncpg
from asyncpg import Record
from asyncpg.pool import PoolConnectionProxy
from typing_extensions import override

from app.domain.errors import StoreUnavailable

if TYPE_CHECKING:
    Connection = PoolConnectionProxy[Record]
    _Connection = asyncpg.Connection[Record]
else:  # generic in the stubs alone
    Connection = PoolConnectionProxy
    _Connection = asyncpg.Connection

# Any text may be a tenant's name for Postgres; this is what may stand in a statement without quoting doubts.
TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:-]{0,127}")

AWAY = (
    OSError,
    TimeoutError,
    asyncpg.InterfaceError,
    asyncpg.PostgresConnectionError,
    asyncpg.CannotConnectNowError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.TooManyConnectionsError,
    asyncpg.QueryCanceledError,
    asyncpg.InternalClientError,
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.DiskFullError,
    asyncpg.UndefinedTableError,  # it came back, but is not migrated yet
    asyncpg.InvalidCatalogNameError,
)

T = TypeVar("T")


class _PooledConnection(_Connection):
    """A connection whose return to the pool costs no round trip.

    Everything that this service sets is set with SET LOCAL and ends with its transaction.
    """

    @override
    def get_reset_query(self) -> str:
        return ""


class Database:
    """A pool that starts without the database and heals when it comes back.

    Every failure that means "the database is away or too slow" is raised as `StoreUnavailable`; each call has
    its own outer time limit (seconds), since the driver's own limit waits for a server that does not answer.
    """

    def __init__(self, *, dsn: str, size: int = 10, timeout: float = 5.0, pooler: bool = False) -> None:
        """``pooler``: the server is a transaction pooler, so nothing may outlive a transaction."""
        self._dsn = dsn
        self._size = size
        self._timeout = timeout
        self._statement_cache = 0 if pooler else 256
        self._pool: asyncpg.Pool[Record] | None = None

    async def open(self) -> None:
        """Make the pool. Needs no database."""
        self._pool = await asyncpg.create_pool(
            self._dsn,
            min_size=0,
            max_size=self._size,
            timeout=self._timeout,
            connection_class=_PooledConnection,
            statement_cache_size=self._statement_cache,
            max_inactive_connection_lifetime=300,
        )

    async def close(self) -> None:
        """Close the pool, waiting a moment for work under way."""
        if self._pool is None:
            return
        try:
            async with asyncio.timeout(self._timeout):
                await self._pool.close()
        except (TimeoutError, *AWAY):
            self._pool.terminate()

    def sizes(self) -> tuple[int, int]:
        """Connections of the pool: (busy, idle)."""
        if self._pool is None:
            return 0, 0
        idle = self._pool.get_idle_size()
        return self._pool.get_size() - idle, idle

    async def ping(self) -> None:
        """Raise `StoreUnavailable` unless the database answers."""

        async def ask(connection: Connection) -> None:
            await connection.execute("SELECT 1")

        await self.run(ask)

    async def check_schema(self) -> None:
        """Raise `StoreUnavailable` unless the database answers and has Tersely's tables."""

        async def ask(connection: Connection) -> None:
            await connection.execute("SELECT FROM sessions LIMIT 0")

        await self.run(ask)

    async def run(
        self, work: Callable[[Connection], Awaitable[T]], *, tenant: str = "", limit: float | None = None
    ) -> T:
        """Run ``work`` in one transaction that sees ``tenant``'s rows alone. See `transaction`."""
        async with self.transaction(tenant, limit=limit) as connection:
            return await work(connection)

    @asynccontextmanager
    async def transaction(
        self, tenant: str, *, key_id: str = "", limit: float | None = None
    ) -> AsyncIterator[Connection]:
        """A transaction that sees ``tenant``'s rows alone, committed on leaving, rolled back on an error.

        Raises `StoreUnavailable` when the database is away, or not done within ``limit`` seconds.
        """
        if self._pool is None:
            raise StoreUnavailable
        if tenant and not TENANT.fullmatch(tenant):
            raise ValueError(f"not a tenant's name: {tenant!r}")
        if key_id and not TENANT.fullmatch(key_id):
            raise ValueError("not a key's id")
        begin = f"BEGIN; SET LOCAL ROLE tersely_app; SET LOCAL app.tenant = '{tenant}'"
        if key_id:
            begin += f"; SET LOCAL app.key_id = '{key_id}'"
        try:
            async with asyncio.timeout(limit or self._timeout), self._pool.acquire() as connection:
                await _begin(connection, begin)
                try:
                    yield connection
                except BaseException:
                    await _roll_back(connection)
                    raise
                await connection.execute("COMMIT")
        except AWAY as error:
            raise StoreUnavailable(f"the database is away: {type(error).__name__}") from error


async def _begin(connection: Connection, statement: str) -> None:
    """A transaction that cannot even begin means a database that is not Tersely's yet: no role, no schema."""
    try:
        await connection.execute(statement)
    except asyncpg.PostgresError as error:
        await _roll_back(connection)
        raise StoreUnavailable(f"the database is not ready: {type(error).__name__}") from error


async def _roll_back(connection: Connection) -> None:
    """End the transaction; a connection that cannot is thrown away, never returned to the pool inside one."""
    try:
        async with asyncio.timeout(1):
            await connection.execute("ROLLBACK")
    except (Exception, asyncio.CancelledError):  # noqa: BLE001 whatever it is, this connection is lost
        connection.terminate()


def to_json(value: object) -> bytes:
    """Compact JSON bytes for a column that Postgres need not look into (jsonb refuses U+0000)."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True).encode()
