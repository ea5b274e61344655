"""The operator's commands, without the REST API: keys, cleanup, the schema, the OpenAPI document."""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tersely import __version__
from tersely.composition.clock import clock
from tersely.embedded_postgres import default_data_dir, upgrade_cluster
from tersely.server.database import NO_ANSWER, database_of, plainly, up_to_date
from tersely.server.errors import CommandError
from tersely.service.common.auth import new_key
from tersely.service.sessions.forgetting import Forgetting
from tersely.settings import load_settings
from tersely.store.commit.spool import has_records, spool_directory
from tersely.store.db.connection import TENANT, Database
from tersely.store.db.distribution import Distribution, DistributionError, Reporter
from tersely.store.db.distribution import distribute as distribute_tables
from tersely.store.db.migrations import is_newer
from tersely.store.ops import keys, limits
from tersely.store.ops.backup import DATABASE_ERRORS, BackupError, Manifest, load_backup, read_manifest, write_backup

T = TypeVar("T")


def migrate() -> None:
    """Bring the database to the current schema. Raises `CommandError`."""
    with plainly(), database_of(load_settings()) as url:
        asyncio.run(up_to_date(url))


def distribute(shards: int, *, any_size: bool, report: Reporter) -> Distribution:
    """Distribute the database by tenant. Raises `CommandError`."""
    settings = load_settings()
    if settings.database_url is None:
        raise CommandError("the embedded Postgres cannot be distributed: set DATABASE_URL to a Citus coordinator")

    async def work(url: str) -> Distribution:
        await up_to_date(url)
        return await distribute_tables(url, shards=shards, any_size=any_size, report=report)

    with plainly(), database_of(settings) as url:
        try:
            return asyncio.run(work(url))
        except DistributionError as error:
            raise CommandError(error.detail) from error
        except DATABASE_ERRORS as error:
            raise CommandError(f"the database refused: {type(error).__name__}: {str(error)[:200]}") from error
        except TimeoutError as error:
            raise CommandError(NO_ANSWER) from error


def upgrade_embedded(old_programs: Path) -> int:
    """Take over the embedded database of an older Postgres; its major version. Raises `CommandError`."""
    settings = load_settings()
    if settings.database_url is not None:
        raise CommandError("DATABASE_URL is set: upgrade that server with its own tools")
    with plainly(), _orderly_end():
        return upgrade_cluster(settings.data_dir or default_data_dir(), old_programs.expanduser().absolute())


@contextmanager
def _orderly_end() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise `SystemExit` within the block, so that it ends what it started, as on Ctrl-C."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for number, handler in before.items():
            if handler != signal.SIG_IGN:  # nohup
                signal.signal(number, leave)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def cleanup(days: int | None, tenant: str | None) -> int:
    """Delete idle sessions, as `Cleanup.run`; how many. Raises `CommandError`, `StoreUnavailable`."""
    check_tenant(tenant)

    # Other commands do not wait for the service's modules to load.
    from tersely.composition.foundation import prices_of
    from tersely.composition.use_cases import configs_of
    from tersely.service.sessions.cleanup import Cleanup

    async def work(database: Database) -> int:
        settings = load_settings()
        configs = configs_of(settings, prices_of(settings))
        return await Cleanup(database, configs, clock=clock, days=settings.cleanup_days).run(days, tenant=tenant)

    return with_database(work)


def backup(path: Path, *, overwrite: bool) -> tuple[Manifest, bool]:
    """Write a backup. Return its manifest, and whether calls wait in the spool. Raises `CommandError`."""
    if path.exists() and not overwrite:
        raise CommandError(f"{path} exists already (--force replaces it)")
    settings = load_settings()
    with plainly(), database_of(settings) as url, _file_errors(path):

        async def work() -> Manifest:
            await up_to_date(url)
            return await write_backup(url, path, version=__version__, now=clock())

        spool = spool_directory(settings.data_dir or default_data_dir(), url)
        return asyncio.run(work()), has_records(spool)


def restore(path: Path) -> tuple[Manifest, tuple[str, ...]]:
    """Write a backup into an empty database. Return its row counts and the omitted tables. Raises `CommandError`."""
    with plainly(), _file_errors(path):
        manifest = read_manifest(path)
        if is_newer(manifest.revision):
            raise CommandError(f"{path} was made by a newer version ({manifest.version}): update Tersely first")
        with database_of(load_settings()) as url:

            async def work() -> tuple[str, ...]:
                await up_to_date(url, manifest.revision)
                left_out = await load_backup(url, path, manifest)
                await up_to_date(url)
                return left_out

            return manifest, asyncio.run(work())


