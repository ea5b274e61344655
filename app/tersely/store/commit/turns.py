"""Turns as rows: list, hide, undo and remove them.

Whatever changes a turn here does so under the session's lock and counts as an edit of its history, so that the
next context starts a new epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

import msgspec
from asyncpg import Record
from msgspec import structs

from tersely.domain.history.history import Epoch, Status
from tersely.domain.history.runs import Run
from tersely.domain.history.sessions import Session
from tersely.store.db.connection import Connection
from tersely.store.history import artifacts, packed_log, sent_contexts, turn_rows
from tersely.store.history.messages import StoredMessage
from tersely.store.history.sessions import COLUMNS, read_epoch, session_from, write_epoch
from tersely.store.history.turn_rows import of_each_turn, of_turns
from tersely.store.notes import daily_memory as memory
from tersely.store.notes import states, summaries
from tersely.store.ops import shadows
from tersely.store.search import pages as search

HiddenStatus = Literal["dropped", "undone"]
# First and last sequence number.

HERE = "tenant_id = $1 AND session_id = $2"
LIVE_SEQS = f"""
SELECT seq FROM {of_turns("seq", "turn > 0 AND status = 'live' AND model_visible")}
"""
OF_MESSAGES = f"""
SELECT seq, turn FROM messages WHERE {HERE} AND seq = ANY($3::bigint[]) AND turn > 0 AND status = 'live'
  AND client_visible
"""
ENDS = f"""
SELECT turn, min(seq) AS first_seq, max(seq) AS last_seq
FROM {of_each_turn("turn, seq", "turn > 0 AND status = 'live' AND model_visible AND client_visible")}
GROUP BY turn
"""
LIVE_TURNS = f"""
SELECT DISTINCT turn FROM {of_turns("turn", "turn > 0 AND status = 'live'")}
"""
# Earlier versions did not count the turn of a reply to instructions alone.
NEWEST_TURN = "SELECT greatest(turns, 1) FROM sessions WHERE tenant_id = $1 AND id = $2"
GROUPS = f"""
SELECT turn, status, count(*) AS messages, min(seq) AS first_seq, max(seq) AS last_seq, sum(tokens) AS tokens,
    min(created_at) AS created_at, max(created_at) AS updated_at
FROM {of_turns("turn, status, seq, tokens, created_at", "turn > 0")}
GROUP BY turn, status ORDER BY turn
"""
# A call belongs to the turn that it was made for.
USAGE = f"""
SELECT turn, count(*) AS calls, sum(tokens_before) AS tokens_before, sum(tokens_after) AS tokens_after,
    sum(input_tokens) AS input, sum(cached_tokens) AS cached, sum(output_tokens) AS output,
    (array_agg(coalesce(weight, coalesce(input_tokens, tokens_after) + coalesce(output_tokens, 0)) ORDER BY number DESC)
        FILTER (WHERE status < 400))[1] AS weight
FROM calls WHERE {HERE} AND turn BETWEEN $3 AND $4 GROUP BY turn
"""
TERSE = f"""
SELECT turn, seq, number, text FROM terse WHERE {HERE} AND turn BETWEEN $3 AND $4 ORDER BY turn, seq, number
"""
LOCK = f"SELECT {COLUMNS} FROM sessions WHERE tenant_id = $1 AND id = $2 FOR UPDATE"
OF_TURN = f"SELECT seq, status, tokens, model_visible FROM {of_turns('seq, status, tokens, model_visible')}"
# With its turn, a message that was hidden from the model alone is hidden from everybody.
HIDE = f"UPDATE messages SET status = $4, model_visible = true WHERE {HERE} AND seq = ANY($3::bigint[])"
WITHOUT_DIFFERENCE = "model_prefix = NULL, model_suffix = NULL, model_middle = NULL"
REMOVE = f"""
UPDATE messages SET status = 'removed', raw = ''::bytea, model_raw = NULL, {WITHOUT_DIFFERENCE}, tokens = 0
WHERE {HERE} AND seq = ANY($3::bigint[])
"""
REPLACE = f"""
UPDATE messages SET raw = $4, model_raw = $5, {WITHOUT_DIFFERENCE}, tokens = $6 WHERE {HERE} AND seq = $3
"""
FORGET_TERSE_OF = f"DELETE FROM terse WHERE {HERE} AND seq = $3"
FORGET_TERSE = f"DELETE FROM terse WHERE {HERE} AND turn = $3"
FORGET_PLANS = f"SELECT number, plan FROM epochs WHERE {HERE}"
SET_PLAN = f"UPDATE epochs SET plan = $4 WHERE {HERE} AND number = $3"
SET_EDITED = """
UPDATE sessions SET edited = true, edits = edits + 1, version = version + 1, tokens = tokens - $4, plan = $5,
    open_chain = NULL, updated_at = $3
