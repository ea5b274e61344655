"""Writing an exchange late: after its call has ended, perhaps after other calls of its session, perhaps not for the
first time.

An exchange is written in one transaction with its id, so that it is written once, however often that is tried. What
came to the session after the exchange stays as it is: a late exchange supersedes nothing that is newer than itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from datetime import datetime
from itertools import takewhile

import asyncpg
import msgspec
from msgspec import structs

from tersely.domain.errors import StoreUnavailable
from tersely.domain.history.links import PlacedMessage, StoredLink
from tersely.domain.history.placement import MIN_GAP
from tersely.domain.history.reconciliation import Reconciliation, append_messages
from tersely.domain.history.repetition import find_earlier_question, reconcile_repetition
from tersely.domain.history.reply_placement import ReplyPlacement
from tersely.store.commit import idempotency_keys as appends
from tersely.store.commit.apply import AT_THE_END, NewRows, enter_parts, enter_replies, enter_report, enter_request
from tersely.store.commit.decisions import append_again, decide_again
from tersely.store.commit.locked_writes import lock_sessions
from tersely.store.commit.records import NewReply, NewSession, ReplyWrite, RequestOutcome, RequestWrite, SessionCounters
from tersely.store.commit.rows import insert_rows
from tersely.store.commit.sizes import LARGE_LIMIT
from tersely.store.commit.statuses import place_late_reply, set_statuses
from tersely.store.db.connection import Connection, Database, refusal
from tersely.store.history import messages, model_views, sessions
from tersely.store.history.messages import TailRow
from tersely.store.history.tail_cache import TailCache

CLAIM = """
INSERT INTO replays (tenant_id, id, session_id, created_at) VALUES ($1, $2, $3, $4)
ON CONFLICT (tenant_id, id) DO NOTHING RETURNING id
"""
# Held to the end of the transaction: of two exchanges that may make a session, the second one sees what the first did.
TAKE_TURN = """
INSERT INTO replays (tenant_id, id, session_id, created_at) VALUES ($1, '', '', $2)
ON CONFLICT (tenant_id, id) DO UPDATE SET created_at = excluded.created_at
"""
# Where an exchange is, other than where it was to be.
MOVE_CLAIM = "UPDATE replays SET session_id = $3 WHERE tenant_id = $1 AND id = $2"
FIND_CLAIM = """
SELECT s.id, s.created_at FROM replays r JOIN sessions s ON s.tenant_id = $1 AND s.id = r.session_id
WHERE r.tenant_id = $1 AND r.id = $2
"""
FORGET = "DELETE FROM replays WHERE tenant_id = $1 AND created_at < $2"
FIND_CALL = "SELECT number FROM calls WHERE tenant_id = $1 AND session_id = $2 AND exchange = $3"
FIND_REQUEST = """
SELECT seq, turn, place, status FROM messages WHERE tenant_id = $1 AND session_id = $2 AND exchange = $3 ORDER BY seq
"""
# A reply that the client has sent again, to a replica that did not know it: it becomes what it is.
ADOPT_REPLY = """
UPDATE messages SET raw = $4, model_raw = $5, model_prefix = $6, model_suffix = $7, model_middle = $8, chain = $9,
    finish = $10, call = $11
