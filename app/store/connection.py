"""The pool, and the one way to a transaction: a tenant's rows, under a role that owns no table."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

import asyncpg
from asyncpg import Record

from app.domain.errors import StoreUnavailable

if TYPE_CHECKING:
    Connection = asyncpg.Connection[Record]
else:  # generic in the stubs alone
    Connection = asyncpg.Connection

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

# Of these, what says nothing about whether the next call would get an answer.
_ANSWERS = (
    asyncpg.QueryCanceledError,
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.DiskFullError,
    asyncpg.UndefinedTableError,
)

T = TypeVar("T")

# What a connection of our own is from its first moment on. A pooler between us and the server refuses or ignores it.
_OWN = {"role": "tersely_app", "plan_cache_mode": "force_generic_plan"}
# A distributed Postgres hands on to its other nodes only what is set inside a transaction.
_IS_OWN = """
SELECT current_setting('role') = 'tersely_app' AND current_setting('plan_cache_mode') = 'force_generic_plan'
    AND NOT EXISTS (SELECT FROM pg_extension WHERE extname = 'citus')
"""

# While the database is away it is asked so often, and given so long to answer, in seconds.
PROBE_EVERY = 0.25
PROBE_TIMEOUT = 1.0


@dataclass(slots=True, eq=False)
class _Slot:
    """A connection. ``is_own``: what is set on it stays with us, and ``tenant`` is whose rows it sees; else nothing
    may outlive a transaction.
    """

    connection: Connection
    is_own: bool
    tenant: str = ""


class _Pool:
    """Connections, made when they are needed and kept while they are.

    Taking one costs no task and no round trip, which a general pool's return does: there is nothing to reset.
    """

    def __init__(self, connect: Callable[[], Awaitable[_Slot]], size: int) -> None:
        self._connect = connect
        self._free = asyncio.Semaphore(size)
        self._idle: list[_Slot] = []
        self._busy: set[_Slot] = set()

    async def take(self, tenant: str) -> _Slot:
        """A connection, if possible one that sees ``tenant``'s rows already; waits while all are busy."""
        await self._free.acquire()
        try:
            slot = self._living(tenant) or await self._connect()
        except BaseException:
            self._free.release()
            raise
        self._busy.add(slot)
        return slot

    def _living(self, tenant: str) -> _Slot | None:
        for place in range(len(self._idle) - 1, -1, -1):
            if self._idle[place].tenant == tenant:
                slot = self._idle.pop(place)
                if not slot.connection.is_closed():
                    return slot
        while self._idle:
            slot = self._idle.pop()
            if not slot.connection.is_closed():
                return slot
        return None

    def give_back(self, slot: _Slot) -> None:
        """Return what was taken; one that is still in a transaction is thrown away."""
        self._busy.discard(slot)
        connection = slot.connection
        if not connection.is_closed():
            if connection.is_in_transaction():
                connection.terminate()
            else:
                self._idle.append(slot)
        self._free.release()

    def drop_idle(self) -> None:
        """Throw idle connections away: after one of them failed, the others are likely to be dead too."""
        while self._idle:
            self._idle.pop().connection.terminate()

    async def close(self) -> None:
        """Close what is idle, cut off what is not."""
        for slot in self._busy:
            slot.connection.terminate()
        while self._idle:
            await self._idle.pop().connection.close(timeout=1)

    def sizes(self) -> tuple[int, int]:
        """Connections: (busy, idle)."""
        return len(self._busy), len(self._idle)


