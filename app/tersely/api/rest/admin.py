"""``/api/admin``: tenants, keys and limits, for the operator with the admin key."""

from __future__ import annotations

import hmac
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from typing_extensions import override

from tersely.api.rest.guard import Guard, GuardedRoute
from tersely.api.rest.responses import json_response, page_response, write_time
from tersely.api.rest.schemas.admin import (
    KeyLimitsIn,
    KeyLimitsOut,
    KeyPage,
    LimitsIn,
    NewKey,
    NewKeyOut,
    NewTenant,
    TenantLimitsOut,
    TenantOut,
    TenantPage,
)
from tersely.api.rest.schemas.common import Limit
from tersely.api.rest.services import AppServices
from tersely.domain.errors import Forbidden, NotFound, Unauthorized
from tersely.domain.limits import Limits
from tersely.service.limits.tenants import LimitedKey, LimitedTenant
from tersely.store.ops.keys import ApiKey

After = Annotated[str, Query(max_length=200, description="The `next` of the page before.")]
OfTenant = Annotated[str | None, Query(max_length=128, description="Only this tenant's keys.")]


class AdminRoute(GuardedRoute):
    """A route for the operator."""

    @override
    async def admit(self, guard: Guard, request: Request, *, has_body: bool) -> Request:
        _check_admin(request, guard)
        return await guard.read(request, has_body=has_body)


def _check_admin(request: Request, guard: Guard) -> None:
    """Raise `NotFound` where no admin key is configured, `Unauthorized` or `Forbidden` for whoever lacks it."""
    if guard.admin_key is None:
        raise NotFound(f"there is nothing at {request.url.path[:300]}: TERSELY_ADMIN_KEY is not set")
    guard.auth.check_address(request.headers.items())
    given = request.headers.get("x-tersely-key")
    if given is None:
        scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
        given = credentials.strip() if scheme.lower() == "bearer" else None
    if not given:
        raise Unauthorized("the admin key is needed (X-Tersely-Key, or Authorization: Bearer)")
    if not hmac.compare_digest(given.encode("utf-8", "replace"), guard.admin_key.encode()):
        raise Forbidden("that is not the admin key")


router = APIRouter(prefix="/admin", route_class=AdminRoute)


@router.get("/tenants", summary="List tenants", response_model=TenantPage)
async def list_tenants(services: AppServices, after: After = "", limit: Limit = 100) -> Response:
    """Tenants with limits, use and keys, by name."""
    found, following = await services.tenants.page(after=after, limit=limit)
    return page_response([write_tenant(each) for each in found], following)


@router.post("/tenants", status_code=201, summary="Make a tenant", response_model=TenantOut)
async def create_tenant(services: AppServices, body: NewTenant) -> Response:
    """Create a tenant without keys. 409 if the name is taken."""
    return json_response(write_tenant(await services.tenants.create(body.tenant)), 201)


@router.get("/tenants/{tenant}", summary="A tenant", response_model=TenantOut)
async def get_tenant(services: AppServices, tenant: str) -> Response:
    return json_response(write_tenant(await services.tenants.get(tenant)))


@router.get("/tenants/{tenant}/limits", summary="A tenant's limits and use", response_model=TenantLimitsOut)
async def get_tenant_limits(services: AppServices, tenant: str) -> Response:
    return json_response(_write_tenant_limits(await services.tenants.get(tenant)))


@router.put("/tenants/{tenant}/limits", summary="Set a tenant's limits", response_model=TenantLimitsOut)
async def set_tenant_limits(services: AppServices, tenant: str, body: LimitsIn) -> Response:
    """Replace all limits. A limit that is left out or null has the configured default."""
    given = body.model_dump()
    days = given.pop("retention_days")
    await services.tenants.set_limits(tenant, Limits(**given))
    return json_response(_write_tenant_limits(await services.tenants.set_retention(tenant, days)))


@router.get("/keys", summary="List keys", response_model=KeyPage)
async def list_keys(services: AppServices, tenant: OfTenant = None) -> Response:
    """Keys without their secrets, by tenant, oldest first."""
    return page_response([write_key(key) for key in await services.tenants.all_keys(tenant)], None)


@router.post("/keys", status_code=201, summary="Make a key", response_model=NewKeyOut)
async def create_key(services: AppServices, body: NewKey) -> Response:
    """Make a key, and its tenant with its first one. `key` is shown this once."""
    text, stored = await services.tenants.create_key(
        body.tenant, body.name, scope=body.scope, days=body.days, client=body.client
    )
    return json_response({**write_key(stored), "key": text}, 201)


@router.delete("/keys/{key_id}", status_code=204, summary="Revoke a key")
async def revoke_key(services: AppServices, key_id: str) -> Response:
    """Revoke a key. Workers may accept it for two seconds more; while the database is away, for up to 30."""
    await services.tenants.revoke_key(key_id)
    return Response(status_code=204)


@router.get("/keys/{key_id}/limits", summary="A key's limits and use", response_model=KeyLimitsOut)
async def get_key_limits(services: AppServices, key_id: str) -> Response:
    return json_response(_write_key_limits(await services.tenants.get_key(key_id)))


@router.put("/keys/{key_id}/limits", summary="Set a key's limits", response_model=KeyLimitsOut)
async def set_key_limits(services: AppServices, key_id: str, body: KeyLimitsIn) -> Response:
    """Replace all limits of a key. The limits of its tenant apply as well."""
    return json_response(_write_key_limits(await services.tenants.set_key_limits(key_id, Limits(**body.model_dump()))))


def write_tenant(tenant: LimitedTenant) -> dict[str, Any]:
    """Return a tenant as JSON members."""
    return {
        "tenant": tenant.name,
        "created_at": None if tenant.created_at is None else write_time(tenant.created_at),
        **_write_tenant_limits(tenant),
        "keys": [{**write_key(each.key), **_write_key_limits(each)} for each in tenant.keys],
    }


def _write_tenant_limits(tenant: LimitedTenant) -> dict[str, Any]:
    return {
        "limits": {**asdict(tenant.limits), "retention_days": tenant.retention_days},
        "effective": asdict(tenant.effective),
        "used": asdict(tenant.used),
    }


def _write_key_limits(key: LimitedKey) -> dict[str, Any]:
    return {"limits": _without_bytes(asdict(key.limits)), "used": _without_bytes(asdict(key.used))}


def _without_bytes(members: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in members.items() if name != "stored_bytes"}


def write_key(key: ApiKey) -> dict[str, Any]:
    """Return a key without its secret as JSON members."""
    return {
        "id": key.id,
        "tenant": key.tenant,
        "name": key.label,
        "scope": key.scope,
        "client": key.client,
        "created_at": write_time(key.created_at),
        "expires_at": None if key.expires_at is None else write_time(key.expires_at),
        "revoked_at": None if key.revoked_at is None else write_time(key.revoked_at),
    }
