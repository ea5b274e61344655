"""A service whose models are offered tools."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import Database
from tests.support.services import FROM_THE_START, Service, serve
from tests.support.upstreams import Model


@pytest.fixture(scope="module")
def offering(store: Database, model: Model) -> Iterator[Service]:
    """A service whose strategy offers tools from the start."""
    with serve(store, model.url, strategy="window", instructions="off", epoch=FROM_THE_START, heartbeat=0.3) as running:
        yield running