WHERE tenant_id = $1 AND session_id = $2 AND seq = $3 AND chain IS NULL AND status = 'live' RETURNING seq
"""
# Sessions made since a time to which a client brought a reply, near their beginning.
FIND_SINCE = """
SELECT DISTINCT s.id, s.created_at FROM (
    SELECT session_id, seq FROM messages
    WHERE tenant_id = $1 AND digest = $5 AND chain IS NULL AND role = 'assistant' LIMIT 1000
) AS m JOIN sessions s ON s.tenant_id = $1 AND s.id = m.session_id
WHERE m.seq <= $4 AND s.created_at >= $2 AND s.client_id IS NOT DISTINCT FROM $3
ORDER BY s.created_at DESC, s.id LIMIT 8
"""
# A session that has nothing but one question without a reply.
LEAVE_QUESTION = """
UPDATE sessions AS s SET version = version + 1, edits = edits + 1, edited = true, open_chain = NULL
WHERE s.tenant_id = $1 AND s.id = $2 AND s.calls <= 1 AND NOT EXISTS (
    SELECT FROM messages m WHERE m.tenant_id = $1 AND m.session_id = $2 AND m.chain IS NOT NULL
) RETURNING s.id
"""
LEAVE = """
UPDATE sessions SET version = version + 1, edits = edits + 1, edited = true, open_chain = NULL
WHERE tenant_id = $1 AND id = $2
"""
LEAVE_MESSAGES = """
UPDATE messages SET status = 'superseded', chain = NULL
WHERE tenant_id = $1 AND session_id = $2 AND status = 'live'
"""
# Replies of one session for the same messages of another one, whose numbers are $4.
MOVE_REPLIES = """
UPDATE messages AS m SET raw = o.raw, model_raw = o.model_raw, model_prefix = o.model_prefix,
    model_suffix = o.model_suffix, model_middle = o.model_middle, chain = o.chain, finish = o.finish
FROM messages o, unnest($4::bigint[], $5::bigint[]) AS n (old, new)
WHERE o.tenant_id = $1 AND o.session_id = $2 AND o.seq = n.old AND o.chain IS NOT NULL
  AND m.tenant_id = $1 AND m.session_id = $3 AND m.seq = n.new AND m.chain IS NULL