WHERE tenant_id = $1 AND id = $2
"""


class TurnUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The calls made for a turn, in tokens: as estimated before and after, and as the provider reported them.

    ``weight`` is what the session weighed at the last of them, prompt and completion of its last round (std::slop,
    "Token Accounting").
    """

    calls: int = 0
    tokens_before: int = 0
    tokens_after: int = 0
    input: int | None = None
    cached: int | None = None
    output: int | None = None
    weight: int | None = None


class TurnRow(msgspec.Struct, frozen=True, kw_only=True):
    """A turn: of its live messages, or of all of them where none is live."""

    turn: int
    status: Status
    messages: int
    first_seq: int
    last_seq: int
    tokens: int
    created_at: datetime
    updated_at: datetime
    usage: TurnUsage
    terse: tuple[str, ...]


# The status of a turn is the first of these that one of its messages has.
PRECEDENCE: tuple[Status, ...] = ("live", "dropped", "undone", "superseded", "removed")


async def live_seqs(connection: Connection, tenant: str, session_id: str, first: int, last: int) -> list[int]:
    """Return the live messages of the turns ``first`` to ``last``, in order."""
    turns = await turn_rows.span(connection, tenant, session_id, first, last)
    found = await connection.fetch(LIVE_SEQS, tenant, session_id, *turns)
    return sorted(record["seq"] for record in found)


async def of_messages(connection: Connection, tenant: str, session_id: str, seqs: Sequence[int]) -> dict[int, int]:
    """Sequence number -> turn, of those of ``seqs`` that are live messages which the client knows of."""
    records = await connection.fetch(OF_MESSAGES, tenant, session_id, list(seqs))
    return {record["seq"]: record["turn"] for record in records}


async def ends(
    connection: Connection, tenant: str, session_id: str, numbers: Sequence[int]
) -> dict[int, tuple[int, int]]:
    """Turn -> the sequence numbers of its first and last live message that both client and model know of."""
    turns = await turn_rows.spans(connection, tenant, session_id, numbers)
    records = await connection.fetch(ENDS, tenant, session_id, *turns)
    return {record["turn"]: (record["first_seq"], record["last_seq"]) for record in records}


async def live_turns(connection: Connection, tenant: str, session_id: str, first: int, last: int) -> list[int]:
    """Return which of the turns ``first`` to ``last`` have live messages."""
    turns = await turn_rows.span(connection, tenant, session_id, first, last)
    return [record["turn"] for record in await connection.fetch(LIVE_TURNS, tenant, session_id, *turns)]


async def first_live_turns(
    connection: Connection, tenant: str, session_id: str, *, since: int, limit: int
) -> list[int]:
    """Return the first turns with live messages from the turn ``since`` on, in order."""
    newest = await connection.fetchval(NEWEST_TURN, tenant, session_id) or 0
    found: list[int] = []
    width = limit
    while len(found) < limit and since <= newest:
        found += sorted(await live_turns(connection, tenant, session_id, since, since + width - 1))
        since, width = since + width, 2 * width
    return found[:limit]


