"""Statistics of a session, from rows that are few or small; messages are never read for them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from tersely.store.db.connection import Connection
from tersely.store.history import packed_log

HERE = "tenant_id = $1 AND session_id = $2"
CALLS = f"""
SELECT count(*) AS calls, coalesce(sum(tokens_before) FILTER (WHERE status < 400), 0)::bigint AS tokens_before,
    coalesce(sum(tokens_after) FILTER (WHERE status < 400), 0)::bigint AS tokens_after,
    coalesce(sum(input_tokens), 0)::bigint AS input,
    coalesce(sum(cached_tokens), 0)::bigint AS cached, coalesce(sum(output_tokens), 0)::bigint AS output,
    count(*) FILTER (WHERE status IS NULL OR status >= 400) AS failed,
    coalesce(sum(input_tokens) FILTER (WHERE cached_tokens IS NOT NULL), 0)::bigint AS input_of_cached
FROM calls WHERE {HERE}
"""
REASONS = f"SELECT reason, count(*) AS epochs FROM epochs WHERE {HERE} GROUP BY reason ORDER BY reason"
TERSE = f"SELECT source, count(*) AS entries FROM terse WHERE {HERE} GROUP BY source ORDER BY source"
EPOCHS = f"""
SELECT number, cut, reason, head_tokens, tokens_before, tokens_after, created_at FROM epochs
WHERE {HERE} AND number > $3 ORDER BY number LIMIT $4
"""
# A state that was written again has the same source and covers no messages.
SUMMARIES = f"SELECT count(*) FROM summaries WHERE {HERE} AND text IS NOT NULL AND purpose <> 'state'"
COMPRESSION = f"""
SELECT max(created_at) AS last_at, avg(before / after)::float8 AS ratio FROM (
    SELECT created_at, (ended ->> 'tokens_before')::numeric AS before, (ended ->> 'tokens_after')::numeric AS after
    FROM (
        SELECT created_at, convert_from(body, 'UTF8')::jsonb AS ended FROM events
        WHERE {HERE} AND kind = 'compaction_end'
    ) AS ends
    WHERE ended ->> 'result' IN ('model', 'extractive') AND ended ->> 'purpose' <> 'state'
) AS done WHERE after > 0
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """Results of compactions: the number of summaries, the mean ratio of tokens before and after, the last time."""

    summaries: int
    ratio: float | None
    last_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTotals:
    """Sums over a session's upstream calls, in tokens; those before and after over calls that did not fail.
    ``input_of_cached``: the input of calls whose provider reported the cached part.
    """

    calls: int
    tokens_before: int
    tokens_after: int
    input: int
    cached: int
    output: int
    failed: int
    input_of_cached: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRow:
    """A started epoch, and its savings."""

    number: int
    cut: int
    reason: str
    head_tokens: int
    tokens_before: int
    tokens_after: int
    created_at: datetime


async def call_totals(connection: Connection, tenant: str, session_id: str) -> CallTotals:
    """Sums over all calls."""
    record = await connection.fetchrow(CALLS, tenant, session_id)
    assert record is not None  # an aggregate always gives a row
    return CallTotals(**dict(record))


async def epochs_by_reason(connection: Connection, tenant: str, session_id: str) -> dict[str, int]:
    """Reason -> how many epochs started for it."""
    return {r["reason"]: r["epochs"] for r in await connection.fetch(REASONS, tenant, session_id)}


async def terse_by_source(connection: Connection, tenant: str, session_id: str) -> dict[str, int]:
    """Source -> how many terse entries."""
    found = {r["source"]: r["entries"] for r in await connection.fetch(TERSE, tenant, session_id)}
    packed = await packed_log.count(connection, tenant, session_id)
    if packed:
        found[packed_log.SOURCE] = found.get(packed_log.SOURCE, 0) + packed
    return dict(sorted(found.items()))


async def compression(connection: Connection, tenant: str, session_id: str) -> Compression:
    """Over all compactions that made something."""
    record = await connection.fetchrow(COMPRESSION, tenant, session_id)
    assert record is not None  # an aggregate always gives a row
    summaries = await connection.fetchval(SUMMARIES, tenant, session_id)
    return Compression(summaries=summaries, ratio=record["ratio"], last_at=record["last_at"])


async def epochs(connection: Connection, tenant: str, session_id: str, *, after: int, limit: int) -> list[EpochRow]:
    """Epochs in order, after number ``after``."""
    return [EpochRow(**dict(r)) for r in await connection.fetch(EPOCHS, tenant, session_id, after, limit)]
