"""The store on a fresh database, and a look behind row-level security."""

from __future__ import annotations

from collections.abc import AsyncIterator

import asyncpg
import pytest

from tersely.store.db.connection import Database
from tests import conftest
from tests.support.stores import open_store


@pytest.fixture
async def store(database: conftest.Database) -> AsyncIterator[Database]:
    async with open_store(database, size=1, timeout=20) as opened:
        yield opened


@pytest.fixture
async def admin(database: conftest.Database) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    """A superuser's connection."""
    connection = await asyncpg.connect(database.admin_dsn)
    yield connection
    await connection.close()
