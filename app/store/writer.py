"""Group commit: the writes of many requests in one durable transaction.

Writes of one session keep their order; a session's row is locked while its counters move, so that sequence
numbers are gapless whatever the number of replicas. A batch that fails is tried again write by write.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime

import asyncpg

from app.domain.errors import Conflict, NotFound, StoreUnavailable, TerselyError
from app.domain.lineage import Decision, append, reconcile
from app.store import messages
from app.store.connection import Connection, Database
from app.store.sessions import COLUMNS, in_flight
from app.store.writes import NewEpoch, Outcome, ReplyWrite, RequestWrite, Said, Write

MAX_BATCH = 128
# How long a request's messages wait for company. Real replies take far longer; a reply that does not is written
# together with its request in one transaction.
LINGER = 0.002
NOTHING_SAID = Said()


@dataclass(slots=True)
class _Job:
    write: Write
    done: asyncio.Future[None]


@dataclass(slots=True, kw_only=True)
class _State:
    """A session's counters, while its row is locked."""

    id: str
    last_seq: int = 0
    turns: int = 0
    tokens: int = 0
    version: int = 0
    edits: int = 0
    edited: bool = False
    calls: int = 0
    epoch: int = 0
    cut: int = 1
    last_turn: int = 0
    plan: bytes | None = None
    open_chain: bytes | None = None
    last_call_at: datetime | None = None
    is_new: bool = False
    touched: datetime | None = None


@dataclass(slots=True)
class _Rows:
    """The rows of a batch, column lists to be."""

    messages: list[tuple[object, ...]] = field(default_factory=list)
    terse: list[tuple[object, ...]] = field(default_factory=list)
    calls: list[tuple[object, ...]] = field(default_factory=list)
    epochs: list[tuple[object, ...]] = field(default_factory=list)
    attributes: list[tuple[object, ...]] = field(default_factory=list)
    appends: list[tuple[object, ...]] = field(default_factory=list)


class Writer:
    """Takes writes, commits them in groups. One transaction at a time per tenant, a few tenants at once."""

    def __init__(self, database: Database, *, lanes: int = 4, linger: float = LINGER) -> None:
        """``linger`` in seconds."""
        self._database = database
        self._linger = linger
        self._queues: defaultdict[str, deque[_Job]] = defaultdict(deque)
        self._busy: set[str] = set()
        self._lanes = asyncio.Semaphore(lanes)
        self._tasks: set[asyncio.Task[None]] = set()

    async def write(self, write: Write) -> None:
        """Return when ``write`` is on disk. Raises `StoreUnavailable`, `Conflict`, `NotFound`.

        A caller that is cancelled meanwhile loses only the news: the write goes on.
        """
        await asyncio.shield(self.submit(write))

    def submit(self, write: Write) -> asyncio.Future[None]:
        """Queue ``write``; the future is done when it is on disk."""
        loop = asyncio.get_running_loop()
        tenant = _tenant(write)
        job = _Job(write, loop.create_future())
        job.done.add_done_callback(_heed)
        self._queues[tenant].append(job)
        if isinstance(write, RequestWrite) and write.is_call and self._linger:
            loop.call_later(self._linger, self._start, tenant)
        else:
            self._start(tenant)
        return job.done

    async def close(self) -> None:
        """Wait until everything that was submitted is written."""
        for tenant in list(self._queues):
            self._start(tenant)
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, tenant: str) -> None:
        if tenant in self._busy or not self._queues.get(tenant):
            return
        self._busy.add(tenant)
        task = asyncio.get_running_loop().create_task(self._drain(tenant))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drain(self, tenant: str) -> None:
        queue = self._queues[tenant]
        try:
            async with self._lanes:
                while queue:
                    await self._commit(tenant, _take(queue))
        finally:
            self._busy.discard(tenant)
            if queue:
                self._start(tenant)
            else:
                self._queues.pop(tenant, None)

    async def _commit(self, tenant: str, jobs: list[_Job]) -> None:
        try:
            await self._transact(tenant, [job.write for job in jobs])
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

    async def _transact(self, tenant: str, writes: list[Write]) -> None:
        async with self._database.transaction(tenant) as connection:
            await write_all(connection, tenant, writes)


