"""Group commit: the writes of many requests in one durable transaction.

Writes of one session keep their order; a session's row is locked while its counters move, so that sequence
numbers are gapless whatever the number of replicas. A batch that fails is tried again write by write.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial

import asyncpg

from app.domain.errors import Conflict, NotFound, StoreUnavailable, TerselyError
from app.domain.lineage import Decision, append, known_again, reconcile, repeat
from app.store import epochs, messages
from app.store.connection import Connection, Database
from app.store.ledger import AT_THE_END, Placement, Rows, enter_reply, enter_request
from app.store.sessions import COLUMNS, session_from
from app.store.statements import (
    INSERTS,
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
from app.store.tails import Tails, grown
from app.store.writes import (
    Named,
    NewSession,
    Outcome,
    ReplyWrite,
    RequestWrite,
    State,
    Write,
    counters_of,
    made,
    moved,
    state_of,
)

MAX_BATCH = 128
# How long a request's messages wait for company. Real replies take far longer; a reply that does not is written
# together with its request in one transaction.
LINGER = 0.002
# A write of more new messages goes apart: encoded in a thread, sent in portions of so many rows, given so many seconds.
LARGE = 2_000
PORTION = 1_000
LARGE_LIMIT = 60.0

# A tenant, and whether for what is large.
_Lane = tuple[str, bool]


@dataclass(slots=True)
class _Job:
    write: Write
    done: asyncio.Future[None]


class Writer:
    """Takes writes, commits them in groups. One transaction at a time per tenant, a few tenants at once.

    Large writes have a lane of their own, so that nobody waits for them; a session's writes stay in one lane.
    """

    def __init__(
        self, database: Database, *, tails: Tails | None = None, lanes: int = 4, linger: float = LINGER
    ) -> None:
        """``linger`` in seconds. ``tails`` are told what has been written."""
        self._database = database
        self.tails = tails if tails is not None else Tails()
        self._linger = linger
        self._queues: defaultdict[_Lane, deque[_Job]] = defaultdict(deque)
        self._busy: set[_Lane] = set()
        # Of each session that has writes under way: in which lane, and how many.
        self._sessions: dict[tuple[str, str], tuple[_Lane, int]] = {}
        self._slots = {False: asyncio.Semaphore(lanes), True: asyncio.Semaphore(1)}
        self._tasks: set[asyncio.Task[None]] = set()

    async def write(self, write: Write) -> None:
        """Return when ``write`` is on disk. Raises `StoreUnavailable`, `Conflict`, `NotFound`.

        A caller that is cancelled meanwhile loses only the news: the write goes on.
        """
        await asyncio.shield(self.submit(write))

    def submit(self, write: Write) -> asyncio.Future[None]:
        """Queue ``write``; the future is done when it is on disk."""
        loop = asyncio.get_running_loop()
        session = _tenant(write), _session_id(write)
        lane, others = self._sessions.get(session) or ((session[0], _is_large(_request(write))), 0)
        self._sessions[session] = lane, others + 1
        job = _Job(write, loop.create_future())
        job.done.add_done_callback(partial(self._heed, session))
        self._queues[lane].append(job)
        if isinstance(write, RequestWrite) and write.is_call and self._linger:
            loop.call_later(self._linger, self._start, lane)
        else:
            self._start(lane)
        return job.done

    async def close(self) -> None:
        """Wait until everything that was submitted is written."""
        for lane in list(self._queues):
            self._start(lane)
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _heed(self, session: tuple[str, str], done: asyncio.Future[None]) -> None:
        """A failed write is reported by whoever waits for it; nobody may be waiting any more."""
        lane, count = self._sessions.pop(session)
        if count > 1:
            self._sessions[session] = lane, count - 1
        if not done.cancelled():
            done.exception()

    def _start(self, lane: _Lane) -> None:
        if lane in self._busy or not self._queues.get(lane):
            return
        self._busy.add(lane)
        task = asyncio.get_running_loop().create_task(self._drain(lane))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drain(self, lane: _Lane) -> None:
        queue = self._queues[lane]
        tenant, is_large = lane
        try:
            async with self._slots[is_large]:
                while queue:
                    await self._commit(tenant, [queue.popleft()] if is_large else _take(queue))
        finally:
            self._busy.discard(lane)
            if queue:
                self._start(lane)
            else:
                self._queues.pop(lane, None)

    async def _commit(self, tenant: str, jobs: list[_Job]) -> None:
        try:
            await write_all(self._database, self.tails, tenant, [job.write for job in jobs])
        except StoreUnavailable as error:
            _fail(jobs, error)
        except (TerselyError, asyncpg.PostgresError, ValueError) as error:
            if len(jobs) == 1:
                _fail(jobs, _meaning(error))
            else:
                for job in jobs:
                    await self._commit(tenant, [job])
        except BaseException as error:
            _fail(jobs, StoreUnavailable(f"the write failed: {type(error).__name__}"))
            raise
        else:
            for job in jobs:
                if not job.done.done():
                    job.done.set_result(None)


def _tenant(write: Write) -> str:
    return _request(write).tenant


def _session_id(write: Write) -> str:
    return _request(write).session_id


def _request(write: Write) -> RequestWrite:
    return write if isinstance(write, RequestWrite) else write.request


def _is_large(request: RequestWrite) -> bool:
    return request.decision.last_seq - (request.session.last_seq if request.session else 0) > LARGE


def _fail(jobs: list[_Job], error: BaseException) -> None:
    for job in jobs:
        if not job.done.done():
            job.done.set_exception(error)


def _meaning(error: Exception) -> Exception:
    if isinstance(error, asyncpg.UniqueViolationError):
        return Conflict("that id is already taken")
    if isinstance(error, asyncpg.ForeignKeyViolationError):
        return NotFound("the session is gone")
    if isinstance(error, asyncpg.PostgresError):
        return StoreUnavailable(f"the database refused a write: {type(error).__name__}")
    return error


def _take(queue: deque[_Job]) -> list[_Job]:
    """The longest run of jobs that one transaction can hold: per session one request and then one reply.

    What is decided for a job may need rows that an earlier job of its session writes.
    """
    taken: list[_Job] = []
    left: list[_Job] = []
    held: dict[str, bool] = {}
    while queue and len(taken) < MAX_BATCH:
        job = queue.popleft()
        session = _session_id(job.write)
        is_reply = isinstance(job.write, ReplyWrite)
        if session not in held or (is_reply and held[session]):
            held[session] = not is_reply
            taken.append(job)
        else:
            held[session] = False
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
FIND_APPEND = """
SELECT digest, first_seq, last_seq, turn FROM appends WHERE tenant_id = $1 AND session_id = $2 AND key = $3
"""
AROUND_REPLY = """
SELECT a.status,
    (SELECT min(n.place) FROM messages n
     WHERE n.tenant_id = $1 AND n.session_id = $2 AND n.place > a.place AND n.turn > 0) AS next_place,
    (SELECT max(n.call) FROM messages n
     WHERE n.tenant_id = $1 AND n.session_id = $2 AND n.place > a.place AND n.turn = a.turn AND n.turn + 0 IS NOT NULL
       AND n.role = 'assistant' AND n.status = 'live'
       AND NOT EXISTS (SELECT FROM messages b WHERE b.tenant_id = $1 AND b.session_id = $2 AND b.status = 'live'
                       AND b.role <> 'assistant' AND b.client_visible AND b.turn > 0 AND b.place > a.place
                       AND b.place < n.place)
    ) AS rival
