"""The rows that a connection sees: of our own from its first moment on, and through a pooler for one transaction."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import asyncpg
import pytest

from tersely.domain.errors import StoreUnavailable
from tersely.store.db.connection import Connection, Database
from tersely.store.db.server import DatabaseServer
from tersely.store.history import sessions
from tersely.store.history.sessions import Configuration
from tests import conftest
from tests.store.test_distribution import on_one_server

# Between Tersely and the nodes of a distributed one there is no pooler.
pytestmark = on_one_server

NOW = datetime(2026, 1, 1, tzinfo=UTC)
WHO = "SELECT current_user::text || ' ' || current_setting('app.tenant')"
ALL = "SELECT string_agg(id, ' ' ORDER BY id) FROM sessions"

Dial = Callable[[DatabaseServer, dict[str, str]], Awaitable[Connection]]
_dial: Dial = DatabaseServer._dial


async def _refuse(database: DatabaseServer, settings: dict[str, str]) -> Connection:
    """A pooler that refuses what it does not know."""
    if settings:
        raise asyncpg.ProtocolViolationError("unsupported startup parameter: role")
    return await _dial(database, settings)


async def _ignore(database: DatabaseServer, settings: dict[str, str]) -> Connection:
    """A pooler that was told to ignore it."""
    del settings
    return await _dial(database, {})


@pytest.fixture(params=["own", "pooler", "pooler that refuses", "pooler that ignores"])
async def opened(
    request: pytest.FixtureRequest, database: conftest.Database, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Database, bool]]:
    """A database with one connection and a session of each of two tenants, and whether that connection is our own."""
    stubs: dict[str, Dial] = {"pooler that refuses": _refuse, "pooler that ignores": _ignore}
    if request.param in stubs:
        monkeypatch.setattr(DatabaseServer, "_dial", stubs[request.param])
    one = Database(dsn=database.dsn, size=1, timeout=20, pooler="on" if request.param == "pooler" else "off")
    await one.open()
    for tenant in ("north", "south"):
        async with one.transaction(tenant) as connection:
            given = Configuration(strategy=None, epoch_policy=None, metadata=b"{}")
            assert await sessions.add(connection, tenant, f"of-{tenant}", None, given, NOW)
    yield one, request.param == "own"
    await one.close()


async def test_each_tenant_sees_its_own_rows(opened: tuple[Database, bool]) -> None:
    database, _ = opened
    for tenant in ("north", "south", "south", "north", "east"):
        expected = f"of-{tenant}" if tenant != "east" else None
        for use in (database.statements, database.transaction, database.reading):
            async with use(tenant) as connection:
                assert await connection.fetchval(WHO) == f"tersely_app {tenant}"
                assert await connection.fetchval(ALL) == expected


async def test_a_transaction_of_another_tenant_leaves_nothing_behind(opened: tuple[Database, bool]) -> None:
    database, _ = opened
    async with database.statements("north") as connection:
        assert await connection.fetchval(ALL) == "of-north"
    async with database.transaction("south") as connection:
        assert await connection.fetchval(ALL) == "of-south"
    with pytest.raises(ZeroDivisionError):
        async with database.transaction("south"):
            raise ZeroDivisionError
    async with database.statements("north") as connection:
        assert await connection.fetchval(ALL) == "of-north"


async def test_only_own_connections_keep_session_settings(opened: tuple[Database, bool]) -> None:
    database, is_own = opened
    raw: list[Any] = []
    async with database.statements("north") as connection:
        raw.append(connection)
        assert connection.is_in_transaction() is not is_own
    role, tenant = await raw[0].fetchrow("SELECT current_setting('role'), current_setting('app.tenant', true)")
    assert (role, tenant or "") == (("tersely_app", "north") if is_own else ("none", ""))


async def test_an_error_in_a_statement_spoils_nothing(opened: tuple[Database, bool]) -> None:
    database, _ = opened
    with pytest.raises(asyncpg.DivisionByZeroError):
        async with database.statements("north") as connection:
            await connection.fetchval("SELECT 1 / 0")
    async with database.statements("north") as connection:
        assert await connection.fetchval(ALL) == "of-north"


async def test_a_statement_that_takes_too_long_is_given_up(opened: tuple[Database, bool]) -> None:
    database, _ = opened
    with pytest.raises(StoreUnavailable):
        async with database.statements("north", limit=0.2) as connection:
            await connection.fetchval("SELECT pg_sleep(30)")
    async with database.statements("north") as connection:
        assert await connection.fetchval(ALL) == "of-north"


async def test_a_given_up_statement_ends_at_the_server(opened: tuple[Database, bool]) -> None:
    database, _ = opened
    for use in (database.statements, database.transaction):
        with pytest.raises(StoreUnavailable):
            async with use("north", limit=0.2) as connection:
                await connection.fetchval("SELECT pg_sleep(30)")
        async with database.statements("north") as connection:
            sleeping = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query ~ $1"
            assert await connection.fetchval(sleeping, "^SELECT pg_sleep") == 0
    assert not database.is_away()


async def test_a_tenant_leaves_connections_to_the_others(database: conftest.Database) -> None:
    one = Database(dsn=database.dsn, size=5, timeout=2)
    await one.open()
    began = asyncio.Semaphore(0)
    done = asyncio.Event()

    async def hold(tenant: str) -> None:
        async with one.transaction(tenant):
            began.release()
            await done.wait()

    holders = [asyncio.create_task(hold("north")) for _ in range(8)]
    for _ in range(4):
        await began.acquire()
    await asyncio.sleep(0.05)
    assert one.sizes()[0] == 4
    async with one.statements("south") as connection:
        assert await connection.fetchval("SELECT 1") == 1
    done.set()
    await asyncio.gather(*holders)
    assert one.sizes()[0] == 0
    await one.close()
