"""The connection pool, and the only way to a transaction: with one tenant's rows, under a role that owns no table."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

import asyncpg
from asyncpg import Record

from tersely.domain.errors import InvalidRequest, StoreRefused, StoreUnavailable

if TYPE_CHECKING:
    Connection = asyncpg.Connection[Record]
else:  # generic in the stubs alone
    Connection = asyncpg.Connection

# Postgres allows any text as a tenant's name; only these characters may stand unquoted in a statement.
TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:-]{0,127}")

# The server does not know a prepared statement, or knows it from another client: a pooler is in between.
_FOREIGN_STATEMENT = (asyncpg.InvalidSQLStatementNameError, asyncpg.DuplicatePreparedStatementError)
# Errors of a server that answers: they concern one statement or transaction, and a repetition may succeed.
_ANSWERS = (
    *_FOREIGN_STATEMENT,
    asyncpg.InvalidCachedStatementError,
    asyncpg.OutdatedSchemaCacheError,
    asyncpg.QueryCanceledError,
    asyncpg.TransactionRollbackError,  # serialisation, deadlock
    asyncpg.ObjectNotInPrerequisiteStateError,  # a lock that is not to be had, among others
    asyncpg.InvalidTransactionStateError,  # read-only, among others
    asyncpg.InsufficientResourcesError,
    asyncpg.PostgresSystemError,
    asyncpg.InternalServerError,
    asyncpg.UndefinedTableError,  # it is back, but not migrated yet
    asyncpg.UndefinedColumnError,
)
AWAY = (
    OSError,
    TimeoutError,
    asyncpg.InterfaceError,
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.InternalClientError,
    asyncpg.InvalidCatalogNameError,
    *_ANSWERS,
)

# Texts with U+0000 or with half a surrogate pair.
_UNSTORABLE = (asyncpg.CharacterNotInRepertoireError, asyncpg.UntranslatableCharacterError)
# Classes of errors that a statement meets at every repetition: bad data, violated constraints, limits of the server.
_REFUSING = frozenset({"22", "23", "54"})

T = TypeVar("T")

# What a connection of our own is from its first moment on. A pooler between us and the server refuses or ignores it.
_OWN = {"role": "tersely_app", "plan_cache_mode": "force_generic_plan"}
# One row: a pooler ignored the setting. Two: a distributed Postgres, which passes only settings inside a transaction to
# its other nodes. Three: the setting holds. The number of rows is known without a prepared statement.
_COUNT_OWN = """
SELECT FROM generate_series(1, CASE
    WHEN current_setting('role') <> 'tersely_app' OR current_setting('plan_cache_mode') <> 'force_generic_plan' THEN 1
    WHEN EXISTS (SELECT FROM pg_extension WHERE extname = 'citus') THEN 2 ELSE 3 END)
