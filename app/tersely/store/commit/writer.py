"""Group commit: the writes of many requests in one durable transaction.

Writes of one session keep their order; a session's row is locked while its counters move, so that sequence
numbers are gapless whatever the number of replicas. A batch that fails is tried again write by write.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, overload

import asyncpg
import msgspec

from tersely.domain.errors import Conflict, NotFound, StoreUnavailable, TerselyError
from tersely.store.commit.batches import Results, write_all
from tersely.store.commit.records import (
    ReplyWrite,
    RequestOutcome,
    RequestWrite,
    Result,
    StoredReply,
    Write,
    request_of,
    session_id_of,
)
from tersely.store.commit.sizes import is_large
from tersely.store.commit.slots import SLOW_AFTER, Slots
from tersely.store.db.connection import Database, refusal
from tersely.store.history.tail_cache import TailCache
from tersely.store.search.pages import PAGE

MAX_BATCH = 128
# Seconds that a request's messages wait for other writes. Real replies take far longer; a quick one is written together
# with its request in one transaction.
LINGER = 0.002
# Under load a lane's transactions begin at least so far apart (seconds, for each other session with a write under way,
# and at most): a durable commit costs the database as much as the statements of three calls, so several share one. A
# session that is alone never waits.
SPACING = 0.00025
MAX_SPACING = 0.004
# How long (seconds) the request of a live call waits for its reply, so that most calls take one statement. After that
# it is written alone: a crash loses no question that is older.
HOLD = 2.0


# A tenant, and whether the lane is for large writes.
_Lane = tuple[str, bool]


class DeferredCall(Protocol):
    """A call whose request is submitted with its reply, or when that takes long."""

    @property
    def write(self) -> RequestWrite:
        """The request."""
        ...


class _Job(msgspec.Struct):
    write: Write
    done: asyncio.Future[Any]


class Writer:
    """Takes writes, commits them in groups. One transaction at a time per tenant, a few tenants at once; slow
    transactions, which may wait for locked rows, leave their slots to others.

    Large writes have a lane of their own, so that no other write waits for them; a session's writes stay in one
    lane.
    """

    def __init__(
        self,
        database: Database,
        *,
        tail_cache: TailCache | None = None,
        lanes: int = 4,
        linger: float = LINGER,
        on_full_pages: Callable[[str, str, int], None] | None = None,
    ) -> None:
        """``linger`` in seconds. ``tail_cache`` is updated by every write. ``on_full_pages`` gets tenant, session and
        the number of filled pages of messages.
        """
        self._database = database
        self._on_full_pages = on_full_pages
        self.tails = tail_cache if tail_cache is not None else TailCache()
        self._linger = linger
        self._queues: defaultdict[_Lane, deque[_Job]] = defaultdict(deque)
        self._busy: set[_Lane] = set()
        # What is left of batches that failed and are tried again write by write.
        self._retried: list[deque[_Job]] = []
        # Requests that wait for their replies, with the timers that end the wait.
        self._held: dict[tuple[str, str], tuple[_Job, asyncio.TimerHandle]] = {}
        # Of each session that has writes under way: in which lane, how many, and the end of the last one.
        self._sessions: dict[tuple[str, str], tuple[_Lane, int, asyncio.Future[Any]]] = {}
        # Calls that have not submitted their requests, with what does that. Their callers add and remove them.
        self.deferred: dict[DeferredCall, Callable[[Any], None]] = {}
        self._lanes = lanes
        # Slots by the group of servers that fail together, and by whether they are for large writes.
        self._slots: dict[tuple[object, bool], Slots] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def write(self, write: RequestWrite) -> RequestOutcome:
        """Return when ``write`` is on disk. Raises `StoreUnavailable`, `Conflict`, `NotFound`.

        If the caller is cancelled, the write goes on.
        """
        return await asyncio.shield(self.submit(write))

    @overload
    def submit(self, write: RequestWrite) -> asyncio.Future[RequestOutcome]: ...

    @overload
    def submit(self, write: ReplyWrite) -> asyncio.Future[StoredReply]: ...

    def submit(self, write: Write) -> asyncio.Future[Any]:
        """Queue ``write``; the future is done when it is on disk."""
        loop = asyncio.get_running_loop()
        request = request_of(write)
        session = request.tenant, session_id_of(write)
        job = _Job(write, loop.create_future())
        lane, others, _ = self._sessions.get(session) or ((request.tenant, is_large(request)), 0, None)
        self._sessions[session] = lane, others + 1, job.done
        job.done.add_done_callback(partial(self._on_done, session))
        self._queue_held(session, lane)
        if isinstance(write, RequestWrite) and write.whole is not None:
            self._held[session] = job, loop.call_later(HOLD, self._release, session)
            return job.done
        self._queues[lane].append(job)
        if isinstance(write, RequestWrite) and write.is_call and self._linger:
            loop.call_later(self._linger, self._start, lane)
        else:
            self._start(lane)
        return job.done

    def track(self, task: asyncio.Task[Result]) -> asyncio.Task[Result]:
        """Have `close` wait for a task that is going to submit something."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def hurry(self, write: RequestWrite) -> None:
        """Write a request that waits for its reply now."""
        held = self._held.get((write.tenant, write.session_id))
        if held is not None and held[0].write is write:
            self._release((write.tenant, write.session_id))

    async def flush(self, tenant: str, session_id: str | None) -> None:
        """Write what waits for replies in a session (None: in all sessions of the tenant). Return when that, and what
        was under way, is written or has failed, at the latest after the time limit of a transaction.
        """

        def is_wanted(session: tuple[str, str]) -> bool:
            return session[0] == tenant and session_id in (None, session[1])

        for call, submit in list(self.deferred.items()):
            if is_wanted((call.write.tenant, call.write.session_id)):
                submit(call)
        for session in filter(is_wanted, list(self._held)):
            self._release(session)
        # The writes of a session keep their order.
        if last := [self._sessions[session][2] for session in filter(is_wanted, self._sessions)]:
            await asyncio.wait(last, timeout=self._database.timeout)

    def _queue_held(self, session: tuple[str, str], lane: _Lane) -> None:
        held = self._held.pop(session, None)
        if held is not None:
            job, timer = held
            timer.cancel()
            self._queues[lane].append(job)

    def _release(self, session: tuple[str, str]) -> None:
        lane, _, _ = self._sessions[session]
        self._queue_held(session, lane)
        self._start(lane)

    def withdraw(self, write: Write) -> None:
        """Remove ``write`` from the queue if it has not started, because its caller no longer waits."""
        for queue in (*self._queues.values(), *self._retried):
            for job in queue:
                if job.write is write:
                    queue.remove(job)
                    _fail([job], StoreUnavailable("the write was withdrawn"))
                    return

    async def close(self) -> None:
        """Wait until everything that was submitted is written."""
        for session in list(self._held):
            self._release(session)
        for lane in list(self._queues):
            self._start(lane)
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _on_done(self, session: tuple[str, str], done: asyncio.Future[Any]) -> None:
        """Retrieve the error of a failed write, in case that its caller no longer waits."""
        lane, count, last = self._sessions.pop(session)
        if count > 1:
            self._sessions[session] = lane, count - 1, last
        if not done.cancelled():
            done.exception()

    def _start(self, lane: _Lane) -> None:
        if lane in self._busy or not self._queues.get(lane):
            return
        self._busy.add(lane)
        self.track(asyncio.get_running_loop().create_task(self._drain(lane)))

    async def _drain(self, lane: _Lane) -> None:
        queue = self._queues[lane]
        tenant, is_large = lane
        loop = asyncio.get_running_loop()
        try:
            while queue:
                began = loop.time()
                async with self._slots_of(tenant, is_large=is_large).take():
                    await self._commit(tenant, [queue.popleft()] if is_large else _take(queue))
                pause = min(MAX_SPACING, SPACING * (len(self._sessions) - 1)) - (loop.time() - began)
                if pause > 0 and not is_large:
                    await asyncio.sleep(pause)
        finally:
            self._busy.discard(lane)
            if queue:
                self._start(lane)
            else:
                self._queues.pop(lane, None)

    def _slots_of(self, tenant: str, *, is_large: bool) -> Slots:
        group = self._database.group_of(tenant), is_large
        if group not in self._slots:
            self._slots[group] = Slots(1 if is_large else self._lanes, SLOW_AFTER[is_large])
        return self._slots[group]

    async def _commit(self, tenant: str, jobs: list[_Job], results: Results | None = None) -> None:
        """Write jobs; ``results`` has those of earlier tries."""
        results = {} if results is None else results
        try:
            await write_all(self._database, self.tails, tenant, [job.write for job in jobs], results)
        except StoreUnavailable as error:
            _fail(self._settle(tenant, jobs, results), error)
        except (TerselyError, asyncpg.PostgresError, ValueError) as error:
            left = self._settle(tenant, jobs, results)
            if len(jobs) == 1:
                _fail(left, _translate_error(error))
            else:
                await self._commit_one_by_one(tenant, left, results)
        except BaseException as error:
            _fail(self._settle(tenant, jobs, results), StoreUnavailable(f"the write failed: {type(error).__name__}"))
            raise
        else:
            self._settle(tenant, jobs, results)

    async def _commit_one_by_one(self, tenant: str, jobs: list[_Job], results: Results) -> None:
        queue = deque(jobs)
        self._retried.append(queue)
        try:
            while queue:
                await self._commit(tenant, [queue.popleft()], results)
        finally:
            self._retried = [each for each in self._retried if each is not queue]

    def _settle(self, tenant: str, jobs: list[_Job], results: Results) -> list[_Job]:
        """Report the jobs that are stored. Return the others."""
        left = []
        for job in jobs:
            result = results.get(id(job.write))
            if result is None:
                left.append(job)
                continue
            if not job.done.done():
                job.done.set_result(result)
            if self._on_full_pages is not None:
                parts = [(part, results[id(part)]) for part in job.write.parts if id(part) in results]
                if pages := sum([_filled_pages(part, outcome) for part, outcome in parts]):
                    self._on_full_pages(tenant, session_id_of(job.write), pages)
        return left


