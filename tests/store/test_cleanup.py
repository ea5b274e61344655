"""Idle sessions are deleted where that is wanted, whosoever they are, and no others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest

from tersely.service.context.context_configs import ContextConfigs
from tersely.service.sessions.cleanup import Cleanup
from tersely.store.db.connection import Database
from tersely.store.history import sessions
from tersely.store.history.sessions import Configuration
from tersely.store.ops import cleanup, limits
from tests import conftest
from tests.store.test_distribution import on_one_server

NOW = datetime(2026, 5, 1, tzinfo=UTC)
TRIM = '{"name": "trim", "max_steps": 3}'


def cleanup_of(
    database: Database, *, strategy: str = "slim", days: int | None = None, at: datetime = NOW, name: str = "operator"
) -> Cleanup:
    configs = ContextConfigs(strategy=strategy, epoch="auto", references=None, instructions=True, derive_terse=True)
    return Cleanup(database, configs, clock=lambda: at, days=days, name=name)


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
    assert await cleanup_of(database).run() >= 2
    kept = {"new-trim", "old-slim", "old-plain"}
    assert await left(database, *two_tenants) == {f"{tenant}/{name}" for tenant in two_tenants for name in kept}


async def test_the_configured_strategy_counts_for_sessions_without_their_own(
    database: Database, two_tenants: tuple[str, str]
) -> None:
    assert await cleanup_of(database, strategy="trim").run(tenant=two_tenants[0]) == 2
    assert await left(database, two_tenants[0]) == {f"{two_tenants[0]}/new-trim", f"{two_tenants[0]}/old-slim"}


async def test_the_operator_may_say_after_how_many_days_all_go_and_of_whom(
    database: Database, two_tenants: tuple[str, str]
) -> None:
    first, second = two_tenants
    assert await cleanup_of(database).run(30, tenant=first) == 3
    assert await left(database, first) == {f"{first}/new-trim"}
    assert len(await left(database, second)) == 4
    assert await cleanup_of(database, days=30).run(tenant=second) == 3


async def test_a_session_that_is_used_again_meanwhile_stays(database: Database, two_tenants: tuple[str, str]) -> None:
    tenant = two_tenants[0]
    before = NOW - timedelta(days=30)
    assert set(two_tenants) <= set(await cleanup.tenants(database))
    found = await cleanup.idle(database, tenant, before, older_than=(NOW, ""), limit=100)
    ids = [each.id for each in found]
    assert set(ids) == {"old-trim", "old-slim", "old-plain"}
    async with database.transaction(tenant) as connection:
        assert await sessions.mark_edited(connection, tenant, "old-trim", NOW)
    assert await cleanup.delete_idle(database, tenant, ids, before) == 2
    assert await left(database, tenant) == {f"{tenant}/old-trim", f"{tenant}/new-trim"}


async def test_a_tenant_may_have_a_retention_of_its_own(database: Database, two_tenants: tuple[str, str]) -> None:
    first, second = two_tenants
    await limits.set_retention(database, first, 10, NOW)
    await limits.set_retention(database, second, 1_000, NOW)
    assert await cleanup_of(database, days=30).run() == 4
    assert await left(database, first) == set()
    assert len(await left(database, second)) == 4
    await limits.set_retention(database, second, None, NOW)
    assert await cleanup_of(database, days=30).run() == 3


async def test_one_process_at_a_time_cleans_up(database: Database, two_tenants: tuple[str, str]) -> None:
    later = NOW + timedelta(minutes=10)
    assert await cleanup.take_lease(database, "first", until=later, now=NOW)
    assert await cleanup_of(database, days=30).run(has_lease=True) == 0
    assert await cleanup.take_lease(database, "first", until=later, now=NOW)
    assert await cleanup.take_lease(database, "operator", until=later + timedelta(minutes=10), now=later)
    assert await cleanup_of(database, days=30).run(has_lease=True) > 0
    assert len(await left(database, *two_tenants)) == 2


async def test_a_cleanup_is_done_once_by_all_processes_and_taken_over_from_a_killed_one(
    database: Database, two_tenants: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with database.transaction("") as connection:
        await connection.execute("DELETE FROM service_leases")
    delete_idle = cleanup.delete_idle

    async def kill(*_: object) -> int:
        raise asyncio.CancelledError

    def process(name: str, hours: float) -> Cleanup:
        return cleanup_of(database, days=30, at=NOW + timedelta(hours=hours), name=name)

    monkeypatch.setattr(cleanup, "delete_idle", kill)
    with pytest.raises(asyncio.CancelledError):
        await process("first", 0).run_if_due()
    monkeypatch.setattr(cleanup, "delete_idle", delete_idle)
    assert await process("second", 9 / 60).run_if_due() == 0
    assert await process("second", 10 / 60).run_if_due() == 6
    await make(database, two_tenants[0], "old-plain", None, 400)
    for name in ("first", "second"):
        assert await process(name, 6).run_if_due() == 0
    assert await process("first", 6.2).run_if_due() == 1


@on_one_server  # a node of a distributed one keeps its plans to itself
async def test_idle_sessions_are_found_by_an_index(database: Database) -> None:
    async with database.transaction("cleanup-a") as connection:
        await connection.execute("SET LOCAL enable_seqscan = off")
        plan = await connection.fetch("EXPLAIN " + cleanup.IDLE, "cleanup-a", NOW, NOW, "", 200)
    assert "sessions_recent" in " ".join(row[0] for row in plan)


@on_one_server  # a tenant's transaction cannot ask for all there
async def test_a_tenant_sees_no_other_tenants_sessions(database: Database, two_tenants: tuple[str, str]) -> None:
    async with database.transaction("cleanup-c") as connection:
        assert await connection.fetchval("SELECT count(*) FROM sessions") == 0
        assert await sessions.get(connection, two_tenants[0], "old-trim") is None
