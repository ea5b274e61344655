"""The terse log as people read it: the stored entries, and a line for each other reply that ends a turn.

A line without a model is stored when an epoch cuts its turn. Until then it is made from the reply whenever somebody
reads the log: calls write nothing for it. A reply without words gets its line at the cut alone, from the whole turn.
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
from tersely.store.history.packed_log import LogCursor
from tersely.store.history.turn_rows import LAST_TURN
from tersely.strategies.summaries.activity_log import derive_terse, ends_turn, first_sentence

# Replies may be large.
REPLIES_AT_ONCE = 50
# So many turns are looked at for a page at least: many may have no line.
LEAST_TURNS = 50
# The place of a line that is not stored among the entries of its message: behind those that an epoch may store of it.
_NOT_STORED = 2**31 - 1
# Behind all entries of a turn.
_AT_END = 10**18 - 1


async def page(
    connection: Connection, tenant: str, session_id: str, *, after: LogCursor, limit: int, derives: bool
) -> tuple[list[TerseEntry], LogCursor | None]:
    """Return entries after a cursor, and the next cursor; None at the end of the log.

    ``derives``: also last replies without an entry get a line.
    """
    while True:
        lines: list[TerseEntry] = []
        end = LAST_TURN
        if derives:
            most = max(limit, LEAST_TURNS)
            numbers = await turns.first_live_turns(connection, tenant, session_id, since=max(1, after[0]), limit=most)
            if len(numbers) == most:
                end = numbers[-1]
            lines = await derived(connection, tenant, session_id, numbers)
        found = await terse.log_page(connection, tenant, session_id, after=after, limit=limit + 1, last_turn=end)
        placed = [((line.turn, line.seq, _NOT_STORED), line) for line in lines]
        found = sorted([*found, *(each for each in placed if each[0] > after)], key=lambda each: each[0])
        if len(found) > limit:
            return [entry for _, entry in found[:limit]], found[limit - 1][0]
        following = (end, _AT_END, 0) if end < LAST_TURN else None
        if found or following is None:
            return [entry for _, entry in found], following
        after = following


async def derived(connection: Connection, tenant: str, session_id: str, numbers: Iterable[int]) -> list[TerseEntry]:
    """Return a line for each of these turns that ends with a reply which has words and no entry."""
    ends = await turns.ends(connection, tenant, session_id, list(numbers))
    lasts = {turn: last for turn, (_, last) in ends.items()}
    told = await terse.told(connection, tenant, session_id, lasts)
    missing = sorted(set(lasts.values()) - told)
    found: list[TerseEntry] = []
    for start in range(0, len(missing), REPLIES_AT_ONCE):
        stored = await messages.content(connection, tenant, session_id, missing[start : start + REPLIES_AT_ONCE])
        entries = await asyncio.to_thread(_read, [each for each in stored if each.status == "live"])
        found += [derive_terse([each]) for each in entries if ends_turn(each) and first_sentence(each.message.text)]
    return found


def _read(stored: Sequence[StoredMessage]) -> list[Entry]:
    """Read each message by itself: what it says does not depend on those beside it."""
    return [entry for each in stored for entry in stored_entries([each], dialect_of(each.dialect))]
