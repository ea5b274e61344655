"""Alembic's entry: runs the migrations over an asyncpg connection, one DDL statement at a time."""

import asyncio
from functools import partial

import asyncpg
from alembic import context
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, event, pool
from sqlalchemy.ext.asyncio import create_async_engine

from tersely.store.db.liveness import ended_when_silent
from tersely.store.db.server import PROPAGATE_SETTINGS

CONNECT_SECONDS = 5.0
# A migration that waits for a lock makes every later statement on that table wait behind it: it gives up soon, lets the
# others pass, and is tried again. The nodes of a distributed Postgres have the same limit. No migration sets another.
LOCK_TIMEOUT = "2s"


def _run(connection: Connection) -> None:
    config = context.config
    found = MigrationContext.configure(connection).get_current_revision()
    if found is not None and found not in config.attributes["known"]:
        config.attributes["newer"] = found
        return
    connection.rollback()
    event.listen(connection, "begin", _limit_waiting)
    context.configure(connection=connection, transaction_per_migration=True)
    with context.begin_transaction():
        context.run_migrations()


def _limit_waiting(connection: Connection) -> None:
    connection.exec_driver_sql(PROPAGATE_SETTINGS)
    connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")


async def _migrate(dsn: str) -> None:
    # A server that accepts and does not answer must hold up neither the start of the service nor its end.
    # Statements without a name go through a transaction pooler too.
    options = {
        # asyncpg reads the address itself, as it does for the service: SQLAlchemy knows fewer of its parameters.
        "async_creator_fn": partial(asyncpg.connect, dsn),
        "timeout": CONNECT_SECONDS,
        "statement_cache_size": 0,
        "prepared_statement_cache_size": 0,
        "prepared_statement_name_func": str,
    }
    engine = create_async_engine("postgresql+asyncpg://", poolclass=pool.NullPool, connect_args=options)
    try:
        async with engine.connect() as connection:
            raw = await connection.get_raw_connection()
            async with ended_when_silent(dsn, raw.driver_connection):
                await connection.run_sync(_run)
    finally:
        await engine.dispose()


asyncio.run(_migrate(context.config.attributes["dsn"]))
