"""The summarizer: it writes summaries in the background, one replica at a time per session, with or without a model.

A job names a range of a session's messages and the purpose of its summary. The holder of the session's lease runs it;
see `tersely.service.summaries.writing`. Results and failed attempts are stored with their basis, so no work is
repeated. Jobs exist in this process alone. If it dies, the session's next request asks for them again; entries of the
daily memory are stored with the cut itself (`tersely.store.notes.pending_memory`). The leases of a dead process expire.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Literal

from tersely.domain.errors import NotFound, StoreUnavailable
from tersely.domain.history.history import Summary
from tersely.service.common.metrics import Metrics
from tersely.service.summaries.caller_keys import CallerKeys
from tersely.service.summaries.jobs import Job, SummaryInput, load_source
from tersely.service.summaries.models import Models
from tersely.service.summaries.writing import Charge, SummaryWriter, WrittenSummary, charge_nobody
from tersely.store.db import leases
from tersely.store.db.connection import Connection, Database
from tersely.store.history import sessions
from tersely.store.notes import daily_memory as memory
from tersely.store.notes import pending_memory, summaries
from tersely.store.notes.daily_memory import MemoryEntry
from tersely.store.notes.summaries import NewSummary
from tersely.store.ops import events
from tersely.strategies.prefetch import MEMORY_UPDATE
from tersely.strategies.summaries.prompts import Purpose

_log = logging.getLogger(__name__)

JobResult = Literal["model", "extractive", "unchanged", "done", "empty", "held", "stale", "failed"]
"""How a job ended: written by a model, or without one; nothing shorter was found; done or tried before; nothing to
summarise; another replica is at it; the messages or the lease changed meanwhile; given up.
"""

# A lease outlasts the longest call of a model by so much.
LEASE_MARGIN = timedelta(seconds=30)
# How long `run_now` waits for whoever is at work on the session, and how often it looks, in seconds.
PATIENCE = 10.0
LOOK_EVERY = 0.2
STALE_TRIES = 3
# A memory entry that found another replica at work on its session is tried again after so many seconds, so many times.
HELD_WAIT = 1.0
HELD_TRIES = 60
# Seconds for reading a long range, and seconds in which a cancelled job may store its end.
READ_LIMIT = 15.0
LAST_WORDS = 1.0


class LeaseLost(Exception):
    """Another replica took over the session's lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """The result of a job: the tokens of the messages, and the tokens of the summary that replaces them (else the
    same).

    ``error`` says why no model wrote it, if one should have; a fixed text, without content.
    """

    result: JobResult
    summary: Summary | None = None
    tokens_before: int = 0
    tokens_after: int = 0
    error: str = ""


class Summarizer:
    """Runs jobs: ``workers`` at a time, with at most ``room`` waiting or under way."""

    def __init__(
        self,
        database: Database,
        models: Models,
        metrics: Metrics,
        *,
        clock: Callable[[], datetime],
        monotonic: Callable[[], float],
        name: str,
        workers: int = 2,
        room: int = 256,
        room_each: int = 64,
        charge: Charge = charge_nobody,
    ) -> None:
        """``name`` identifies this process. ``room_each``: the maximum of jobs of one session. ``charge`` counts the
        tokens of a call for a tenant's limits.
        """
        self.config = models.config
        self._database = database
        self._summary_writer = SummaryWriter(database, models, metrics, clock=clock, charge=charge)
        self._metrics = metrics
        self._clock = clock
        self._monotonic = monotonic
        self._name = name
        self._workers = workers
        self._room = room
        self._room_each = room_each
        self.caller_keys = CallerKeys()
        self._lease = timedelta(seconds=models.config.timeout) + LEASE_MARGIN
        self._leases = 0
        self._jobs = 0
        self._waiting: dict[tuple[str, str], dict[tuple[Purpose, int, int], Job]] = {}
        self._held: Counter[tuple[tuple[str, str], tuple[Purpose, int, int]]] = Counter()
        self._waiting_sessions: deque[tuple[str, str]] = deque()
        self._wake = asyncio.Event()
        self._finished = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Start to work in the background."""
        self._tasks = [asyncio.get_running_loop().create_task(self._work()) for _ in range(self._workers)]

    async def close(self) -> None:
        """Stop: what is under way is given up, its leases are given back."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        self._waiting.clear()
        self._waiting_sessions.clear()
        self._held.clear()
        self._jobs = 0

    def submit(self, job: Job) -> bool:
        """Have ``job`` done soon; never waits. False when it is under way already, or when there is no room."""
        waiting = self._waiting.get(job.session_key)
        if self._jobs >= self._room or (waiting and (job.key in waiting or len(waiting) >= self._room_each)):
            return False
        if waiting is None:
            waiting = self._waiting[job.session_key] = {}
            self._waiting_sessions.append(job.session_key)
            self._wake.set()
        waiting[job.key] = job
        self._jobs += 1
        return True

    async def run_all(self, jobs: Sequence[Job], seconds: float) -> None:
        """Run ``jobs`` and wait for them at most ``seconds``. Unfinished jobs continue in the background."""
        left = sum(not self.submit(job) and job.key not in self._waiting.get(job.session_key, ()) for job in jobs)
        if left:
            _log.warning("%d summaries are not made: the queue is full", left)
        try:
            async with asyncio.timeout(seconds):
                while any(job.key in self._waiting.get(job.session_key, ()) for job in jobs):
                    self._finished.clear()
                    await self._finished.wait()
        except TimeoutError:
            return

    async def run_now(self, job: Job) -> Compaction:
        """Run ``job`` while the caller waits. Returns `held` when another job of the session takes too long.

        Raises `StoreUnavailable`, and `NotFound` for a missing session.
        """
        end = self._monotonic() + PATIENCE
        while True:
            done = await self._run(job)
            if done.result == "done":
                return await self._count(job, done)
            if done.result != "held" or self._monotonic() >= end:
                return done
            await asyncio.sleep(LOOK_EVERY)

    async def _count(self, job: Job, done: Compaction) -> Compaction:
        """Add the tokens that a finished job saves."""
        async with self._database.reading(job.tenant, limit=READ_LIMIT) as connection:
            before = await summaries.covered_tokens(connection, *job.session_key, job.first_seq, job.last_seq)
        after = done.summary.tokens if done.summary else before
        return replace(done, tokens_before=before, tokens_after=after)

    @property
    def pending(self) -> int:
        """Return how many jobs are waiting or under way in the background."""
        return self._jobs

    def has_model(self, job: Job) -> bool:
        """Return whether there is a model that can be asked to write the summary of ``job``."""
        return self._summary_writer.has_model(job)

    def model_of(self, job: Job) -> str:
        """Return the name of the model that would write the summary of ``job``; empty if it would be an extract."""
        return self._summary_writer.model_of(job)

    def lacks_key(self, job: Job) -> bool:
        """Return whether a model is configured for ``job`` that nobody's key pays for, or that cannot be asked."""
        return bool(self._summary_writer.reason_for_none(job))

    # In the background

    async def _work(self) -> None:
        while True:
            while not self._waiting_sessions:
                self._wake.clear()
                await self._wake.wait()
            session_key = self._waiting_sessions.popleft()
            waiting = self._waiting[session_key]
            # One worker runs all jobs of a session: others would only wait for its lease.
            while waiting:
                key, job = next(iter(waiting.items()))
                await self._run_quietly(job)
                del waiting[key]
                self._jobs -= 1
                self._finished.set()
            del self._waiting[session_key]

    async def _run_quietly(self, job: Job) -> None:
        try:
            done = await self._run(job)
            if job.purpose == MEMORY_UPDATE:
                self._try_again_if_held(job, done)
        except (StoreUnavailable, NotFound) as error:
            _log.info("a summary was not made: %s", type(error).__name__)
        except Exception as error:  # noqa: BLE001 a worker goes on; a message may quote content, so only its class is told
            _log.error("a summary was not made: %s", type(error).__name__)

    def _try_again_if_held(self, job: Job, done: Compaction) -> None:
        """Submit a memory entry again if another replica was at work on its session."""
        name = (job.session_key, job.key)
        if done.result != "held" or self._held[name] >= HELD_TRIES:
            del self._held[name]
            return
        self._held[name] += 1
        asyncio.get_running_loop().call_later(HELD_WAIT, self._submit_if_open, job)

    def _submit_if_open(self, job: Job) -> None:
        if self._tasks and not self.submit(job):
            del self._held[job.session_key, job.key]

    # One job

    async def _run(self, job: Job) -> Compaction:
        started = self._monotonic()
        self._leases += 1
        holder = f"{self._name}-{self._leases}"
        done = Compaction(result="failed")
        try:
            if await self._hold(job, holder):
                try:
                    done = await self._under_lease(job, holder)
                finally:
                    await self._in_the_end(leases.give_back, job, holder)
            else:
                done = Compaction(result="held")
            return done
        finally:
            if done.result not in ("done", "held") and job.purpose != "state":
                self._metrics.compactions.labels(job.strategy, done.result).inc()
                self._metrics.compaction_seconds.observe(self._monotonic() - started)

    async def _hold(self, job: Job, holder: str) -> bool:
        """Take or prolong the session's lease."""
        now = self._clock()
        async with self._database.transaction(job.tenant) as connection:
            if await leases.take(connection, *job.session_key, holder, until=now + self._lease, now=now):
                return True
            if await sessions.get(connection, *job.session_key) is None:
                raise NotFound("there is no such session")
        return False

    async def _under_lease(self, job: Job, holder: str) -> Compaction:
        done = Compaction(result="stale")
        # Messages that leave a context are summarised once; if they change meanwhile, the newest version is used.
        for _ in range(STALE_TRIES if job.purpose == MEMORY_UPDATE else 1):
            source = await self._read(job)
            if isinstance(source, Compaction):
                return source
            done = await self._write(job, source, holder)
            if done.result != "stale":
                break
        return done

    async def _write(self, job: Job, source: SummaryInput, holder: str) -> Compaction:
        async def prolong() -> None:
            if not await self._hold(job, holder):
                raise LeaseLost

        try:
            written = await self._summary_writer.write(job, source, prolong=prolong)
            return await self._store(job, source, written, holder)
        except BaseException as error:
            result: JobResult = "stale" if isinstance(error, LeaseLost) else "failed"
            end = self._end(job, source, 0, result, type(error).__name__)
            await self._in_the_end(events.add, job, "compaction_end", end, self._clock())
            if isinstance(error, LeaseLost):
                return Compaction(
                    result=result,
                    tokens_before=source.tokens,
                    tokens_after=source.tokens,
                    error="another replica took over",
                )
            raise

    async def _read(self, job: Job) -> SummaryInput | Compaction:
        """Return the source of the summary, or why there will be none."""
        async with self._database.transaction(job.tenant, limit=READ_LIMIT) as connection:
            source = await load_source(connection, job, has_model=self.has_model(job))
            if source is None:
                found = await summaries.newest(connection, *job.session_key, [job.purpose], up_to=job.last_seq)
                same = [each for each in found if (each.first_seq, each.last_seq) == (job.first_seq, job.last_seq)]
                return Compaction(result="done", summary=same[0] if same else None)
            if source.count == 0:
                if job.purpose == MEMORY_UPDATE:
                    await _delete_pending(connection, job)
                return Compaction(result="empty")
            start = {"purpose": job.purpose, "strategy": job.strategy, "first_seq": source.first_seq,
                     "last_seq": source.last_seq, "tokens_before": source.tokens, "messages": source.count}  # fmt: skip
            await events.add(connection, *job.session_key, "compaction_start", start, self._clock())
        return source

    async def _store(self, job: Job, source: SummaryInput, written: WrittenSummary, holder: str) -> Compaction:
        now = self._clock()
        new = NewSummary(
            purpose=job.purpose,
            first_seq=source.first_seq,
            last_seq=source.last_seq,
            basis=source.basis,
            text=written.text,
            tokens=written.tokens,
            source=written.source,
            model=written.model,
        )
        async with self._database.transaction(job.tenant) as connection:
            is_added = await summaries.add(connection, *job.session_key, new, holder=holder, now=now)
            result: JobResult = "stale"
            if is_added:
                result = "unchanged" if written.text is None else written.source
            if is_added and job.purpose == MEMORY_UPDATE:
                if written.text is not None:
                    await memory.add(connection, job.tenant, _remembered(job, source, written.text, now))
                await _delete_pending(connection, job)
            end = self._end(job, source, written.tokens, result, written.error)
            await events.add(connection, *job.session_key, "compaction_end", end, now)
        summary = None
        if is_added and written.text is not None:
            summary = Summary(
                first_seq=source.first_seq,
                last_seq=source.last_seq,
                purpose=job.purpose,
                text=written.text,
                tokens=written.tokens,
                source=written.source,
                created_at=now,
            )
        return Compaction(
            result=result,
            summary=summary,
            tokens_before=source.tokens,
            tokens_after=summary.tokens if summary else source.tokens,
            error=written.error,
        )

    def _end(self, job: Job, source: SummaryInput, after: int, result: JobResult, error: str) -> Mapping[str, object]:
        """Return the event of a finished compaction."""
        record: dict[str, object] = {
            "purpose": job.purpose,
            "strategy": job.strategy,
            "first_seq": source.first_seq,
            "last_seq": source.last_seq,
            "result": result,
            "tokens_before": source.tokens,
            "tokens_after": after or source.tokens,
            "messages": source.count,
        }
        return {**record, "error": error} if error else record

    async def _in_the_end(self, say: Callable[..., Awaitable[object]], job: Job, *what: object) -> None:
        """Write a last record to the store, also while being stopped. An unavailable store is not waited for."""

        async def notify() -> None:
            try:
                async with self._database.transaction(job.tenant, limit=LAST_WORDS) as connection:
                    await say(connection, *job.session_key, *what)
            except StoreUnavailable:
                pass
            except Exception as error:  # noqa: BLE001 it must not hide why the job ended; the session may be deleted
                _log.info("the end of a summary was not stored: %s", type(error).__name__)

        await asyncio.shield(asyncio.get_running_loop().create_task(notify()))


async def _delete_pending(connection: Connection, job: Job) -> None:
    """Delete the pending record of a memory entry."""
    await pending_memory.delete(connection, *job.session_key, job.epoch or 0, job.first_seq, job.last_seq)


def _remembered(job: Job, source: SummaryInput, text: str, now: datetime) -> MemoryEntry:
    """Return the entry in the memory of the day on which the newest of the messages was written."""
    return MemoryEntry(
        session_id=job.session_id,
        first_seq=source.runs[0][0],
        last_seq=source.runs[-1][1],
        created_at=source.newest_at or now,
        text=text,
        runs=source.runs,
    )
