"""Group commit: the writes of many requests in one durable transaction.

Writes of one session keep their order; a session's row is locked while its counters move, so that sequence
numbers are gapless whatever the number of replicas. A batch that fails is tried again write by write.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, overload

import asyncpg
from msgspec import structs

from tersely.domain.errors import Conflict, NotFound, StoreUnavailable, TerselyError
from tersely.domain.history.history import BROKE_OFF, CLIENT_LEFT, INCOMPLETE
from tersely.domain.history.links import StoredLink, as_incoming
from tersely.domain.history.reconciliation import Reconciliation, append_messages, reconcile
from tersely.domain.history.repetition import find_earlier_question, reconcile_repetition
from tersely.domain.history.reply_placement import ReplyNeighbours, ReplyPlacement, place_reply
from tersely.domain.messages import INSTRUCTION_ROLES, is_outside_messages
from tersely.store.commit import epochs, large_values
from tersely.store.commit import idempotency_keys as appends
from tersely.store.commit.apply import AT_THE_END, NewRows, enter_reply, enter_request
from tersely.store.commit.idempotency_keys import Append
from tersely.store.commit.records import (
    Attribute,
    NewSession,
    Outcome,
    ReferencedReply,
    ReplyWrite,
    RequestWrite,
    Result,
    State,
    StoredReply,
    Write,
    counters_of,
    figures_of,
    new_session_from,
    session_after,
    state_of,
)
from tersely.store.db.connection import Connection, Database, refusal
from tersely.store.db.statements import (
    HOLD_SESSION,
    INSERT_ROW,
    INSERTS,
    MAKE_SESSION,
    NEW,
    TABLES,
    UPDATE_SESSION,
    Record,
    Shape,
    as_arrays,
    flat,
    shape_of,
    write_at_once,
)
from tersely.store.history import messages
from tersely.store.history.sessions import COLUMNS, session_from
from tersely.store.history.tail_cache import TailCache, appended
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
# A write of more new messages, or of more bytes, goes apart: encoded in a thread, sent in portions of so many rows and
# bytes, given so many seconds. So is one with so many literals of the context that was sent.
LARGE = 2_000
LARGE_BYTES = 4 * 1024 * 1024
PORTION = 400
PORTION_BYTES = 2 * 1024 * 1024
LARGE_LIMIT = 60.0

# Seconds after which a transaction gives its place to another tenant's: locked rows are its own tenant's matter. By
# whether it is a large one.
SLOW_AFTER = {False: 0.1, True: 5.0}

# A tenant, and whether the lane is for large writes.
_Lane = tuple[str, bool]


class _Places:
    """Places for transactions that run at once. A slow one moves to one of as many further places: its own is free."""

    def __init__(self, count: int, slow_after: float) -> None:
        self._free = asyncio.Semaphore(count)
        self._free_for_slow = count
        self._slow_after = slow_after

    @asynccontextmanager
    async def take(self) -> AsyncIterator[None]:
        """Hold a place for the length of the block."""
        await self._free.acquire()
        is_slow = False

        def move() -> None:
            nonlocal is_slow
            if self._free_for_slow:
                is_slow = True
                self._free_for_slow -= 1
                self._free.release()

        timer = asyncio.get_running_loop().call_later(self._slow_after, move)
        try:
            yield
        finally:
            timer.cancel()
            if is_slow:
                self._free_for_slow += 1
            else:
                self._free.release()


@dataclass(slots=True)
class _Job:
    write: Write
    done: asyncio.Future[Any]


class Writer:
    """Takes writes, commits them in groups. One transaction at a time per tenant, a few tenants at once; those whose
    transactions are slow, for locked rows say, leave their places to others.

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
        """``linger`` in seconds. ``tail_cache`` is told what is written, ``on_full_pages`` the tenant, the session,
        and how many pages of messages were filled.
        """
        self._database = database
        self._on_full_pages = on_full_pages
        self.tails = tail_cache if tail_cache is not None else TailCache()
        self._linger = linger
        self._queues: defaultdict[_Lane, deque[_Job]] = defaultdict(deque)
        self._busy: set[_Lane] = set()
        # Requests that wait for their replies, with the timers that end the wait.
        self._held: dict[tuple[str, str], tuple[_Job, asyncio.TimerHandle]] = {}
        # Of each session that has writes under way: in which lane, and how many.
        self._sessions: dict[tuple[str, str], tuple[_Lane, int]] = {}
        self._lanes = lanes
        # Places by what fails together, and whether they are for what is large.
        self._places: dict[tuple[object, bool], _Places] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def write(self, write: RequestWrite) -> Outcome:
        """Return when ``write`` is on disk. Raises `StoreUnavailable`, `Conflict`, `NotFound`.

        If the caller is cancelled, the write goes on.
        """
        return await asyncio.shield(self.submit(write))

    @overload
    def submit(self, write: RequestWrite) -> asyncio.Future[Outcome]: ...

    @overload
    def submit(self, write: ReplyWrite) -> asyncio.Future[StoredReply]: ...

    def submit(self, write: Write) -> asyncio.Future[Any]:
        """Queue ``write``; the future is done when it is on disk."""
        loop = asyncio.get_running_loop()
        session = _tenant(write), _session_id(write)
        lane, others = self._sessions.get(session) or ((session[0], _is_large(_request(write))), 0)
        self._sessions[session] = lane, others + 1
        job = _Job(write, loop.create_future())
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

    def _queue_held(self, session: tuple[str, str], lane: _Lane) -> None:
        held = self._held.pop(session, None)
        if held is not None:
            job, timer = held
            timer.cancel()
            self._queues[lane].append(job)

    def _release(self, session: tuple[str, str]) -> None:
        lane, _ = self._sessions[session]
        self._queue_held(session, lane)
        self._start(lane)

    def withdraw(self, write: Write) -> None:
        """Remove ``write`` from the queue if it has not started, because its caller no longer waits."""
        for queue in self._queues.values():
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
        lane, count = self._sessions.pop(session)
        if count > 1:
            self._sessions[session] = lane, count - 1
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
                async with self._places_of(tenant, is_large=is_large).take():
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

    def _places_of(self, tenant: str, *, is_large: bool) -> _Places:
        group = self._database.group_of(tenant), is_large
        if group not in self._places:
            self._places[group] = _Places(1 if is_large else self._lanes, SLOW_AFTER[is_large])
        return self._places[group]

    async def _commit(self, tenant: str, jobs: list[_Job]) -> None:
        try:
            results = await write_all(self._database, self.tails, tenant, [job.write for job in jobs])
        except StoreUnavailable as error:
            _fail(jobs, error)
        except (TerselyError, asyncpg.PostgresError, ValueError) as error:
            if len(jobs) == 1:
                _fail(jobs, _translate_error(error))
            else:
                for job in jobs:
                    await self._commit(tenant, [job])
        except BaseException as error:
            _fail(jobs, StoreUnavailable(f"the write failed: {type(error).__name__}"))
            raise
        else:
            for job, result in zip(jobs, results, strict=True):
                if not job.done.done():
                    job.done.set_result(result)
                if self._on_full_pages is not None and (pages := _filled_pages(job.write, result)):
                    self._on_full_pages(tenant, _session_id(job.write), pages)


