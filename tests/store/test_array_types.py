"""Connections know the array types of all statements: none asks the server, which takes long under a session's lock."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import asyncpg
import pytest

import tersely
from tersely.store.db.array_types import BUILT_IN
from tersely.store.db.connection import Database
from tersely.store.db.server import Pooler
from tests import conftest
from tests.support.rows import query

SOURCES = Path(tersely.__file__).parent


async def test_known_array_types_are_those_of_the_server(database: conftest.Database) -> None:
    for oid, array in BUILT_IN.items():
        found = await query(
            database,
            "SELECT a.typname, a.typelem, a.typdelim::text, e.typname AS element "
            "FROM pg_type a JOIN pg_type e ON e.oid = a.typelem WHERE a.oid = $1::int",
            oid,
        )
        assert [tuple(row) for row in found] == [(f"_{array.name}", array.element, ",", array.name)]


async def test_array_types_of_every_statement_are_known(database: conftest.Database) -> None:
    named = {name for path in SOURCES.rglob("*.py") for name in re.findall(r"::\s*([a-z0-9_ ]+\[\])", path.read_text())}
    assert {"bigint[]", "text[]"} <= named
    for name in named:
        [found] = await query(database, "SELECT $1::text::regtype::oid::int AS oid", name)
        assert found["oid"] in BUILT_IN, name


@pytest.mark.parametrize("pooler", ["off", "prepared", "on"])
async def test_arrays_are_sent_without_asking_for_their_types(database: conftest.Database, pooler: Pooler) -> None:
    one = Database(dsn=database.dsn, size=1, timeout=20, pooler=pooler)
    await one.open()
    asked: list[str] = []
    examples: dict[str, list[Any]] = {"bigint": [1, 2**40], "text": ["a", "ä"], "bytea": [b"\0"], "boolean": [True]}
    async with one.transaction("north") as connection:

        def note(record: asyncpg.connection.LoggedQuery) -> None:
            asked.append(record.query)

        connection.add_query_logger(note)
        for kind, values in examples.items():
            statement = f"SELECT $1::{kind}[]"
            assert await connection.fetchval(statement, values) == values
        await asyncio.sleep(0)  # the log comes a moment later
        assert asked == [f"SELECT $1::{kind}[]" for kind in examples]
        # The driver asks the server about every other type.
        assert await connection.fetchval("SELECT $1::cidr[]", []) == []
        await asyncio.sleep(0)
        assert len(asked) > len(examples) + 1
        connection.remove_query_logger(note)
    await one.close()
