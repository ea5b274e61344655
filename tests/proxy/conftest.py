"""One database, one scripted upstream and one service per module; tests keep apart by their sessions."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import asyncpg
import pytest

from tests.conftest import OWNER, Database, Server
from tests.proxy.harness import Model, RawUpstream, Service, raw_upstream, scripted, serve


async def _execute(server: Server, statement: str) -> None:
    admin = await asyncpg.connect(server.admin_dsn)
    try:
        await admin.execute(statement)
    finally:
        await admin.close()


@pytest.fixture(scope="module")
def store(server: Server) -> Iterator[Database]:
    """A database for the module, with the current schema."""
    name = f"tersely_test_{secrets.token_hex(6)}"
    with ThreadPoolExecutor(max_workers=1) as pool:

        def run(statement: str) -> None:
            pool.submit(asyncio.run, _execute(server, statement)).result()

        run(f"CREATE DATABASE {name} TEMPLATE {server.template} OWNER {OWNER} STRATEGY FILE_COPY")
        yield Database(name=name, dsn=server.dsn(name, user=OWNER), admin_dsn=server.dsn(name))
        run(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    """The scripted upstream of the module."""
    with scripted() as running:
        yield running


@pytest.fixture(scope="module")
def service(store: Database, model: Model) -> Iterator[Service]:
    """The service with its defaults, in front of ``model``."""
    with serve(store, model.url) as running:
        yield running


@pytest.fixture(scope="module")
def plain(store: Database, model: Model) -> Iterator[Service]:
    """The service with strategy `full` and no instructions: bytes pass through unchanged."""
    with serve(store, model.url, strategy="full", instructions="off") as running:
        yield running


@pytest.fixture(scope="module")
def forgetful() -> Iterator[Model]:
    with scripted(is_forgetful=True) as running:
        yield running


@pytest.fixture(scope="module")
def before_forgetful(store: Database, forgetful: Model) -> Iterator[Service]:
    with serve(store, forgetful.url) as running:
        yield running


@pytest.fixture(scope="module")
def plain_before_forgetful(store: Database, forgetful: Model) -> Iterator[Service]:
    with serve(store, forgetful.url, strategy="full", instructions="off") as running:
        yield running


@pytest.fixture(params=["keeps", "plain keeps", "forgets", "plain forgets"])
def host(request: pytest.FixtureRequest) -> tuple[Service, Model]:
    """A service with a context of its own, or (plain) that changes nothing, before a host that keeps replies or not."""
    names = {
        "keeps": ("service", "model"),
        "plain keeps": ("plain", "model"),
        "forgets": ("before_forgetful", "forgetful"),
        "plain forgets": ("plain_before_forgetful", "forgetful"),
    }
    there, model = names[request.param]
    return request.getfixturevalue(there), request.getfixturevalue(model)


@pytest.fixture(scope="module")
def raw(request: pytest.FixtureRequest) -> Iterator[RawUpstream]:
    """An upstream of bytes."""
    del request
    with raw_upstream() as running:
        yield running


@pytest.fixture(scope="module")
def behind_raw(store: Database, raw: RawUpstream) -> Iterator[Service]:
    """The service with quick heartbeats in front of ``raw``."""
    with serve(store, raw.url, heartbeat=0.3, idle_timeout=1.5) as running:
        yield running


@pytest.fixture(scope="module")
def plain_behind_raw(store: Database, raw: RawUpstream) -> Iterator[Service]:
    """The same, changing nothing."""
    with serve(store, raw.url, heartbeat=0.3, idle_timeout=1.5, strategy="full", instructions="off") as running:
        yield running


@pytest.fixture
def key() -> str:
    """A word that no other test uses: a session id, a user, a marker."""
    return f"k{secrets.token_hex(8)}"
