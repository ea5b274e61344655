"""Replies to side calls, remembered by anchors, so that a client that goes on from its own summary is recognised."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from app.store.connection import Connection

REMEMBER = """
INSERT INTO side_replies (tenant_id, session_id, anchor, created_at)
SELECT $1, $2, u.anchor, $4 FROM unnest($3::bytea[]) AS u (anchor)
ON CONFLICT (tenant_id, session_id, anchor) DO UPDATE SET created_at = excluded.created_at
"""
FORGET = "DELETE FROM side_replies WHERE tenant_id = $1 AND session_id = $2 AND created_at < $3"


async def remember(
    connection: Connection, tenant: str, session_id: str, anchors: Sequence[bytes], now: datetime
) -> None:
    """Remember that a side call of this session was answered so."""
    await connection.execute(REMEMBER, tenant, session_id, list(anchors), now)


async def forget(connection: Connection, tenant: str, session_id: str, before: datetime) -> None:
    """Forget what is older than ``before``."""
    await connection.execute(FORGET, tenant, session_id, before)
