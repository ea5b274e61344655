"""Alembic's entry: runs the migrations over an asyncpg connection, one DDL statement at a time."""

import asyncio

from alembic import context
from sqlalchemy import Connection, pool
from sqlalchemy.ext.asyncio import create_async_engine

CONNECT_SECONDS = 5.0


def _run(connection: Connection) -> None:
    context.configure(connection=connection, transaction_per_migration=True)
    with context.begin_transaction():
        context.run_migrations()


async def _migrate(url: str) -> None:
    # A server that accepts and does not answer must hold up neither the start of the service nor its end.
    options = {"statement_cache_size": 0, "timeout": CONNECT_SECONDS}
    engine = create_async_engine(url, poolclass=pool.NullPool, connect_args=options)
    try:
        async with engine.connect() as connection:
            await connection.run_sync(_run)
    finally:
        await engine.dispose()


asyncio.run(_migrate(context.config.attributes["url"]))
