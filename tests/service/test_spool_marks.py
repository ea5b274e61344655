"""A process's mark for a tenant is in the database while, and only while, exchanges of it wait in its spool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from tersely.domain.errors import StoreUnavailable
from tersely.service.proxy.durability.spool_marks import SpoolMarks
from tersely.store.commit.spool_marks import MARK
from tersely.store.db.connection import Database


class SlowDatabase:
    """Has one row or none. The first transaction takes longer than those that begin after it."""

    def __init__(self) -> None:
        self.is_marked = False
        self.refused = 0
        self.removed: list[str] = []
        self._delays = [0.05]

    def is_away(self, tenant: str) -> bool:
        return False

    @asynccontextmanager
    async def transaction(self, tenant: str, *, limit: float | None = None) -> AsyncIterator[SlowDatabase]:
        if self.refused:
            self.refused -= 1
            raise StoreUnavailable
        delay = self._delays.pop(0) if self._delays else 0.0
        self._statement = ""
        yield self
        statement = self._statement
        await asyncio.sleep(delay)
        self.is_marked = statement == MARK

    async def execute(self, statement: str, _: str, mark: str, *__: Any) -> None:
        self._statement = statement
        if statement != MARK:
            self.removed.append(mark)


@pytest.fixture
def database() -> SlowDatabase:
    return SlowDatabase()


@pytest.fixture
def marks(database: SlowDatabase) -> SpoolMarks:
    return SpoolMarks(cast("Database", database), process="one", clock=lambda: datetime.now(UTC))


async def test_a_mark_that_is_written_slowly_does_not_outlive_its_exchange(
    marks: SpoolMarks, database: SlowDatabase
) -> None:
    marks.add("t")
    writing = asyncio.create_task(marks.write())
    await asyncio.sleep(0.01)
    await marks.write()
    await marks.remove("t")
    await writing
    assert not database.is_marked


async def test_a_mark_that_is_removed_slowly_is_there_for_the_next_exchange(
    marks: SpoolMarks, database: SlowDatabase
) -> None:
    database._delays = [0.0, 0.05]
    marks.add("t")
    await marks.write()
    removing = asyncio.create_task(marks.remove("t"))
    await asyncio.sleep(0.01)
    marks.add("t")
    await marks.write()
    await removing
    assert database.is_marked


async def test_a_mark_that_could_not_be_removed_is_removed_later(marks: SpoolMarks, database: SlowDatabase) -> None:
    marks.add("t")
    await marks.write()
    database.refused = 1
    await marks.remove("t")
    assert database.removed == []
    assert await marks.remove_left()
    assert database.removed == ["waiting:one"]
    assert await marks.remove_left()
    assert database.removed == ["waiting:one"]


async def test_a_mark_that_could_not_be_removed_counts_as_missing(marks: SpoolMarks, database: SlowDatabase) -> None:
    """It may be gone: the next exchange writes it anew."""
    marks.add("t")
    await marks.write()
    database.refused = 1
    await marks.remove("t")
    database.is_marked = False
    marks.add("t")
    await marks.write()
    assert database.is_marked
    assert await marks.remove_left()
    assert database.is_marked


async def test_the_mark_of_an_ended_process_is_removed_after_its_last_exchange(
    marks: SpoolMarks, database: SlowDatabase
) -> None:
    for _ in range(2):
        marks.add("t")
        marks.adopt("t", "another")
    await marks.remove("t")
    assert await marks.remove_left()
    assert database.removed == []
    await marks.remove("t")
    assert database.removed == ["waiting:another"]
