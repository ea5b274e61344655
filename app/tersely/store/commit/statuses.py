"""Change the status of stored messages, and place replies that come late."""

from __future__ import annotations

from tersely.domain.history.history import BROKE_OFF, CLIENT_LEFT, INCOMPLETE
from tersely.domain.history.reconciliation import Reconciliation
from tersely.domain.history.reply_placement import ReplyNeighbours, ReplyPlacement, place_reply
from tersely.store.commit import epochs
from tersely.store.commit.records import ReplyWrite, RequestOutcome
from tersely.store.db.connection import Connection
from tersely.store.db.ranges import END
from tersely.store.history import turn_rows
from tersely.store.history.messages import HERE, IS_EXCEPTION
from tersely.store.history.turn_rows import of_turns

SET_STATUS = """
UPDATE messages SET status = $4 WHERE tenant_id = $1 AND session_id = $2 AND seq = ANY($3::bigint[])
"""
# What the model did beside its replies, hidden from the client, goes the way of the replies.
SET_STATUS_OF_HIDDEN = f"""
UPDATE messages SET status = $4 WHERE tenant_id = $1 AND session_id = $2 AND status = $5 AND NOT client_visible
  AND {IS_EXCEPTION}
  AND call IN (SELECT r.call FROM messages r
               WHERE r.tenant_id = $1 AND r.session_id = $2 AND r.seq = ANY($3::bigint[]) AND r.call > 0)
"""
# There is no index of places. Nearly all messages are in the place of their number, the others are in the index of
# exceptions: so each question is asked of both. For one row in order the planner takes an index, whatever it expects.
_WORDS = "status = 'live' AND role <> 'assistant' AND client_visible AND turn > 0"
AROUND_REPLY = f"""
SELECT a.status, least(
        (SELECT seq FROM messages
         WHERE {HERE} AND seq > floor(a.place)::bigint AND place = seq AND turn > 0 ORDER BY seq LIMIT 1),
        (SELECT min(place) FROM messages WHERE {HERE} AND {IS_EXCEPTION} AND place > a.place AND turn > 0)
    ) AS next_position,
    r.call AS current_call, r.broke_off AS current_broke_off
FROM messages a LEFT JOIN LATERAL (
    SELECT n.call, coalesce(n.finish IN ('{BROKE_OFF}', '{CLIENT_LEFT}'), false) AS broke_off
    FROM (
        SELECT * FROM {of_turns("call, finish, place", "role = 'assistant' AND status = 'live' AND client_visible")}
    ) AS n
    WHERE n.place > a.place
        AND (SELECT seq FROM messages
             WHERE {HERE} AND seq > floor(a.place)::bigint AND seq < ceil(n.place)::bigint AND place = seq AND {_WORDS}
             ORDER BY seq LIMIT 1) IS NULL
        AND (SELECT min(seq) FROM messages
             WHERE {HERE} AND {IS_EXCEPTION} AND place > a.place AND place < n.place AND {_WORDS}) IS NULL
    ORDER BY n.call DESC LIMIT 1
) AS r ON true
WHERE a.tenant_id = $1 AND a.session_id = $2 AND a.seq = $7
"""
# The messages of a call are stored after the question that it answers, so they have greater sequence numbers.
SUPERSEDE_RIVAL = f"""
UPDATE messages SET status = 'superseded'
WHERE {HERE} AND seq BETWEEN $4 AND {END} AND status = 'live' AND call = $3 RETURNING seq
"""


async def set_statuses(connection: Connection, tenant: str, session_id: str, decision: Reconciliation) -> None:
    """Hide the messages that a decision supersedes, show the ones that it restores, and correct the epoch's plan."""
    for seqs, status, before in (
        (decision.superseded, "superseded", "live"),
        (decision.restored, "live", "superseded"),
    ):
        if seqs:
            await connection.execute(SET_STATUS, tenant, session_id, list(seqs), status)
            await connection.execute(SET_STATUS_OF_HIDDEN, tenant, session_id, list(seqs), status, before)
    if changed := (*decision.superseded, *decision.restored):
        last = None if decision.kind == "delta" else decision.last_known
        await epochs.remove_from_plans(connection, tenant, session_id, changed, last=last)


async def place_late_reply(
    connection: Connection, tenant: str, write: ReplyWrite, outcome: RequestOutcome, session_id: str
) -> ReplyPlacement:
    """Place a reply in a session that changed while the model replied."""
    turns = await turn_rows.span(connection, tenant, session_id, outcome.turn, outcome.turn)
    row = await connection.fetchrow(AROUND_REPLY, tenant, session_id, *turns, outcome.answered_seq)
    neighbours = ReplyNeighbours(**dict(row)) if row else ReplyNeighbours(status=None)
    broke_off = any(reply.finish in INCOMPLETE for reply in write.replies)
    placement = place_reply(neighbours, call=outcome.call, broke_off=broke_off)
    if placement.replaces:
        after = outcome.answered_seq
        replaced = await connection.fetch(SUPERSEDE_RIVAL, tenant, session_id, placement.replaces, after)
        await epochs.remove_from_plans(connection, tenant, session_id, [record["seq"] for record in replaced])
    return placement