"""
MOVE_REPLY_IDS = """
UPDATE reply_ids AS r SET session_id = $3, seq = n.new FROM unnest($4::bigint[], $5::bigint[]) AS n (old, new)
WHERE r.tenant_id = $1 AND r.session_id = $2 AND r.seq = n.old
"""
TOUCH = "UPDATE sessions SET version = version + 1 WHERE tenant_id = $1 AND id = $2"
# So many messages more than the exchange has may come before its reply in such a session.
SPARE_MESSAGES = 64
# An exchange of more bytes is given more time.
LARGE_BYTES = 1024 * 1024


async def write_late(
    database: Database,
    tail_cache: TailCache,
    write: ReplyWrite,
    *,
    outcome: RequestOutcome | None,
    version: int | None,
    is_named: bool,
    now: datetime,
    chains: Sequence[bytes] = (),
    limit: float | None = None,
) -> bool:
    """Write an exchange; return False if it was written before.

    ``outcome`` is set if the request is stored already. ``version`` is that of the session that the decision was made
    on (None: the session did not exist). ``is_named``: the session must be the one of that id. ``chains`` are those by
    which no session was found.

    Raises `StoreUnavailable`, `StoreRefused`, and `NotFound` where its session is gone.
    """
    request = write.request
    left: list[str] = []
    if limit is None and sum(map(len, request.raws)) > LARGE_BYTES:
        limit = LARGE_LIMIT
    try:
        async with database.transaction(request.tenant, limit=limit) as connection:
            assert request.exchange is not None
            if request.create is not None and not is_named:
                await connection.execute(TAKE_TURN, request.tenant, now)
                client_id = request.create.client_id
                if chains and await sessions.find_by_chain(connection, request.tenant, chains, client_id) is not None:
                    raise StoreUnavailable("the session of the exchange was written meanwhile")
            claim = (request.tenant, request.exchange, request.session_id, now)
            if await connection.fetchval(CLAIM, *claim) is None:
                return False
            if request.create is not None and not is_named:
                request, left = await _in_session_since(connection, write, request.create)
            if request.session_id != write.request.session_id:
                outcome, version = None, None
                await connection.execute(MOVE_CLAIM, request.tenant, request.exchange, request.session_id)
            return await _write(connection, structs.replace(write, request=request), outcome, version=version)
    except asyncpg.PostgresError as error:
        raise refusal(error) from error
    finally:
        for session_id in {request.session_id, write.request.session_id, *left}:
            tail_cache.forget(request.tenant, session_id)
        if request.create is not None and request.create.spare_id is not None:
            tail_cache.forget(request.tenant, request.create.spare_id)


async def _in_session_since(
    connection: Connection, write: ReplyWrite, create: NewSession
) -> tuple[RequestWrite, list[str]]:
    """Return the request of a write, in the session that has got the same history since, if there is one; and the
    sessions that were left.

    Whoever made that session did not know the reply. Where the request alone is stored already, in a session of its
    own, that one is left.
    """
    request, tenant = write.request, write.request.tenant
    found = await _find_sessions_since(connection, write, create)
    if not found or found[0].id == request.session_id:
        return request, []
    is_there = await sessions.get(connection, tenant, request.session_id) is not None
    if is_there:
        if await connection.fetchval(LEAVE_QUESTION, tenant, request.session_id) is None:
            return request, []
        await connection.execute(LEAVE_MESSAGES, tenant, request.session_id)
    left = await _leave_unanswered(connection, tenant, found[1:])
    return structs.replace(request, session_id=found[0].id, create=None), left


async def rejoin(
    database: Database, tail_cache: TailCache, write: ReplyWrite, create: NewSession, *, now: datetime
) -> bool:
    """Leave the session of an exchange for one that continues it, where both were made at the same moment.

    Neither could see the other's. What was relayed becomes part of the other session; the calls stay where they were.
    Returns whether there is such a session. Raises as `write_late`.
    """
    tenant = write.request.tenant
    changed: list[str] = []
    try:
        async with database.transaction(tenant) as connection:
            await connection.execute(TAKE_TURN, tenant, now)
            old = await _find_stored(connection, write)
            found = [each for each in await _find_sessions_since(connection, write, create) if each.id != old.id]
            if not found or [link.digest for link in old.shared] != [link.digest for link in found[0].shared]:
                return False
            new = found[0]
            changed = [old.id, *(each.id for each in found)]
            if not old.is_continued_by(new):
                return bool(await _leave_unanswered(connection, tenant, found))
            for each in sorted((old, new), key=lambda each: each.id):
                await connection.execute(LEAVE if each is old else TOUCH, tenant, each.id)
            same = list(
                takewhile(lambda pair: pair[0].digest == pair[1].digest, zip(old.links, new.links, strict=False))
            )
            numbers = [mine.seq for mine, _ in same], [its.seq for _, its in same]
            await connection.execute(MOVE_REPLIES, tenant, old.id, new.id, *numbers)
            await connection.execute(MOVE_REPLY_IDS, tenant, old.id, new.id, *numbers)
            await connection.execute(MOVE_CLAIM, tenant, write.request.exchange, new.id)
            await connection.execute(LEAVE_MESSAGES, tenant, old.id)
            await _leave_unanswered(connection, tenant, found[1:])
            return True
    except asyncpg.PostgresError as error:
        raise refusal(error) from error
    finally:
        for session_id in changed:
            tail_cache.forget(tenant, session_id)


async def _write(
    connection: Connection, write: ReplyWrite, outcome: RequestOutcome | None, *, version: int | None
) -> bool:
    request, tenant = write.request, write.request.tenant
    states = await lock_sessions(connection, tenant, [request])
    if await connection.fetchval(FIND_CALL, tenant, request.session_id, request.exchange) is not None:
        return False
    rows = NewRows()
    stored = [row for row in await messages.all_rows(connection, tenant, request.session_id) if not row.is_hidden]
    if outcome is None:
        outcome = await _write_request(connection, write, states, stored, rows, version)
    await _write_reply(connection, write, outcome, states[outcome.session_id], stored, rows)
    await insert_rows(connection, tenant, rows, states.values())
    return True


async def forget_replays(connection: Connection, tenant: str, before: datetime) -> None:
    """Forget which exchanges were written before that time: their spool is gone."""
    await connection.execute(FORGET, tenant, before)


class _MatchingSession(msgspec.Struct, frozen=True, kw_only=True):
    """A session that begins with an exchange: its messages up to the reply (``shared``), and those after it."""

    id: str
    created_at: datetime
    shared: list[StoredLink]
    rest: list[StoredLink]

    @property
    def links(self) -> list[StoredLink]:
        """Return all current messages."""
        return self.shared + self.rest

    @property
    def goes_on(self) -> bool:
        """Return whether something after the exchange was answered."""
        return any(link.role == "assistant" for link in self.rest)

    def is_continued_by(self, other: _MatchingSession) -> bool:
        """Return whether the conversation goes on in the other session, and not in this one."""
        mine, its = [link.digest for link in self.rest], [link.digest for link in other.rest]
        if its[: len(mine)] == mine:
            return True
        return not self.goes_on and (other.goes_on or other.created_at > self.created_at)


async def _leave_unanswered(connection: Connection, tenant: str, found: Sequence[_MatchingSession]) -> list[str]:
    """Leave the sessions in which nothing after the exchange was answered. Their clients went on in another one."""
    left = sorted(each.id for each in found if not each.goes_on)
    for session_id in left:
        await connection.execute(LEAVE, tenant, session_id)
        await connection.execute(LEAVE_MESSAGES, tenant, session_id)
    return left


async def _find_sessions_since(connection: Connection, write: ReplyWrite, create: NewSession) -> list[_MatchingSession]:
    """Return the sessions, made since the exchange, whose histories begin with its request and its reply, as a client
    brought it: first those that go on, of these the newest first.
    """
    request = write.request
    reply = _relayed(write.replies)
    if reply is None:
        return []
    expected = [message.digest for message in request.incoming if message.is_link] + [reply.digest]
    arguments = (request.now, create.client_id, len(request.incoming) + SPARE_MESSAGES, reply.digest)
    found = []
    for record in await connection.fetch(FIND_SINCE, request.tenant, *arguments):
        holder = await _holder_of(connection, request.tenant, record["id"], record["created_at"], len(expected))
        if [link.digest for link in holder.shared] == expected:
            found.append(holder)
    return sorted(found, key=lambda each: not each.goes_on)


async def _find_stored(connection: Connection, write: ReplyWrite) -> _MatchingSession:
    """Return the session in which the exchange was stored."""
    request = write.request
    claim = await connection.fetchrow(FIND_CLAIM, request.tenant, request.exchange)
    session_id, created_at = (request.session_id, request.now) if claim is None else (claim["id"], claim["created_at"])
    count = sum(message.is_link for message in request.incoming) + 1
    return await _holder_of(connection, request.tenant, session_id, created_at, count)


async def _holder_of(
    connection: Connection, tenant: str, session_id: str, created_at: datetime, count: int
) -> _MatchingSession:
    links = [each.row for each in await messages.all_rows(connection, tenant, session_id) if _is_current(each)]
    return _MatchingSession(id=session_id, created_at=created_at, shared=links[:count], rest=links[count:])


def _relayed(replies: Sequence[NewReply]) -> NewReply | None:
    return next((each for each in replies if each.chain is not None), None)


# The request


async def _write_request(
    connection: Connection,
    write: ReplyWrite,
    states: dict[str, SessionCounters],
    stored: Sequence[TailRow],
    rows: NewRows,
    version: int | None,
) -> RequestOutcome:
    request = write.request
    state = states[request.session_id]
    if request.mode == "append":
        found = await connection.fetch(FIND_REQUEST, request.tenant, state.id, request.exchange)
        if found:
            placed = tuple(
                PlacedMessage(seq=r["seq"], turn=r["turn"], position=r["place"], is_new=False, status=r["status"])
                for r in found
            )
            return _outcome_of_stored(placed, request, state)
    is_as_decided = state.version == (version or 0)
    decision = request.decision
    if not is_as_decided:
        again = await _decide_late(connection, write, state, stored)
        if again is None:
            request = request.in_spare_session()
            states |= await lock_sessions(connection, request.tenant, [request])
            state, is_as_decided = states[request.session_id], True
        else:
            decision = again
    elif request.mode != "append":
        # What went through without the store is decided when it is replayed, on what the session has become since.
        decision = _leave_newer(decision, stored, write.now)
    if request.key is not None and decision.answered is not None and decision.answered.is_new:
        await appends.forget(connection, request.tenant, state.id, request.key)
    outcome = enter_request(request, state, decision, rows, is_as_decided=is_as_decided)
    await set_statuses(connection, request.tenant, state.id, decision)
    return outcome


def _outcome_of_stored(
    placed: tuple[PlacedMessage, ...], request: RequestWrite, state: SessionCounters
) -> RequestOutcome:
    """Return the outcome of a request that was stored without its sender getting to know."""
    state.calls += 1
    decision = structs.replace(request.decision, placed=placed, superseded=(), restored=())
    answered = decision.answered
    return RequestOutcome(
        session_id=state.id,
        call=state.calls,
        first_seq=placed[0].seq,
        last_seq=placed[-1].seq,
        turn=answered.turn if answered else max(1, state.turns),
        answered_seq=answered.seq if answered else 0,
        answered_position=answered.position if answered else 0.0,
        decision=decision,
        state=copy(state),
        is_as_decided=False,
    )


async def _decide_late(
    connection: Connection, write: ReplyWrite, state: SessionCounters, stored: Sequence[TailRow]
) -> Reconciliation | None:
    """Place the request's messages in a session that has changed; None as for `decide_again`."""
    request = write.request
    if request.mode == "append":
        again = _asked_before(write, stored)
        if again is not None:
            instructions = [row.row for row in stored if not row.row.is_link and row.row.status == "live"]
            return reconcile_repetition(
                again, instructions, request.incoming, last_seq=state.last_seq, turns=state.turns
            )
        later = [row for row in stored if _is_current(row) and not row.row.call and row.created_at > request.now]
        if later:
            inserted = _insert_before(min(row.row.position for row in later), request, state, stored)
            if inserted is not None:
                return inserted
        return await append_again(connection, request.tenant, request, state)
    decision = await decide_again(connection, request.tenant, request, state, None)
    return None if decision is None else _leave_newer(decision, stored, write.now)