async def between(connection: Connection, tenant: str, session_id: str, first: int, last: int) -> list[TurnRow]:
    """Return the turns ``first`` to ``last``, in order, removed ones left out."""
    turns = await turn_rows.span(connection, tenant, session_id, first, last)
    arguments = (tenant, session_id, *turns[:2])
    usage = {r["turn"]: _usage(dict(r)) for r in await connection.fetch(USAGE, *arguments)}
    terse: dict[int, list[str]] = {}
    records = await connection.fetch(TERSE, *arguments)
    lines = [((r["turn"], r["seq"], r["number"]), r["text"].decode("utf-8", "replace")) for r in records]
    lines += [(cursor, entry.text) for cursor, entry in await packed_log.between(connection, *arguments)]
    for (turn, _, _), text in packed_log.merge(lines):
        terse.setdefault(turn, []).append(text)
    best: dict[int, dict[str, Any]] = {}
    for record in await connection.fetch(GROUPS, tenant, session_id, *turns):
        row = dict(record)
        known = best.get(row["turn"])
        if known is None or _rank(row["status"]) < _rank(known["status"]):
            best[row["turn"]] = row
    return [
        TurnRow(**row, usage=usage.get(turn, TurnUsage()), terse=tuple(terse.get(turn, ())))
        for turn, row in sorted(best.items())
        if row["status"] != "removed"
    ]


def _rank(status: object) -> int:
    return PRECEDENCE.index(status)


def _usage(row: Mapping[str, Any]) -> TurnUsage:
    return TurnUsage(**{name: value for name, value in row.items() if name != "turn"})


async def lock(connection: Connection, tenant: str, session_id: str) -> Session | None:
    """Return the session, locked until the transaction ends."""
    record = await connection.fetchrow(LOCK, tenant, session_id)
    return None if record is None else session_from(record)


async def hide(
    connection: Connection, tenant: str, session: Session, turn: int, status: HiddenStatus, now: datetime
) -> list[tuple[Run, ...]] | None:
    """Hide a turn's live messages from every context; None when it has none. The session must be locked.

    Their memory entries are deleted. Return the ranges of these, to be summarised anew.
    """
    rows = await _rows_of(connection, tenant, session.id, turn)
    live = [row["seq"] for row in rows if row["status"] == "live"]
    if not live:
        return None
    hidden = [row["seq"] for row in rows if row["status"] == "dropped" and not row["model_visible"]]
    await connection.execute(HIDE, tenant, session.id, [*live, *hidden], status)
    await states.forget_rebuilt(connection, tenant, session.id, min(live))
    before_cut = sum(row["tokens"] for row in rows if row["status"] == "live" and row["seq"] < session.cut)
    plan = _without(session.plan, live, before_cut) if session.plan else None
    await set_edited(connection, tenant, session, plan, 0, now)
    return await memory.forget_range(connection, tenant, session.id, min(live), max(live))


async def remove(
    connection: Connection, tenant: str, session: Session, turn: int, now: datetime
) -> list[tuple[Run, ...]] | None:
    """Empty a turn's messages for good, and whatever was made from them; None when it has none that are not yet.

    Their rows stay, so that numbers have no gaps and a client that goes on sending them is understood. Return the
    ranges of the deleted memory entries, to be summarised anew.
    """
    rows = await _rows_of(connection, tenant, session.id, turn)
    if all(row["status"] == "removed" for row in rows):
        return None
    seqs = [row["seq"] for row in rows]
    await connection.execute(REMOVE, tenant, session.id, seqs)
    await connection.execute(FORGET_TERSE, tenant, session.id, turn)
    await packed_log.forget(connection, tenant, session.id, turn=turn)
    before_cut = sum(row["tokens"] for row in rows if row["status"] == "live" and row["seq"] < session.cut)
    return await _forget_quotes(
        connection, tenant, session, seqs, sum(row["tokens"] for row in rows), before_cut=before_cut, now=now
    )


