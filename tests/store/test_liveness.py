"""Long work on a database that stops answering ends; work that takes long goes on."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from tersely.store.db import liveness
from tersely.store.db.liveness import ended_when_silent
from tests.conftest import Database
from tests.support.relay import relay


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "ASK_EVERY", 0.3)
    monkeypatch.setattr(liveness, "SILENT_SECONDS", 1.0)


async def test_work_ends_when_the_database_freezes_under_it(database: Database) -> None:
    with relay(database) as way:
        connection = await asyncpg.connect(way.dsn)
        limit = asyncio.timeout(20)

        async def work() -> None:
            async with limit, ended_when_silent(way.dsn, connection), connection.transaction():
                way.freeze()
                await connection.execute("SELECT 1")

        with pytest.raises(TimeoutError, match="the database has not answered for 1 s"):
            await work()
        assert not limit.expired()
        assert connection.is_closed()


async def test_long_work_goes_on_while_the_database_answers(database: Database) -> None:
    connection = await asyncpg.connect(database.dsn)
    try:
        async with ended_when_silent(database.dsn, connection):
            await connection.execute("SELECT pg_sleep(2.5)")
        assert not connection.is_closed()
    finally:
        await connection.close()


async def test_work_ends_when_each_new_connection_fails_within_the_driver(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = await asyncpg.connect(database.dsn)

    async def fail(*_: object, **__: object) -> None:
        raise asyncpg.InternalClientError("unexpected")

    async def work() -> None:
        async with asyncio.timeout(20), ended_when_silent(database.dsn, connection):
            await connection.execute("SELECT pg_sleep(10)")

    with monkeypatch.context() as patch:
        patch.setattr(asyncpg, "connect", fail)
        with pytest.raises(TimeoutError, match="the database has not answered for 1 s"):
            await work()
