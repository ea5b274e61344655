"""Of what is deleted nothing is left, in whatever table."""

from __future__ import annotations

import asyncpg

from tersely.store.db.connection import Database
from tersely.store.history import sessions
from tersely.store.ops import tenants
from tests import conftest
from tests.store.test_tails import TENANT, Talk, Worker

TABLES = (
    "SELECT table_name FROM information_schema.columns WHERE column_name = 'session_id' AND table_schema = 'public'"
)


async def left(database: conftest.Database) -> dict[str, int]:
    """Table -> rows of sessions, where there are any."""
    admin = await asyncpg.connect(database.admin_dsn)
    try:
        tables = [row["table_name"] for row in await admin.fetch(TABLES)]
        assert {"messages", "terse", "calls", "epochs"} <= set(tables)
        counts = {table: await admin.fetchval(f"SELECT count(*) FROM {table}") for table in tables}
        return {table: count for table, count in counts.items() if count}
    finally:
        await admin.close()


async def test_deletion_removes_all_rows_of_a_session_and_a_tenant(database: conftest.Database) -> None:
    opened = Database(dsn=database.dsn, timeout=20)
    await opened.open()
    try:
        worker = Worker(opened)
        for name in ("one", "two"):
            talk = Talk(name)
            await worker.turn(talk, f"hello from {name}", "hi", at=0)
            await worker.turn(talk, "cut here", "so be it", at=1, cuts=True)
        both = await left(database)
        assert {"messages", "terse", "calls", "epochs"} <= set(both)

        async with opened.transaction(TENANT) as connection:
            assert await sessions.delete(connection, TENANT, "one")
            assert not await sessions.delete(connection, TENANT, "one")
        assert await left(database) == {table: count // 2 for table, count in both.items()}

        await tenants.forget(opened, TENANT)
        assert await left(database) == {}
    finally:
        await opened.close()