FROM messages a WHERE a.tenant_id = $1 AND a.session_id = $2 AND a.seq = $3
"""
SUPERSEDE_RIVAL = """
UPDATE messages SET status = 'superseded'
WHERE tenant_id = $1 AND session_id = $2 AND status = 'live' AND call = $3
"""


@dataclass(slots=True, eq=False)
class _Attempt:
    """One session's part of a batch, worked out on the state that its writes expect."""

    state: State
    expected: int | None
    create: NewSession | None
    writes: list[Write] = field(default_factory=list)
    rows: Rows = field(default_factory=Rows)
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def shape(self) -> tuple[bool, Shape]:
        """What the statement that stores it looks like."""
        return self.expected is None, shape_of((table, len(getattr(self.rows, table))) for table in TABLES)

    def arguments(self, tenant: str) -> list[object]:
        """The parameters of that statement."""
        state = self.state
        found: list[object] = [tenant, state.id, *counters_of(state)]
        if self.create is None:
            found.append(self.expected)
        else:
            found += [getattr(self.create, name) for name in NEW]
        for table in TABLES:
            if rows := getattr(self.rows, table):
                found += flat(rows)
        return found

    def tell(self, tails: Tails, tenant: str) -> None:
        """Have what was written remembered, where what was there before is."""
        before = tails.get(tenant, self.state.id) if self.create is None else None
        if self.create is not None:
            session = made(self.create, self.state)
        elif before is not None and before.session.version == self.expected:
            session = moved(before.session, self.state)
        else:
            return
        replies = [reply for write in self.writes if isinstance(write, ReplyWrite) for reply in write.replies]
        chain = next((reply.chain for reply in replies if reply.chain is not None), None)
        tails.put(tenant, grown(before, session, self.rows.messages, chain))


