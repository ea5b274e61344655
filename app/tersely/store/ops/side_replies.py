"""Remember replies to side calls by anchors and requester, to recognise a client that continues from its own summary.

Nobody continues from another requester's summary.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from tersely.store.db.connection import Connection

REMEMBER = """
INSERT INTO side_replies (tenant_id, session_id, anchor, requester, created_at)
SELECT $1, $2, u.anchor, $4, $5 FROM unnest($3::bytea[]) AS u (anchor)
ON CONFLICT (tenant_id, session_id, anchor) DO UPDATE
SET created_at = excluded.created_at, requester = excluded.requester
"""
FORGET = "DELETE FROM side_replies WHERE tenant_id = $1 AND session_id = $2 AND created_at < $3"


async def remember(
    connection: Connection, tenant: str, session_id: str, anchors: Sequence[bytes], requester: bytes, now: datetime
) -> None:
    """Store the reply to a side call of this session by ``requester``."""
    await connection.execute(REMEMBER, tenant, session_id, list(anchors), requester, now)


async def forget(connection: Connection, tenant: str, session_id: str, before: datetime) -> None:
    """Forget what is older than ``before``."""
    await connection.execute(FORGET, tenant, session_id, before)
