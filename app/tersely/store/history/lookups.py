"""Group lookup: find in one statement which sessions continue the histories of many requests, and their tails.

It does for reads what group commit does for writes: nearly every request needs this one.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

import msgspec
from asyncpg import Record
from msgspec.structs import replace

from tersely.domain.errors import StoreUnavailable
from tersely.domain.history.links import StoredLink
from tersely.domain.history.sessions import Session
from tersely.store.db.connection import Connection, Database
from tersely.store.history import model_views
from tersely.store.history.messages import RAN_OUT, UNKNOWN, TailRow, tail_rows_in_steps
from tersely.store.history.sessions import COLUMNS, TWINS, ReplyMatch, best_match, session_from
from tersely.store.history.tail_cache import CachedTail, TailCache, cached_tail

MAX_BATCH = 64

_ROW = (
    "r.seq, r.place, r.turn, r.tokens, r.role, r.status, r.digest, r.chain, r.call, r.follows, r.dialect, r.pinned, "
    f"r.priority, r.created_at, {model_views.model_raw('r')} AS model_raw, r.client_visible, r.finish"
)
_LISTS = {
    "seqs": "seq",
    "positions": "place",
    "row_turns": "turn",
    "row_tokens": "tokens",
    "roles": "role",
    "statuses": "status",
    "digests": "digest",
    "relayed": "chain IS NOT NULL",
    "row_calls": "call",
    "row_follows": "follows",
    "dialects": "dialect",
    "pins": "pinned",
    "priorities": "priority",
    "times": "created_at",
    "model_raws": "model_raw",
    "hidden": UNKNOWN,
    "full": RAN_OUT,
}

# The session that a history with a known last reply continues, and whether the session is unchanged.
CHECK = f"""
SELECT $4::integer AS request, h.id, h.version, h.created_at, h.hit_seq, h.hit_is_current
FROM ({best_match("$2::bytea", "id, version, created_at, client_id, last_seq, updated_at")}) AS h
"""
# The same rows as in `messages.TAIL_ROWS`. The limit limits nothing: it has the planner read the index of numbers in
# order, and not the whole table where one session has most of it.
FIND = f"""
SELECT $4::integer AS request, h.*, t.* FROM (
    SELECT b.* FROM unnest($2::bytea[]) AS c (chain) CROSS JOIN LATERAL ({best_match("c.chain", COLUMNS)}) AS b LIMIT 1
) AS h LEFT JOIN LATERAL (
    SELECT {", ".join(f"array_agg({column}) AS {name}" for name, column in _LISTS.items())} FROM (
        (SELECT {_ROW} FROM messages r
        WHERE h.hit_is_current AND h.hit_seq >= h.cut AND r.tenant_id = $1 AND r.session_id = h.id AND r.seq >= h.cut
            AND r.status <> 'superseded' AND r.turn > 0
        ORDER BY r.seq LIMIT greatest(0, h.last_seq - h.cut + 1))
        UNION ALL
        SELECT {_ROW} FROM messages r
        WHERE h.hit_is_current AND h.hit_seq >= h.cut AND r.tenant_id = $1 AND r.session_id = h.id AND r.turn = 0
            AND r.status = 'live'
        ORDER BY place, seq
    ) AS tail
) AS t ON true
"""

# The same in steps, each a look at one table, for a distributed Postgres.
MAX_REPLIES, FEW = 32, 8
REPLIES = f"""
SELECT $3::integer AS request, session_id, seq, chain, status FROM messages
WHERE tenant_id = $1 AND chain = ANY($2::bytea[]) LIMIT {MAX_REPLIES + 1}
"""
# Of more replies, for one chain: the newest, and those in the client's own sessions. The expression keeps the planner
# from reading all replies of the chain.
NEWEST_REPLIES = """
SELECT session_id, seq, chain, status FROM messages
WHERE tenant_id = $1 AND chain = $2::bytea ORDER BY created_at DESC LIMIT $3::integer
"""
OWN_SESSIONS = f"""
SELECT id FROM sessions WHERE tenant_id = $1 AND client_id = $2::text ORDER BY updated_at DESC LIMIT {TWINS}
"""
OWN_REPLIES = """
SELECT session_id, seq, chain, status FROM messages
WHERE tenant_id = $1 AND session_id = ANY($2::text[]) AND substring(chain FROM 1) = $3::bytea
"""
SESSIONS = f"SELECT {COLUMNS} FROM sessions WHERE tenant_id = $1 AND id = ANY($2::text[])"


class _Question(msgspec.Struct):
    chains: Sequence[bytes]
    client_id: str | None
    known: ReplyMatch | None
    answer: asyncio.Future[ReplyMatch | None]


class Lookups:
    """Find sessions by their messages, batching concurrent questions."""

    def __init__(self, database: Database, tail_cache: TailCache) -> None:
        self._database = database
        self._tail_cache = tail_cache
        self._queues: defaultdict[str, deque[_Question]] = defaultdict(deque)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def is_chain_of_another(self, tenant: str, chain: bytes, session_id: str) -> bool:
        """Return whether this process knows another session whose newest reply has that chain value."""
        tail = self._tail_cache.ending_with(tenant, chain)
        return tail is not None and tail.session.id != session_id

    async def find(
        self, tenant: str, chains: Sequence[bytes], client_id: str | None, *, known: ReplyMatch | None = None
    ) -> ReplyMatch | None:
        """Return the session with the longest history in common, with its tail; ``chains`` the longest first.

        ``known`` is the expected answer, which is returned where it still holds. Raises `StoreUnavailable`.
        """
        loop = asyncio.get_running_loop()
        question = _Question(chains, client_id, known, loop.create_future())
        self._queues[tenant].append(question)
        if tenant not in self._tasks:
            self._tasks[tenant] = loop.create_task(self._drain(tenant))
        return await question.answer

    async def _drain(self, tenant: str) -> None:
        queue = self._queues[tenant]
        try:
            while queue:
                await self._ask(tenant, [queue.popleft() for _ in range(min(len(queue), MAX_BATCH))])
        finally:
            del self._tasks[tenant]
            if not queue:
                self._queues.pop(tenant, None)

    async def _ask(self, tenant: str, questions: list[_Question]) -> None:
        questions = [question for question in questions if not question.answer.done()]
        try:
            async with self._database.reading(tenant) as connection:
                found = await self._find(connection, tenant, dict(enumerate(questions)))
        except StoreUnavailable as error:
            _fail(questions, error)
        except BaseException as error:
            _fail(questions, StoreUnavailable(f"a lookup failed: {type(error).__name__}"))
            raise
        else:
            for number, question in enumerate(questions):
                if not question.answer.done():
                    question.answer.set_result(found.get(number))

    async def _find(
        self, connection: Connection, tenant: str, questions: dict[int, _Question]
    ) -> dict[int, ReplyMatch]:
        if await self._database.is_distributed():
            return await self._find_in_steps(connection, tenant, questions)
        found = await self._check(connection, tenant, questions)
        left = [
            (tenant, question.chains, question.client_id, number)
            for number, question in questions.items()
            if number not in found
        ]
        if left:
            for record in await connection.fetchmany(FIND, left):
                hit = found[record["request"]] = _hit(record)
                if hit.tail is not None:
                    self._tail_cache.put(tenant, cached_tail(hit.session, hit.tail, None))
        return found

    async def _find_in_steps(
        self, connection: Connection, tenant: str, questions: dict[int, _Question]
    ) -> dict[int, ReplyMatch]:
        parameters = [(tenant, question.chains, number) for number, question in questions.items()]
        rows: dict[int, list[Record]] = {number: [] for number in questions}
        for reply in await connection.fetchmany(REPLIES, parameters):
            rows[reply["request"]].append(reply)
        few = {number: replies for number, replies in rows.items() if len(replies) <= MAX_REPLIES}
        sessions = await _sessions_of(connection, tenant, [reply for replies in few.values() for reply in replies])
        found: dict[int, ReplyMatch] = {}
        for number, question in questions.items():
            if number in few:
                hit = _preferred(question, few[number], sessions)
            else:
                hit = await _find_among_twins(connection, tenant, question)
            if hit is not None:
                found[number] = await self._with_tail(connection, tenant, hit, question)
        return found

    async def _with_tail(self, connection: Connection, tenant: str, hit: ReplyMatch, question: _Question) -> ReplyMatch:
        """Return a match with the session's tail, which is read unless it is cached."""
        session = hit.session
        if not hit.is_current or hit.seq < session.cut:
            return hit
        if question.known is not None and _is_unchanged(question.known.session, session):
            return question.known
        cached = self._tail_cache.ending_with(tenant, question.chains[0])
        if cached is not None and _is_unchanged(cached.session, session):
            return replace(hit, session=cached.session, tail=cached.rows)
        # Rows that were written since the session was read are not part of it.
        rows = [
            row
            for row in await tail_rows_in_steps(connection, tenant, session.id, session.cut)
            if row.row.seq <= session.last_seq
        ]
        self._tail_cache.put(tenant, cached_tail(session, rows, None))
        return replace(hit, tail=rows)

    async def _check(
        self, connection: Connection, tenant: str, questions: dict[int, _Question]
    ) -> dict[int, ReplyMatch]:
        """Answer the requests for which it suffices that a session is unchanged."""
        known: dict[int, tuple[Session, ReplyMatch | CachedTail]] = {}
        for number, question in questions.items():
            tail = question.known or self._tail_cache.ending_with(tenant, question.chains[0])
            if tail is not None:
                known[number] = tail.session, tail
        if not known:
            return {}
        found: dict[int, ReplyMatch] = {}
        checks = [(tenant, questions[number].chains[0], questions[number].client_id, number) for number in known]
        for record in await connection.fetchmany(CHECK, checks):
            number = record["request"]
            session, tail = known[number]
            is_same = (record["id"], record["version"], record["created_at"]) == (
                session.id,
                session.version,
                session.created_at,
            )
            if not (is_same and record["hit_is_current"] and record["hit_seq"] >= session.cut):
                continue
            found[number] = tail if isinstance(tail, ReplyMatch) else ReplyMatch(
                session=session, seq=record["hit_seq"], chain=questions[number].chains[0], is_current=True,
                tail=tail.rows,
            )  # fmt: skip
        return found