"""

# While the database is away it is asked so often, and given so long to answer, in seconds, but not longer than half of
# a transaction's time limit.
PROBE_EVERY = 0.25
PROBE_TIMEOUT = 1.0
# The share of connections that one tenant may hold, so that its slow transactions leave some for others.
TENANT_SHARE = 0.8
# Seconds between attempts while the server has no free connection, unless one of our own becomes free.
CONNECT_EVERY = 0.1
# Texts by which poolers report that, if they do not use the error code for it.
_POOLER_IS_FULL = "no more connections allowed"


class _ServerFull(ConnectionError):
    """The server, or the pooler in front of it, has no connection left for us."""


@dataclass(slots=True, eq=False)
class _Slot:
    """A connection. ``is_own``: it is not shared through a pooler, so settings persist, and ``tenant`` is the tenant of
    its visible rows. Otherwise nothing may outlive a transaction. ``holder``: the tenant that used it last.
    """

    connection: Connection
    is_own: bool
    tenant: str = ""
    holder: str = ""


@dataclass(slots=True)
class _Wait:
    """A wait for a connection. ``for_pool``: for one of our own that others use, not for the server. ``is_over``: a
    connection is available.
    """

    for_pool: bool = False
    is_over: bool = False


@dataclass(slots=True)
class _Share:
    """The connections that one tenant may hold. ``users``: how many transactions hold one or wait for one."""

    free: asyncio.Semaphore
    users: int = 0


class _Pool:
    """Connections, made when they are needed and kept while they are.

    Taking one needs no task and no round trip, unlike a general pool's return: there is nothing to reset.
    """

    def __init__(self, connect: Callable[[], Awaitable[_Slot]], size: int) -> None:
        self._connect = connect
        self._free = asyncio.Semaphore(size)
        self._share = max(1, int(size * TENANT_SHARE))
        self._shares: dict[str, _Share] = {}
        self._idle: list[_Slot] = []
        self._busy: set[_Slot] = set()
        self._returned = asyncio.Event()

    async def take(self, tenant: str, wait: _Wait) -> _Slot:
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

    async def _take_or_connect(self, tenant: str, wait: _Wait) -> _Slot:
        while True:
            wait.for_pool = False
            slot = self._living(tenant)
            if slot is not None:
                return slot
            try:
                return await self._connect()
            except _ServerFull:
                wait.for_pool = True
                self._returned.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(CONNECT_EVERY):
                        await self._returned.wait()

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


class Database:
    """A pool that starts without the database and heals when it comes back.

    Every failure that means "the database is away or too slow" is raised as `StoreUnavailable`; each transaction has
    its own outer time limit (seconds), since the driver's own limit waits for a server that does not answer.

    A transaction that fails or takes too long fails alone. The database counts as away when no connection can be made,
    or when a new connection gets no answer to a question. The question is asked when a connection is lost, and when a
    transaction comes near its time limit. While the database is away transactions fail at once, instead of each
    waiting for its limit, until the question is answered.
    """

    def __init__(self, *, dsn: str, size: int = 10, timeout: float = 5.0, pooler: bool = False) -> None:
        """``pooler``: the server is a transaction pooler, so nothing may outlive a transaction."""
        self._dsn = dsn
        self._timeout = timeout
        self._probe_timeout = min(PROBE_TIMEOUT, timeout / 2)
        self._may_own = not pooler
        self._statements = 0 if pooler else 256
        self._pool = _Pool(self._connect, size)
        self._is_open = False
        self._ending: set[asyncio.Task[None]] = set()
        self._probing: asyncio.Task[None] | None = None
        self._healing: asyncio.Task[None] | None = None

    async def _connect(self) -> _Slot:
        """Return a new connection, our own if no pooler is in between."""
        try:
            if self._may_own:
                try:
                    connection = await self._dial(_OWN)
                except asyncpg.ProtocolViolationError as error:
                    if _POOLER_IS_FULL in str(error):
                        raise
                else:
                    rows = await _count_own(connection)
                    if rows > 1:
                        return _Slot(connection, is_own=rows == 3)
                    connection.terminate()
                self._adapt_to_pooler()
            return _Slot(await self._dial({}), is_own=False)
        except asyncpg.PostgresError as error:  # a server that refuses us counts as unavailable
            if isinstance(error, asyncpg.TooManyConnectionsError) or _POOLER_IS_FULL in str(error):
                raise _ServerFull(type(error).__name__) from error
            raise ConnectionError(type(error).__name__) from error

    def _adapt_to_pooler(self) -> None:
        """Adapt to an undeclared transaction pooler: keep no state beyond a transaction."""
        self._may_own = False
        self._statements = 0

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
        for task in (self._probing, self._healing, *self._ending):
            if task is not None:
                task.cancel()
        try:
            async with asyncio.timeout(self._timeout):
                await self._pool.close()
        except AWAY:
            pass

    def _probe(self) -> None:
        """Find out in the background whether the database is away."""
        if self._probing is None and self._healing is None and self._is_open:
            self._probing = asyncio.get_running_loop().create_task(self._fail_fast_unless_answered())

    async def _fail_fast_unless_answered(self) -> None:
        try:
            if not await self._answers():
                self._fail_fast()
        finally:
            self._probing = None

    def _fail_fast(self) -> None:
        """Let transactions fail at once until the database answers again."""
        if self._healing is None and self._is_open:
            self._pool.drop_idle()
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
        """Return whether a new connection gets an answer. The pool's connections may all be waiting for one."""
        try:
            async with asyncio.timeout(self._probe_timeout):
                try:
                    connection = (await self._connect()).connection
                except _ServerFull:
                    return True
                try:
                    await connection.execute("SELECT 1")
                finally:
                    connection.terminate()
        except (*AWAY, asyncpg.PostgresError):
            return False
        return True

    @property
    def timeout(self) -> float:
        """Return the limit of a transaction, in seconds."""
        return self._timeout

    @property
    def is_away(self) -> bool:
        """Return whether calls fail at once at the moment."""
        return self._healing is not None

    async def wait_until_back(self, seconds: float) -> bool:
        """Wait at most this long for a database that is known to be unavailable. Return whether to try again."""
        if self._healing is not None:
            await asyncio.wait({self._healing}, timeout=seconds)
        return self._healing is None

    def sizes(self) -> tuple[int, int]:
        """Connections: (busy, idle)."""
        return self._pool.sizes()

    async def ping(self) -> None:
        """Raise `StoreUnavailable` unless the database answers."""

        async def ask(connection: Connection) -> None:
            await connection.execute("SELECT 1")

        await self.run(ask)

    async def read_revision(self) -> str | None:
        """Return the revision of the database's schema; None for one that is too old to be queried.

        Raises `StoreUnavailable` unless the database answers and has Tersely's tables.
        """

        async def ask(connection: Connection) -> str | None:
            found = await connection.fetchval("SELECT version_num FROM alembic_version")
            return None if found is None else str(found)

        try:
            return await self.run(ask)
        except asyncpg.InsufficientPrivilegeError:
            return None

    async def run(
        self, work: Callable[[Connection], Awaitable[T]], *, tenant: str = "", limit: float | None = None
    ) -> T:
        """Run ``work`` in one transaction that sees only ``tenant``'s rows. See `transaction`."""
        async with self.transaction(tenant, limit=limit) as connection:
            return await work(connection)

    def transaction(
        self, tenant: str, *, key_id: str = "", limit: float | None = None
    ) -> AbstractAsyncContextManager[Connection]:
        """Return a transaction that sees ``tenant``'s rows alone, committed on leaving, rolled back on an error.

        Raises `StoreUnavailable` when the database is away, or not done within ``limit`` seconds.
        """
        return self._use(tenant, key_id, limit, is_one=True)

    def statements(self, tenant: str, *, limit: float | None = None) -> AbstractAsyncContextManager[Connection]:
        """Like `transaction`, for statements that need no common transaction. Each is committed at the latest at the
        end of the block, and sees what was committed before it. On a connection of our own this saves the round trips
        that begin and end a transaction.
        """
        return self._use(tenant, "", limit, is_one=False)

    reading = statements

    @asynccontextmanager
    async def _use(self, tenant: str, key_id: str, limit: float | None, *, is_one: bool) -> AsyncIterator[Connection]:
        if not self._is_open or self._healing is not None:
            raise StoreUnavailable
        wait = _Wait()
        seconds = limit or self._timeout
        # The question is asked so early that its answer is there when the time limit ends.
        delay = max(seconds, self._timeout) - 1.1 * self._probe_timeout
        alarm = asyncio.get_running_loop().call_later(delay, self._probe)
        try:
            async with asyncio.timeout(seconds) as patience:
                slot = await self._pool.take(tenant, wait)
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
                        is_unfinished = is_begun or isinstance(error, asyncio.CancelledError)
                        if is_unfinished and not patience.expired():
                            await _roll_back(connection)
                        raise
                finally:
                    if patience.expired():
                        self._give_up(slot)
                    else:
                        self._pool.give_back(slot)
        except (*_UNSTORABLE, asyncpg.DataError) as error:
            if isinstance(error, _UNSTORABLE) or isinstance(error.__cause__, UnicodeEncodeError):
                raise InvalidRequest("a text contains a character that cannot be stored") from error
            raise
        except AWAY as error:
            if isinstance(error, ValueError):  # a value that the driver cannot send: no matter of the database
                raise
            if wait.for_pool:
                raise StoreUnavailable("all connections to the database are busy") from error
            self._on_failure(error, is_connected=wait.is_over)
            if isinstance(error, TimeoutError) and wait.is_over:
                raise StoreUnavailable("the database took too long") from error
            raise StoreUnavailable(f"the database is away: {type(error).__name__}") from error
        finally:
            alarm.cancel()

    def _give_up(self, slot: _Slot) -> None:
        """Have the server cancel a statement that nobody waits for, and return its connection afterwards.

        Otherwise the server would go on with it, on a connection that none of our limits counts.
        """

        async def roll_back() -> None:
            try:
                await _roll_back(slot.connection)
            finally:
                self._pool.give_back(slot)

        task = asyncio.get_running_loop().create_task(roll_back())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _on_failure(self, error: Exception, *, is_connected: bool) -> None:
        """Let go of connections that are no good any more, and find out whether the database is away."""
        if isinstance(error, _FOREIGN_STATEMENT):
            self._adapt_to_pooler()
        if isinstance(error, (*_FOREIGN_STATEMENT, asyncpg.InvalidCachedStatementError)):
            self._pool.drop_idle()
        if isinstance(error, _ANSWERS):
            return
        if is_connected or isinstance(error, TimeoutError):
            self._probe()
        else:
            self._fail_fast()


