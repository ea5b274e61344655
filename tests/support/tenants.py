"""Tenants with keys."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from datetime import UTC, datetime

from tersely.service.common.auth import new_key
from tersely.store.db.connection import Database as Store
from tersely.store.ops import keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A tenant with one key."""

    name: str
    key: str
    key_id: str


async def tenant(keyring: Store) -> Tenant:
    """Create a tenant with a new key."""
    name = f"tenant-{secrets.token_hex(4)}"
    key_id = secrets.token_hex(8)
    text, stored = new_key(name, "", now=datetime.now(UTC), key_id=key_id, secret=secrets.token_urlsafe(32))
    await keys.add(keyring, stored)
    return Tenant(name=name, key=text, key_id=key_id)
