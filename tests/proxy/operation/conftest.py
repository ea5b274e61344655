"""Fixtures of a running service: two tenants with keys of their own."""

from __future__ import annotations

import pytest

from tersely.store.db.connection import Database as Store
from tests.support.tenants import Tenant, tenant


@pytest.fixture
async def ours(keyring: Store) -> Tenant:
    return await tenant(keyring)


@pytest.fixture
async def theirs(keyring: Store) -> Tenant:
    return await tenant(keyring)
