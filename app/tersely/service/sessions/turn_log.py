"""The terse log as people read it: the stored entries, and a line for each other turn that has ended.

A line without a model is stored when an epoch cuts its turn. Until then it is made from the turn's messages whenever
somebody reads the log: calls write nothing for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import groupby

from tersely.domain.history.history import TerseEntry
from tersely.service.context.entries import stored_entries
from tersely.service.sessions.messages import dialect_of
from tersely.store.commit import turns
from tersely.store.db.connection import Connection
from tersely.store.history import messages, terse
from tersely.store.history.messages import StoredMessage
from tersely.store.history.terse import LogCursor
from tersely.strategies.summaries.activity_log import derive_terse

# Behind all entries of a turn.
_AT_END = 10**18 - 1


async def page(
    connection: Connection,
    tenant: str,
    session_id: str,
    *,
    after: LogCursor,
    limit: int,
    last_turn: int,
    derives: bool,
) -> tuple[list[TerseEntry], LogCursor | None]:
    """Return entries after a cursor, and the next cursor; None at the end of the log.

    ``last_turn`` is the session's. ``derives``: also turns without an entry get a line.
    """
    while True:
        end = max(after[0], min(after[0] + limit, last_turn))
        found = await terse.log_page(connection, tenant, session_id, after=after, limit=limit + 1, last_turn=end)
        if derives:
            known = {entry.turn for _, entry in found}
            missing = [turn for turn in range(after[0] + 1, end + 1) if turn not in known]
            lines = await derived(connection, tenant, session_id, missing)
            found += [((entry.turn, entry.seq, 0), entry) for entry in lines]
            found.sort(key=lambda each: each[0])
        if len(found) > limit:
            return [entry for _, entry in found[:limit]], found[limit - 1][0]
        following = (end, _AT_END, 0) if end < last_turn else None
        if found or following is None:
            return [entry for _, entry in found], following
        after = following


async def derived(connection: Connection, tenant: str, session_id: str, numbers: Sequence[int]) -> list[TerseEntry]:
    """Return a line for each of these turns that has ended: whose last message is a reply that calls no tool."""
    if not numbers:
        return []
    wanted = set(numbers)
    seqs = await turns.live_seqs(connection, tenant, session_id, min(wanted), max(wanted))
    stored = [each for each in await messages.content(connection, tenant, session_id, seqs) if each.turn in wanted]
    return await asyncio.to_thread(_derive, stored)


def _derive(stored: Sequence[StoredMessage]) -> list[TerseEntry]:
    found: list[TerseEntry] = []
    for _, group in groupby(sorted(stored, key=lambda each: (each.turn, each.position, each.seq)), lambda e: e.turn):
        of_turn = list(group)
        entries = stored_entries(of_turn, dialect_of(of_turn[-1].dialect))
        if entries and entries[-1].message.role == "assistant" and not entries[-1].message.calls:
            found.append(derive_terse(entries))
    return found