def _tenant(write: Write) -> str:
    return write.tenant if isinstance(write, RequestWrite) else write.request.tenant


def _session_id(write: Write) -> str:
    return write.session_id if isinstance(write, RequestWrite) else write.request.session_id


def _heed(done: asyncio.Future[None]) -> None:
    """A failed write is reported by whoever waits for it; nobody may be waiting any more."""
    if not done.cancelled():
        done.exception()


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
# The last live message by place is the last one whose place is its number, or was put between older ones after it:
# found from the end, so that it costs the same in every session.
LAST_TURN = """
SELECT turn FROM messages
WHERE tenant_id = $1 AND session_id = $2 AND status = 'live' AND turn > 0 AND seq >= coalesce((
    SELECT seq FROM messages
    WHERE tenant_id = $1 AND session_id = $2 AND status = 'live' AND turn > 0 AND place = seq::float8
    ORDER BY seq DESC LIMIT 1), 1)
ORDER BY place DESC, seq DESC LIMIT 1
"""
INSERT_SESSION = """
INSERT INTO sessions (tenant_id, id, parent, client_id, strategy, epoch_policy, metadata, last_seq, turns, tokens,
    version, edits, edited, calls, epoch, cut, plan, open_chain, last_call_at, created_at, updated_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, 0, 0, 0, 0, 0, false, 0, 0, 1, NULL, NULL, NULL, $8, $8)
ON CONFLICT (tenant_id, id) DO NOTHING RETURNING id
"""
UPDATE_SESSIONS = """
UPDATE sessions s SET last_seq = u.last_seq, turns = u.turns, tokens = u.tokens, version = u.version,
    edits = u.edits, edited = u.edited, calls = u.calls, epoch = u.epoch, cut = u.cut, plan = u.plan,
    open_chain = u.open_chain, last_call_at = u.last_call_at, updated_at = u.updated_at
FROM unnest($2::text[], $3::bigint[], $4::integer[], $5::bigint[], $6::bigint[], $7::bigint[], $8::boolean[],
    $9::bigint[], $10::integer[], $11::bigint[], $12::bytea[], $13::bytea[], $14::timestamptz[], $15::timestamptz[])
    AS u (id, last_seq, turns, tokens, version, edits, edited, calls, epoch, cut, plan, open_chain, last_call_at,
        updated_at)
WHERE s.tenant_id = $1 AND s.id = u.id
"""
_INSERTS: dict[str, tuple[str, str]] = {
    "messages": (
        "session_id, seq, turn, tokens, place, role, status, dialect, client_visible, model_visible, pinned, finish, "
        "call, digest, chain, created_at, raw, model_raw",
        "text, bigint, integer, integer, float8, text, text, text, boolean, boolean, boolean, text, "
        "bigint, bytea, bytea, timestamptz, bytea, bytea",
    ),
    "terse": (
        "session_id, turn, seq, number, role, source, created_at, text",
        "text, integer, bigint, integer, text, text, timestamptz, bytea",
    ),
    "calls": (
        "session_id, number, turn, model, strategy, epoch, cut, last_seq, tools, tokens_before, tokens_after, "
        "input_tokens, cached_tokens, output_tokens, status, created_at, finished_at",
        "text, bigint, integer, text, text, integer, bigint, bigint, bytea, integer, integer, "
        "integer, integer, integer, integer, timestamptz, timestamptz",
    ),
    "epochs": (
        "session_id, number, cut, reason, head_tokens, tokens_before, tokens_after, created_at, plan",
        "text, integer, bigint, text, integer, integer, integer, timestamptz, bytea",
    ),
    "attributes": ("session_id, digest, kind, created_at, raw", "text, bytea, text, timestamptz, bytea"),
    "appends": (
        "session_id, key, digest, first_seq, last_seq, turn, created_at",
        "text, text, bytea, bigint, bigint, integer, timestamptz",
    ),
}


def _insert(table: str) -> str:
    columns, types = _INSERTS[table]
    arrays = ", ".join(f"${n}::{kind.strip()}[]" for n, kind in enumerate(types.split(","), start=2))
    skip = " ON CONFLICT DO NOTHING" if table in ("attributes", "terse", "calls") else ""
    return f"INSERT INTO {table} (tenant_id, {columns}) SELECT $1, u.* FROM unnest({arrays}) AS u{skip} RETURNING 1"


