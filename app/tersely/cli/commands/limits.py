"""``tersely tenants``: list tenants, set limits of tenants and keys, and show their use."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

from tersely.cli.commands.operator import check_tenant, with_database
from tersely.composition.clock import clock
from tersely.domain.errors import NotFound
from tersely.domain.limits import LIMIT_NAMES, Limits
from tersely.service.common.metrics import Metrics
from tersely.service.limits.limiter import Limiter
from tersely.service.limits.tenants import LimitedTenant, ReportedUse, Tenants
from tersely.settings import load_settings
from tersely.store.db.connection import Database

T = TypeVar("T")
Rows = list[tuple[str, str, str, str]]


def list_limits(tenant: str | None) -> list[LimitedTenant]:
    """Return a tenant, or all, with limits and use. Raises `CommandError`, `NotFound`."""
    check_tenant(tenant)

    async def work(tenants: Tenants) -> list[LimitedTenant]:
        if tenant is not None:
            return [await tenants.get(tenant)]
        found: list[LimitedTenant] = []
        after: str | None = ""
        while after is not None:
            page, after = await tenants.page(after=after, limit=500)
            found += page
        return found

    return _with_tenants(work)


def set_limits(tenant: str, key_id: str | None, given: dict[str, Any], unset: list[str]) -> LimitedTenant:
    """Change the limits of a tenant, or of a key of it. Raises `CommandError`, `NotFound`, `InvalidRequest`."""
    check_tenant(tenant)
    changes = {**given, **dict.fromkeys(unset)}

    async def work(tenants: Tenants) -> LimitedTenant:
        if key_id is None:
            own = (await tenants.get(tenant)).limits
            return await tenants.set_limits(tenant, replace(own, **changes))
        key = await tenants.get_key(key_id)
        if key.key.tenant != tenant:
            raise NotFound(f"{tenant} has no key {key_id[:64]!r}")
        await tenants.set_key_limits(key_id, replace(key.limits, **changes))
        return await tenants.get(tenant)

    return _with_tenants(work)


def set_retention(tenant: str, days: int | None) -> None:
    """Set after how many idle days a tenant's sessions go; None: as configured. Raises `CommandError`, `NotFound`."""
    check_tenant(tenant)
    _with_tenants(lambda tenants: tenants.set_retention(tenant, days))


def limit_rows(tenant: LimitedTenant) -> Rows:
    """Return a tenant's limits and those of its keys as rows: owner, limit, maximum, used."""
    rows = _rows(tenant.name, tenant.effective, tenant.used, is_default=tenant.limits)
    for each in tenant.keys:
        rows += _rows(f"{tenant.name} key {each.key.id}", each.limits, each.used)
    return rows


def _rows(owner: str, limits: Limits, used: ReportedUse, *, is_default: Limits | None = None) -> Rows:
    rows: Rows = []
    for name in LIMIT_NAMES:
        most = getattr(limits, name)
        if most is None:
            continue
        count = getattr(used, name)
        mark = " (default)" if is_default is not None and getattr(is_default, name) is None else ""
        rows.append((owner, name, f"{most:,}{mark}", "" if count is None else f"{count:,}"))
    return rows


def _with_tenants(work: Callable[[Tenants], Awaitable[T]]) -> T:
    async def run(database: Database) -> T:
        limiter = Limiter(
            database,
            Metrics(),
            defaults=Limits(**load_settings().limits.model_dump()),
            clock=clock,
            monotonic=time.monotonic,
            name="operator",
        )
        return await work(Tenants(database, limiter, clock=clock, new_secret=secrets.token_hex))

    return with_database(run)
