"""Idempotency keys: the messages that were appended with a key, so that they are stored once."""

from __future__ import annotations

import msgspec

from tersely.store.db.connection import Connection

FIND = """
SELECT session_id, key, digest, first_seq, last_seq, turn FROM appends
WHERE tenant_id = $1 AND session_id = $2 AND key = $3
"""
FIND_ANYWHERE = """
SELECT session_id, key, digest, first_seq, last_seq, turn FROM appends
WHERE tenant_id = $1 AND key = $2 AND digest = $3 ORDER BY created_at DESC LIMIT 1
"""
FORGET = "DELETE FROM appends WHERE tenant_id = $1 AND session_id = $2 AND key = $3"


class KeyedAppend(msgspec.Struct, frozen=True, kw_only=True):
    """The messages ``first_seq`` to ``last_seq``, which were appended with a key. ``digest`` identifies them."""

    session_id: str
    key: str
    digest: bytes
    first_seq: int
    last_seq: int
    turn: int


async def find(connection: Connection, tenant: str, session_id: str, key: str) -> KeyedAppend | None:
    """Return the messages of a key in the session."""
    row = await connection.fetchrow(FIND, tenant, session_id, key)
    return KeyedAppend(**dict(row)) if row else None


async def find_anywhere(connection: Connection, tenant: str, key: str, digest: bytes) -> KeyedAppend | None:
    """Return what the key brought, to whichever session of the tenant, where these messages came with it."""
    row = await connection.fetchrow(FIND_ANYWHERE, tenant, key, digest)
    return KeyedAppend(**dict(row)) if row else None


async def forget(connection: Connection, tenant: str, session_id: str, key: str) -> None:
    """Delete a key, so that its next use appends messages again."""
    await connection.execute(FORGET, tenant, session_id, key)
