"""The service's own access to a database, for tests that read or write without a service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tersely.store.db.connection import Database as Store
from tests.conftest import Database


@asynccontextmanager
async def open_store(database: Database, **options: Any) -> AsyncIterator[Store]:
    """Open a store on the database, and close it at the end. ``options`` are those of the store."""
    store = Store(dsn=database.dsn, **options)
    await store.open()
    try:
        yield store
    finally:
        await store.close()
