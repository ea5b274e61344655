"""Distributing the schema, and what a node of a distributed Postgres is asked. Most of it needs a Citus cluster
(`make test-distributed`).
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta

import asyncpg
import pytest

import tersely.store
from tersely.store.db import cluster
from tersely.store.db.connection import Database
from tersely.store.db.distribution import EVERYWHERE, DistributionError, distribute
from tests import conftest

on_cluster = pytest.mark.skipif(
    "TERSELY_TEST_DISTRIBUTED_URL" not in os.environ, reason="needs a Citus cluster (make test-distributed)"
)
on_one_server = pytest.mark.skipif(
    "TERSELY_TEST_DISTRIBUTED_URL" in os.environ, reason="needs a Postgres without Citus"
)
TENANT = "north"
# For the coordinator: rows of all tenants.
OF_ALL_TENANTS = frozenset(
    {
        "tersely.store.notes.pending_memory.DUE",
        "tersely.store.ops.calibrations.CHANGED",
        "tersely.store.ops.limits.USE_OF_MANY",
    }
)
ARGUMENTS: dict[str, object] = {
    "text": "a", "int8": 1, "int4": 1, "int2": 1, "float8": 1.0, "bytea": b"a", "bool": True,
    "timestamptz": datetime(2026, 1, 1, tzinfo=UTC), "date": date(2026, 1, 1), "interval": timedelta(1),
    "text[]": ["a"], "bytea[]": [b"a"], "int8[]": [1],
}  # fmt: skip


def statements() -> Iterator[tuple[str, str]]:
    """Every statement of the store about one tenant's own rows, with the name of its constant."""
    for module in pkgutil.walk_packages(tersely.store.__path__, "tersely.store."):
        for name, value in vars(importlib.import_module(module.name)).items():
            found = value.items() if isinstance(value, dict) else [("", value)]
            for key, text in found:
                if isinstance(text, str) and re.match(r"\s*(SELECT|INSERT|UPDATE|DELETE|WITH)\b", text):
                    writes_everywhere = re.search(rf"\b(INTO|UPDATE|DELETE FROM) ({'|'.join(EVERYWHERE)})\b", text)
                    if "tenant_id" in text and "$1" in text and "{" not in text and not writes_everywhere:
                        yield f"{module.name}.{name}{key and f'[{key}]'}", text


@pytest.mark.parametrize(
    ("version", "mode"),
    [
        ("Citus 13.2.0 on x86_64-pc-linux-gnu", "auto"),
        ("Citus 12.1.6 on x86_64-pc-linux-gnu", "auto"),
        ("Citus 13.2.1 on x86_64-pc-linux-gnu", "force_custom_plan"),
        ("Citus 14.0devel on x86_64-pc-linux-gnu", "force_custom_plan"),
        ("something else", "force_custom_plan"),
    ],
)
def test_plans_are_kept_where_the_version_reuses_them(version: str, mode: str) -> None:
    assert cluster.plan_cache_mode(version) == mode


@on_one_server
async def test_a_server_without_the_extension_is_refused(database: conftest.Database) -> None:
    with pytest.raises(DistributionError, match="extension citus"):
        await distribute(database.dsn, report=print)


@on_one_server
async def test_a_plain_server_is_not_distributed(database: conftest.Database) -> None:
    one = Database(dsn=database.dsn, size=1, timeout=20)
    await one.open()
    assert not await one.is_distributed()
    assert one.group_of("north") is one.group_of("south")
    await one.close()


@on_cluster
async def test_distributing_again_changes_nothing(database: conftest.Database) -> None:
    done = await distribute(database.dsn, report=print)
    assert (done.by_tenant, done.everywhere, done.rows) == ((), (), 0)


@on_cluster
async def test_tenants_of_two_nodes_fail_apart(database: conftest.Database) -> None:
    one = Database(dsn=database.dsn, size=2, timeout=20)
    await one.open()
    groups = set()
    for number in range(32):
        async with one.reading(f"t{number}") as connection:
            assert await connection.fetchval("SELECT current_user") == "tersely_app"
        groups.add(one.group_of(f"t{number}"))
    assert len(groups) > 1
    await one.close()


@on_cluster
async def test_statements_about_a_tenant_stay_on_its_node(database: conftest.Database) -> None:
    """The role of a tenant's transactions cannot log in, so a statement that asks another node fails."""
    one = Database(dsn=database.dsn, size=1, timeout=60)
    await one.open()
    failed = {}
    names = [name for name, _ in statements()]
    assert len(names) > 100
    for name, text in statements():
        if name in OF_ALL_TENANTS or "meaning" in text.lower():
            continue
        async with one.reading(TENANT) as connection:
            statement = await connection.prepare(text)
            kinds = [kind.name for kind in statement.get_parameters()]
            arguments = [ARGUMENTS.get(kind) for kind in kinds]
            if kinds[0] == "text":
                arguments[0] = TENANT
            transaction = connection.transaction()
            await transaction.start()
            try:
                await statement.fetch(*arguments)
            except (asyncpg.IntegrityConstraintViolationError, asyncpg.DataError):
                pass
            except asyncpg.PostgresError as error:
                failed[name] = str(error)
            finally:
                await transaction.rollback()
    await one.close()
    assert failed == {}
