"""Upstream calls as rows: of one session, the latest of a tenant, and sums of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import Literal

from tersely.domain.history.history import Epoch, Status
from tersely.store.db.connection import Connection
from tersely.store.history.sessions import read_epoch

GroupBy = Literal["day", "model", "strategy", "client"]

COLUMNS = (
    "session_id, number, turn, model, client, strategy, epoch, cut, last_seq, tokens_before, tokens_after, "
    "input_tokens, cached_tokens, output_tokens, cost_sent, cost_full, overhead_ms, status, created_at, finished_at, "
    "request_id, sent, tools, host"
)
HERE = "tenant_id = $1 AND session_id = $2"
OF_SESSION = f"SELECT {COLUMNS} FROM calls WHERE {HERE} AND number > $3 ORDER BY number LIMIT $4"
BEFORE = f"SELECT {COLUMNS} FROM calls WHERE {HERE} AND number < $3 ORDER BY number DESC LIMIT $4"
ONE = f"SELECT {COLUMNS} FROM calls WHERE {HERE} AND number = $3"
LATEST = f"""
SELECT {COLUMNS} FROM calls
WHERE tenant_id = $1 AND ($2::timestamptz IS NULL OR (created_at, session_id, number) < ($2, $3::text, $4::bigint))
ORDER BY created_at DESC, session_id DESC, number DESC LIMIT $5
"""
SINCE = f"""
SELECT {COLUMNS} FROM calls
WHERE tenant_id = $1 AND created_at BETWEEN $2 AND 'infinity' AND finished_at > $3
ORDER BY finished_at, session_id, number LIMIT $4
"""
FIRST_WITH = f"""
SELECT wanted.seq, (SELECT min(number) FROM calls WHERE {HERE} AND last_seq >= wanted.seq) AS number
FROM unnest($3::bigint[]) AS wanted (seq)
"""
PLAN = f"SELECT plan FROM epochs WHERE {HERE} AND number = $3"
ROWS = f"""
SELECT seq, turn, place, tokens, role, status, model_visible, client_visible FROM messages
WHERE {HERE} AND seq <= $3 ORDER BY place, seq
"""
MESSAGES_OF = f"""
SELECT seq, turn, place, tokens, role, status, model_visible, client_visible FROM messages
WHERE {HERE} AND seq = ANY($3::bigint[]) ORDER BY place, seq
"""
SEQS = f"SELECT coalesce(array_agg(seq ORDER BY place, seq), '{{}}') FROM messages WHERE {HERE} AND seq <= $3"
# Other calls of the session may store messages between a call's request and its reply.
MOST_BETWEEN = 1_000
REPLIES = f"""
SELECT seq FROM messages
WHERE {HERE} AND seq > $3 AND seq <= $3 + {MOST_BETWEEN} AND call = $4 AND client_visible ORDER BY place, seq
"""
GROUPS = {
    "day": "to_char(created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD')",
    "model": "model",
    "strategy": "strategy",
    "client": "coalesce(client, '')",
}
SUMS = """
    count(*) AS calls, coalesce(sum(tokens_before) FILTER (WHERE status < 400), 0)::bigint AS tokens_before,
    coalesce(sum(tokens_after) FILTER (WHERE status < 400), 0)::bigint AS tokens_after,
    coalesce(sum(input_tokens), 0)::bigint AS input_tokens,
    coalesce(sum(cached_tokens), 0)::bigint AS cached_tokens, coalesce(sum(output_tokens), 0)::bigint AS output_tokens,
    coalesce(sum(cost_sent), 0)::float8 AS cost_sent, coalesce(sum(cost_full), 0)::float8 AS cost_full,
    count(cost_sent) AS priced_calls
"""
SUMMARIES = """
SELECT {key} AS key, model, sum(calls)::bigint AS calls, sum(input_tokens)::bigint AS input_tokens,
    sum(output_tokens)::bigint AS output_tokens
FROM summary_costs WHERE tenant_id = $1 AND day >= $2::date AND day <= $3::date GROUP BY 1, 2
"""
SUMMARY_KEYS = {"day": "to_char(day, 'YYYY-MM-DD')", "model": "model", "strategy": "''", "client": "''"}
COSTS = f"""
SELECT sum(cost_sent)::float8 AS cost_sent, sum(cost_full)::float8 AS cost_full, count(cost_sent) AS priced_calls
FROM calls WHERE {HERE}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRow:
    """A call. Tokens before and after are our own counts, the others the provider's; costs are in USD. ``host`` is the
    name of the model host (empty: the default one of its dialect; None: not known).
    """

    session_id: str
    number: int
    turn: int
    model: str
    client: str | None
    strategy: str
    epoch: int
    cut: int
    last_seq: int
    tokens_before: int
    tokens_after: int
    input_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    cost_sent: float | None
    cost_full: float | None
    overhead_ms: float | None
    status: int | None
    created_at: datetime
    finished_at: datetime | None
    request_id: str | None
    sent: bytes | None
    tools: bytes | None
    host: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRow:
    """A stored message without its content."""

    seq: int
    turn: int
    place: float
    tokens: int
    role: str
    status: Status
    model_visible: bool
    client_visible: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSums:
    """Sums over calls that share ``key``: costs over the ``priced_calls`` among them, tokens before and after over
    those that did not fail.
    """

    key: str
    calls: int
    tokens_before: int
    tokens_after: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    cost_sent: float
    cost_full: float
    priced_calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SummarySums:
    """The summarizer's use of tokens, by key and model."""

    key: str
    model: str
    calls: int
    input_tokens: int
    output_tokens: int


