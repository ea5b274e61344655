"""The real application over an in-process transport, on a database of its own."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tersely.api.proxy import ProxyRoutes
from tersely.composition.application import build
from tersely.composition.clock import clock
from tersely.service.common.auth import new_key
from tersely.settings import Settings
from tersely.store.db import connection
from tersely.store.ops import keys
from tests.conftest import Database

UPSTREAM = "http://127.0.0.1:9"  # nobody answers there


@dataclass(frozen=True, slots=True)
class Api:
    """A client of the application, and the application."""

    http: httpx.AsyncClient
    app: ProxyRoutes

    async def append(self, session: str, *messages: object, **headers: str) -> httpx.Response:
        return await self.http.post(
            f"/api/sessions/{session}/messages", json={"messages": list(messages)}, headers=headers
        )

    async def post_raw(self, path: str, body: bytes, **headers: str) -> httpx.Response:
        return await self.http.post(path, content=body, headers={"content-type": "application/json", **headers})


@asynccontextmanager
async def serve(dsn: str, *, upstream: str = UPSTREAM, is_local: bool = False, **settings: Any) -> AsyncIterator[Api]:
    """The application on that database."""
    given = Settings(_env_file=None, **settings)
    app = build(given, database_url=dsn, openai_base_url=upstream, is_local=is_local)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with (
        app.rest.router.lifespan_context(app.rest),
        httpx.AsyncClient(transport=transport, base_url="http://test") as http,
    ):
        yield Api(http, app)


@pytest.fixture
async def api(database: Database) -> AsyncIterator[Api]:
    """The application with its defaults."""
    async with serve(database.dsn) as running:
        yield running


NewKey = Callable[[str], Awaitable[dict[str, str]]]


@pytest.fixture
async def new_tenant(database: Database) -> AsyncIterator[NewKey]:
    """Makes a tenant with a key; gives the headers that carry it."""
    store = connection.Database(dsn=database.dsn)
    await store.open()

    async def make(tenant: str) -> dict[str, str]:
        text, stored = new_key(tenant, "", now=clock(), key_id=secrets.token_hex(8), secret=secrets.token_urlsafe(32))
        await keys.add(store, stored)
        return {"x-tersely-key": text}

    yield make
    await store.close()


@pytest.fixture
async def guarded(database: Database) -> AsyncIterator[Api]:
    """The application where every request needs a key."""
    async with serve(database.dsn, auth="keys") as running:
        yield running
