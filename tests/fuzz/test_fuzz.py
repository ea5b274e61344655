"""Random histories in every dialect: no request that a provider would refuse, and the store holds what was said."""

from __future__ import annotations

import os

import pytest

from tests.conftest import Database
from tests.fuzz.running import run_talks
from tests.fuzz.talks import DIALECTS

# More for a longer run: ``TERSELY_TEST_FUZZ=25000`` requests of each dialect, and another seed.
REQUESTS = int(os.environ.get("TERSELY_TEST_FUZZ", "100"))
SEED = int(os.environ.get("TERSELY_TEST_FUZZ_SEED", "1"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120 + REQUESTS)]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_random_histories_are_valid_and_stored(database: Database, dialect: str) -> None:
    found = await run_talks(database, dialect, requests=REQUESTS, seed=SEED, tell=print)
    print(f"{dialect}: {found.talks} conversations, {found.requests} requests, {found.refused} refused")
    assert found.faults == []
    assert found.refused == 0
    assert found.requests >= REQUESTS