async def of_session(connection: Connection, tenant: str, session_id: str, *, after: int, limit: int) -> list[CallRow]:
    """A session's calls after number ``after``, in order."""
    return [CallRow(**dict(row)) for row in await connection.fetch(OF_SESSION, tenant, session_id, after, limit)]


async def before(connection: Connection, tenant: str, session_id: str, *, number: int, limit: int) -> list[CallRow]:
    """A session's calls before ``number``, in order: the last ones."""
    rows = await connection.fetch(BEFORE, tenant, session_id, number, limit)
    return [CallRow(**dict(row)) for row in reversed(rows)]


async def get(connection: Connection, tenant: str, session_id: str, number: int) -> CallRow | None:
    """One call."""
    row = await connection.fetchrow(ONE, tenant, session_id, number)
    return None if row is None else CallRow(**dict(row))


async def latest(
    connection: Connection, tenant: str, *, before: tuple[datetime, str, int] | None, limit: int
) -> list[CallRow]:
    """A tenant's calls, the newest first."""
    rows = await connection.fetch(LATEST, tenant, *(before or (None, None, None)), limit)
    return [CallRow(**dict(row)) for row in rows]


async def finished_since(
    connection: Connection, tenant: str, *, begun: datetime, finished: datetime, limit: int
) -> list[CallRow]:
    """Calls begun at ``begun`` or later that ended after ``finished``, in the order of their ends."""
    return [CallRow(**dict(row)) for row in await connection.fetch(SINCE, tenant, begun, finished, limit)]


async def first_with(connection: Connection, tenant: str, session_id: str, seqs: Sequence[int]) -> dict[int, int]:
    """Message -> the first call that was made when it was the last, or after it."""
    rows = await connection.fetch(FIRST_WITH, tenant, session_id, list(seqs))
    return {row["seq"]: row["number"] for row in rows if row["number"] is not None}


async def epoch_plan(connection: Connection, tenant: str, session_id: str, number: int) -> Epoch | None:
    """The epoch of that number."""
    plan = await connection.fetchval(PLAN, tenant, session_id, number)
    return None if plan is None else read_epoch(plan)


async def messages_up_to(connection: Connection, tenant: str, session_id: str, last: int) -> list[MessageRow]:
    """The messages up to ``last``, in the order of the history."""
    records = await connection.fetch(ROWS, tenant, session_id, last)
    return await asyncio.to_thread(lambda: [MessageRow(**dict(record)) for record in records])


async def messages_of(connection: Connection, tenant: str, session_id: str, seqs: Sequence[int]) -> list[MessageRow]:
    """Return the given messages that are stored, in the order of the history."""
    return [MessageRow(**dict(row)) for row in await connection.fetch(MESSAGES_OF, tenant, session_id, list(seqs))]


async def seqs_up_to(connection: Connection, tenant: str, session_id: str, last: int) -> list[int]:
    """The sequence numbers up to ``last``, in the order of the history. O(length), but cheap for each message."""
    return list(await connection.fetchval(SEQS, tenant, session_id, last))


async def replies_of(connection: Connection, tenant: str, session_id: str, *, number: int, after: int) -> list[int]:
    """The messages that the client received in reply to a call. ``after``: the last message that the call knew."""
    return [row["seq"] for row in await connection.fetch(REPLIES, tenant, session_id, after, number)]


async def costs(connection: Connection, tenant: str, session_id: str) -> tuple[float, float] | None:
    """Return the cost of a session's calls as sent and as the full history; None if no call has a price."""
    row = await connection.fetchrow(COSTS, tenant, session_id)
    assert row is not None  # an aggregate always gives a row
    return (row["cost_sent"], row["cost_full"]) if row["priced_calls"] else None


async def sums(connection: Connection, tenant: str, *, since: datetime, until: datetime, by: GroupBy) -> list[CallSums]:
    """Sums over the calls from ``since`` until before ``until``."""
    sql = f"SELECT {GROUPS[by]} AS key, {SUMS} FROM calls WHERE tenant_id = $1 AND created_at >= $2 AND created_at < $3"
    rows = await connection.fetch(f"{sql} GROUP BY 1 ORDER BY 1", tenant, since, until)
    return [CallSums(**dict(row)) for row in rows]


async def summary_sums(
    connection: Connection, tenant: str, *, since: date, until: date, by: GroupBy
) -> Sequence[SummarySums]:
    """Return the summarizer's use from day ``since`` to day ``until``."""
    rows = await connection.fetch(SUMMARIES.format(key=SUMMARY_KEYS[by]), tenant, since, until)
    return [SummarySums(**dict(row)) for row in rows]