async def write_all(database: Database, tails: Tails, tenant: str, writes: list[Write]) -> None:
    """Write everything: at once where sessions are as the writes expect them.

    What finds its session changed is decided anew under the session's lock.
    """
    attempts, left = _work_out(writes)
    if attempts:
        refused = await _write_what_is_as_expected(database, tenant, attempts)
        for attempt in attempts:
            if attempt in refused:
                left += attempt.writes
            else:
                attempt.tell(tails, tenant)
    if left:
        for write in left:
            tails.forget(tenant, _session_id(write))
        has_large = any(isinstance(write, RequestWrite) and _is_large(write) for write in left)
        limit = LARGE_LIMIT if has_large else None
        async with database.transaction(tenant, limit=limit) as connection:
            await _write_locked(connection, tenant, left)


def _work_out(writes: list[Write]) -> tuple[list[_Attempt], list[Write]]:
    """What can be written without a look at the database first, and the rest."""
    attempts: dict[str, _Attempt] = {}
    left: list[Write] = []
    left_sessions: set[str] = set()
    for write in writes:
        session_id = _session_id(write)
        attempt = None if session_id in left_sessions else (attempts.get(session_id) or _attempt(write))
        if attempt is None or not _enter(write, attempt):
            left.append(write)
            left_sessions.add(session_id)
        else:
            attempts[session_id] = attempt
    return [attempts[session_id] for session_id in sorted(attempts)], left


async def _write_what_is_as_expected(database: Database, tenant: str, attempts: list[_Attempt]) -> list[_Attempt]:
    """Write what is as expected, all of it or nothing; return what is not."""
    shapes: defaultdict[tuple[bool, Shape], list[_Attempt]] = defaultdict(list)
    for attempt in attempts:
        shapes[attempt.shape].append(attempt)
    use = database.statements if len(shapes) == 1 else database.transaction
    held: set[str] = set()
    async with use(tenant) as connection:
        for (makes, shape), alike in shapes.items():
            statement = write_at_once(shape, makes=makes)
            rows = await connection.fetchmany(statement, [attempt.arguments(tenant) for attempt in alike])
            held.update(row["id"] for row in rows)
    refused: list[_Attempt] = []
    for attempt in attempts:
        if attempt.state.id not in held:
            refused.append(attempt)
            continue
        requests = [write for write in attempt.writes if isinstance(write, RequestWrite)]
        for write, outcome in zip(requests, attempt.outcomes, strict=True):
            write.outcome = outcome
    return refused


def _attempt(write: Write) -> _Attempt | None:
    if isinstance(write, RequestWrite):
        if write.session is not None:
            return _Attempt(state=state_of(write.session), expected=write.session.version, create=None)
        return _Attempt(state=State(id=write.session_id), expected=None, create=write.create) if write.create else None
    if write.request.outcome is None:
        return None
    state = copy(write.request.outcome.state)
    return _Attempt(state=state, expected=state.version, create=None)