INSERTS: dict[str, str] = {table: _insert(table) for table in _INSERTS}
SET_STATUS = """
UPDATE messages SET status = $4 WHERE tenant_id = $1 AND session_id = $2 AND seq = ANY($3::bigint[])
"""
FIND_APPEND = """
SELECT digest, first_seq, last_seq, turn FROM appends WHERE tenant_id = $1 AND session_id = $2 AND key = $3
"""
AROUND_REPLY = """
SELECT a.status,
    (SELECT min(n.place) FROM messages n
     WHERE n.tenant_id = $1 AND n.session_id = $2 AND n.place > a.place AND n.turn > 0) AS next_place,
    (SELECT max(n.call) FROM messages n
     WHERE n.tenant_id = $1 AND n.session_id = $2 AND n.place > a.place AND n.turn = a.turn
       AND n.role = 'assistant' AND n.status = 'live'
       AND NOT EXISTS (SELECT FROM messages b WHERE b.tenant_id = $1 AND b.session_id = $2 AND b.status = 'live'
                       AND b.role <> 'assistant' AND b.turn > 0 AND b.place > a.place AND b.place < n.place)
    ) AS rival
FROM messages a WHERE a.tenant_id = $1 AND a.session_id = $2 AND a.seq = $3
"""
SUPERSEDE_RIVAL = """
UPDATE messages SET status = 'superseded'
WHERE tenant_id = $1 AND session_id = $2 AND role = 'assistant' AND status = 'live' AND call = $3
"""


async def write_all(connection: Connection, tenant: str, writes: list[Write]) -> None:
    """Write everything in the caller's transaction."""
    rows = _Rows()
    states = await _lock(connection, tenant, writes)
    for write in writes:
        state = states[_session_id(write)]
        if isinstance(write, RequestWrite):
            await _write_request(connection, tenant, write, states, rows)
        else:
            await _write_reply(connection, tenant, write, state, rows)
    for table, sql in INSERTS.items():
        found: list[tuple[object, ...]] = getattr(rows, table)
        if found:
            await connection.fetch(sql, tenant, *map(list, zip(*found, strict=True)))
    changed = [state for state in states.values() if state.touched is not None]
    if changed:
        await connection.execute(
            UPDATE_SESSIONS,
            tenant,
            *(
                [getattr(state, name) for state in changed]
                for name in (
                    "id",
                    "last_seq",
                    "turns",
                    "tokens",
                    "version",
                    "edits",
                    "edited",
                    "calls",
                    "epoch",
                    "cut",
                    "plan",
                    "open_chain",
                    "last_call_at",
                    "touched",
                )
            ),
        )


async def _lock(connection: Connection, tenant: str, writes: list[Write]) -> dict[str, _State]:
    """Make the sessions that are missing, lock the others, and read their counters."""
    states: dict[str, _State] = {}
    wanted = sorted({_session_id(write) for write in writes})
    create = {w.session_id: w for w in writes if isinstance(w, RequestWrite) and w.create and w.version is None}
    for session_id, write in sorted(create.items()):
        new = write.create
        assert new is not None
        made = await connection.fetchval(
            INSERT_SESSION,
            tenant,
            session_id,
            new.parent,
            new.client_id,
            new.strategy,
            new.epoch_policy,
            new.metadata,
            write.now,
        )
        if made is not None:
            states[session_id] = _State(id=session_id, is_new=True)
    rest = [session_id for session_id in wanted if session_id not in states]
    if rest:
        for row in await connection.fetch(LOCK, tenant, rest):
            states[row["id"]] = _State(
                id=row["id"],
                last_seq=row["last_seq"],
                turns=row["turns"],
                tokens=row["tokens"],
                version=row["version"],
                edits=row["edits"],
                edited=row["edited"],
                calls=row["calls"],
                epoch=row["epoch"],
                cut=row["cut"],
                plan=row["plan"],
                last_call_at=row["last_call_at"],
            )
    missing = [session_id for session_id in wanted if session_id not in states]
    if missing:
        raise NotFound("the session is gone")
    return states


