"""Tenants of replayed transcripts: a replay of a tenant's is no part of its sessions, figures, or memory."""

from __future__ import annotations

from hashlib import sha256

SUFFIX = ":replays"
_LONGEST = 128


def replay_tenant(tenant: str) -> str:
    """Return the tenant that holds the replays of ``tenant``."""
    if len(tenant) + len(SUFFIX) > _LONGEST:
        tenant = "sha256-" + sha256(tenant.encode()).hexdigest()
    return tenant + SUFFIX


def is_replay_tenant(tenant: str) -> bool:
    """Return whether a tenant holds replays; nobody gets a key of such a one."""
    return tenant.endswith(SUFFIX)
