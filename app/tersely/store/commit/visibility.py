"""Change who sees single messages (tiancaiamao/ai, "Message Visibility").

A message that is hidden from the model alone has the status `dropped`, like those of a dropped turn, and is not
`model_visible`. Contexts, log, states, summaries and a client's resent history treat both alike. The client's view
still shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from msgspec import structs

from tersely.domain.history.runs import Run
from tersely.domain.history.sessions import Session
from tersely.store.commit.turns import set_edited
from tersely.store.db.connection import Connection
from tersely.store.history import turn_rows
from tersely.store.history.turn_rows import of_turns
from tersely.store.notes import daily_memory as memory
from tersely.store.notes import states

HERE = "tenant_id = $1 AND session_id = $2"
# What the turn's messages are to whoever may change it: live, or hidden from the model alone.
CHANGEABLE = "(status = 'live' OR (status = 'dropped' AND NOT model_visible))"
OF_TURN = f"SELECT seq FROM {of_turns('seq', CHANGEABLE)} ORDER BY seq"
HIDE = f"""
UPDATE messages SET status = 'dropped', model_visible = false
WHERE {HERE} AND seq = ANY($3::bigint[]) AND status = 'live' RETURNING seq, tokens, pinned
"""
SHOW = f"""
UPDATE messages SET status = 'live', model_visible = true
WHERE {HERE} AND seq = ANY($3::bigint[]) AND status = 'dropped' AND NOT model_visible RETURNING seq, tokens, pinned
"""
SET_CLIENT = f"UPDATE messages SET client_visible = $4 WHERE {HERE} AND seq = $3"
TOUCH = "UPDATE sessions SET version = version + 1, updated_at = $3 WHERE tenant_id = $1 AND id = $2"
IS_OWN_TRAFFIC = f"""
SELECT call > 0 AND chain IS NULL AND NOT client_visible FROM messages WHERE {HERE} AND seq = $3
"""


async def of_turn(connection: Connection, tenant: str, session_id: str, turn: int) -> list[int]:
    """Return the messages of a turn that are live or hidden from the model alone, in order."""
    turns = await turn_rows.span(connection, tenant, session_id, turn, turn)
    return [record["seq"] for record in await connection.fetch(OF_TURN, tenant, session_id, *turns)]


async def is_tersely_traffic(connection: Connection, tenant: str, session_id: str, seq: int) -> bool:
    """Return whether the message is a call to a tool of Tersely's own, or its result: the client knows of neither."""
    return bool(await connection.fetchval(IS_OWN_TRAFFIC, tenant, session_id, seq))


async def set_client_visible(
    connection: Connection, tenant: str, session: Session, seq: int, now: datetime, *, visible: bool
) -> None:
    """Show a message in the client's view, or hide it there. The session must be locked."""
    await connection.execute(SET_CLIENT, tenant, session.id, seq, visible)
    await connection.execute(TOUCH, tenant, session.id, now)


async def set_model_visible(
    connection: Connection, tenant: str, session: Session, seqs: Sequence[int], now: datetime, *, visible: bool
) -> list[tuple[Run, ...]]:
    """Show messages to the model, or hide them from it; the next context starts an epoch. The session must be locked.

    Return the memory ranges that contained them. They are to be summarised anew.
    """
    changed = await connection.fetch(SHOW if visible else HIDE, tenant, session.id, list(seqs))
    numbers = [record["seq"] for record in changed]
    if not numbers:
        return []
    await states.forget_rebuilt(connection, tenant, session.id, min(numbers))
    plan = session.plan
    if plan is not None:
        before_cut = sum(record["tokens"] for record in changed if record["seq"] < session.cut)
        if visible:
            pinned = [record["seq"] for record in changed if record["pinned"]]
            plan = structs.replace(
                plan.without_messages((), numbers, pinned), older_tokens=plan.older_tokens + before_cut
            )
        else:
            plan = structs.replace(plan.without_messages(numbers), older_tokens=max(0, plan.older_tokens - before_cut))
    await set_edited(connection, tenant, session, plan, 0, now)
    return await memory.forget_range(connection, tenant, session.id, min(numbers), max(numbers))
