"""A database, a scripted model, a worker, and tenants that the operator made and limited over REST."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import aiohttp
import pytest

from tersely.service.limits import accounts, limiter
from tests.conftest import Database
from tests.support.services import Worker, run_worker
from tests.support.tenants import Tenant
from tests.support.upstreams import Model, scripted

ADMIN_KEY = "the-operator-s-own-key"
AS_ADMIN = {"X-Tersely-Key": ADMIN_KEY}
NewTenant = Callable[..., Awaitable[Tenant]]


@pytest.fixture
def quick_accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers read limits again, and give back what they hold for idle tenants, after 0.4 s instead of 2 s."""
    for module, name in ((limiter, "TICK"), (limiter, "REFRESH"), (accounts, "IDLE")):
        monkeypatch.setattr(module, name, getattr(module, name) / 5)


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with scripted() as running:
        yield running


@pytest.fixture
async def worker(store: Database, model: Model) -> AsyncIterator[Worker]:
    async with run_worker(store, model.url, auth="keys", admin_key=ADMIN_KEY) as running:
        yield running


async def admin(http: aiohttp.ClientSession, base_url: str, method: str, path: str, body: Any = None) -> Any:
    """A call of the operator's that succeeds."""
    async with http.request(method, f"{base_url}/api/admin{path}", json=body, headers=AS_ADMIN) as answer:
        assert answer.status < 300, await answer.text()
        return await answer.json() if answer.status != 204 else None


async def make_tenant(http: aiohttp.ClientSession, base_url: str, *, of_key: bool = False, **limits: float) -> Tenant:
    """Make a tenant with a key and with limits; ``of_key`` limits the key instead."""
    name = f"tenant-{secrets.token_hex(4)}"
    made = await admin(http, base_url, "POST", "/keys", {"tenant": name})
    path = f"/keys/{made['id']}/limits" if of_key else f"/tenants/{name}/limits"
    await admin(http, base_url, "PUT", path, limits)
    return Tenant(name=name, key=made["key"], key_id=made["id"])


@pytest.fixture
def new_tenant(worker: Worker) -> NewTenant:
    """Makes a tenant of ``worker``'s, see `make_tenant`."""

    async def make(**given: Any) -> Tenant:
        return await make_tenant(worker.http, worker.base_url, **given)

    return make
