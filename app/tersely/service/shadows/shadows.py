"""Judge calls in the background, one after the other: off the way of every call, and within bounds.

A job waits in a queue of bounded length and memory. What does not fit is dropped and counted. The work takes at most a
share of one core, whatever waits. Figures are stored with the state that they lead to, in one transaction, so that
several processes may judge calls of one session: each call is judged once, in order, as far as they are answered in
order.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeVar

from tersely.domain.history.history import EpochInputs
from tersely.service.common.metrics import Metrics
from tersely.service.context.context_configs import compact_setting
from tersely.service.context.epoch_inputs import load_epoch_inputs
from tersely.service.money.prices import Prices
from tersely.service.shadows.judging import judge
from tersely.service.shadows.planning import AnsweredCall, build_shadow, matched_with, prepare_context
from tersely.store.commit.records import CallReport
from tersely.store.db.connection import Database
from tersely.store.ops import shadows
from tersely.store.ops.shadows import ShadowState
from tersely.strategies.presets import strategy_name

_log = logging.getLogger(__name__)

T = TypeVar("T")

# ``dropped``: the queue was full; ``late``: a later call of the session was judged before,
# or its history was edited; ``failed``: no context fits,
# or the database is away.
ShadowResult = Literal["judged", "dropped", "late", "failed"]

MOST_JOBS = 256
MOST_BYTES = 64 * 1024 * 1024
SHARE = 0.25
"""The largest share of one core."""
PATIENCE = 3.0
"""Seconds that a job waits for earlier calls of its session, which another process may judge, since the last was."""
LOOK_EVERY = 0.05
TIMEOUT = 10.0
"""Seconds for one statement of a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowJob:
    """A call to be judged. ``load`` reads what that takes, in a thread; ``size``: bytes that waiting for it holds.

    ``strategy`` is the text of the configuration that is tried out. ``edits`` counts those of the history up to the
    call.
    """

    tenant: str
    session_id: str
    number: int
    edits: int
    strategy: str
    dialect: str
    report: CallReport
    started: datetime
    size: int
    load: Callable[[], AnsweredCall]


@dataclass(slots=True, kw_only=True)
class _QueuedJob:
    """A job in the queue. ``since`` is a monotonic time: when it was queued, or last saw an earlier call judged, which
    was ``seen``.
    """

    job: ShadowJob
    since: float
    seen: int = 0


class Shadows:
    """The background work of one process."""

    def __init__(
        self,
        database: Database,
        prices: Prices,
        metrics: Metrics,
        *,
        monotonic: Callable[[], float],
        clock: Callable[[], datetime],
        most_jobs: int = MOST_JOBS,
        most_bytes: int = MOST_BYTES,
        share: float = SHARE,
    ) -> None:
        self._database = database
        self._prices = prices
        self._metrics = metrics
        self._monotonic = monotonic
        self._clock = clock
        self._most_jobs = most_jobs
        self._most_bytes = most_bytes
        self._share = share
        self._waiting: deque[_QueuedJob] = deque()
        self._bytes = 0
        self._task: asyncio.Task[None] | None = None
        self._worked = 0.0

    def submit(self, job: ShadowJob) -> None:
        """Queue a job, or drop it where the queue is full. Never waits."""
        if len(self._waiting) >= self._most_jobs or self._bytes + job.size > self._most_bytes:
            self._count("dropped")
            return
        self._bytes += job.size
        self._waiting.append(_QueuedJob(job=job, since=self._monotonic()))
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._work_off())

    async def close(self) -> None:
        """Stop. What waits is not judged."""
        task, self._task = self._task, None
        self._waiting.clear()
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def _work_off(self) -> None:
        while self._waiting:
            waiting = self._waiting.popleft()
            self._worked = 0.0
            try:
                result = await self._judge(waiting)
            except Exception as error:  # noqa: BLE001 - nothing waits for the figures: the next call is judged
                result = "failed"
                _log.warning("a call was not judged for its shadow: %s", type(error).__name__)
            if result is None:
                self._waiting.append(waiting)
                await asyncio.sleep(LOOK_EVERY)
                continue
            self._bytes -= waiting.job.size
            self._count(result)
            del waiting
            await asyncio.sleep(self._worked * (1 / self._share - 1))

    def _count(self, result: ShadowResult) -> None:
        self._metrics.shadow_calls.labels(result).inc()

    async def _judge(self, waiting: _QueuedJob) -> ShadowResult | None:
        """Judge a call; None if an earlier one of its session comes first."""
        job = waiting.job
        session_key = job.tenant, job.session_id
        async with self._database.reading(job.tenant, limit=TIMEOUT) as connection:
            state = await shadows.get(connection, *session_key)
            last = state.last_call if state is not None else 0
            if job.number <= last:
                return "late"
            is_next = job.number == last + 1 or not self._is_patient(waiting, last)
            if not is_next and await shadows.waits_for_earlier(connection, *session_key, after=last, before=job.number):
                return None
        call = await self._in_thread(job.load)
        pending = await self._in_thread(lambda: prepare_context(call, state.epoch if state is not None else None))
        inputs = EpochInputs()
        if pending.epoch_start is not None and call.match.session is not None:
            match = matched_with(call.match, None)
            async with self._database.reading(job.tenant, limit=TIMEOUT) as connection:
                inputs = await load_epoch_inputs(connection, job.tenant, match, call.config.strategy)
        built = await self._in_thread(lambda: build_shadow(call, pending, inputs))
        strategy = compact_setting(job.strategy) or strategy_name(call.config.strategy)
        judged = await self._in_thread(
            lambda: judge(
                call,
                built,
                number=job.number,
                strategy=strategy,
                report=job.report,
                price=self._prices.of(job.report.model, job.dialect),
                before=state.sent if state is not None else b"",
                now=job.started,
            )
        )
        after = ShadowState(
            strategy=strategy,
            last_call=job.number,
            epoch=built.context.epoch,
            sent=judged.sent,
        )
        # No session changes, so no live session has to be checked again.
        async with self._database.group_commit(job.tenant) as connection:
            is_stored = await shadows.advance(
                connection, *session_key, after, judged.call, expected=last, edits=job.edits, now=self._clock()
            )
        return "judged" if is_stored else "late"

    def _is_patient(self, waiting: _QueuedJob, last: int) -> bool:
        if waiting.seen != last:
            waiting.seen, waiting.since = last, self._monotonic()
        return self._monotonic() - waiting.since < PATIENCE

    async def _in_thread(self, work: Callable[[], T]) -> T:
        began = self._monotonic()
        try:
            return await asyncio.to_thread(work)
        finally:
            self._worked += self._monotonic() - began
