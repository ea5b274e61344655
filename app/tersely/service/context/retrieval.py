"""Older turns that bear on the current task, for strategies that bring such back (Fifth, "Retrieval")."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from tersely.dialects.dialect import Dialect
from tersely.domain.errors import StoreUnavailable
from tersely.domain.history.history import Entry, PastTurn
from tersely.domain.history.turns import Turn, group_turns
from tersely.domain.search.relevance import rank_turns
from tersely.service.context.entries import Restore, entries_of
from tersely.service.context.history import History
from tersely.service.recognition.incoming_history import IncomingHistory
from tersely.service.recognition.session_lookup import SessionMatch
from tersely.service.search.session_search import Searcher
from tersely.store.commit import turns
from tersely.store.db.connection import Connection, Database
from tersely.strategies.presets import Strategy, Tiered

# Messages that are looked at for their turns, and turns that are read whole.
MESSAGES, TURNS = 24, 8
# Seconds. A request waits no longer for what it can do without: the first look at a long session takes a while.
PATIENCE = 1.0


class Retriever:
    """Finds the turns; never fails, at worst it finds nothing."""

    def __init__(self, database: Database, searcher: Searcher) -> None:
        self._database = database
        self._searcher = searcher

    async def with_past(
        self,
        tenant: str,
        found: SessionMatch,
        history: History,
        strategy: Strategy,
        arrival: IncomingHistory,
        dialect: Dialect,
        restore: Restore,
    ) -> History:
        """``history`` with the turns before its tail that its running turn speaks of, where an epoch starts."""
        if not isinstance(strategy, Tiered) or history.advance is None or found.session is None:
            return history
        loaded = group_turns((*history.snapshot.kept, *history.snapshot.entries))
        task = "\n".join(entry.message.text for entry in loaded[-1].opening) if loaded else ""
        if not task or not history.snapshot.older_tokens:
            return history
        try:
            numbers = await asyncio.wait_for(self._related(tenant, found, loaded, task), PATIENCE)
            async with self._database.reading(tenant) as connection:
                older = await self._read(connection, tenant, found, arrival, dialect, restore, numbers)
        except (StoreUnavailable, TimeoutError):
            return history
        return replace(history, material=replace(history.material, past_turns=_weigh(older, loaded[:-1], task)))

    async def _related(self, tenant: str, found: SessionMatch, loaded: Sequence[Turn], task: str) -> list[int]:
        """The turns of the best matches that are not loaded anyway, the best first."""
        assert found.session is not None
        seqs = await self._searcher.rank(tenant, found.session, task, limit=MESSAGES)
        async with self._database.reading(tenant) as connection:
            by_seq = await turns.of_messages(connection, tenant, found.session.id, seqs)
        shown = {turn.number for turn in loaded}
        numbers = dict.fromkeys(by_seq[seq] for seq in seqs if seq in by_seq)
        return [number for number in numbers if number not in shown][:TURNS]

    async def _read(
        self,
        connection: Connection,
        tenant: str,
        found: SessionMatch,
        arrival: IncomingHistory,
        dialect: Dialect,
        restore: Restore,
        numbers: Sequence[int],
    ) -> list[Turn]:
        assert found.session is not None
        entries: list[Entry] = []
        for number in sorted(numbers):
            seqs = await turns.live_seqs(connection, tenant, found.session.id, number, number)
            whole = await entries_of(connection, tenant, found, arrival, dialect, restore, seqs)
            # A turn that the request does not show whole is none that it speaks of.
            entries += whole if len(whole) == len(seqs) else ()
        return list(group_turns(entries))


def _weigh(older: Sequence[Turn], loaded: Sequence[Turn], task: str) -> tuple[PastTurn, ...]:
    """``older`` with their relevance, measured among all turns at hand."""
    relevance = {ranked.turn.number: ranked.relevance for ranked in rank_turns([*older, *loaded], task)}
    past = [
        PastTurn(turn=turn.number, entries=turn.entries, relevance=relevance.get(turn.number, 0.0)) for turn in older
    ]
    return tuple(sorted(past, key=lambda each: -each.relevance))
