"""Group lookup: which sessions continue the histories of many requests, and their tails, in one statement.

What group commit is for writes, this is for the one read that nearly every request needs.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from asyncpg import Record

from app.domain.errors import StoreUnavailable
from app.domain.lineage import Row
from app.store.connection import Connection, Database
from app.store.messages import TailRow
from app.store.sessions import COLUMNS, Hit, session_from

MAX_BATCH = 64

_S = ", ".join(f"s.{name}" for name in COLUMNS.split(", "))
_ROW = (
    "r.seq, r.place, r.turn, r.tokens, r.role, r.status, r.digest, r.chain, r.call, r.pinned, r.created_at, r.model_raw"
)
_LISTS = {
    "seqs": "seq",
    "places": "place",
    "row_turns": "turn",
    "row_tokens": "tokens",
    "roles": "role",
    "statuses": "status",
    "digests": "digest",
    "relayed": "chain IS NOT NULL",
    "row_calls": "call",
    "pins": "pinned",
    "times": "created_at",
    "model_raws": "model_raw",
}

# The same order of preference, and the same rows, as in `sessions.BY_CHAIN` and `messages.TAIL_ROWS`.
FIND = f"""
WITH asked AS (
    SELECT * FROM unnest($2::integer[], $3::bytea[], $4::integer[], $5::text[]) AS u (request, chain, rank, client_id)
), hits AS (
    SELECT DISTINCT ON (a.request) a.request, {_S}, m.seq AS hit_seq, m.chain AS hit_chain,
        m.status <> 'superseded' AS hit_is_current
    FROM asked a
    JOIN messages m ON m.tenant_id = $1 AND m.chain = a.chain
    JOIN sessions s ON s.tenant_id = $1 AND s.id = m.session_id
    WHERE a.client_id IS NULL OR s.client_id IS NULL OR s.client_id = a.client_id
    ORDER BY a.request, a.rank, (s.client_id = a.client_id) IS TRUE DESC, m.seq = s.last_seq DESC, s.updated_at DESC,
        s.id
)
SELECT h.*, t.* FROM hits h LEFT JOIN LATERAL (
    SELECT {", ".join(f"array_agg({column}) AS {name}" for name, column in _LISTS.items())} FROM (
        SELECT {_ROW} FROM messages r
        WHERE r.tenant_id = $1 AND r.session_id = h.id AND r.seq >= h.cut AND r.status <> 'superseded' AND r.turn > 0
            AND r.client_visible
        UNION ALL
        SELECT {_ROW} FROM messages r
        WHERE r.tenant_id = $1 AND r.session_id = h.id AND r.turn = 0 AND r.status = 'live'
        ORDER BY place, seq
    ) AS tail
) AS t ON h.hit_is_current AND h.hit_seq >= h.cut
"""


@dataclass(slots=True)
class _Question:
    chains: Sequence[bytes]
    client_id: str | None
    answer: asyncio.Future[Hit | None]


class Lookups:
    """Finds sessions by what was said in them, for whoever asks at the same time."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._queues: defaultdict[str, deque[_Question]] = defaultdict(deque)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def find(self, tenant: str, chains: Sequence[bytes], client_id: str | None) -> Hit | None:
        """The session with the longest history in common, with its tail; ``chains`` the longest first.

        Raises `StoreUnavailable`.
        """
        loop = asyncio.get_running_loop()
        question = _Question(chains, client_id, loop.create_future())
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
                found = await _find(connection, tenant, questions)
        except StoreUnavailable as error:
            _fail(questions, error)
        except BaseException as error:
            _fail(questions, StoreUnavailable(f"a lookup failed: {type(error).__name__}"))
            raise
        else:
            for number, question in enumerate(questions):
                if not question.answer.done():
                    question.answer.set_result(found.get(number))


def _fail(questions: list[_Question], error: StoreUnavailable) -> None:
    for question in questions:
        if not question.answer.done():
            question.answer.set_exception(error)


async def _find(connection: Connection, tenant: str, questions: list[_Question]) -> dict[int, Hit]:
    rows = [
        (number, chain, rank, question.client_id)
        for number, question in enumerate(questions)
        for rank, chain in enumerate(question.chains)
    ]
    if not rows:
        return {}
    found = await connection.fetch(FIND, tenant, *map(list, zip(*rows, strict=True)))
    return {record["request"]: _hit(record) for record in found}


def _hit(record: Record) -> Hit:
    return Hit(
        session=session_from(record),
        seq=record["hit_seq"],
        chain=record["hit_chain"],
        is_current=record["hit_is_current"],
        tail=None if record["seqs"] is None else _tail(record),
    )


def _tail(record: Record) -> list[TailRow]:
    return [
        TailRow(
            row=Row(
                seq=seq,
                place=place,
                turn=turn,
                tokens=tokens,
                role=role,
                status=status,
                digest=digest,
                relayed=relayed,
                call=call,
            ),
            pinned=pinned,
            created_at=created_at,
            model_raw=model_raw,
        )
        for seq, place, turn, tokens, role, status, digest, relayed, call, pinned, created_at, model_raw in zip(
            *(record[name] for name in _LISTS), strict=True
        )
    ]
