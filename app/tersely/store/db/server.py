"""One Postgres server: its connections, its time limits, and whether it is away."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum
from functools import lru_cache
from typing import Any, Literal

import asyncpg

from tersely.domain.errors import InvalidRequest, StoreRefused, StoreUnavailable
from tersely.store.db.array_types import TypedConnection
from tersely.store.db.pool import Connection, ConnectionWait, Pool, ServerFull, Slot

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

_ROLE = "tersely_app"
# What a connection of our own is from its first moment on. A pooler between us and the server refuses or ignores it.
# Each of our statements has one good plan. To plan again at each execution costs more than the execution.
_OWN = {"role": _ROLE, "plan_cache_mode": "force_generic_plan"}
# One row: a pooler ignored the setting. Two: the setting holds. The number of rows is known without a prepared
# statement.
_COUNT_OWN = """
SELECT FROM generate_series(1, CASE
    WHEN current_setting('role') <> 'tersely_app' OR current_setting('plan_cache_mode') <> 'force_generic_plan' THEN 1
    ELSE 2 END)
"""

# While the database is away it is asked so often, and given so long to answer, in seconds, but not longer than half of
# a transaction's time limit.
# The statistics begin anew when a server has crashed, although its first process goes on.
_STARTED = "SELECT pg_postmaster_start_time(), stats_reset FROM pg_stat_bgwriter"
PROBE_EVERY = 0.25
PROBE_TIMEOUT = 1.0
# A coordinator passes the settings that a transaction makes after this one on to the other nodes, until its end.
PROPAGATE_SETTINGS = "SET LOCAL citus.propagate_set_commands = 'local'"
# Texts by which poolers report that, if they do not use the error code for it.
_POOLER_IS_FULL = "no more connections allowed"


# A transaction pooler in front of the server: "on", nothing may outlive a transaction; "prepared", it keeps prepared
# statements (PgBouncer from 1.21 on, with `max_prepared_statements`), and nothing else.
Pooler = Literal["off", "on", "prepared"]


class ServerKind(Enum):
    """The kind of a server, which decides how a transaction on it begins."""

    ALONE = "alone"
    """All of a plain Postgres."""
    NODE = "node"
    """The node of a distributed Postgres that stores a tenant's rows. The role of our transactions cannot log in
    anywhere, so a statement that would go on to another node fails; it never answers without the other node's rows.
    """
    COORDINATOR = "coordinator"
    """The coordinator, for rows of all tenants and rows that every node stores. It passes only settings inside a
    transaction to other nodes, and no role: row-level security holds for the tables' owner too.
    """


class DatabaseServer:
    """A pool that starts without the database and heals when it comes back.

    Every failure that means "the database is away or too slow" is raised as `StoreUnavailable`; each transaction has
    its own outer time limit (seconds), since the driver's own limit waits for a server that does not answer.

    A transaction that fails or takes too long fails alone. The database counts as away when no connection can be made,
    or when a new connection gets no answer to a question. The question is asked when a connection is lost, and when a
    transaction comes near its time limit. While the database is away transactions fail at once, instead of each
    waiting for its limit, until the question is answered.
    """

    def __init__(
        self,
        *,
        dsn: str,
        size: int,
        timeout: float,
        pooler: Pooler = "off",
        kind: ServerKind = ServerKind.ALONE,
        address: tuple[str, int] | None = None,
        plan_cache_mode: str = "auto",
    ) -> None:
        """``address``: host and port in place of those of ``dsn``. ``plan_cache_mode``: of a node."""
        self._dsn = dsn
        self._address: dict[str, Any] = {"host": address[0], "port": address[1]} if address else {}
        self._kind = kind
        self._node_settings = {"role": _ROLE, "plan_cache_mode": plan_cache_mode}
        self._timeout = timeout
        self._probe_timeout = min(PROBE_TIMEOUT, timeout / 2)
        self._may_own = kind is ServerKind.ALONE and pooler == "off"
        self._statements = 0 if pooler == "on" else 256
        self._pool = Pool(self._connect_and_note, size)
        self._is_open = False
        self._ending: set[asyncio.Task[None]] = set()
        self._probing: asyncio.Task[None] | None = None
        self._healing: asyncio.Task[None] | None = None
        # When the server was away last, in the loop's time, and the server's start times, which change with a restart.
        self._outage_at = -math.inf
        self._started: asyncpg.Record | None = None

    async def _connect_and_note(self) -> Slot:
        slot = await self._connect()
        if self._started is None:
            await self._note_start(slot.connection)
        return slot

    async def _note_start(self, connection: Connection) -> None:
        """Note since when the server has run. If it has started again, it was away, however shortly."""
        started = await connection.fetchrow(_STARTED)
        if self._started is not None and started != self._started:
            self._outage_at = asyncio.get_running_loop().time()
        self._started = started

    async def _connect(self) -> Slot:
        """Return a new connection, our own if no pooler is in between."""
        try:
            if self._kind is ServerKind.NODE:
                return Slot(await self._dial(self._node_settings), is_own=True)
            if self._may_own:
                try:
                    connection = await self._dial(_OWN)
                except asyncpg.ProtocolViolationError as error:
                    if _POOLER_IS_FULL in str(error):
                        raise
                else:
                    if await _count_own(connection) == 2:
                        return Slot(connection, is_own=True)
                    connection.terminate()
                self._adapt_to_pooler()
            return Slot(await self._dial({}), is_own=False)
        except asyncpg.PostgresError as error:  # a server that refuses us counts as unavailable
            if isinstance(error, asyncpg.TooManyConnectionsError) or _POOLER_IS_FULL in str(error):
                raise ServerFull(type(error).__name__) from error
            raise ConnectionError(type(error).__name__) from error

    def _adapt_to_pooler(self) -> None:
        """Adapt to an undeclared transaction pooler: keep no state beyond a transaction."""
        self._may_own = False
        self._statements = 0

    async def _dial(self, settings: dict[str, str]) -> Connection:
        return await asyncpg.connect(
            self._dsn,
            timeout=self._timeout,
            statement_cache_size=self._statements,
            server_settings=settings,
            connection_class=TypedConnection,
            **self._address,
        )

    def open(self) -> None:
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

    def drop_idle(self) -> None:
        """Close connections that nobody uses."""
        self._pool.drop_idle()

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
            self._outage_at = asyncio.get_running_loop().time()

    async def _answers(self) -> bool:
        """Return whether a new connection gets an answer. The pool's connections may all be waiting for one."""
        try:
            async with asyncio.timeout(self._probe_timeout):
                try:
                    connection = (await self._connect()).connection
                except ServerFull:
                    return True
                try:
                    await self._note_start(connection)
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

    async def seconds_since_outage(self) -> float:
        """Return how long ago the server was away or started again; 0 while it is away.

        A connection that was lost alone is no outage: what is found out about one is waited for.
        """
        if self._probing is not None:
            await asyncio.wait({self._probing})
        return 0.0 if self.is_away else asyncio.get_running_loop().time() - self._outage_at

    def sizes(self) -> tuple[int, int]:
        """Connections: (busy, idle)."""
        return self._pool.sizes()

    @asynccontextmanager
    async def use(self, tenant: str, key_id: str, limit: float | None, *, is_one: bool) -> AsyncIterator[Connection]:
        """Hold a connection for the length of the block. See `tersely.store.db.connection.Database`.

        ``is_one``: the block is one transaction.
        """
        if not self._is_open or self._healing is not None:
            raise StoreUnavailable
        wait = ConnectionWait()
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
                        await _prepare(connection, _begin_statement(tenant, key_id, self._kind, is_own=slot.is_own))
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

    def _give_up(self, slot: Slot) -> None:
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
def _begin_statement(tenant: str, key_id: str, kind: ServerKind, *, is_own: bool) -> str:
    """Return the statement that begins a transaction. It contains names, so they are checked."""
    if key_id and not TENANT.fullmatch(key_id):
        raise ValueError("not a key's id")
    parts = ["BEGIN", _tenant_statement(tenant, scope="LOCAL ")]
    if kind is ServerKind.COORDINATOR:
        parts[1:1] = [PROPAGATE_SETTINGS]
    elif not is_own:
        parts[1:1] = [f"SET LOCAL ROLE {_ROLE}", "SET LOCAL plan_cache_mode = force_generic_plan"]
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