def _is_unchanged(known: Session, stored: Session) -> bool:
    return (known.id, known.version, known.created_at) == (stored.id, stored.version, stored.created_at)


def _fail(questions: list[_Question], error: StoreUnavailable) -> None:
    for question in questions:
        if not question.answer.done():
            question.answer.set_exception(error)


async def _find_among_twins(connection: Connection, tenant: str, question: _Question) -> ReplyMatch | None:
    """Return the match of a history that very many sessions have in part. Its chains are tried in turn."""
    for chain in question.chains:
        replies = await connection.fetch(NEWEST_REPLIES, tenant, chain, FEW)
        sessions = await _sessions_of(connection, tenant, replies)
        last = [reply for reply in replies if _is_last_of_own(question, reply, sessions.get(reply["session_id"]))]
        if not last and len(replies) == FEW:
            replies = await connection.fetch(NEWEST_REPLIES, tenant, chain, TWINS)
            if question.client_id is not None:
                own = [row["id"] for row in await connection.fetch(OWN_SESSIONS, tenant, question.client_id)]
                replies = [*replies, *await connection.fetch(OWN_REPLIES, tenant, own, chain)]
            sessions = await _sessions_of(connection, tenant, replies)
        hit = _preferred(question, last or replies, sessions)
        if hit is not None:
            return hit
    return None


