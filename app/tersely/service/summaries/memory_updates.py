"""Write messages that leave contexts on request into the tenant's memory, and rewrite entries that change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import cast

from tersely.domain.errors import StoreUnavailable
from tersely.domain.history.runs import Run, subtract
from tersely.domain.messages import Dialect as DialectName
from tersely.service.summaries.jobs import Job
from tersely.service.summaries.summarizer import Summarizer
from tersely.store.db.connection import Connection, Database
from tersely.store.notes import daily_memory as memory
from tersely.store.notes import pending_memory, summaries
from tersely.store.notes.pending_memory import DueMemory, PendingMemory
from tersely.store.notes.summaries import NO_LIMIT, LastCall
from tersely.strategies.prefetch import MEMORY_UPDATE

# The maximum of messages in one entry, and of entries for one request; only the newest are written, since a session may
# have any length.
PIECE = 1_000
MOST = 32
# Seconds that a request to clear or hide waits for the memory; longer work continues in the background.
PATIENCE = 5.0
# Seconds between looks for entries that another process should have written, and how many are claimed at once.
RESUME_EVERY = timedelta(minutes=1)
RESUMED_AT_ONCE = 500
# How long an entry waits for a key. After that it is written without a model.
KEY_PATIENCE = timedelta(hours=1)

_log = logging.getLogger(__name__)


class MemoryUpdates:
    """Summarises messages of sessions into the memory, with the summarizer's model if there is one.

    Due entries are stored as pending first, so that another process writes them if this one dies.
    """

    def __init__(self, database: Database, summarizer: Summarizer, *, clock: Callable[[], datetime]) -> None:
        self._database = database
        self._summarizer = summarizer
        self._clock = clock

    async def enqueue(
        self, connection: Connection, tenant: str, session_id: str, entries: Iterable[Sequence[Run]], *, strategy: str
    ) -> None:
        """Store ``entries`` (runs of messages) as pending, in the caller's transaction; `write` comes after it."""
        last = await summaries.last_call(connection, tenant, session_id)
        pending = [_pending(runs, last, strategy=strategy) for runs in entries if runs]
        await pending_memory.add(connection, tenant, session_id, pending, self._clock())

    async def write(
        self,
        tenant: str,
        session_id: str,
        entries: Iterable[Sequence[Run]],
        *,
        strategy: str,
        call: LastCall | None = None,
        credentials: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Write the live messages of each of ``entries`` (runs of messages) into the memory, unless it covers them
        already. ``call`` names the model to ask (None: that of the session's last call), ``credentials`` are for its
        host.

        Each becomes one entry, or several above `PIECE` messages. Returns when that is done, or after the maximum wait.
        """
        runs_of_entries = [runs for runs in entries if runs]
        if not runs_of_entries:
            return
        async with self._database.transaction(tenant) as connection:
            if call is None:
                call = await summaries.last_call(connection, tenant, session_id)
            pending = [_pending(runs, call, strategy=strategy) for runs in runs_of_entries]
            pieces = await self._split(connection, tenant, session_id, pending)
        jobs = [_job(tenant, session_id, piece, tuple(credentials)) for piece in pieces]
        await self._summarizer.run_all(jobs, PATIENCE)

    async def _split(
        self, connection: Connection, tenant: str, session_id: str, entries: Iterable[PendingMemory]
    ) -> list[PendingMemory]:
        """Split ``entries`` into pieces of at most `PIECE` messages that the memory does not cover yet."""
        found: list[PendingMemory] = []
        given: list[tuple[int, int]] = []
        for entry in entries:
            given.append((entry.first_seq, entry.last_seq))
            covered = await memory.covered_runs(connection, tenant, session_id, entry.first_seq, entry.last_seq)
            uncovered = subtract(entry.runs, covered)
            pieces = await summaries.pieces(connection, tenant, session_id, uncovered, size=PIECE, limit=MOST)
            for start, end in pieces:
                runs = subtract(uncovered, ((0, start - 1), (end + 1, NO_LIMIT)))
                found.append(replace(entry, first_seq=runs[0][0], last_seq=runs[-1][1], runs=runs))
        found = sorted(found, key=lambda piece: piece.runs)[-MOST:]
        kept = {(piece.first_seq, piece.last_seq) for piece in found}
        for first, last in given:
            if (first, last) not in kept:
                await pending_memory.delete(connection, tenant, session_id, 0, first, last)
        await pending_memory.add(connection, tenant, session_id, found, self._clock())
        return found

    # Entries that other processes left pending

    async def keep_resuming(self) -> None:
        """Write what other processes left pending, at the start and then each minute, until cancelled."""
        while True:
            try:
                if count := await self.resume():
                    _log.info("memory entries updated: %d", count)
            except StoreUnavailable:
                _log.info("no memory entries updated: the database is away")
            await asyncio.sleep(RESUME_EVERY.total_seconds())

    async def resume(self) -> int:
        """Claim due entries and start jobs for them; return their number. Raises `StoreUnavailable`.

        Without a key of the service's own, the key of the session's newest call pays for an entry. An entry whose
        session made no call through this process yet waits `KEY_PATIENCE` for one, here or elsewhere.
        """
        now = self._clock()
        found = await pending_memory.due(self._database, now, limit=RESUMED_AT_ONCE)
        ready = [each for each in found if now - each.due_at > KEY_PATIENCE or not self._lacks_key(each)]
        return sum([await self._take_over(each, now) for each in ready])

    def _lacks_key(self, each: DueMemory) -> bool:
        return self._summarizer.lacks_key(self._resumed(each, each.entry))

    def _resumed(self, each: DueMemory, entry: PendingMemory) -> Job:
        keys = self._summarizer.caller_keys.get(each.tenant, each.session_id, host=entry.host, dialect=entry.dialect)
        return _job(each.tenant, each.session_id, entry, keys)

    async def _take_over(self, each: DueMemory, now: datetime) -> bool:
        async with self._database.transaction(each.tenant) as connection:
            if not await pending_memory.take_over(connection, each, now):
                return False
            pieces = [each.entry]
            if not each.entry.epoch:
                pieces = await self._split(connection, each.tenant, each.session_id, pieces)
        for piece in pieces:
            self._summarizer.submit(self._resumed(each, piece))
        return True


def _pending(runs: Sequence[Run], call: LastCall, *, strategy: str) -> PendingMemory:
    return PendingMemory(
        first_seq=runs[0][0],
        last_seq=runs[-1][1],
        runs=tuple(runs),
        strategy=strategy,
        dialect=call.dialect or "openai_chat",
        model=call.model,
        host=call.host,
    )


def _job(tenant: str, session_id: str, entry: PendingMemory, credentials: tuple[tuple[str, str], ...] = ()) -> Job:
    return Job(
        tenant=tenant,
        session_id=session_id,
        purpose=MEMORY_UPDATE,
        first_seq=entry.first_seq,
        last_seq=entry.last_seq,
        runs=entry.runs,
        epoch=entry.epoch or None,
        strategy=entry.strategy,
        dialect=cast(DialectName, entry.dialect),
        model=entry.model,
        host=entry.host,
        credentials=credentials,
    )