def _enter(write: Write, attempt: _Attempt) -> bool:
    """Work a write out; False when it takes a look at the database to do so."""
    if isinstance(write, RequestWrite):
        if write.key is not None or write.decision.superseded or write.decision.revived or _is_large(write):
            return False
        attempt.outcomes.append(enter_request(write, attempt.state, write.decision, attempt.rows, is_as_decided=True))
    else:
        asked = attempt.outcomes[-1] if attempt.outcomes else write.request.outcome
        assert asked is not None
        if attempt.state.last_seq != asked.last_seq:
            return False
        enter_reply(write, asked, attempt.state, AT_THE_END, attempt.rows)
    attempt.writes.append(write)
    return True


async def _write_locked(connection: Connection, tenant: str, writes: list[Write]) -> None:
    rows = Rows()
    states = await _lock(connection, tenant, writes)
    for write in writes:
        if isinstance(write, RequestWrite):
            await _write_request(connection, tenant, write, states, rows)
        else:
            await _write_reply(connection, tenant, write, states[_session_id(write)], rows)
    for table, sql in INSERTS.items():
        found: list[Record] = getattr(rows, table)
        for start in range(0, len(found), PORTION):
            await connection.fetch(sql, tenant, *as_arrays(found[start : start + PORTION]))
    for state in states.values():
        if state.touched is not None:
            await connection.execute(UPDATE_SESSION, tenant, state.id, *counters_of(state))


async def _lock(connection: Connection, tenant: str, writes: list[Write]) -> dict[str, State]:
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
        raise NotFound("the session is gone")
    return states


async def _write_request(
    connection: Connection, tenant: str, write: RequestWrite, states: dict[str, State], rows: Rows
) -> None:
    state = states[write.session_id]
    if write.key is not None and (done := await _written_before(connection, tenant, write, state)) is not None:
        write.outcome = done
        return
    decision = write.decision
    is_as_decided = state.version == (0 if write.version is None else write.version)
    if not is_as_decided:
        again = await _decide_again(connection, tenant, write, state)
        if again is None:
            state = await _take_spare(connection, tenant, write, states)
            is_as_decided = True
        else:
            decision = again
    enter = partial(enter_request, write, state, decision, rows, is_as_decided=is_as_decided)
    write.outcome = await asyncio.to_thread(enter) if _is_large(write) else enter()
    await _set_statuses(connection, tenant, state.id, decision)


async def _set_statuses(connection: Connection, tenant: str, session_id: str, decision: Decision) -> None:
    for seqs, status, before in ((decision.superseded, "superseded", "live"), (decision.revived, "live", "superseded")):
        if seqs:
            await connection.execute(SET_STATUS, tenant, session_id, list(seqs), status)
            await connection.execute(SET_STATUS_OF_HIDDEN, tenant, session_id, list(seqs), status, before)
    if changed := (*decision.superseded, *decision.revived):
        await epochs.without(connection, tenant, session_id, changed)


async def _written_before(connection: Connection, tenant: str, write: RequestWrite, state: State) -> Outcome | None:
    row = await connection.fetchrow(FIND_APPEND, tenant, write.session_id, write.key)
    if row is None:
        return None
    if row["digest"] != write.key_digest:
        raise Conflict("that idempotency key was used for other messages", field="Idempotency-Key")
    return Outcome(
        session_id=write.session_id,
        call=0,
        first_seq=row["first_seq"],
        last_seq=row["last_seq"],
        turn=row["turn"],
        answered_seq=row["last_seq"],
        answered_place=float(row["last_seq"]),
        decision=replace(write.decision, placed=()),
        state=copy(state),
        was_stored_before=True,
    )


async def _decide_again(connection: Connection, tenant: str, write: RequestWrite, state: State) -> Decision | None:
    """The session has moved on since the decision: decide on what is there now, under its lock.

    None where the id went to another conversation of the same client: two histories that share nothing are not
    one session.
    """
    if write.named is not None:
        return await _lay_again(connection, tenant, write, write.named, state)
    if write.mode == "append" and write.decision.kind != "retry":
        return await _append_again(connection, tenant, write, state)
    rows = [tail.row for tail in await messages.all_rows(connection, tenant, state.id) if not tail.is_hidden]
    counters = {"last_seq": state.last_seq, "turns": state.turns}
    if write.mode == "append":
        # The first try may have been answered meanwhile; where others went on from it, it is said once more.
        again = repeat(rows, write.incoming, **counters, is_answered=True)
        return again or await _append_again(connection, tenant, write, state)
    decision = reconcile(rows, write.incoming, **counters, revivable=True)
    if write.decision.kind != "edited" and _knows_nothing(write.decision) and _knows_nothing(decision):
        if write.create is not None and write.create.spare_id is not None:
            return None
        if not any(message.role == "assistant" for message in write.incoming):
            # Two beginnings under one id of ours: each said something new.
            return await _append_again(connection, tenant, write, state)
    return decision


