"""Epochs that start outside of a call, because appended messages outgrow the current one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

import msgspec

from tersely.domain.history.runs import Run, subtract
from tersely.domain.history.sessions import Session
from tersely.store.commit.records import NewEpoch
from tersely.store.db.connection import Connection
from tersely.store.db.ranges import END
from tersely.store.history import packed_log
from tersely.store.history.sessions import read_epoch, write_epoch
from tersely.store.notes import pending_memory, states

TAIL_SIZE = f"""
SELECT coalesce(sum(tokens), 0)::bigint AS tokens, count(*) AS messages, count(DISTINCT turn) AS turns
FROM (
    SELECT tokens, turn FROM messages
    WHERE tenant_id = $1 AND session_id = $2 AND seq BETWEEN $3 AND {END} AND turn > 0 AND status = 'live'
    UNION ALL
    SELECT tokens, turn FROM messages
    WHERE tenant_id = $1 AND session_id = $2 AND seq = ANY($4::bigint[]) AND seq < $3 AND turn > 0 AND status = 'live'
) AS shown
"""
TIMES = """
SELECT (SELECT created_at FROM messages
        WHERE tenant_id = $1 AND session_id = $2 AND seq < $3 AND turn > 0 ORDER BY seq DESC LIMIT 1) AS before,
       (SELECT created_at FROM messages WHERE tenant_id = $1 AND session_id = $2 AND seq = $3) AS first
"""
PLANS = """
SELECT number, plan FROM epochs WHERE tenant_id = $1 AND session_id = $2 AND number IN ($3, $3::integer - 1)
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
    plan, log, log_first_turn, log_last_turn, log_lines)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)
"""
ADD_TERSE = """
INSERT INTO terse (tenant_id, session_id, turn, seq, number, role, source, created_at, text)
SELECT $1, $2, u.* FROM unnest($3::integer[], $4::bigint[], $5::integer[], $6::text[], $7::text[], $8::timestamptz[],
    $9::bytea[]) AS u
ON CONFLICT DO NOTHING
"""


async def remove_from_plans(
    connection: Connection, tenant: str, session_id: str, seqs: Sequence[int], *, last: int | None = None
) -> None:
    """Remove messages that left or rejoined the history from the session's stored plans.

    ``last`` is as in `Epoch.without_messages`. The session must be locked.
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
    if before is not None and (after := before.without_messages(left, back, pinned, last=last)) != before:
        await connection.execute(SET_PLAN, tenant, session_id, write_epoch(after))


class TailSize(msgspec.Struct, frozen=True, kw_only=True):
    """The size of an epoch without its head: live messages from the cut on, and kept ones before it."""

    tokens: int
    messages: int
    turns: int


async def tail_size(connection: Connection, tenant: str, session: Session) -> TailSize:
    """Measure a session's epoch besides its head. O(tail)."""
    kept = list(session.plan.kept) if session.plan else []
    record = await connection.fetchrow(TAIL_SIZE, tenant, session.id, session.cut, kept)
    assert record is not None  # an aggregate always gives a row
    return TailSize(**dict(record))


async def pause_before(connection: Connection, tenant: str, session_id: str, seq: int) -> timedelta | None:
    """Return the time between message ``seq`` and the message before it; None for the first message."""
    record = await connection.fetchrow(TIMES, tenant, session_id, seq)
    if record is None or record["before"] is None or record["first"] is None:
        return None
    pause: timedelta = record["first"] - record["before"]
    return max(pause, timedelta(0))


async def messages_left(connection: Connection, tenant: str, session_id: str, number: int) -> tuple[Run, ...]:
    """Return the messages that left the context with stored epoch ``number``, live or not.

    After an edit or a change of configuration everything before the cut counts, since this strategy has not summarised
    it.
    """
    plans = {r["number"]: read_epoch(r["plan"]) for r in await connection.fetch(PLANS, tenant, session_id, number)}
    epoch = plans.get(number)
    if epoch is None:
        return ()
    before = plans.get(number - 1)
    shown: tuple[Run, ...] = ((epoch.cleared_at, epoch.cut - 1),)
    if before is not None and epoch.reason not in {"first", "edit", "config"} and not before.must_rebuild:
        shown = ((before.cut, epoch.cut - 1), *((seq, seq) for seq in before.kept if seq < before.cut))
    return subtract([run for run in shown if run[0] <= run[1]], [(seq, seq) for seq in epoch.kept])


async def start(connection: Connection, tenant: str, session: Session, new: NewEpoch, now: datetime) -> bool:
    """Start an epoch that was planned on ``session``. Return False if the session has changed since."""
    epoch = new.epoch
    moved = await connection.fetchval(MOVE, tenant, session.id, session.version, epoch.number, epoch.cut, new.plan)
    if moved is None:
        return False
    packed, single = packed_log.number_entries(new.derived)
    await connection.execute(
        ADD, tenant, session.id, epoch.number, epoch.cut, epoch.reason, epoch.head_tokens, new.tokens_before,
        new.tokens_after, now, new.past_plan, *packed_log.pack(packed),
    )  # fmt: skip
    await states.add_found(connection, tenant, session.id, new.states)
    if new.memory is not None:
        await pending_memory.add(connection, tenant, session.id, [new.memory], now)
    if single:
        rows = [(*cursor, e.role, e.source, e.created_at, e.text.encode("utf-8", "replace")) for cursor, e in single]
        await connection.execute(ADD_TERSE, tenant, session.id, *map(list, zip(*rows, strict=True)))
    return True