class Database:
    """A pool that starts without the database and heals when it comes back.

    Every failure that means "the database is away or too slow" is raised as `StoreUnavailable`; each call has
    its own outer time limit (seconds), since the driver's own limit waits for a server that does not answer.
    After such a failure calls fail at once, instead of each waiting for itself, until the database has answered
    a question of its own.
    """

    def __init__(self, *, dsn: str, size: int = 10, timeout: float = 5.0, pooler: bool = False) -> None:
        """``pooler``: the server is a transaction pooler, so nothing may outlive a transaction."""
        self._dsn = dsn
        self._timeout = timeout
        self._may_own = not pooler
        self._statements = 0 if pooler else 256
        self._pool = _Pool(self._connect, size)
        self._is_open = False
        self._healing: asyncio.Task[None] | None = None

    async def _connect(self) -> _Slot:
        """A new connection, our own where nothing stands between us and the server."""
        try:
            if self._may_own:
                try:
                    connection = await self._dial(_OWN)
                except asyncpg.ProtocolViolationError:  # a pooler, although nobody has said so
                    self._may_own = False
                else:
                    return await _owned(connection)
            return _Slot(await self._dial({}), is_own=False)
        except asyncpg.PostgresError as error:  # a server that does not let us in is no better than none
            raise ConnectionError(type(error).__name__) from error

    async def _dial(self, settings: dict[str, str]) -> Connection:
        return await asyncpg.connect(
            self._dsn, timeout=self._timeout, statement_cache_size=self._statements, server_settings=settings
        )

    async def open(self) -> None:
        """Get ready. Needs no database."""
        self._is_open = True

    async def close(self) -> None:
        """Close all connections."""
        self._is_open = False
        if self._healing is not None:
            self._healing.cancel()
        try:
            async with asyncio.timeout(self._timeout):
                await self._pool.close()
        except AWAY:
            pass

    def _fail_fast(self) -> None:
        """Let calls fail at once until the database answers again."""
        if self._healing is None and self._is_open:
            self._healing = asyncio.get_running_loop().create_task(self._heal())

    async def _heal(self) -> None:
        try:
            while True:
                if await self._answers():
                    return
                await asyncio.sleep(PROBE_EVERY)
        finally:
            self._healing = None

    async def _answers(self) -> bool:
        """Whether a new connection gets an answer; those of the pool may all be waiting for one."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT):
                connection = (await self._connect()).connection
                try:
                    await connection.execute("SELECT 1")
                finally:
                    connection.terminate()
        except (*AWAY, asyncpg.PostgresError):
            return False
        return True

    def sizes(self) -> tuple[int, int]:
        """Connections: (busy, idle)."""
        return self._pool.sizes()

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

    def transaction(
        self, tenant: str, *, key_id: str = "", limit: float | None = None
    ) -> AbstractAsyncContextManager[Connection]:
        """A transaction that sees ``tenant``'s rows alone, committed on leaving, rolled back on an error.

        Raises `StoreUnavailable` when the database is away, or not done within ``limit`` seconds.
        """
        return self._use(tenant, key_id, limit, is_one=True)

    def statements(self, tenant: str, *, limit: float | None = None) -> AbstractAsyncContextManager[Connection]:
        """Like `transaction`, for statements that need not be one: a statement is committed when the block is left
        at the latest, and sees what was committed before it. On a connection of our own this saves the round trips
        that begin and end a transaction.
        """
        return self._use(tenant, "", limit, is_one=False)

    reading = statements

    @asynccontextmanager
    async def _use(self, tenant: str, key_id: str, limit: float | None, *, is_one: bool) -> AsyncIterator[Connection]:
        if not self._is_open or self._healing is not None:
            raise StoreUnavailable
        try:
            async with asyncio.timeout(limit or self._timeout) as patience:
                slot = await self._pool.take(tenant)
                connection = slot.connection
                try:
                    is_begun = is_one or not slot.is_own
                    if is_begun:
                        await _prepare(connection, _begin_statement(tenant, key_id, is_own=slot.is_own))
                    elif slot.tenant != tenant:
                        await _prepare(connection, _tenant_statement(tenant))
                        slot.tenant = tenant
                    try:
                        yield connection
                        if is_begun:
                            await connection.execute("COMMIT")
                    except BaseException as error:
                        if patience.expired():
                            connection.terminate()
                        elif is_begun or isinstance(error, asyncio.CancelledError):
                            await _roll_back(connection)
                        raise
                finally:
                    self._pool.give_back(slot)
        except AWAY as error:
            if isinstance(error, ValueError):  # a value that the driver cannot send: no matter of the database
                raise
            if not isinstance(error, _ANSWERS) and (limit is None or not isinstance(error, TimeoutError)):
                self._pool.drop_idle()
                self._fail_fast()
            raise StoreUnavailable(f"the database is away: {type(error).__name__}") from error


async def _owned(connection: Connection) -> _Slot:
    try:
        return _Slot(connection, is_own=bool(await connection.fetchval(_IS_OWN)))
    except BaseException:
        connection.terminate()
        raise


@lru_cache(maxsize=4096)
def _begin_statement(tenant: str, key_id: str, *, is_own: bool) -> str:
    """What begins a transaction. The names stand in the statement itself, so they are checked."""
    if key_id and not TENANT.fullmatch(key_id):
        raise ValueError("not a key's id")
    parts = ["BEGIN", _tenant_statement(tenant, scope="LOCAL ")]
    if not is_own:
        # Our statements have one good plan each; making it anew at each call costs more than running it.
        parts[1:1] = ["SET LOCAL ROLE tersely_app", "SET LOCAL plan_cache_mode = force_generic_plan"]
    if key_id:
        parts.append(f"SET LOCAL app.key_id = '{key_id}'")
    return "; ".join(parts)


@lru_cache(maxsize=4096)
def _tenant_statement(tenant: str, scope: str = "") -> str:
    """What makes a tenant's rows visible, and no others."""
    if tenant and not TENANT.fullmatch(tenant):
        raise ValueError(f"not a tenant's name: {tenant!r}")
    return f"SET {scope}app.tenant = '{tenant}'"


async def _prepare(connection: Connection, statement: str) -> None:
    """A transaction that cannot even begin means a database that is not Tersely's yet: no role, no schema."""
    try:
        await connection.execute(statement)
    except asyncpg.PostgresError as error:
        await _roll_back(connection)
        raise StoreUnavailable(f"the database is not ready: {type(error).__name__}") from error
    except BaseException:
        connection.terminate()  # nobody knows whether the transaction has begun
        raise


async def _roll_back(connection: Connection) -> None:
    """End the transaction, and wait for what was cancelled.

    A connection that cannot is thrown away, never returned to the pool inside one.
    """
    try:
        async with asyncio.timeout(1):
            await connection.execute("ROLLBACK")
    except (Exception, asyncio.CancelledError):  # noqa: BLE001 whatever it is, this connection is lost
        connection.terminate()


def to_json(value: object) -> bytes:
    """Compact JSON bytes for a column that Postgres need not look into (jsonb refuses U+0000)."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True).encode()