def _filled_pages(write: Write, result: RequestOutcome | StoredReply) -> int:
    """Return how many pages of messages a write has filled."""
    if isinstance(result, RequestOutcome):
        first, last = result.first_seq, result.last_seq
        if result.was_stored_before:
            return 0
    else:
        assert isinstance(write, ReplyWrite)
        first = result.first_seq
        last = first + len(write.replies) - 1 if first else 0
    return max(0, last // PAGE - (first - 1) // PAGE) if first else 0


def _fail(jobs: list[_Job], error: BaseException) -> None:
    for job in jobs:
        if not job.done.done():
            job.done.set_exception(error)


def _translate_error(error: Exception) -> Exception:
    if isinstance(error, asyncpg.UniqueViolationError):
        return Conflict("that id is already taken")
    if isinstance(error, asyncpg.ForeignKeyViolationError):
        return NotFound("the session was deleted")
    if isinstance(error, asyncpg.PostgresError):
        return refusal(error)
    return error


def _take(queue: deque[_Job]) -> list[_Job]:
    """Return the longest run of jobs that one transaction can hold: per session one request, and then the reply to it.

    What is decided for a job may need rows that an earlier job of its session writes: so the reply to an earlier
    request of the session waits for the next transaction.
    """
    if len(queue) == 1:
        return [queue.popleft()]
    taken: list[_Job] = []
    left: list[_Job] = []
    newest: dict[str, RequestWrite | None] = {}
    while queue and len(taken) < MAX_BATCH:
        job = queue.popleft()
        session = session_id_of(job.write)
        request = job.write if isinstance(job.write, RequestWrite) else None
        if session not in newest or (isinstance(job.write, ReplyWrite) and newest[session] is job.write.request):
            newest[session] = request
            taken.append(job)
        else:
            newest[session] = None
            left.append(job)
    queue.extendleft(reversed(left))
    return taken