def _is_last_of_own(question: _Question, reply: Record, session: Session | None) -> bool:
    """Return whether no other reply would be preferred, but a newer one."""
    if session is None or reply["seq"] != session.last_seq:
        return False
    return question.client_id is None or session.client_id == question.client_id


async def _sessions_of(connection: Connection, tenant: str, replies: Sequence[Record]) -> dict[str, Session]:
    ids = sorted({reply["session_id"] for reply in replies})
    if not ids:
        return {}
    return {row["id"]: session_from(row) for row in await connection.fetch(SESSIONS, tenant, ids)}


def _preferred(question: _Question, replies: Sequence[Record], sessions: Mapping[str, Session]) -> ReplyMatch | None:
    """Return the match that `FIND` prefers."""

    def order(reply: Record) -> tuple[object, ...]:
        session = sessions[reply["session_id"]]
        is_own = question.client_id is not None and session.client_id == question.client_id
        is_last = reply["seq"] == session.last_seq
        return ranks[reply["chain"]], not is_own, not is_last, -session.updated_at.timestamp(), session.id

    ranks = {chain: rank for rank, chain in reversed(list(enumerate(question.chains)))}
    fitting = [
        reply
        for reply in replies
        if (session := sessions.get(reply["session_id"])) is not None
        and (question.client_id is None or session.client_id is None or session.client_id == question.client_id)
    ]
    if not fitting:
        return None
    best = min(fitting, key=order)
    return ReplyMatch(
        session=sessions[best["session_id"]],
        seq=best["seq"],
        chain=best["chain"],
        is_current=best["status"] != "superseded",
    )


def _hit(record: Record) -> ReplyMatch:
    return ReplyMatch(
        session=session_from(record),
        seq=record["hit_seq"],
        chain=record["hit_chain"],
        is_current=record["hit_is_current"],
        tail=None if record["seqs"] is None else _tail(record),
    )


def _tail(record: Record) -> list[TailRow]:
    return [
        TailRow(
            row=StoredLink(
                seq=seq,
                position=position,
                turn=turn,
                tokens=tokens,
                role=role,
                status=status,
                digest=digest,
                relayed=relayed,
                call=call,
                follows=follows,
            ),
            dialect=dialect,
            pinned=pinned,
            priority=priority,
            created_at=created_at,
            model_raw=model_raw,
            is_hidden=is_hidden,
            ran_out=ran_out,
        )
        for (
            seq,
            position,
            turn,
            tokens,
            role,
            status,
            digest,
            relayed,
            call,
            follows,
            dialect,
            pinned,
            priority,
            created_at,
            model_raw,
            is_hidden,
            ran_out,
        ) in zip(*(record[name] for name in _LISTS), strict=True)
    ]
