"""Tenants and keys for the operator: create them, limit them, read their use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from tersely.domain.errors import Conflict, InvalidRequest, NotFound
from tersely.domain.limits import LimitName, Limits, TotalUse
from tersely.service.common.auth import DEFAULT_TENANT, new_key
from tersely.service.limits.limiter import Limiter
from tersely.store.db.connection import TENANT, Database
from tersely.store.ops import keys, limits
from tersely.store.ops.keys import ApiKey
from tersely.store.ops.limits import LimitHolder

# What can be counted for a key: what is stored belongs to its tenant.
LIMITS_OF_KEYS: tuple[LimitName, ...] = ("requests_per_minute", "concurrent", "tokens_per_day", "money_per_month")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedUse:
    """The use of limits: in the last minute, now, today and this month (UTC). Bytes: None until they are measured."""

    requests_per_minute: int
    concurrent: int
    tokens_per_day: int
    money_per_month: float
    stored_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitedKey:
    """A key with its limits and what it has used of them."""

    key: ApiKey
    limits: Limits
    used: ReportedUse


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitedTenant:
    """A tenant with its keys, oldest first.

    ``limits`` are its own, ``effective`` those that hold: its own, else the defaults. ``created_at`` is None for the
    tenant that needs no key.
    """

    name: str
    created_at: datetime | None
    retention_days: int | None
    limits: Limits
    effective: Limits
    used: ReportedUse
    keys: list[LimitedKey] = field(default_factory=list)


class Tenants:
    """Tenants and keys for the operator. No permission is checked here."""

    def __init__(
        self, database: Database, limiter: Limiter, *, clock: Callable[[], datetime], new_secret: Callable[[int], str]
    ) -> None:
        """``new_secret(n)`` returns an unguessable lower-case text of ``2 n`` hexadecimal digits."""
        self._database = database
        self._limiter = limiter
        self._clock = clock
        self._new_secret = new_secret

    async def page(self, *, after: str = "", limit: int = 100) -> tuple[list[LimitedTenant], str | None]:
        """Return tenants by name, and the name after which the next page starts."""
        found: list[tuple[str, datetime | None]] = list(await limits.list_tenants(self._database, after, limit + 1))
        following = found[limit - 1][0] if len(found) > limit else None
        found = found[:limit]
        if not after and await limits.tenant_since(self._database, DEFAULT_TENANT) is None:
            found.insert(0, (DEFAULT_TENANT, None))
        return await self._with_limits(found), following

    async def get(self, name: str) -> LimitedTenant:
        """Return a tenant. Raises `NotFound`."""
        since = await limits.tenant_since(self._database, name) if TENANT.fullmatch(name) else None
        if since is None and name != DEFAULT_TENANT:
            raise NotFound(f"there is no tenant {name[:128]!r}: create it, or a key for it, first")
        (tenant,) = await self._with_limits([(name, since)])
        return tenant

    async def create(self, name: str) -> LimitedTenant:
        """Make a tenant without keys. Raises `InvalidRequest`, `Conflict`."""
        if not TENANT.fullmatch(name):
            raise InvalidRequest(
                "a tenant's name is 1 to 128 letters, digits, and . _ @ : - (not first)", field="tenant"
            )
        if not await limits.add_tenant(self._database, name, self._clock()):
            raise Conflict(f"there is a tenant {name!r} already")
        return await self.get(name)

    async def set_limits(self, name: str, given: Limits) -> LimitedTenant:
        """Set a tenant's own limits; None: the default. Raises `NotFound`."""
        await self.get(name)
        await limits.write(self._database, LimitHolder(name), given, self._clock())
        await self._limiter.refresh()
        return await self.get(name)

    async def set_retention(self, name: str, days: int | None) -> LimitedTenant:
        """Set the idle days after which a tenant's sessions are deleted; None: as configured. Raises `NotFound`."""
        await self.get(name)
        await limits.set_retention(self._database, name, days, self._clock())
        return await self.get(name)

    # Keys

    async def all_keys(self, tenant: str | None = None) -> list[ApiKey]:
        """Return the keys of a tenant, or of all, oldest first."""
        if tenant is None:
            return await keys.of_all_tenants(self._database)
        return (await keys.of_tenant(self._database, tenant)) if TENANT.fullmatch(tenant) else []

    async def get_key(self, key_id: str) -> LimitedKey:
        """Return a key. Raises `NotFound`."""
        owner = await self._owner(key_id)
        tenant = await self.get(owner)
        return next(each for each in tenant.keys if each.key.id == key_id)

    async def create_key(
        self,
        tenant: str,
        label: str = "",
        *,
        scope: str | None = None,
        days: int | None = None,
        client: str | None = None,
    ) -> tuple[str, ApiKey]:
        """Create a key. Return its secret form, which is shown once, and the stored one. Raises `InvalidRequest`."""
        text, stored = new_key(
            tenant,
            label,
            now=self._clock(),
            key_id=self._new_secret(8),
            secret=self._new_secret(32),
            scope=scope,
            days=days,
            client=client,
        )
        await keys.add(self._database, stored)
        return text, stored

    async def revoke_key(self, key_id: str) -> None:
        """Revoke a key. Raises `NotFound`."""
        owner = await self._owner(key_id)
        if not await keys.revoke(self._database, owner, key_id, self._clock()):
            raise NotFound(f"there is no valid key {key_id}")

    async def set_key_limits(self, key_id: str, given: Limits) -> LimitedKey:
        """Set the limits of a key, beside those of its tenant. Raises `NotFound`, `InvalidRequest`."""
        if given.stored_bytes is not None:
            raise InvalidRequest("stored_bytes can be limited for a tenant only", field="stored_bytes")
        owner = await self._owner(key_id)
        await limits.write(self._database, LimitHolder(owner, key_id), given, self._clock())
        await self._limiter.refresh()
        return await self.get_key(key_id)

    async def _owner(self, key_id: str) -> str:
        owner = await keys.tenant_of(self._database, key_id)
        if owner is None:
            raise NotFound(f"there is no key {key_id[:64]!r}")
        return owner

    async def _with_limits(self, tenants: Sequence[tuple[str, datetime | None]]) -> list[LimitedTenant]:
        names = [name for name, _ in tenants]
        own, use, retentions = await limits.read_tenants(self._database, names)
        now = self._clock()
        found = []
        for name, since in tenants:
            subject = LimitHolder(name)
            found.append(
                LimitedTenant(
                    name=name,
                    created_at=since,
                    retention_days=retentions.get(name),
                    limits=own.get(subject, Limits()),
                    effective=own.get(subject, Limits()).over(self._limiter.defaults),
                    used=_used(use.get(subject), now),
                    keys=[
                        LimitedKey(
                            key=key,
                            limits=own.get(LimitHolder(name, key.id), Limits()),
                            used=replace(_used(use.get(LimitHolder(name, key.id)), now), stored_bytes=None),
                        )
                        for key in await keys.of_tenant(self._database, name)
                    ],
                )
            )
        return found


def _used(use: TotalUse | None, now: datetime) -> ReportedUse:
    current = (use or TotalUse()).at(now)
    return ReportedUse(
        requests_per_minute=current.requests,
        concurrent=current.slots,
        tokens_per_day=round(current.tokens),
        money_per_month=round(current.money, 6),
        stored_bytes=current.stored,
    )