async def _rows_of(connection: Connection, tenant: str, session_id: str, turn: int) -> list[Record]:
    turns = await turn_rows.span(connection, tenant, session_id, turn, turn)
    return await connection.fetch(OF_TURN, tenant, session_id, *turns)


async def replace_content(
    connection: Connection, tenant: str, session: Session, message: StoredMessage, *, tokens: int, now: datetime
) -> list[tuple[Run, ...]]:
    """Replace the stored bytes of ``message``, and delete its terse line and all memory that quotes it.

    ``tokens``: how many more tokens the old bytes had. The session must be locked.

    The message keeps its digest, so that a client that goes on sending the old content is recognised. Returns the
    ranges of messages that the memory must cover again.
    """
    values = (message.raw, message.model_raw, message.tokens)
    await connection.execute(REPLACE, tenant, session.id, message.seq, *values)
    await connection.execute(FORGET_TERSE_OF, tenant, session.id, message.seq)
    await packed_log.forget(connection, tenant, session.id, seq=message.seq)
    before_cut = tokens if message.status == "live" and message.seq < session.cut else 0
    return await _forget_quotes(connection, tenant, session, [message.seq], tokens, before_cut=before_cut, now=now)


async def _forget_quotes(
    connection: Connection,
    tenant: str,
    session: Session,
    seqs: Sequence[int],
    tokens: int,
    *,
    before_cut: int,
    now: datetime,
) -> list[tuple[Run, ...]]:
    """Delete what was made of these messages. ``tokens`` of them are stored no more, ``before_cut`` of these were cut.

    Returns the ranges that the memory spoke of.
    """
    await states.forget(connection, tenant, session.id, seqs)
    await states.forget_rebuilt(connection, tenant, session.id, min(seqs))
    await artifacts.forget(connection, tenant, session.id, seqs)
    await sent_contexts.forget(connection, tenant, session.id, seqs)
    await search.forget_pages(connection, tenant, session.id, seqs)
    await summaries.forget(connection, tenant, session.id, min(seqs), max(seqs))
    runs = await memory.forget_range(connection, tenant, session.id, min(seqs), max(seqs))
    for record in await connection.fetch(FORGET_PLANS, tenant, session.id):
        plan = _forgetting(read_epoch(record["plan"]), seqs, 0)
        await connection.execute(SET_PLAN, tenant, session.id, record["number"], write_epoch(plan))
    await shadows.forget(connection, tenant, session.id, lambda epoch: _forgetting(epoch, seqs, 0), now)
    current = _forgetting(session.plan, seqs, before_cut) if session.plan else None
    await set_edited(connection, tenant, session, current, tokens, now)
    return runs


def _without(plan: Epoch, seqs: Sequence[int], tokens: int) -> Epoch:
    """Return a plan without these messages. ``tokens`` of them had been cut."""
    return structs.replace(plan.without_messages(seqs), older_tokens=max(0, plan.older_tokens - tokens))


def _forgetting(plan: Epoch, seqs: Sequence[int], tokens: int) -> Epoch:
    """Return the epoch without text that Tersely wrote, since it may quote the messages, and without checksums of their
    lines.
    """
    # A block of an unknown message may be one of these; a client that still sends it brings it back.
    injected = tuple(block for block in plan.injected if block.seq and block.seq not in seqs)
    return structs.replace(
        _without(plan, seqs, tokens).marked_for_rebuild(), is_stale=True, injected=injected, repeats=None
    )


async def set_edited(
    connection: Connection, tenant: str, session: Session, plan: Epoch | None, tokens: int, now: datetime
) -> None:
    """Note that the history was edited: the next context starts an epoch. ``tokens`` are no longer stored."""
    stored = None if plan is None else write_epoch(plan)
    await connection.execute(SET_EDITED, tenant, session.id, now, tokens, stored)
