"""One database, one scripted upstream and one service per module; tests keep apart by their sessions."""

from __future__ import annotations

import io
import logging
import secrets
import sys
from collections.abc import AsyncIterator, Iterator

import pytest

from tersely.api.transport import protocol
from tersely.server.run import log_as_json
from tersely.store.db.connection import Database as Store
from tests.conftest import Database
from tests.support.services import Service, serve
from tests.support.stores import open_store
from tests.support.upstreams import Model, RawUpstream, raw_upstream, scripted


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


@pytest.fixture(scope="module")
def locked(store: Database, model: Model) -> Iterator[Service]:
    """A service that wants keys."""
    with serve(store, model.url, auth="keys") as running:
        yield running


@pytest.fixture
async def keyring(store: Database) -> AsyncIterator[Store]:
    async with open_store(store) as database:
        yield database


@pytest.fixture
def key() -> str:
    """A word that no other test uses: a session id, a user, a marker."""
    return f"k{secrets.token_hex(8)}"


@pytest.fixture
def brief_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused connection is closed after 0.3 s, not 2 s, if its client does not close it."""
    monkeypatch.setattr(protocol, "LINGER", 0.3)


@pytest.fixture
def log_lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Return the lines that the service writes to stderr at its default level."""
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    log_as_json("info")
    yield written
    root.handlers[:], root.level = before