async def _write_request(
    connection: Connection, tenant: str, write: RequestWrite, states: dict[str, _State], rows: _Rows
) -> None:
    state = states[write.session_id]
    if write.key is not None and (done := await _written_before(connection, tenant, write)) is not None:
        write.outcome = done
        return
    decision = write.decision
    is_as_decided = state.is_new if write.version is None else state.version == write.version
    if not is_as_decided:
        again = await _decide_again(connection, tenant, write, state)
        if again is None:
            state = await _take_spare(connection, tenant, write, states)
            is_as_decided = True
        else:
            decision = again
    first = state.last_seq + 1
    new_tokens = 0
    for index, (placed, incoming, raw, tokens) in enumerate(
        zip(decision.placed, write.incoming, write.raws, write.tokens, strict=True)
    ):
        if not placed.is_new:
            continue
        new_tokens += tokens
        said = write.said.get(index, NOTHING_SAID)
        rows.messages.append(
            (
                state.id,
                placed.seq,
                placed.turn,
                tokens,
                placed.place,
                incoming.role,
                "live",
                write.dialect,
                True,
                True,
                False,
                None,
                0,
                incoming.digest,
                None,
                write.now,
                raw,
                said.model_raw,
            )
        )
        rows.terse += _terse_rows(state.id, placed.turn, placed.seq, said.terse, write.now)
    for seqs, status in ((decision.superseded, "superseded"), (decision.revived, "live")):
        if seqs:
            await connection.execute(SET_STATUS, tenant, state.id, list(seqs), status)
    state.last_seq = decision.last_seq
    state.turns = decision.turns
    state.tokens += new_tokens
    state.version += 1
    if decision.kind == "edited":
        state.edits += 1
        state.edited = True
    state.touched = write.now
    if write.is_call:
        state.calls += 1
        state.last_call_at = write.now
    state.open_chain = in_flight(write.open_chain) if write.open_chain else None
    rows.attributes.extend((state.id, a.digest, a.kind, write.now, a.raw) for a in write.attributes)
    answered = decision.answered
    turn = answered.turn if answered else max(1, state.turns)
    if write.key is not None:
        rows.appends.append((state.id, write.key, write.key_digest, first, state.last_seq, turn, write.now))
    write.outcome = Outcome(
        session_id=state.id,
        call=state.calls,
        first_seq=first,
        last_seq=state.last_seq,
        turn=turn,
        answered_seq=answered.seq if answered else 0,
        answered_place=answered.place if answered else 0.0,
        decision=decision,
        is_as_decided=is_as_decided,
    )


def _terse_rows(
    session_id: str, turn: int, seq: int, entries: Iterable[tuple[str, str]], now: datetime
) -> list[tuple[object, ...]]:
    """Rows for a reply's log entries, given as (text, source)."""
    return [
        (session_id, turn, seq, number, "assistant", source, now, text.encode("utf-8", "replace"))
        for number, (text, source) in enumerate(entries)
    ]


async def _written_before(connection: Connection, tenant: str, write: RequestWrite) -> Outcome | None:
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
        was_stored_before=True,
    )


async def _decide_again(connection: Connection, tenant: str, write: RequestWrite, state: _State) -> Decision | None:
    """The session has moved on since the decision: decide on what is there now, under its lock.

    None where the id went to another conversation of the same client: two histories that share nothing are not
    one session.
    """
    if write.mode == "append":
        return await _append_again(connection, tenant, write, state)
    rows = [tail.row for tail in await messages.all_rows(connection, tenant, state.id)]
    decision = reconcile(rows, write.incoming, last_seq=state.last_seq, turns=state.turns, revivable=True)
    if write.version is None and not any(p.turn and not p.is_new for p in decision.placed):
        if write.create is not None and write.create.spare_id is not None:
            return None
        if not any(message.role == "assistant" for message in write.incoming):
            # Two beginnings under one id of ours: each said something new.
            return await _append_again(connection, tenant, write, state)
    return decision


async def _append_again(connection: Connection, tenant: str, write: RequestWrite, state: _State) -> Decision:
    turn = await connection.fetchval(LAST_TURN, tenant, state.id) or 0
    superseded: list[int] = []
    if write.replaces_instructions or (write.mode == "full" and any(not m.is_link for m in write.incoming)):
        superseded = [m.seq for m in await messages.instructions(connection, tenant, state.id)]
    return append(write.incoming, last_seq=state.last_seq, turns=state.turns, turn=turn, superseded=superseded)