def _asked_before(write: ReplyWrite, stored: Sequence[TailRow]) -> Sequence[StoredLink] | None:
    """Return the messages that a delta repeats: those that its decision found, or that were stored by whoever sent the
    same while its call was under way. What was stored after it was answered says the same words once more.
    """
    decision, incoming = write.request.decision, write.request.incoming
    links = [message.digest for message in incoming if message.is_link]
    known = {placed.seq for placed in decision.placed if placed.turn > 0 and not placed.is_new}
    found = [row.row for row in stored if row.row.seq in known and row.row.status == "live"]
    if known and [row.digest for row in found] == links:
        return found
    since = decision.last_seq - sum(placed.is_new for placed in decision.placed)
    recent = [row.row for row in stored if row.row.seq > since and row.created_at <= write.now]
    before = find_earlier_question(recent, incoming)
    return None if before is None else before.rows


def _insert_before(
    place: float, request: RequestWrite, state: SessionCounters, stored: Sequence[TailRow]
) -> Reconciliation | None:
    """Return an append with its messages before ``place``; None where there is no room."""
    before = [row.row for row in stored if _is_current(row) and row.row.position < place]
    lower = before[-1].position if before else 0.0
    step = (place - lower) / (len(request.incoming) + 1)
    if step < MIN_GAP:
        return None
    again = append_messages(
        request.incoming,
        last_seq=state.last_seq,
        turns=state.turns,
        turn=before[-1].turn if before else 0,
        follows_seq=before[-1].seq if before else 0,
    )
    numbered = enumerate(again.placed, start=1)
    placed = tuple(structs.replace(each, position=lower + step * number) for number, each in numbered)
    return structs.replace(again, placed=placed)


