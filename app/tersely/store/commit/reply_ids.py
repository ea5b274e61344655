"""Replies by the ids that providers gave them and their items, for requests that name them instead of sending them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tersely.store.commit.records import HistoryOwner
from tersely.store.db.connection import Connection
from tersely.store.history.sessions import COLUMNS, ReplyMatch, session_from

_S = ", ".join(f"s.{name}" for name in COLUMNS.split(", "))

# A request that is sent again may be answered under the same id: then the current reply counts, or the newest.
# OFFSET 0 keeps the order of the joins, as in `tersely.store.history.sessions`.
BY_ID = f"""
SELECT DISTINCT ON (s.id) {_S}, m.seq AS hit_seq, m.chain AS hit_chain, m.status <> 'superseded' AS hit_is_current,
    r.keeper
FROM (SELECT session_id, seq, keeper FROM reply_ids WHERE tenant_id = $1 AND id = $2 OFFSET 0) AS r
CROSS JOIN LATERAL (SELECT {COLUMNS} FROM sessions WHERE tenant_id = $1 AND id = r.session_id OFFSET 0) AS s
CROSS JOIN LATERAL (
    SELECT seq, chain, status FROM messages WHERE tenant_id = $1 AND session_id = r.session_id AND seq = r.seq OFFSET 0
) AS m
ORDER BY s.id, m.status <> 'superseded' DESC, m.seq DESC LIMIT 2
"""
REPLIES = """
SELECT m.raw
FROM (
    SELECT DISTINCT session_id, seq FROM reply_ids WHERE tenant_id = $1 AND id = ANY($2::text[]) OFFSET 0
) AS r
CROSS JOIN LATERAL (
    SELECT raw, role FROM messages WHERE tenant_id = $1 AND session_id = r.session_id AND seq = r.seq OFFSET 0
) AS m
WHERE m.raw <> '' AND m.role = 'assistant'
"""
# A reply that is asked for again is the newest under its id. One without a message has the id at its question.
RECALLED = """
SELECT CASE WHEN m.role = 'assistant' THEN m.raw ELSE '' END AS raw, r.usage, m.finish
FROM (SELECT session_id, seq, usage FROM reply_ids WHERE tenant_id = $1 AND id = $2 OFFSET 0) AS r
CROSS JOIN LATERAL (
    SELECT raw, role, finish, created_at FROM messages
    WHERE tenant_id = $1 AND session_id = r.session_id AND seq = r.seq OFFSET 0
) AS m
ORDER BY m.created_at DESC, r.seq DESC LIMIT 1
"""
KEEPER = "SELECT keeper FROM reply_ids WHERE tenant_id = $1 AND session_id = $2 AND seq = $3"


class ReplyById(msgspec.Struct, frozen=True, kw_only=True):
    """A reply that was named by its id, in its session: as the message of its question (without a chain), if it left
    none.
    """

    hit: ReplyMatch
    history_owner: HistoryOwner


class RecalledReply(msgspec.Struct, frozen=True, kw_only=True):
    """A reply in the client's view (``raw``; empty: it left no message, or that was removed), how it ended, and the
    usage of all its rounds (empty: of one).
    """

    raw: bytes
    finish: str
    usage: bytes


async def find(connection: Connection, tenant: str, reply_id: str) -> ReplyById | None:
    """Return the one reply of the tenant's with that id; None where there is none, or one in several sessions."""
    rows = await connection.fetch(BY_ID, tenant, reply_id)
    if len(rows) != 1:
        return None
    row = rows[0]
    hit = ReplyMatch(
        session=session_from(row), seq=row["hit_seq"], chain=row["hit_chain"] or b"", is_current=row["hit_is_current"]
    )
    return ReplyById(hit=hit, history_owner=row["keeper"])


async def replies(connection: Connection, tenant: str, ids: Sequence[str]) -> list[bytes]:
    """Return the tenant's replies, in the client's view, that bear one of these ids or have an item that does."""
    return [row["raw"] for row in await connection.fetch(REPLIES, tenant, list(ids))]


async def stored_response(connection: Connection, tenant: str, reply_id: str) -> RecalledReply | None:
    """Return the tenant's newest reply with that id."""
    row = await connection.fetchrow(RECALLED, tenant, reply_id)
    if row is None:
        return None
    return RecalledReply(raw=row["raw"], finish=row["finish"] or "", usage=row["usage"] or b"")


async def history_owner(connection: Connection, tenant: str, session_id: str, seq: int) -> HistoryOwner:
    """Return which side has the history up to a reply."""
    found: HistoryOwner | None = await connection.fetchval(KEEPER, tenant, session_id, seq)
    return found or "tersely"