@contextmanager
def _file_errors(path: Path) -> Iterator[None]:
    """Raise `CommandError` for errors of a backup and its file."""
    try:
        yield
    except TimeoutError as error:  # an `OSError`, but not of the file
        raise CommandError(NO_ANSWER) from error
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or type(error).__name__}") from error
    except BackupError as error:
        raise CommandError(error.detail) from error
    except DATABASE_ERRORS as error:
        raise CommandError(f"the database refused: {type(error).__name__}: {str(error)[:200]}") from error


def list_retentions() -> dict[str, int]:
    """Return the tenants' own retentions in days. Raises `CommandError`."""
    return with_database(limits.retentions)


def forget(tenant: str, session: str | None, user: str | None, *, is_dry: bool) -> dict[str, Any]:
    """Remove everything of a tenant, of a session or of a user's sessions; the receipt. Raises `CommandError`."""
    check_tenant(tenant)
    settings = load_settings()
    with plainly(), database_of(settings) as url:
        directory = spool_directory(settings.data_dir or default_data_dir(), url)
        if has_records(directory):
            raise CommandError(
                "calls wait in the spool for the database: start the service to store them, then run this command again"
            )

    async def work(database: Database) -> dict[str, Any]:
        forgetting = Forgetting(database, clock=clock, directory=directory)
        if session is None and user is None:
            return await forgetting.forget_tenant(tenant, is_dry=is_dry)
        return await forgetting.forget_sessions(tenant, session=session, user=user, is_dry=is_dry)

    return with_database(work)


def create_key(
    tenant: str, label: str, *, scope: str | None = None, days: int | None = None, client: str | None = None
) -> str:
    """Create a key of a tenant. The tenant is created with its first key.

    ``scope`` limits what the key permits, ``days`` how long it is valid, ``client`` who may use it. Raises
    `CommandError`, `InvalidRequest`.
    """
    text, stored = new_key(
        tenant,
        label,
        now=clock(),
        key_id=secrets.token_hex(8),
        secret=secrets.token_urlsafe(32),
        scope=scope,
        days=days,
        client=client,
    )

    async def work(database: Database) -> None:
        await keys.add(database, stored)

    with_database(work)
    return text


def list_keys(tenant: str | None) -> list[dict[str, Any]]:
    """Return the keys of a tenant or of all, as JSON values, without their secrets. Raises `CommandError`."""
    check_tenant(tenant)

    async def work(database: Database) -> list[keys.ApiKey]:
        if tenant is None:
            return await keys.of_all_tenants(database)
        return await keys.of_tenant(database, tenant)

    return [
        {
            "id": key.id,
            "tenant": key.tenant,
            "name": key.label,
            "created_at": key.created_at.isoformat(timespec="seconds"),
            "revoked_at": key.revoked_at.isoformat(timespec="seconds") if key.revoked_at else None,
            "scope": key.scope,
            "client": key.client,
            "expires_at": key.expires_at.isoformat(timespec="seconds") if key.expires_at else None,
        }
        for key in with_database(work)
    ]


def revoke_key(key_id: str, tenant: str | None) -> None:
    """Revoke a key; with ``tenant``, only a key of this tenant. Raises `CommandError`."""
    check_tenant(tenant)

    async def work(database: Database) -> bool:
        owner = await keys.tenant_of(database, key_id)
        if owner is None or tenant not in (None, owner):
            return False
        return await keys.revoke(database, owner, key_id, clock())

    if not with_database(work):
        raise CommandError(f"{f'{tenant} has' if tenant else 'there is'} no valid key {key_id}")


def openapi() -> bytes:
    """Return the OpenAPI document."""
    from tersely.api.openapi.document import openapi_document
    from tersely.composition.application import build

    with plainly():
        return openapi_document(build(load_settings(), database_url="postgresql://").rest)


def check_tenant(tenant: str | None) -> None:
    """Raise `CommandError` for what can be no tenant's name."""
    if tenant is not None and not TENANT.fullmatch(tenant):
        raise CommandError(f"{tenant!r} is not a valid tenant name")


def with_database(work: Callable[[Database], Awaitable[T]]) -> T:
    """Return the result of ``work(database)`` on the configured database, migrated. Raises `CommandError`."""
    with plainly(), database_of(load_settings()) as url:

        async def run() -> T:
            await up_to_date(url)
            database = Database(dsn=url, size=2, pooler=load_settings().database_pooler)
            await database.open()
            try:
                return await work(database)
            finally:
                await database.close()

        return asyncio.run(run())
