"""Brings a database to the current schema."""

from __future__ import annotations

import asyncio
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError

SCRIPTS = Path(__file__).resolve().parents[2] / "migrations"
RACES = 5


def _upgrade(dsn: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(SCRIPTS))
    config.attributes["url"] = make_url(dsn).set(drivername="postgresql+asyncpg")
    command.upgrade(config, "head")


async def migrate(dsn: str) -> None:
    """Run every migration that the database at ``dsn`` lacks.

    Several processes may start at once: whoever loses the race to create the schema finds, on trying again, that
    it is there.
    """
    for attempt in range(RACES):
        try:
            await asyncio.to_thread(_upgrade, dsn)
            return
        except DBAPIError:
            if attempt == RACES - 1:
                raise
            await asyncio.sleep(0.2 * (attempt + 1))