def refusal(error: asyncpg.PostgresError) -> StoreUnavailable:
    """Return the error that a failed statement means for the writer: worth a retry, or refused for good."""
    name = type(error).__name__
    if (error.sqlstate or "")[:2] in _REFUSING:
        return StoreRefused(f"the database refuses a value: {name}")
    return StoreUnavailable(f"the database refused a write: {name}")


async def _count_own(connection: Connection) -> int:
    try:
        return int((await connection.execute(_COUNT_OWN)).rpartition(" ")[2])
    except BaseException:
        connection.terminate()
        raise


@lru_cache(maxsize=4096)
def _begin_statement(tenant: str, key_id: str, *, is_own: bool) -> str:
    """Return the statement that begins a transaction. It contains names, so they are checked."""
    if key_id and not TENANT.fullmatch(key_id):
        raise ValueError("not a key's id")
    parts = ["BEGIN", _tenant_statement(tenant, scope="LOCAL ")]
    if not is_own:
        # Each of our statements has one good plan. To plan again at each execution costs more than the execution.
        parts[1:1] = ["SET LOCAL ROLE tersely_app", "SET LOCAL plan_cache_mode = force_generic_plan"]
    if key_id:
        parts.append(f"SET LOCAL app.key_id = '{key_id}'")
    return "; ".join(parts)


