"""Store writes under the locks of their sessions, deciding again what has changed since the first decision."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from copy import copy
from functools import partial

from msgspec import structs

from tersely.domain.errors import Conflict, NotFound, StoreUnavailable
from tersely.store.commit import idempotency_keys as appends
from tersely.store.commit.apply import AT_THE_END, NewRows, enter_reply, enter_request
from tersely.store.commit.decisions import decide_again
from tersely.store.commit.idempotency_keys import KeyedAppend
from tersely.store.commit.records import (
    ReplyWrite,
    RequestOutcome,
    RequestWrite,
    SessionCounters,
    StoredReply,
    Write,
    session_counters,
    session_id_of,
)
from tersely.store.commit.rows import insert_rows
from tersely.store.commit.sizes import has_long_epoch, is_large
from tersely.store.commit.statuses import place_late_reply, set_statuses
from tersely.store.db.connection import Connection
from tersely.store.db.statements import NEW
from tersely.store.history.sessions import COLUMNS, session_from

LOCK = f"SELECT {COLUMNS} FROM sessions WHERE tenant_id = $1 AND id = ANY($2::text[]) ORDER BY id FOR UPDATE"
INSERT_SESSION = """
INSERT INTO sessions (tenant_id, id, parent, client_id, strategy, epoch_policy, metadata, last_seq, turns, tokens,
    version, edits, edited, calls, epoch, cut, plan, open_chain, last_call_at, created_at, updated_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, 0, 0, 0, 0, 0, false, 0, 0, 1, NULL, NULL, NULL, $8, $8)
ON CONFLICT (tenant_id, id) DO NOTHING RETURNING id
"""


async def write_locked(
    connection: Connection, tenant: str, writes: list[Write], before: Mapping[int, RequestOutcome | StoredReply]
) -> dict[int, RequestOutcome | StoredReply]:
    """Write under the sessions' locks. Return the results by the ids of the writes; ``before`` are those of the writes
    of the same batch that are stored already.
    """
    rows = NewRows()
    results = dict(before)
    states = await lock_sessions(connection, tenant, writes)
    for write in writes:
        if isinstance(write, RequestWrite):
            results[id(write)] = await _write_request(connection, tenant, write, states, rows)
        else:
            outcome = results.get(id(write.request)) or write.request_outcome
            if not isinstance(outcome, RequestOutcome):
                raise StoreUnavailable("the request itself could not be stored")
            state = states[outcome.session_id]
            results[id(write)] = await _write_reply(connection, tenant, write, outcome, state, rows)
    await insert_rows(connection, tenant, rows, states.values())
    return results


async def lock_sessions(connection: Connection, tenant: str, writes: list[Write]) -> dict[str, SessionCounters]:
    """Make the sessions that are missing, lock the others, and read their counters."""
    states: dict[str, SessionCounters] = {}
    wanted = sorted({session_id_of(write) for write in writes})
    create = {w.session_id: w for w in writes if isinstance(w, RequestWrite) and w.create and w.session is None}
    for session_id, write in sorted(create.items()):
        new = [getattr(write.create, name) for name in NEW]
        if await connection.fetchval(INSERT_SESSION, tenant, session_id, *new, write.now) is not None:
            states[session_id] = SessionCounters(id=session_id)
    rest = [session_id for session_id in wanted if session_id not in states]
    if rest:
        for row in await connection.fetch(LOCK, tenant, rest):
            states[row["id"]] = session_counters(session_from(row))
    if len(states) < len(wanted):
        raise NotFound("the session was deleted")
    return states


async def _write_request(
    connection: Connection, tenant: str, write: RequestWrite, states: dict[str, SessionCounters], rows: NewRows
) -> RequestOutcome:
    state = states[write.session_id]
    earlier = await appends.find(connection, tenant, state.id, write.key) if write.key is not None else None
    if earlier is not None and not write.is_call:
        return _stored_before(write, earlier, state)
    decision = write.decision
    is_as_decided = state.version == (0 if write.version is None else write.version)
    if not is_as_decided:
        write = write.expanded()
        decision = write.decision
        again = await decide_again(connection, tenant, write, state, earlier)
        if again is None:
            write = write.in_spare_session()
            states |= await lock_sessions(connection, tenant, [write])
            state = states[write.session_id]
            is_as_decided = True
        else:
            decision = again
    if earlier is not None and decision.answered is not None and decision.answered.is_new:
        await appends.forget(connection, tenant, state.id, earlier.key)
    enter = partial(enter_request, write, state, decision, rows, is_as_decided=is_as_decided)
    outcome = await asyncio.to_thread(enter) if is_large(write) else enter()
    await set_statuses(connection, tenant, state.id, decision)
    return outcome


def _stored_before(write: RequestWrite, earlier: KeyedAppend, state: SessionCounters) -> RequestOutcome:
    """Return where the messages of an earlier append with the same key are. Raises `Conflict` for other messages."""
    if earlier.digest != write.key_digest:
        raise Conflict("that idempotency key was used for other messages", field="Idempotency-Key")
    return RequestOutcome(
        session_id=write.session_id,
        call=0,
        first_seq=earlier.first_seq,
        last_seq=earlier.last_seq,
        turn=earlier.turn,
        answered_seq=earlier.last_seq,
        answered_position=float(earlier.last_seq),
        decision=structs.replace(write.decision, placed=()),
        state=copy(state),
        was_stored_before=True,
    )


async def _write_reply(
    connection: Connection,
    tenant: str,
    write: ReplyWrite,
    outcome: RequestOutcome,
    state: SessionCounters,
    rows: NewRows,
) -> StoredReply:
    placement = AT_THE_END
    answered = outcome.decision.answered
    has_moved = state.last_seq != outcome.last_seq or state.edits != outcome.state.edits
    is_hidden = answered is not None and answered.status != "live"
    if write.replies and (has_moved or is_hidden or not outcome.decision.replies_at_end):
        placement = await place_late_reply(connection, tenant, write, outcome, state.id)
    if has_long_epoch(write):
        return await asyncio.to_thread(enter_reply, write, outcome, state, placement, rows)
    return enter_reply(write, outcome, state, placement, rows)
