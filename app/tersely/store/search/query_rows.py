"""The rows that an agent's own SQL is run over, in portions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from asyncpg import Record

from tersely.domain.history.history import Status
from tersely.store.db.connection import Connection
from tersely.store.history import model_views

COLUMNS = (
    "seq, turn, role, status, dialect, tokens, created_at, raw, "
    f"CASE WHEN role = 'assistant' AND client_visible THEN {model_views.model_raw()} END AS model_raw"
)
HERE = "tenant_id = $1 AND session_id = $2"

# From the newest row backwards; a portion ends after so many bytes or rows, whichever comes first.
SPANS = f"""
SELECT min(seq) AS first, max(seq) AS last, sum(size)::bigint AS size
FROM (
    SELECT seq, size, (sum(size) OVER newest)::bigint AS total, row_number() OVER newest AS number
    FROM (
        SELECT seq, octet_length(raw)::bigint AS size FROM messages
        WHERE {HERE} AND seq > $3 AND seq <= $4 ORDER BY seq DESC LIMIT $6
    ) AS row WINDOW newest AS (ORDER BY seq DESC)
) AS counted
WHERE total <= $5
GROUP BY total / $7 + number / $8
ORDER BY first
"""
# What is hidden from the model is hidden from its queries.
SHOWN = "turn > 0 AND model_visible"
ROWS = f"SELECT {COLUMNS} FROM messages WHERE {HERE} AND seq BETWEEN $3 AND $4 AND {SHOWN} ORDER BY seq"
SOME = f"SELECT {COLUMNS} FROM messages WHERE {HERE} AND seq = ANY($3::bigint[]) AND {SHOWN} ORDER BY seq"
INSTRUCTIONS = f"SELECT {COLUMNS} FROM messages WHERE {HERE} AND turn = 0 AND status = 'live' ORDER BY seq"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Messages with consecutive sequence numbers, ``first`` to ``last``, of ``size`` bytes in all."""

    first: int
    last: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryRow:
    """A message's columns for agents' queries.

    ``raw`` is empty where the message was removed. ``model_raw`` is the model's view of a reply where the client's
    differs.
    """

    seq: int
    turn: int
    role: str
    status: Status
    dialect: str
    tokens: int
    created_at: datetime
    raw: bytes
    model_raw: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Portions:
    """Bytes and rows: of all rows read, and of a portion (which may be one message longer)."""

    size: int
    rows: int
    portion_size: int
    portion_rows: int


async def spans(
    connection: Connection, tenant: str, session_id: str, *, after: int, last: int, most: Portions
) -> list[Span]:
    """Return the messages behind ``after`` up to ``last``.

    As many of the newest as fit, in portions, the oldest first.
    """
    bounds = (most.size, most.rows, most.portion_size, most.portion_rows)
    records = await connection.fetch(SPANS, tenant, session_id, after, last, *bounds)
    return [Span(**dict(record)) for record in records]


async def rows(connection: Connection, tenant: str, session_id: str, span: Span) -> list[QueryRow]:
    """Return a portion of the history, whatever the status, in order."""
    return _rows(await connection.fetch(ROWS, tenant, session_id, span.first, span.last))


async def some(connection: Connection, tenant: str, session_id: str, seqs: Sequence[int]) -> list[QueryRow]:
    """Return the messages of the history with these sequence numbers."""
    return _rows(await connection.fetch(SOME, tenant, session_id, list(seqs)))


async def instructions(connection: Connection, tenant: str, session_id: str) -> list[QueryRow]:
    """Return the session's current instructions."""
    return _rows(await connection.fetch(INSTRUCTIONS, tenant, session_id))


def _rows(records: Sequence[Record]) -> list[QueryRow]:
    return [QueryRow(**dict(record)) for record in records]
