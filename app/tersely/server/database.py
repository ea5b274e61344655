"""The database of a command or of a service: the configured one, or an embedded server.

Commands that need no more than the database load in a third of the time that the service takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import asyncpg
from sqlalchemy.exc import DBAPIError

from tersely.embedded_postgres import EmbeddedPostgresError, default_data_dir, open_embedded_postgres
from tersely.server.errors import CommandError
from tersely.settings import InvalidSettings, Settings
from tersely.store.db.migrations import migrate

# How long a command waits for an embedded server that accepts connections and answers none, and for another process
# that starts or stops the server.
SILENT_SECONDS, TURN_SECONDS = 15.0, 60.0
NO_ANSWER = "the database does not answer: `tersely doctor` looks why"
# Errors that show that the database is unavailable.
AWAY = (OSError, DBAPIError, asyncpg.PostgresError, TimeoutError)


@contextmanager
def database_of(settings: Settings, *, is_command: bool = True) -> Iterator[str]:
    """Yield the URL of the configured database, or of an embedded one that runs within the block.

    ``is_command``: somebody waits for the result of a command, so a silent embedded server is an error soon.
    """
    if settings.database_url is not None:
        yield _for_asyncpg(settings.database_url.get_secret_value())
        return
    data_dir = settings.data_dir or default_data_dir()
    silent, turn = (SILENT_SECONDS, TURN_SECONDS) if is_command else (None, None)
    with open_embedded_postgres(data_dir, silent_timeout=silent, turn_timeout=turn) as server:
        yield server.admin_dsn


def _for_asyncpg(url: str) -> str:
    """Return the URL without another tool's driver in its scheme (``postgresql+asyncpg://``)."""
    scheme, separator, rest = url.partition("://")
    if scheme.partition("+")[0] not in ("postgresql", "postgres"):
        raise CommandError("DATABASE_URL must begin with postgresql://")
    return f"postgresql{separator}{rest}"


@contextmanager
def plainly() -> Iterator[None]:
    """Turn errors of the settings and of the database's start into `CommandError`."""
    try:
        yield
    except InvalidSettings as error:
        raise CommandError(error.detail) from error
    except EmbeddedPostgresError as error:
        raise CommandError(str(error)) from error


async def up_to_date(url: str, revision: str = "head") -> None:
    """Bring the database to the current schema, or up to ``revision``. Raises `CommandError` without an answer."""
    try:
        await migrate(url, revision)
    except AWAY as error:
        raise CommandError(f"{NO_ANSWER} ({type(error.__cause__ or error).__name__})") from error
