"""Locks that keep everybody else from a table."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg


@asynccontextmanager
async def locked(dsn: str, table: str = "messages") -> AsyncIterator[None]:
    """Nobody can read or write the table. ``dsn`` is its owner's."""
    connection = await asyncpg.connect(dsn)
    try:
        async with connection.transaction():
            await connection.execute(f"LOCK TABLE {table}")
            yield
    finally:
        await connection.close()
