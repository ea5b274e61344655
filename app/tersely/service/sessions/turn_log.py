"""The terse log as people read it: the stored entries, and a line for each other reply that ends a turn.

A line without a model is stored when an epoch cuts its turn. Until then it is made from the turn's messages whenever
somebody reads the log: calls write nothing for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from tersely.domain.history.history import Entry, TerseEntry
from tersely.service.context.entries import stored_entries
from tersely.service.sessions.messages import dialect_of
from tersely.store.commit import turns
from tersely.store.db.connection import Connection
from tersely.store.history import messages, terse
from tersely.store.history.messages import StoredMessage
from tersely.store.history.terse import LogCursor
from tersely.strategies.summaries.activity_log import derive_terse, ends_turn, first_sentence

# A reply without words is described by the tools that it and so many messages before it used.
MOST_STEPS = 200
# Replies may be large.
REPLIES_AT_ONCE = 50
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

    ``last_turn`` is the session's. ``derives``: also last replies without an entry get a line.
    """
    while True:
        end = max(after[0], min(after[0] + limit, last_turn))
        found = await terse.log_page(connection, tenant, session_id, after=after, limit=limit + 1, last_turn=end)
        if derives:
            lines = await derived(connection, tenant, session_id, range(max(1, after[0]), end + 1))
            placed = [((line.turn, line.seq, 0), line) for line in lines]
            found = sorted([*found, *(each for each in placed if each[0] > after)], key=lambda each: each[0])
        if len(found) > limit:
            return [entry for _, entry in found[:limit]], found[limit - 1][0]
        following = (end, _AT_END, 0) if end < last_turn else None
        if found or following is None:
            return [entry for _, entry in found], following
        after = following


async def derived(connection: Connection, tenant: str, session_id: str, numbers: Iterable[int]) -> list[TerseEntry]:
    """Return a line for each of these turns that ends with a reply which has none."""
    ends = await turns.ends(connection, tenant, session_id, list(numbers))
    told = await terse.told(connection, tenant, session_id, {turn: last for turn, (_, last) in ends.items()})
    missing = {last: first for first, last in ends.values() if last not in told}
    found: list[TerseEntry] = []
    lasts = sorted(missing)
    for start in range(0, len(lasts), REPLIES_AT_ONCE):
        for entry in await _entries(connection, tenant, session_id, lasts[start : start + REPLIES_AT_ONCE]):
            if not ends_turn(entry):
                continue
            entries = [entry]
            if not first_sentence(entry.message.text):
                first = max(missing[entry.seq], entry.seq - MOST_STEPS)
                of_turn = await _entries(connection, tenant, session_id, range(first, entry.seq + 1))
                entries = [each for each in of_turn if each.turn == entry.turn]
            found.append(derive_terse(entries))
    return found


async def _entries(connection: Connection, tenant: str, session_id: str, seqs: Iterable[int]) -> list[Entry]:
    stored = await messages.content(connection, tenant, session_id, list(seqs))
    return await asyncio.to_thread(_read, [each for each in stored if each.status == "live" and each.model_visible])


def _read(stored: Sequence[StoredMessage]) -> list[Entry]:
    return stored_entries(stored, dialect_of(stored[-1].dialect)) if stored else []