def _knows_nothing(decision: Decision) -> bool:
    """Whether nothing of the history that was sent is stored."""
    return not any(placed.turn and not placed.is_new for placed in decision.placed)


async def _lay_again(connection: Connection, tenant: str, write: RequestWrite, named: Named, state: State) -> Decision:
    """What the request brings itself, once more behind the reply that it names."""
    rows = [tail.row for tail in await messages.all_rows(connection, tenant, state.id) if not tail.is_hidden]
    known = {place.seq for index, place in enumerate(write.decision.placed) if index not in named.own}
    history = await messages.leading_to(connection, tenant, state.id, rows, named.seq)
    if history is None:
        history = [row for row in rows if row.seq in known]
    history = [row for row in history if row.is_link or row.seq in known]
    own, front = [write.incoming[index] for index in named.own], named.front
    incoming = [*own[:front], *map(known_again, history), *own[front:]]
    again = reconcile(rows, incoming, last_seq=state.last_seq, turns=state.turns, revivable=True)
    placed = list(write.decision.placed)
    for index, place in zip(named.own, [*again.placed[:front], *again.placed[front + len(history) :]], strict=True):
        placed[index] = place
    return replace(again, placed=tuple(placed))


async def _append_again(connection: Connection, tenant: str, write: RequestWrite, state: State) -> Decision:
    turn = await connection.fetchval(LAST_TURN, tenant, state.id) or 0
    superseded: list[int] = []
    if write.replaces_instructions or (write.mode == "full" and any(not m.is_link for m in write.incoming)):
        superseded = [m.seq for m in await messages.instructions(connection, tenant, state.id)]
    return append(write.incoming, last_seq=state.last_seq, turns=state.turns, turn=turn, superseded=superseded)


async def _take_spare(connection: Connection, tenant: str, write: RequestWrite, states: dict[str, State]) -> State:
    """Make ``write`` one of a session of its own, a child of the one that has taken its id."""
    assert write.create is not None
    assert write.create.spare_id is not None
    taken, write.session_id = write.session_id, write.create.spare_id
    write.create = replace(write.create, parent=taken, spare_id=None)
    states |= await _lock(connection, tenant, [write])
    return states[write.session_id]


async def _write_reply(connection: Connection, tenant: str, write: ReplyWrite, state: State, rows: Rows) -> None:
    asked = write.request.outcome
    if asked is None:
        raise StoreUnavailable("the request itself could not be stored")
    placement = AT_THE_END
    answered = asked.decision.answered
    has_moved = state.last_seq != asked.last_seq or state.edits != asked.state.edits
    if write.replies and (has_moved or (answered is not None and answered.status != "live")):
        placement = await _place_of_late_reply(connection, tenant, asked, state.id)
    enter_reply(write, asked, state, placement, rows)


async def _place_of_late_reply(connection: Connection, tenant: str, asked: Outcome, session_id: str) -> Placement:
    """The session moved on while the model spoke: the reply still belongs after the message that it answers.

    What became of that message meanwhile (superseded, dropped, undone, removed) becomes of the reply too. Of two
    replies to one message the later request's wins.
    """
    row = await connection.fetchrow(AROUND_REPLY, tenant, session_id, asked.answered_seq)
    if row is None or row["status"] != "live":
        return Placement(status=row["status"] if row else "superseded", before=row["next_place"] if row else None)
    rival = row["rival"]
    if rival is not None and rival > asked.call:
        return Placement(status="superseded", before=row["next_place"])
    if rival is not None and rival > 0:
        await connection.execute(SUPERSEDE_RIVAL, tenant, session_id, rival)
    return Placement(before=row["next_place"])