def _leave_newer(decision: Reconciliation, stored: Sequence[TailRow], answered: datetime) -> Reconciliation:
    """Return the decision, without superseding what came after the exchange.

    Where the history went on without the exchange, the exchange is a branch that was left.
    """
    newer = {row.row.seq: row.row for row in stored if row.created_at > answered}
    left = [newer[seq] for seq in decision.superseded if seq in newer]
    if not left:
        return decision
    has_left_links = any(row.is_link for row in left)
    placed = tuple(
        structs.replace(each, status="superseded") if each.is_new and (has_left_links or not each.turn) else each
        for each in decision.placed
    )
    if has_left_links:
        return structs.replace(decision, kind="retry", placed=placed, superseded=(), restored=())
    return structs.replace(
        decision, placed=placed, superseded=tuple(seq for seq in decision.superseded if seq not in newer)
    )


def _is_current(row: TailRow) -> bool:
    return row.row.is_link and row.row.status != "superseded" and not row.is_hidden


# The reply


class _Neighbour(msgspec.Struct, frozen=True, kw_only=True):
    """A message of the history after the request is written."""

    seq: int
    position: float
    role: str
    digest: bytes
    created_at: datetime


async def _write_reply(
    connection: Connection,
    write: ReplyWrite,
    outcome: RequestOutcome,
    state: SessionCounters,
    stored: Sequence[TailRow],
    rows: NewRows,
) -> None:
    answered = next((row.row for row in stored if row.row.seq == outcome.answered_seq), None)
    known = outcome.decision.answered
    status = answered.status if answered else (known.status if known else "live")
    if answered is not None and answered.seq in outcome.decision.restored:
        status = "live"
    outcome = structs.replace(outcome, answered_position=answered.position if answered else outcome.answered_position)
    following = _following(outcome, stored)
    upper = following[0].position if following else None
    if status != "live":
        enter_replies(
            write,
            write.replies,
            outcome,
            state,
            ReplyPlacement(status=status, before_position=upper),
            rows,
            after=outcome.answered_position,
        )
    elif not following:
        enter_replies(write, write.replies, outcome, state, AT_THE_END, rows, after=outcome.answered_position)
    elif following[0].role != "assistant":
        enter_replies(
            write,
            write.replies,
            outcome,
            state,
            ReplyPlacement(before_position=upper),
            rows,
            after=outcome.answered_position,
        )
    else:
        await _write_beside(connection, write, outcome, state, following, rows)
    enter_report(write, outcome, state, rows)


