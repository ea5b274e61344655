"""Epochs that start outside a call: when what was appended outgrows the current one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from app.domain.sessions import Session
from app.store import states
from app.store.connection import Connection
from app.store.ledger import DERIVED_FROM
from app.store.sessions import read_epoch, write_epoch
from app.store.writes import NewEpoch

TAIL_TOKENS = """
SELECT coalesce(sum(tokens), 0) FROM messages
WHERE tenant_id = $1 AND session_id = $2 AND seq >= $3 AND turn > 0 AND status = 'live'
"""
PLAN = "SELECT plan FROM sessions WHERE tenant_id = $1 AND id = $2"
SET_PLAN = "UPDATE sessions SET plan = $3 WHERE tenant_id = $1 AND id = $2"
LINKS = """
SELECT seq, pinned, status = 'live' AS is_live FROM messages
WHERE tenant_id = $1 AND session_id = $2 AND seq = ANY($3::bigint[]) AND turn > 0
"""
MOVE = """
UPDATE sessions SET epoch = $4, cut = $5, plan = $6, edited = false, version = version + 1
WHERE tenant_id = $1 AND id = $2 AND version = $3 RETURNING id
"""
ADD = """
INSERT INTO epochs (tenant_id, session_id, number, cut, reason, head_tokens, tokens_before, tokens_after, created_at,
    plan)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)
"""
ADD_TERSE = """
INSERT INTO terse (tenant_id, session_id, turn, seq, number, role, source, created_at, text)
SELECT $1, $2, u.* FROM unnest($3::integer[], $4::bigint[], $5::integer[], $6::text[], $7::text[], $8::timestamptz[],
    $9::bytea[]) AS u
ON CONFLICT DO NOTHING
"""


async def without(connection: Connection, tenant: str, session_id: str, seqs: Sequence[int]) -> None:
    """Have what is told of the history tell no more of these messages, which left it or came back to it.

    The session must be locked.
    """
    found = await connection.fetch(LINKS, tenant, session_id, list(seqs))
    if not found:
        return
    links = [record["seq"] for record in found]
    left = [record["seq"] for record in found if not record["is_live"]]
    back = [record["seq"] for record in found if record["is_live"]]
    pinned = [record["seq"] for record in found if record["is_live"] and record["pinned"]]
    await states.forget_rebuilt(connection, tenant, session_id, min(links))
    plan = await connection.fetchval(PLAN, tenant, session_id)
    before = read_epoch(plan) if plan else None
    if before is not None and (after := before.without(left, back, pinned)) != before:
        await connection.execute(SET_PLAN, tenant, session_id, write_epoch(after))


async def tail_tokens(connection: Connection, tenant: str, session: Session) -> int:
    """Tokens of the live messages from the session's cut on."""
    found: int = await connection.fetchval(TAIL_TOKENS, tenant, session.id, session.cut)
    return found


async def start(connection: Connection, tenant: str, session: Session, new: NewEpoch, now: datetime) -> bool:
    """Start an epoch that was planned on ``session`` as it was; False when the session has moved on since."""
    epoch = new.epoch
    moved = await connection.fetchval(MOVE, tenant, session.id, session.version, epoch.number, epoch.cut, new.plan)
    if moved is None:
        return False
    await connection.execute(
        ADD, tenant, session.id, epoch.number, epoch.cut, epoch.reason, epoch.head_tokens, new.tokens_before,
        new.tokens_after, now, new.plan,
    )  # fmt: skip
    if new.derived:
        rows = [
            (e.turn, e.seq, number, e.role, e.source, e.created_at, e.text.encode("utf-8", "replace"))
            for number, e in enumerate(new.derived, start=DERIVED_FROM)
        ]
        await connection.execute(ADD_TERSE, tenant, session.id, *map(list, zip(*rows, strict=True)))
    return True
