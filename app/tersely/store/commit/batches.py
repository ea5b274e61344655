"""Store a batch of writes: together where sessions are as the writes expect, else under the sessions' locks."""

from __future__ import annotations

from collections import defaultdict
from copy import copy

import msgspec

from tersely.store.commit.apply import AT_THE_END, NewRows, enter_reply, enter_request
from tersely.store.commit.locked_writes import write_locked
from tersely.store.commit.records import (
    NewSession,
    ReplyWrite,
    RequestOutcome,
    RequestWrite,
    SessionCounters,
    StoredReply,
    Write,
    counters_of,
    figures_of,
    new_session_from,
    request_of,
    session_after,
    session_counters,
    session_id_of,
)
from tersely.store.commit.sizes import LARGE_LIMIT, has_large_reply, has_long_epoch, is_large
from tersely.store.db.connection import Database
from tersely.store.db.statements import (
    HOLD_SESSION,
    INSERT_ROW,
    MAKE_SESSION,
    NEW,
    TABLES,
    Record,
    Shape,
    flat,
    shape_of,
    write_at_once,
)
from tersely.store.history.tail_cache import TailCache, appended

# The results of writes, by the ids of these.
Results = dict[int, RequestOutcome | StoredReply]


class SessionAttempt(msgspec.Struct, eq=False):
    """One session's part of a batch, computed on the state that its writes expect."""

    state: SessionCounters
    expected: int | None
    create: NewSession | None
    writes: list[Write] = msgspec.field(default_factory=list)
    rows: NewRows = msgspec.field(default_factory=NewRows)
    results: list[RequestOutcome | StoredReply] = msgspec.field(default_factory=list)

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
        if request_of(self.writes[-1]).whole is not None:
            tail_cache.forget(tenant, self.state.id)  # a live session knows it
            return
        before = tail_cache.get(tenant, self.state.id) if self.create is None else None
        if self.create is not None:
            session = new_session_from(self.create, self.state)
        elif before is not None and before.session.version == self.expected:
            session = session_after(before.session, self.state)
            if session.cut < before.session.cut:
                tail_cache.forget(tenant, self.state.id)  # it lacks the messages that an earlier cut shows again
                return
        else:
            return
        replies = [reply for write in self.writes if isinstance(write, ReplyWrite) for reply in write.replies]
        chain = next((reply.chain for reply in replies if reply.chain is not None), None)
        tail_cache.put(tenant, appended(before, session, self.rows.messages, chain))


async def write_all(
    database: Database, tail_cache: TailCache, tenant: str, writes: list[Write], results: Results
) -> None:
    """Write a batch, together if sessions are as the writes expect them, and add the result of each write.

    A write whose session has changed is decided again under the session's lock, in a transaction of its own. Where that
    fails, ``results`` has what is stored already; a batch that is tried again must be given the same ones, so that
    nothing is stored twice.
    """
    attempts, left = _prepare_attempts(writes, results)
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
            tail_cache.forget(tenant, session_id_of(write))
        has_large = any(is_large(write) if isinstance(write, RequestWrite) else has_long_epoch(write) for write in left)
        limit = LARGE_LIMIT if has_large else None
        async with database.transaction(tenant, limit=limit) as connection:
            found = await write_locked(connection, tenant, left, results)
        results |= found


def _prepare_attempts(writes: list[Write], results: Results) -> tuple[list[SessionAttempt], list[Write]]:
    """Split writes that are not stored yet into those that need no look at the database first, and the rest."""
    attempts: dict[str, SessionAttempt] = {}
    left: list[Write] = []
    left_sessions: set[str] = set()
    for write in writes:
        session_id = session_id_of(write)
        for part in write.parts:
            if id(part) in results:
                left_sessions.add(session_id)
                continue
            attempt = None if session_id in left_sessions else (attempts.get(session_id) or _attempt(part))
            if attempt is None or not _enter(part, attempt):
                left.append(part)
                left_sessions.add(session_id)
            else:
                attempts[session_id] = attempt
    return [attempts[session_id] for session_id in sorted(attempts)], left


async def _write_unchanged_sessions(
    database: Database, tenant: str, attempts: list[SessionAttempt]
) -> list[SessionAttempt]:
    """Write the attempts whose sessions are as expected, all or none. Return the others."""
    if await database.is_distributed():
        return await _write_row_by_row(database, tenant, attempts)
    shapes: defaultdict[tuple[bool, Shape], list[SessionAttempt]] = defaultdict(list)
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


async def _write_row_by_row(database: Database, tenant: str, attempts: list[SessionAttempt]) -> list[SessionAttempt]:
    """Do the same with one statement for each row: a node of a distributed Postgres keeps plans of such alone."""
    held: set[str] = set()
    async with database.group_commit(tenant) as connection:
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


def _attempt(write: Write) -> SessionAttempt | None:
    if isinstance(write, RequestWrite):
        if write.session is not None:
            return SessionAttempt(state=session_counters(write.session), expected=write.session.version, create=None)
        return (
            SessionAttempt(state=SessionCounters(id=write.session_id), expected=None, create=write.create)
            if write.create
            else None
        )
    outcome = write.request_outcome
    if outcome is None:
        return None
    state = copy(outcome.state)
    return SessionAttempt(state=state, expected=state.version, create=None)


def _enter(write: Write, attempt: SessionAttempt) -> bool:
    """Compute a write. Return False if that needs a query."""
    if isinstance(write, RequestWrite):
        if write.key is not None or write.decision.superseded or write.decision.restored or is_large(write):
            return False
        attempt.results.append(enter_request(write, attempt.state, write.decision, attempt.rows, is_as_decided=True))
    else:
        if has_long_epoch(write) or has_large_reply(write):
            return False
        is_together = attempt.writes and attempt.writes[-1] is write.request
        outcome = attempt.results[-1] if is_together else write.request_outcome
        if (
            not isinstance(outcome, RequestOutcome)
            or attempt.state.last_seq != outcome.last_seq
            or not outcome.decision.replies_at_end
        ):
            return False
        attempt.results.append(enter_reply(write, outcome, attempt.state, AT_THE_END, attempt.rows))
    attempt.writes.append(write)
    return True