def _following(outcome: RequestOutcome, stored: Sequence[TailRow]) -> list[_Neighbour]:
    """Return the current messages behind the one that is answered, in order."""
    superseded, restored = set(outcome.decision.superseded), set(outcome.decision.restored)
    return [
        _Neighbour(
            seq=row.row.seq,
            position=row.row.position,
            role=row.row.role,
            digest=row.row.digest,
            created_at=row.created_at,
        )
        for row in stored
        if row.row.is_link
        and row.row.position > outcome.answered_position
        and row.row.seq not in superseded
        and (row.row.status == "live" or row.row.seq in restored)
    ]


async def _write_beside(
    connection: Connection,
    write: ReplyWrite,
    outcome: RequestOutcome,
    state: SessionCounters,
    following: Sequence[_Neighbour],
    rows: NewRows,
) -> None:
    """Write a reply to a message that already has one: the same reply sent again, or a later one."""
    there = following[0]
    index = next((n for n, reply in enumerate(write.replies) if reply.chain is not None), None)
    reply = None if index is None else write.replies[index]
    if index is None or reply is None or reply.digest != there.digest:
        placement = ReplyPlacement(status="superseded", before_position=there.position)
        if there.created_at <= write.now:
            placement = await place_late_reply(connection, write.request.tenant, write, outcome, state.id)
        enter_replies(write, write.replies, outcome, state, placement, rows, after=outcome.answered_position)
        return
    adopted = await connection.fetchval(
        ADOPT_REPLY, write.request.tenant, state.id, there.seq, reply.raw,
        *model_views.columns_of(reply.raw, reply.model_raw), reply.chain, reply.finish, outcome.call,
    )  # fmt: skip
    if adopted is None:
        return
    enter_parts(reply, write.request.referenced, state.id, there.seq, outcome.turn, write.now, rows)
    front, rest = write.replies[:index], write.replies[index + 1 :]
    enter_replies(
        write,
        front,
        outcome,
        state,
        ReplyPlacement(before_position=there.position),
        rows,
        after=outcome.answered_position,
    )
    upper = following[1].position if len(following) > 1 else there.position + 1.0
    enter_replies(write, rest, outcome, state, ReplyPlacement(before_position=upper), rows, after=there.position)
