"""Brings a database to the current schema."""

from __future__ import annotations

import asyncio
import logging
from functools import cache
from pathlib import Path

import asyncpg
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy.exc import DBAPIError

from tersely.store.db.distribution import distribute_new_tables

_log = logging.getLogger(__name__)

_PACKAGE = Path(__file__).resolve().parents[2]
# A wheel contains the migrations in the package; in a checkout they are beside ``app/``.
SCRIPTS = next(each for each in (_PACKAGE / "_migrations", _PACKAGE.parents[1] / "migrations") if each.is_dir())
# Whoever loses a race, or meets a lock that is held for longer than a migration waits (`env.py`), tries again.
ATTEMPTS = 8
PAUSE_SECONDS = 0.2


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(SCRIPTS))
    return config


@cache
def known_revisions() -> tuple[str, ...]:
    """Return the revisions that this version knows, oldest first; the last one is the current schema."""
    scripts = ScriptDirectory.from_config(_config())
    return tuple(script.revision for script in scripts.walk_revisions())[::-1]


def current_revision() -> str:
    """Return the schema revision that this version needs."""
    return known_revisions()[-1]


def is_newer(revision: str | None) -> bool:
    """Return whether a database is of a newer version: migrations only add, so this version runs on it."""
    return revision is not None and revision not in known_revisions()


def is_outdated(revision: str | None) -> bool:
    """Return whether a database lacks migrations that this version needs."""
    return revision != current_revision() and not is_newer(revision)


async def has_tables(dsn: str, limit: float) -> bool:
    """Return whether a database has been migrated at all. ``limit`` in seconds.

    A database without Tersely's tables may lack its role too, under which a `Database` connects. Raises `OSError`,
    `TimeoutError` or `asyncpg.PostgresError` where there is no connection.
    """
    connection = await asyncpg.connect(dsn, timeout=limit, statement_cache_size=0)
    try:
        return await connection.fetchval("SELECT to_regclass('alembic_version') IS NOT NULL", timeout=limit) is True
    finally:
        await connection.close(timeout=limit)


def _upgrade(dsn: str, revision: str) -> None:
    config = _config()
    config.attributes["dsn"] = dsn
    config.attributes["known"] = known_revisions()
    command.upgrade(config, revision)
    if newer := config.attributes.get("newer"):
        _log.info("the database is at schema %s, newer than %s: it is used as it is", newer, current_revision())


async def migrate(dsn: str, revision: str = "head") -> None:
    """Run every migration that the database at ``dsn`` lacks, up to ``revision``. Leave a newer schema unchanged.

    Several processes may start at once. One that loses the race to create the schema finds it when it tries again.
    """
    for attempt in range(ATTEMPTS):
        try:
            await asyncio.to_thread(_upgrade, dsn, revision)
            await distribute_new_tables(dsn)
            return
        except DBAPIError:
            if attempt == ATTEMPTS - 1:
                raise
            await asyncio.sleep(PAUSE_SECONDS * (attempt + 1))