def _filled_pages(write: Write, result: Outcome | StoredReply) -> int:
    """Return how many pages of messages a write has filled."""
    if isinstance(result, Outcome):
        first, last = result.first_seq, result.last_seq
        if result.was_stored_before:
            return 0
    else:
        assert isinstance(write, ReplyWrite)
        first = result.first_seq
        last = first + len(write.replies) - 1 if first else 0
    return max(0, last // PAGE - (first - 1) // PAGE) if first else 0


def _tenant(write: Write) -> str:
    return _request(write).tenant


def _session_id(write: Write) -> str:
    if isinstance(write, ReplyWrite) and (outcome := write.request_outcome) is not None:
        return outcome.session_id
    return _request(write).session_id


def _request(write: Write) -> RequestWrite:
    return write if isinstance(write, RequestWrite) else write.request


def _is_large(request: RequestWrite) -> bool:
    if request.attributes and _are_many(request.attributes):
        return True
    new = request.decision.last_seq - (request.session.last_seq if request.session else 0)
    if new > LARGE or request.size <= LARGE_BYTES:
        return new > LARGE
    placed = request.decision.placed
    return sum(len(raw) for raw, each in zip(request.raws, placed, strict=True) if each.is_new) > LARGE_BYTES


def _are_many(attributes: Sequence[Attribute]) -> bool:
    """Return whether attributes are stored in portions."""
    return len(attributes) > LARGE or sum(len(each.raw) for each in attributes) > LARGE_BYTES


def _has_long_epoch(write: ReplyWrite) -> bool:
    """Return whether the epoch that starts with a reply has so many log entries that they are stored in portions."""
    return write.epoch is not None and len(write.epoch.derived) > LARGE


def _has_large_reply(write: ReplyWrite) -> bool:
    """Return whether a reply comes with so much that it is stored in portions."""
    if write.attributes and _are_many(write.attributes):
        return True
    sizes = [max(len(reply.raw), len(reply.model_raw or b"")) for reply in write.replies]
    return bool(sizes) and max(sizes) > large_values.LARGE_VALUE


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
    taken: list[_Job] = []
    left: list[_Job] = []
    newest: dict[str, RequestWrite | None] = {}
    while queue and len(taken) < MAX_BATCH:
        job = queue.popleft()
        session = _session_id(job.write)
        request = job.write if isinstance(job.write, RequestWrite) else None
        if session not in newest or (isinstance(job.write, ReplyWrite) and newest[session] is job.write.request):
            newest[session] = request
            taken.append(job)
        else:
            newest[session] = None
            left.append(job)
    queue.extendleft(reversed(left))
    return taken


LOCK = f"SELECT {COLUMNS} FROM sessions WHERE tenant_id = $1 AND id = ANY($2::text[]) ORDER BY id FOR UPDATE"
# Late replies stand between older messages; of the messages that came last, one is the last by place. Found from the
# end, so that it costs the same in every session.
LAST_TURN = """
SELECT turn FROM (
    SELECT turn, place, seq FROM messages
    WHERE tenant_id = $1 AND session_id = $2 AND status = 'live' AND turn > 0 ORDER BY seq DESC LIMIT 64
) AS newest ORDER BY place DESC, seq DESC LIMIT 1
"""
INSERT_SESSION = """
INSERT INTO sessions (tenant_id, id, parent, client_id, strategy, epoch_policy, metadata, last_seq, turns, tokens,
    version, edits, edited, calls, epoch, cut, plan, open_chain, last_call_at, created_at, updated_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, 0, 0, 0, 0, 0, false, 0, 0, 1, NULL, NULL, NULL, $8, $8)
ON CONFLICT (tenant_id, id) DO NOTHING RETURNING id
"""
SET_STATUS = """
UPDATE messages SET status = $4 WHERE tenant_id = $1 AND session_id = $2 AND seq = ANY($3::bigint[])
"""
# What the model did beside its replies, hidden from the client, goes the way of the replies. The condition is that of
# the index `messages_exceptions`, word for word.
SET_STATUS_OF_HIDDEN = """
UPDATE messages SET status = $4 WHERE tenant_id = $1 AND session_id = $2 AND status = $5 AND NOT client_visible
  AND CASE WHEN status <> 'live' OR turn = 0 OR place <> seq::float8 OR NOT client_visible OR NOT model_visible
      THEN 1 ELSE 0 END = 1
  AND call IN (SELECT r.call FROM messages r
               WHERE r.tenant_id = $1 AND r.session_id = $2 AND r.seq = ANY($3::bigint[]) AND r.call > 0)
"""
AROUND_REPLY = f"""
SELECT a.status,
    (SELECT min(n.place) FROM messages n
     WHERE n.tenant_id = $1 AND n.session_id = $2 AND n.place > a.place AND n.turn > 0) AS next_position,
    r.call AS rival, r.broke_off AS rival_broke_off
FROM messages a LEFT JOIN LATERAL (
    SELECT n.call, coalesce(n.finish IN ('{BROKE_OFF}', '{CLIENT_LEFT}'), false) AS broke_off FROM messages n
    WHERE n.tenant_id = $1 AND n.session_id = $2 AND n.place > a.place AND n.turn = a.turn AND n.turn + 0 IS NOT NULL
        AND n.role = 'assistant' AND n.status = 'live' AND n.client_visible
        AND NOT EXISTS (SELECT FROM messages b WHERE b.tenant_id = $1 AND b.session_id = $2 AND b.status = 'live'
                        AND b.role <> 'assistant' AND b.client_visible AND b.turn > 0 AND b.place > a.place
                        AND b.place < n.place)
    ORDER BY n.call DESC LIMIT 1
) AS r ON true
WHERE a.tenant_id = $1 AND a.session_id = $2 AND a.seq = $3
"""
SUPERSEDE_RIVAL = """
UPDATE messages SET status = 'superseded'
WHERE tenant_id = $1 AND session_id = $2 AND status = 'live' AND call = $3 RETURNING seq
"""


@dataclass(slots=True, eq=False)
class _Attempt:
    """One session's part of a batch, computed on the state that its writes expect."""

    state: State
    expected: int | None
    create: NewSession | None
    writes: list[Write] = field(default_factory=list)
    rows: NewRows = field(default_factory=NewRows)
    results: list[Outcome | StoredReply] = field(default_factory=list)

    @property
    def shape(self) -> tuple[bool, Shape]:
        """Return the shape of the statement that stores this attempt."""
        return self.expected is None, shape_of([(table, len(getattr(self.rows, table))) for table in TABLES])

    def session_arguments(self, tenant: str) -> list[object]:
        """Return the parameters of the statement that holds or makes the session."""
        state = self.state
        found: list[object] = [tenant, state.id, *counters_of(state), *figures_of(state)]
        if self.create is None:
            found.append(self.expected)
        else:
            found += [getattr(self.create, name) for name in NEW]
        return found

    def arguments(self, tenant: str) -> list[object]:
        """Return the parameters of that statement."""
        found = self.session_arguments(tenant)
        for table in TABLES:
            if rows := getattr(self.rows, table):
                found += flat(rows)
        return found

    def update_cache(self, tail_cache: TailCache, tenant: str) -> None:
        """Add the stored write to the tail cache, if the cache has the session's earlier rows."""
        if _request(self.writes[-1]).whole is not None:
            tail_cache.forget(tenant, self.state.id)  # a live session knows it
            return
        before = tail_cache.get(tenant, self.state.id) if self.create is None else None
        if self.create is not None:
            session = new_session_from(self.create, self.state)
        elif before is not None and before.session.version == self.expected:
            session = session_after(before.session, self.state)
        else:
            return
        replies = [reply for write in self.writes if isinstance(write, ReplyWrite) for reply in write.replies]
        chain = next((reply.chain for reply in replies if reply.chain is not None), None)
        tail_cache.put(tenant, appended(before, session, self.rows.messages, chain))


async def write_all(
    database: Database, tail_cache: TailCache, tenant: str, writes: list[Write]
) -> list[Outcome | StoredReply]:
    """Write a batch, together if sessions are as the writes expect them. Return the result of each write.

    A write whose session has changed is decided again under the session's lock.
    """
    attempts, left = _prepare_attempts(writes)
    results: dict[int, Outcome | StoredReply] = {}
    if attempts:
        refused = await _write_unchanged_sessions(database, tenant, attempts)
        for attempt in attempts:
            if attempt in refused:
                left += attempt.writes
            else:
                attempt.update_cache(tail_cache, tenant)
                results |= {id(write): done for write, done in zip(attempt.writes, attempt.results, strict=True)}
    if left:
        for write in left:
            tail_cache.forget(tenant, _session_id(write))
        has_large = any(
            _is_large(write) if isinstance(write, RequestWrite) else _has_long_epoch(write) for write in left
        )
        limit = LARGE_LIMIT if has_large else None
        async with database.transaction(tenant, limit=limit) as connection:
            results |= await _write_locked(connection, tenant, left, results)
    return [results[id(write)] for write in writes]


def _prepare_attempts(writes: list[Write]) -> tuple[list[_Attempt], list[Write]]:
    """Split writes into those that need no look at the database first, and the rest."""
    attempts: dict[str, _Attempt] = {}
    left: list[Write] = []
    left_sessions: set[str] = set()
    for write in writes:
        session_id = _session_id(write)
        for part in write.parts:
            attempt = None if session_id in left_sessions else (attempts.get(session_id) or _attempt(part))
            if attempt is None or not _enter(part, attempt):
                left.append(part)
                left_sessions.add(session_id)
            else:
                attempts[session_id] = attempt
    return [attempts[session_id] for session_id in sorted(attempts)], left


async def _write_unchanged_sessions(database: Database, tenant: str, attempts: list[_Attempt]) -> list[_Attempt]:
    """Write the attempts whose sessions are as expected, all or none. Return the others."""
    if await database.is_distributed():
        return await _write_row_by_row(database, tenant, attempts)
    shapes: defaultdict[tuple[bool, Shape], list[_Attempt]] = defaultdict(list)
    for attempt in attempts:
        shapes[attempt.shape].append(attempt)
    use = database.statements if len(shapes) == 1 else database.group_commit
    held: set[str] = set()
    async with use(tenant) as connection:
        for (makes, shape), alike in shapes.items():
            statement = write_at_once(shape, makes=makes)
            rows = await connection.fetchmany(statement, [attempt.arguments(tenant) for attempt in alike])
            held.update(row["id"] for row in rows)
    return [attempt for attempt in attempts if attempt.state.id not in held]


async def _write_row_by_row(database: Database, tenant: str, attempts: list[_Attempt]) -> list[_Attempt]:
    """Do the same with one statement for each row: a node of a distributed Postgres keeps plans of such alone."""
    held: set[str] = set()
    async with database.transaction(tenant) as connection:
        for makes, statement in ((False, HOLD_SESSION), (True, MAKE_SESSION)):
            alike = [attempt.session_arguments(tenant) for attempt in attempts if (attempt.create is not None) is makes]
            if alike:
                held.update(row["id"] for row in await connection.fetchmany(statement, alike))
        for table, statement in INSERT_ROW.items():
            rows: list[Record] = []
            for attempt in attempts:
                if attempt.state.id in held:
                    rows += ((tenant, *row) for row in getattr(attempt.rows, table))
            if rows:
                await connection.executemany(statement, rows)
    return [attempt for attempt in attempts if attempt.state.id not in held]


def _attempt(write: Write) -> _Attempt | None:
    if isinstance(write, RequestWrite):
        if write.session is not None:
            return _Attempt(state=state_of(write.session), expected=write.session.version, create=None)
        return _Attempt(state=State(id=write.session_id), expected=None, create=write.create) if write.create else None
    outcome = write.request_outcome
    if outcome is None:
        return None
    state = copy(outcome.state)
    return _Attempt(state=state, expected=state.version, create=None)


def _enter(write: Write, attempt: _Attempt) -> bool:
    """Compute a write. Return False if that needs a query."""
    if isinstance(write, RequestWrite):
        if write.key is not None or write.decision.superseded or write.decision.restored or _is_large(write):
            return False
        attempt.results.append(enter_request(write, attempt.state, write.decision, attempt.rows, is_as_decided=True))
    else:
        if _has_long_epoch(write) or _has_large_reply(write):
            return False
        is_together = attempt.writes and attempt.writes[-1] is write.request
        asked = attempt.results[-1] if is_together else write.request_outcome
        if (
            not isinstance(asked, Outcome)
            or attempt.state.last_seq != asked.last_seq
            or not asked.decision.replies_at_end
        ):
            return False
        attempt.results.append(enter_reply(write, asked, attempt.state, AT_THE_END, attempt.rows))
    attempt.writes.append(write)
    return True


async def _write_locked(
    connection: Connection, tenant: str, writes: list[Write], before: Mapping[int, Outcome | StoredReply]
) -> dict[int, Outcome | StoredReply]:
    """Write under the sessions' locks. Return the results by the ids of the writes; ``before`` are those of the writes
    of the same batch that are stored already.
    """
    rows = NewRows()
    results = dict(before)
    states = await lock_sessions(connection, tenant, writes)
    for write in writes:
        if isinstance(write, RequestWrite):
            results[id(write)] = await _write_request(connection, tenant, write, states, rows)
        else:
            asked = results.get(id(write.request)) or write.request_outcome
            if not isinstance(asked, Outcome):
                raise StoreUnavailable("the request itself could not be stored")
            state = states[asked.session_id]
            results[id(write)] = await _write_reply(connection, tenant, write, asked, state, rows)
    await insert_rows(connection, tenant, rows, states.values())
    return results


async def insert_rows(connection: Connection, tenant: str, rows: NewRows, states: Iterable[State]) -> None:
    """Insert ``rows`` and store the counters of the locked sessions that were written to."""
    for table, sql in INSERTS.items():
        found: list[Record] = getattr(rows, table)
        if len(found) <= LARGE:
            portions, values = _split(table, found)
        else:
            portions, values = await asyncio.to_thread(_split, table, found)
        for portion in portions:
            await connection.fetch(sql, tenant, *portion)
        for value in values:
            await large_values.write(connection, tenant, value)
    for state in states:
        if state.touched is not None:
            await connection.execute(UPDATE_SESSION, tenant, state.id, *counters_of(state), *figures_of(state))


def _split(table: str, records: list[Record]) -> tuple[list[list[list[object]]], list[large_values.LargeValue]]:
    """Return the columns of each portion of a table's records, and the values that are sent apart."""
    values: list[large_values.LargeValue] = []
    if table == "messages":
        records, values = large_values.split_off(records)
    return [as_arrays(portion) for portion in _portions(records)], values


def _portions(records: list[Record]) -> Iterator[list[Record]]:
    """Split records so that no statement is long to encode; a record that is larger than a portion is one by itself."""
    portion: list[Record] = []
    size = 0
    for record in records:
        weight = sum(len(value) for value in record if isinstance(value, bytes | str))
        if portion and (len(portion) == PORTION or size + weight > PORTION_BYTES):
            yield portion
            portion, size = [], 0
        portion.append(record)
        size += weight
    if portion:
        yield portion


async def lock_sessions(connection: Connection, tenant: str, writes: list[Write]) -> dict[str, State]:
    """Make the sessions that are missing, lock the others, and read their counters."""
    states: dict[str, State] = {}
    wanted = sorted({_session_id(write) for write in writes})
    create = {w.session_id: w for w in writes if isinstance(w, RequestWrite) and w.create and w.session is None}
    for session_id, write in sorted(create.items()):
        new = [getattr(write.create, name) for name in NEW]
        if await connection.fetchval(INSERT_SESSION, tenant, session_id, *new, write.now) is not None:
            states[session_id] = State(id=session_id)
    rest = [session_id for session_id in wanted if session_id not in states]
    if rest:
        for row in await connection.fetch(LOCK, tenant, rest):
            states[row["id"]] = state_of(session_from(row))
    if len(states) < len(wanted):
        raise NotFound("the session was deleted")
    return states


async def _write_request(
    connection: Connection, tenant: str, write: RequestWrite, states: dict[str, State], rows: NewRows
) -> Outcome:
    state = states[write.session_id]
    earlier = await appends.find(connection, tenant, state.id, write.key) if write.key is not None else None
    if earlier is not None and not write.is_call:
        return _stored_before(write, earlier, state)
    decision = write.decision
    is_as_decided = state.version == (0 if write.version is None else write.version)
    if not is_as_decided:
        write = write.expanded()
        decision = write.decision
        again = await decide_again(connection, tenant, write, state, earlier)
        if again is None:
            write = write.in_spare_session()
            states |= await lock_sessions(connection, tenant, [write])
            state = states[write.session_id]
            is_as_decided = True
        else:
            decision = again
    if earlier is not None and decision.answered is not None and decision.answered.is_new:
        await appends.forget(connection, tenant, state.id, earlier.key)
    enter = partial(enter_request, write, state, decision, rows, is_as_decided=is_as_decided)
    outcome = await asyncio.to_thread(enter) if _is_large(write) else enter()
    await set_statuses(connection, tenant, state.id, decision)
    return outcome


async def set_statuses(connection: Connection, tenant: str, session_id: str, decision: Reconciliation) -> None:
    for seqs, status, before in (
        (decision.superseded, "superseded", "live"),
        (decision.restored, "live", "superseded"),
    ):
        if seqs:
            await connection.execute(SET_STATUS, tenant, session_id, list(seqs), status)
            await connection.execute(SET_STATUS_OF_HIDDEN, tenant, session_id, list(seqs), status, before)
    if changed := (*decision.superseded, *decision.restored):
        last = None if decision.kind == "delta" else decision.last_known
        await epochs.remove_from_plans(connection, tenant, session_id, changed, last=last)


def _stored_before(write: RequestWrite, earlier: Append, state: State) -> Outcome:
    """Return where the messages of an earlier append with the same key are. Raises `Conflict` for other messages."""
    if earlier.digest != write.key_digest:
        raise Conflict("that idempotency key was used for other messages", field="Idempotency-Key")
    return Outcome(
        session_id=write.session_id,
        call=0,
        first_seq=earlier.first_seq,
        last_seq=earlier.last_seq,
        turn=earlier.turn,
        answered_seq=earlier.last_seq,
        answered_position=float(earlier.last_seq),
        decision=structs.replace(write.decision, placed=()),
        state=copy(state),
        was_stored_before=True,
    )


async def decide_again(
    connection: Connection, tenant: str, write: RequestWrite, state: State, earlier: Append | None
) -> Reconciliation | None:
    """Decide on what the session has become since the first decision, under its lock.

    ``earlier`` are the messages that came with the same idempotency key. None where the id went to another
    conversation of the same client: two histories that share nothing are not one session.
    """
    if write.referenced is not None:
        return await _reconcile_again(connection, tenant, write, write.referenced, state)
    if write.mode == "append":
        again = await _repeat_again(connection, tenant, write, state, earlier) if write.is_call else None
        return again or await append_again(connection, tenant, write, state)
    rows = [tail.row for tail in await messages.all_rows(connection, tenant, state.id) if not tail.is_hidden]
    decision = reconcile(rows, write.incoming, last_seq=state.last_seq, turns=state.turns, allow_restore=True)
    is_other = write.decision.kind != "edited" and _knows_nothing(write.decision) and _knows_nothing(decision)
    if is_other and write.create is not None and write.create.spare_id is not None:
        return None
    return decision


async def _repeat_again(
    connection: Connection, tenant: str, write: RequestWrite, state: State, earlier: Append | None
) -> Reconciliation | None:
    """Return the decision for a delta whose messages are stored already; None where they are not.

    They are where the first decision found them, or were stored since: by whoever sent the same at the same time.
    """
    again = await _rows_asked_before(connection, tenant, write, state, earlier)
    if again is None:
        return None
    has_instructions = any(not message.is_link for message in write.incoming)
    instructions = await messages.instruction_rows(connection, tenant, state.id) if has_instructions else []
    return reconcile_repetition(again, instructions, write.incoming, last_seq=state.last_seq, turns=state.turns)


async def _rows_asked_before(
    connection: Connection, tenant: str, write: RequestWrite, state: State, earlier: Append | None
) -> Sequence[StoredLink] | None:
    asked = [message.digest for message in write.incoming if message.is_link]
    known = [placed.seq for placed in write.decision.placed if placed.turn > 0 and not placed.is_new]
    if not known and earlier is not None and earlier.digest == write.key_digest:
        known = list(range(earlier.first_seq, earlier.last_seq + 1))
    if known:
        rows = [tail.row for tail in await messages.rows_of(connection, tenant, state.id, known)]
        links = sorted((row for row in rows if row.is_link and row.status == "live"), key=lambda row: row.seq)
        if [row.digest for row in links] == asked:
            return links
    since = write.session.last_seq if write.session is not None else 0
    before = find_earlier_question(await messages.links_since(connection, tenant, state.id, since), write.incoming)
    return before.rows if before is not None else None


def _knows_nothing(decision: Reconciliation) -> bool:
    """Return whether nothing of the history that was sent is stored."""
    return not any(placed.turn and not placed.is_new for placed in decision.placed)


async def _reconcile_again(
    connection: Connection, tenant: str, write: RequestWrite, named: ReferencedReply, state: State
) -> Reconciliation:
    """Return the decision for the request's own messages, placed behind the reply that it references."""
    rows = [tail.row for tail in await messages.all_rows(connection, tenant, state.id) if not tail.is_hidden]
    known = {place.seq for index, place in enumerate(write.decision.placed) if index not in named.own_indexes}
    history = await messages.leading_to(connection, tenant, state.id, rows, named.seq)
    if history is None:
        history = [row for row in rows if row.seq in known]
    staying: frozenset[int] = frozenset()
    if named.is_conversation:
        failed = await messages.failed_links(connection, tenant, state.id, rows, calls=state.calls)
        history = [row for row in history if row.seq not in failed]
        staying = frozenset(row.seq for row in rows if row.is_link and row.seq not in failed)
    history = [row for row in history if row.is_link or row.seq in known]
    own, front = [write.incoming[index] for index in named.own_indexes], named.own_before_reply
    incoming = [*own[:front], *map(as_incoming, history), *own[front:]]
    again = reconcile(
        rows,
        incoming,
        last_seq=state.last_seq,
        turns=state.turns,
        allow_restore=True,
        question_index=front + len(history),
        staying=staying,
    )
    placed = list(write.decision.placed)
    for index, place in zip(
        named.own_indexes, [*again.placed[:front], *again.placed[front + len(history) :]], strict=True
    ):
        placed[index] = place
    return structs.replace(again, placed=tuple(placed))


async def append_again(connection: Connection, tenant: str, write: RequestWrite, state: State) -> Reconciliation:
    turn = await connection.fetchval(LAST_TURN, tenant, state.id) or 0
    superseded: list[int] = []
    if write.replaces_instructions:
        stored = await messages.instructions(connection, tenant, state.id)
        brought = zip(write.incoming, write.raws, strict=True)
        kinds = {is_outside_messages(raw) for message, raw in brought if message.is_instruction}
        given = [message for message in stored if message.role in INSTRUCTION_ROLES]
        superseded = [message.seq for message in given if is_outside_messages(message.raw) in kinds]
    return append_messages(write.incoming, last_seq=state.last_seq, turns=state.turns, turn=turn, superseded=superseded)


async def _write_reply(
    connection: Connection, tenant: str, write: ReplyWrite, asked: Outcome, state: State, rows: NewRows
) -> StoredReply:
    placement = AT_THE_END
    answered = asked.decision.answered
    has_moved = state.last_seq != asked.last_seq or state.edits != asked.state.edits
    is_hidden = answered is not None and answered.status != "live"
    if write.replies and (has_moved or is_hidden or not asked.decision.replies_at_end):
        placement = await place_late_reply(connection, tenant, write, asked, state.id)
    if _has_long_epoch(write):
        return await asyncio.to_thread(enter_reply, write, asked, state, placement, rows)
    return enter_reply(write, asked, state, placement, rows)


async def place_late_reply(
    connection: Connection, tenant: str, write: ReplyWrite, asked: Outcome, session_id: str
) -> ReplyPlacement:
    """Place a reply in a session that changed while the model replied."""
    row = await connection.fetchrow(AROUND_REPLY, tenant, session_id, asked.answered_seq)
    neighbours = ReplyNeighbours(**dict(row)) if row else ReplyNeighbours(status=None)
    broke_off = any(reply.finish in INCOMPLETE for reply in write.replies)
    placement = place_reply(neighbours, call=asked.call, broke_off=broke_off)
    if placement.replaces:
        replaced = await connection.fetch(SUPERSEDE_RIVAL, tenant, session_id, placement.replaces)
        await epochs.remove_from_plans(connection, tenant, session_id, [record["seq"] for record in replaced])
    return placement
