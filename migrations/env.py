"""Alembic's entry: runs the migrations over an asyncpg connection, one DDL statement at a time."""

import asyncio

from alembic import context
from sqlalchemy import Connection, pool
from sqlalchemy.ext.asyncio import create_async_engine


def _run(connection: Connection) -> None:
    context.configure(connection=connection, transaction_per_migration=True)
    with context.begin_transaction():
        context.run_migrations()


async def _migrate(url: str) -> None:
    engine = create_async_engine(url, poolclass=pool.NullPool, connect_args={"statement_cache_size": 0})
    try:
        async with engine.connect() as connection:
            await connection.run_sync(_run)
    finally:
        await engine.dispose()


asyncio.run(_migrate(context.config.attributes["url"]))