async def _take_spare(connection: Connection, tenant: str, write: RequestWrite, states: dict[str, _State]) -> _State:
    """Make ``write`` one of a session of its own, a child of the one that has taken its id."""
    assert write.create is not None
    assert write.create.spare_id is not None
    taken, write.session_id = write.session_id, write.create.spare_id
    write.create = replace(write.create, parent=taken, spare_id=None)
    states |= await _lock(connection, tenant, [write])
    return states[write.session_id]


def _start_epoch(new: NewEpoch, state: _State, now: datetime, rows: _Rows) -> None:
    state.epoch = new.epoch.number
    state.edited = False
    state.cut = new.epoch.cut
    state.plan = new.plan
    rows.epochs.append(
        (
            state.id,
            new.epoch.number,
            new.epoch.cut,
            new.epoch.reason,
            new.epoch.head_tokens,
            new.tokens_before,
            new.tokens_after,
            now,
            new.plan,
        )
    )
    for number, entry in enumerate(new.derived):
        rows.terse.append(
            (
                state.id,
                entry.turn,
                entry.seq,
                1000 + number,
                entry.role,
                entry.source,
                entry.created_at,
                entry.text.encode("utf-8", "replace"),
            )
        )


async def _write_reply(connection: Connection, tenant: str, write: ReplyWrite, state: _State, rows: _Rows) -> None:
    asked = write.request.outcome
    if asked is None:
        raise StoreUnavailable("the request itself could not be stored")
    status, place_after = "live", None
    if state.last_seq != asked.last_seq and write.replies:
        status, place_after = await _place_of_late_reply(connection, tenant, asked, state.id)
    for reply in write.replies:
        state.last_seq += 1
        place = float(state.last_seq)
        if place_after is not None:
            place = (asked.answered_place + place_after) / 2
        rows.messages.append(
            (
                state.id,
                state.last_seq,
                asked.turn,
                reply.tokens,
                place,
                "assistant",
                "superseded" if reply.is_alternative else status,
                write.request.dialect,
                True,
                True,
                False,
                reply.finish,
                asked.call,
                reply.digest,
                reply.chain,
                write.now,
                reply.raw,
                reply.model_raw,
            )
        )
        rows.terse += _terse_rows(state.id, asked.turn, state.last_seq, reply.terse, write.now)
        state.tokens += reply.tokens
    # Of a call that failed, the request may be sent again; once there is a reply, its chain is what is looked for.
    is_unanswered = not write.replies and state.last_seq == asked.last_seq
    state.open_chain = write.request.open_chain if is_unanswered else None
    report = write.report
    rows.calls.append(
        (
            state.id,
            asked.call,
            asked.turn,
            report.model,
            report.strategy,
            report.epoch,
            report.cut,
            asked.last_seq,
            report.tools,
            report.tokens_before,
            report.tokens_after,
            report.input_tokens,
            report.cached_tokens,
            report.output_tokens,
            report.status,
            write.started,
            write.now,
        )
    )
    if write.epoch is not None and asked.is_as_decided and write.epoch.epoch.number == state.epoch + 1:
        _start_epoch(write.epoch, state, write.now, rows)
    state.version += 1
    state.touched = write.now


async def _place_of_late_reply(
    connection: Connection, tenant: str, asked: Outcome, session_id: str
) -> tuple[str, float | None]:
    """The session moved on while the model spoke: the reply still belongs after the message that it answers.

    If that message was superseded, so is the reply. Of two replies to one message the later request's wins.
    """
    row = await connection.fetchrow(AROUND_REPLY, tenant, session_id, asked.answered_seq)
    if row is None:
        return "superseded", None
    status = "live" if row["status"] != "superseded" else "superseded"
    rival = row["rival"]
    if status == "live" and rival is not None and rival > 0:
        if rival > asked.call:
            status = "superseded"
        else:
            await connection.execute(SUPERSEDE_RIVAL, tenant, session_id, rival)
    return status, row["next_place"]
