"""Idle sessions are deleted where that is wanted, whosoever they are, and no others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest

from app.service.cleanup import Cleanup
from app.service.recipes import Recipes
from app.store import cleanup, sessions
from app.store.connection import Database
from app.store.sessions import Configuration
from tests import conftest

NOW = datetime(2026, 5, 1, tzinfo=UTC)
TRIM = '{"name": "trim", "max_steps": 3}'


def keeper(database: Database, *, strategy: str = "slim", days: int | None = None) -> Cleanup:
    recipes = Recipes(strategy=strategy, epoch="auto", references=None, instructions=True, derive_terse=True)
    return Cleanup(database, recipes, clock=lambda: NOW, days=days)


async def make(database: Database, tenant: str, session_id: str, strategy: str | None, idle_days: float) -> None:
    given = Configuration(strategy=strategy, epoch_policy=None, metadata=b"{}")
    async with database.transaction(tenant) as connection:
        assert await sessions.add(connection, tenant, session_id, None, given, NOW - timedelta(days=idle_days))


async def left(database: Database, *tenants: str) -> set[str]:
    found = set()
    for tenant in tenants:
        async with database.transaction(tenant) as connection:
            for name in ("old-trim", "new-trim", "old-slim", "old-plain"):
                if await sessions.get(connection, tenant, name) is not None:
                    found.add(f"{tenant}/{name}")
    return found


@pytest.fixture
async def database(database: conftest.Database) -> AsyncIterator[Database]:
    opened = Database(dsn=database.dsn, size=2)
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture
async def two_tenants(database: Database) -> tuple[str, str]:
    names = ("cleanup-a", "cleanup-b")
    for tenant in names:
        await make(database, tenant, "old-trim", TRIM, 31)
        await make(database, tenant, "new-trim", "trim", 29)
        await make(database, tenant, "old-slim", "slim", 400)
        await make(database, tenant, "old-plain", None, 400)
    return names


async def test_sessions_under_trim_go_after_thirty_days_of_every_tenant(
    database: Database, two_tenants: tuple[str, str]
) -> None:
    assert await keeper(database).run() >= 2
    kept = {"new-trim", "old-slim", "old-plain"}
    assert await left(database, *two_tenants) == {f"{tenant}/{name}" for tenant in two_tenants for name in kept}


async def test_what_is_configured_for_all_counts_for_sessions_without_a_strategy_of_their_own(
    database: Database, two_tenants: tuple[str, str]
) -> None:
    assert await keeper(database, strategy="trim").run(tenant=two_tenants[0]) == 2
    assert await left(database, two_tenants[0]) == {f"{two_tenants[0]}/new-trim", f"{two_tenants[0]}/old-slim"}


async def test_the_operator_may_say_after_how_many_days_all_go_and_of_whom(
    database: Database, two_tenants: tuple[str, str]
) -> None:
    first, second = two_tenants
    assert await keeper(database).run(30, tenant=first) == 3
    assert await left(database, first) == {f"{first}/new-trim"}
    assert len(await left(database, second)) == 4
    assert await keeper(database, days=30).run(tenant=second) == 3


async def test_a_session_that_is_used_again_meanwhile_stays(database: Database, two_tenants: tuple[str, str]) -> None:
    tenant = two_tenants[0]
    before = NOW - timedelta(days=30)
    found = await cleanup.idle(database, before, after=(datetime(1, 1, 1, tzinfo=UTC), "", ""), limit=100)
    chosen = next(each for each in found if (each.tenant, each.id) == (tenant, "old-trim"))
    async with database.transaction(tenant) as connection:
        assert await sessions.mark_edited(connection, tenant, "old-trim", NOW)
    assert not await cleanup.delete_idle(database, chosen, before)


async def test_a_tenant_sees_no_other_tenants_sessions(database: Database, two_tenants: tuple[str, str]) -> None:
    async with database.transaction("cleanup-c") as connection:
        assert await connection.fetchval("SELECT count(*) FROM sessions") == 0
        assert await sessions.get(connection, two_tenants[0], "old-trim") is None
