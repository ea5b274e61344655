"""Find older turns that are relevant for the current task, for strategies that show them (Fifth, "Retrieval")."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace

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

# How many messages are ranked, and how many turns are read.
MESSAGES, TURNS = 24, 8
# Seconds that a request waits for retrieval. The first search of a long session takes longer.
PATIENCE = 1.0


class Retriever:
    """Finds relevant turns. It never raises: after an error or a timeout it finds nothing."""

    def __init__(self, database: Database, searcher: Searcher) -> None:
        self._database = database
        self._searcher = searcher

    async def with_past(
        self,
        tenant: str,
        match: SessionMatch,
        history: History,
        strategy: Strategy,
        incoming: IncomingHistory,
        dialect: Dialect,
        restore: Restore,
    ) -> History:
        """Return ``history`` with turns from before its tail that match its running turn, where an epoch starts."""
        if not isinstance(strategy, Tiered) or history.epoch_start is None or match.session is None:
            return history
        loaded = group_turns((*history.snapshot.kept, *history.snapshot.entries))
        task = "\n".join(entry.message.text for entry in loaded[-1].opening) if loaded else ""
        if not task or not history.snapshot.older_tokens:
            return history
        try:
            numbers = await asyncio.wait_for(self._related(tenant, match, loaded, task), PATIENCE)
            async with self._database.reading(tenant) as connection:
                older = await self._read(connection, tenant, match, incoming, dialect, restore, numbers)
        except (StoreUnavailable, TimeoutError):
            return history
        return replace(history, epoch_inputs=replace(history.epoch_inputs, past_turns=_weigh(older, loaded[:-1], task)))

    async def _related(self, tenant: str, match: SessionMatch, loaded: Sequence[Turn], task: str) -> list[int]:
        """Return the numbers of the best matching turns that are not loaded, best first."""
        assert match.session is not None
        seqs = await self._searcher.rank(tenant, match.session, task, limit=MESSAGES)
        async with self._database.reading(tenant) as connection:
            by_seq = await turns.of_messages(connection, tenant, match.session.id, seqs)
        shown = {turn.number for turn in loaded}
        numbers = dict.fromkeys(by_seq[seq] for seq in seqs if seq in by_seq)
        return [number for number in numbers if number not in shown][:TURNS]

    async def _read(
        self,
        connection: Connection,
        tenant: str,
        match: SessionMatch,
        incoming: IncomingHistory,
        dialect: Dialect,
        restore: Restore,
        numbers: Sequence[int],
    ) -> list[Turn]:
        assert match.session is not None
        entries: list[Entry] = []
        for number in sorted(numbers):
            seqs = await turns.live_seqs(connection, tenant, match.session.id, number, number)
            whole = await entries_of(connection, tenant, match, incoming, dialect, restore, seqs)
            # A turn that the request's history does not contain completely is skipped.
            entries += whole if len(whole) == len(seqs) else ()
        return list(group_turns(entries))


def _weigh(older: Sequence[Turn], loaded: Sequence[Turn], task: str) -> tuple[PastTurn, ...]:
    """Return ``older`` with their relevance, computed among all available turns."""
    relevance = {ranked.turn.number: ranked.relevance for ranked in rank_turns([*older, *loaded], task)}
    past = [
        PastTurn(turn=turn.number, entries=turn.entries, relevance=relevance.get(turn.number, 0.0)) for turn in older
    ]
    return tuple(sorted(past, key=lambda each: -each.relevance))
