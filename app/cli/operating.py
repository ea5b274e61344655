"""What the operator's commands do, without the service and its REST API: keys, cleanup, the schema, the document."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from app.api.openapi import openapi_document
from app.cli.refusals import Refused
from app.cli.serving import database_of, plainly, up_to_date
from app.main import build, clock, recipes_of
from app.service.auth import new_key
from app.service.cleanup import Cleanup
from app.settings import Settings
from app.store import keys
from app.store.connection import TENANT, Database

T = TypeVar("T")


def migrate() -> None:
    """Bring the database to the current schema. Raises `Refused`."""
    with plainly(), database_of(Settings()) as url:
        asyncio.run(up_to_date(url))


def cleanup(days: int | None, tenant: str | None) -> int:
    """Delete idle sessions, as `Cleanup.run`; how many. Raises `Refused`, `StoreUnavailable`."""
    _check_tenant(tenant)

    async def work(database: Database) -> int:
        settings = Settings()
        recipes = recipes_of(settings)
        return await Cleanup(database, recipes, clock=clock, days=settings.cleanup_days).run(days, tenant=tenant)

    return _with_database(work)


def create_key(tenant: str, label: str) -> str:
    """A new key of a tenant, which comes into being with its first one. Raises `Refused`, `InvalidRequest`."""
    text, stored = new_key(tenant, label, now=clock(), key_id=secrets.token_hex(8), secret=secrets.token_urlsafe(32))

    async def work(database: Database) -> None:
        await keys.add(database, stored)

    _with_database(work)
    return text


def list_keys(tenant: str | None) -> list[dict[str, Any]]:
    """The keys of a tenant or of all, as JSON values, without their secrets. Raises `Refused`."""
    _check_tenant(tenant)

    async def work(database: Database) -> list[keys.Key]:
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
        }
        for key in _with_database(work)
    ]


def revoke_key(key_id: str, tenant: str | None) -> None:
    """Revoke a key, if it is that tenant's where one is given. Raises `Refused`."""
    _check_tenant(tenant)

    async def work(database: Database) -> bool:
        owner = await keys.tenant_of(database, key_id)
        if owner is None or tenant not in (None, owner):
            return False
        return await keys.revoke(database, owner, key_id, clock())

    if not _with_database(work):
        raise Refused(f"{f'{tenant} has' if tenant else 'there is'} no valid key {key_id}")


def openapi() -> bytes:
    """The OpenAPI document."""
    with plainly():
        return openapi_document(build(Settings(), database_url="postgresql://").rest)


def _check_tenant(tenant: str | None) -> None:
    if tenant is not None and not TENANT.fullmatch(tenant):
        raise Refused(f"{tenant!r} is no tenant's name")


def _with_database(work: Callable[[Database], Awaitable[T]]) -> T:
    """The result of ``work(database)`` on the configured database, migrated. Raises `Refused`."""
    with plainly(), database_of(Settings()) as url:

        async def run() -> T:
            await up_to_date(url)
            database = Database(dsn=url, size=2)
            await database.open()
            try:
                return await work(database)
            finally:
                await database.close()

        return asyncio.run(run())