@lru_cache(maxsize=4096)
def _tenant_statement(tenant: str, scope: str = "") -> str:
    """Return the statement that makes one tenant's rows visible."""
    if tenant and not TENANT.fullmatch(tenant):
        raise ValueError(f"not a tenant's name: {tenant!r}")
    return f"SET {scope}app.tenant = '{tenant}'"


async def _prepare(connection: Connection, statement: str) -> None:
    """Begin a transaction. If that fails, the database is not Tersely's yet: it lacks the role or the schema."""
    try:
        await connection.execute(statement)
    except asyncpg.PostgresError as error:
        await _roll_back(connection)
        raise StoreUnavailable(f"the database is not ready: {type(error).__name__}") from error
    except BaseException:
        connection.terminate()  # nobody knows whether the transaction has begun
        raise


async def _roll_back(connection: Connection) -> None:
    """End the transaction, and wait for a cancelled statement.

    A connection for which that fails is closed. It never returns to the pool inside a transaction.
    """
    try:
        async with asyncio.timeout(1):
            await connection.execute("ROLLBACK")
    except (Exception, asyncio.CancelledError):  # noqa: BLE001 whatever it is, this connection is lost
        connection.terminate()


def to_json(value: object) -> bytes:
    """Compact JSON bytes for a column that Postgres need not look into (jsonb refuses U+0000)."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True).encode()
