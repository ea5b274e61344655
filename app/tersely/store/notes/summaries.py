"""Summaries: append-only rows, each for the live messages in a range of sequence numbers.

A row keeps the ``basis`` of its range: a digest of the numbers in it that were *not* live when the summary was made.
The row is valid while the basis is the same. So it becomes invalid when one of its messages is undone, dropped,
superseded or removed, and valid again when a client returns to that branch. Edits elsewhere do not affect it. A row
without a text records that nothing shorter was found for that basis, so there is no second attempt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from asyncpg import Record

from tersely.domain.history.history import Epoch, Summary, SummarySource
from tersely.domain.history.runs import Run
from tersely.store.db.connection import Connection
from tersely.store.history import turn_rows
from tersely.store.history.messages import FULL, HERE, IS_EXCEPTION, StoredMessage, fetch_messages
from tersely.store.history.turn_rows import of_turns


def _basis(first: str, last: str) -> str:
    """Return the basis of a range.

    Its condition is that of the index of exceptions, so the cost depends on the exceptions alone.
    """
    return f"""(
        SELECT sha256(convert_to(coalesce(string_agg(m.seq::text, ',' ORDER BY m.seq), ''), 'UTF8'))
        FROM messages m
        WHERE m.tenant_id = $1 AND m.session_id = $2 AND m.seq BETWEEN {first} AND {last}
          AND {IS_EXCEPTION}
          AND m.status <> 'live' AND m.turn > 0
    )"""


# The messages of runs. The limit limits nothing: it has the planner read the index of numbers in order.
_IN_RUNS = f"""
unnest($3::bigint[], $4::bigint[]) AS run (first, last) CROSS JOIN LATERAL (
    SELECT seq, tokens FROM messages
    WHERE {HERE} AND seq BETWEEN run.first AND run.last
      AND status = 'live' AND model_visible AND client_visible AND turn > 0
    ORDER BY seq LIMIT greatest(0, run.last - run.first + 1)
) AS of_run
"""
BASIS = f"SELECT {_basis('$3', '$4')}"
IS_DONE = f"""
SELECT EXISTS (
    SELECT FROM summaries
    WHERE {HERE} AND purpose = $3 AND first_seq = $4 AND last_seq = $5 AND basis = $6 AND (text IS NOT NULL OR NOT $7)
)
"""
PIECES = f"""
SELECT min(seq) AS first_seq, max(seq) AS last_seq FROM (
    SELECT seq, (row_number() OVER (ORDER BY seq DESC) - 1) / $5::integer AS piece FROM (
        SELECT seq FROM {_IN_RUNS} ORDER BY seq DESC LIMIT $5::integer * $6::integer
    ) AS newest
) AS numbered GROUP BY piece ORDER BY 1
"""
# Only who holds the session's lease may add; a basis that has changed meanwhile makes the summary worthless.
ADD = f"""
INSERT INTO summaries (tenant_id, session_id, number, purpose, first_seq, last_seq, basis, tokens, source, model,
    created_at, text)
SELECT tenant_id, session_id, (SELECT coalesce(max(number), 0) + 1 FROM summaries WHERE {HERE}),
    $5, $3, $4, $6, $7, $8, $9, $10, $11
FROM leases WHERE {HERE} AND holder = $12 AND {_basis("$3", "$4")} = $6
ON CONFLICT DO NOTHING RETURNING number
"""
# One query for each purpose, so that each reads its index backwards and stops at the first few valid rows.
COUNTING = f"""
SELECT c.* FROM unnest($3::text[]) AS p (purpose) CROSS JOIN LATERAL (
    SELECT number, first_seq, last_seq, purpose, tokens, source, created_at, text FROM summaries s
    WHERE {HERE} AND s.purpose = p.purpose AND last_seq <= $4 AND text IS NOT NULL
      AND basis = {_basis("s.first_seq", "s.last_seq")}
    ORDER BY last_seq DESC, number DESC LIMIT $5
) AS c
ORDER BY c.last_seq DESC, c.number DESC LIMIT $5
"""
COVERED = f"""
SELECT {FULL} FROM messages
WHERE {HERE} AND seq BETWEEN $3 AND $4 AND status = 'live' AND model_visible AND client_visible AND turn > 0
ORDER BY place, seq
"""
OF_RUNS = f"""
SELECT {FULL} FROM messages WHERE {HERE} AND seq = ANY(ARRAY(
    SELECT seq FROM {_IN_RUNS} ORDER BY seq DESC LIMIT $5
))
ORDER BY place, seq
"""
# The first and the newest messages of a range, whatever its length.
ENDS = f"""
SELECT {FULL} FROM messages WHERE {HERE} AND seq IN (
    (SELECT seq FROM messages
     WHERE {HERE} AND seq BETWEEN $3 AND $4 AND status = 'live' AND model_visible AND client_visible AND turn > 0
     ORDER BY seq LIMIT $5)
    UNION
    (SELECT seq FROM messages
     WHERE {HERE} AND seq BETWEEN $3 AND $4 AND status = 'live' AND model_visible AND client_visible AND turn > 0
     ORDER BY seq DESC LIMIT $6)
)
ORDER BY place, seq
"""
SIZE_OF_RUNS = f"""
SELECT count(*) AS messages, coalesce(sum(tokens), 0)::bigint AS tokens FROM {_IN_RUNS}
"""
COVERED_TOKENS = f"""
SELECT coalesce(sum(tokens), 0)::bigint FROM messages
WHERE {HERE} AND seq BETWEEN $3 AND $4 AND status = 'live' AND model_visible AND client_visible AND turn > 0
"""
LEAVING = f"""
SELECT count(*) AS messages, coalesce(sum(tokens), 0)::bigint AS tokens FROM (
    SELECT seq, tokens, status, model_visible, turn FROM messages WHERE {HERE} AND seq >= $3 AND seq < $5
    UNION ALL
    SELECT seq, tokens, status, model_visible, turn FROM messages
    WHERE {HERE} AND seq = ANY($4::bigint[]) AND seq < $3 AND seq < $5
) AS shown
WHERE NOT seq = ANY($6::bigint[]) AND status = 'live' AND model_visible AND turn > 0
"""
LAST_LIVE_TURN = f"SELECT turn FROM messages WHERE {HERE} AND status = 'live' AND turn > 0 ORDER BY seq DESC LIMIT 1"
BEGINNING_OF_TURN = f"""
SELECT min(seq) FROM {of_turns("seq", "status = 'live'")}
"""
LAST_CALL = f"""
SELECT model, host, (
    SELECT dialect FROM messages m WHERE m.tenant_id = $1 AND m.session_id = $2 AND m.seq = c.last_seq
) AS dialect FROM calls c WHERE {HERE} ORDER BY number DESC LIMIT 1
"""
FORGET = f"DELETE FROM summaries WHERE {HERE} AND first_seq <= $4 AND last_seq >= $3"

NO_LIMIT = 2**62


@dataclass(frozen=True, slots=True)
class LastCall:
    """The model that a session's last call asked, the name of the model host (empty: the default one of the dialect),
    and the dialect (empty: unknown).
    """

    model: str = ""
    host: str = ""
    dialect: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSummary:
    """A summary to be added. ``text`` None: nothing shorter was found. ``model`` is empty for extractive ones."""

    purpose: str
    first_seq: int
    last_seq: int
    basis: bytes
    text: str | None
    tokens: int
    source: SummarySource
    model: str = ""


def _summary(record: Record) -> Summary:
    return Summary(
        first_seq=record["first_seq"],
        last_seq=record["last_seq"],
        purpose=record["purpose"],
        text=record["text"].decode("utf-8", "replace"),
        tokens=record["tokens"],
        source=record["source"],
        created_at=record["created_at"],
    )


async def basis(connection: Connection, tenant: str, session_id: str, first: int, last: int) -> bytes:
    """Return a 32-byte digest of the messages ``first`` to ``last`` as they are now, the basis of a summary."""
    found: bytes = await connection.fetchval(BASIS, tenant, session_id, first, last)
    return found


async def is_done(
    connection: Connection,
    tenant: str,
    session_id: str,
    purpose: str,
    first: int,
    last: int,
    on: bytes,
    *,
    in_vain: bool = True,
) -> bool:
    """Return whether this range was summarised on the basis ``on``; ``in_vain``: or tried in vain."""
    found: bool = await connection.fetchval(IS_DONE, tenant, session_id, purpose, first, last, on, not in_vain)
    return found


async def pieces(
    connection: Connection, tenant: str, session_id: str, runs: Sequence[Run], *, size: int, limit: int
) -> list[Run]:
    """Return what there is to summarise in ``runs``, in ranges of ``size`` messages each; the newest ``limit``."""
    found = await connection.fetch(PIECES, tenant, session_id, *_columns(runs), size, limit)
    return [(record["first_seq"], record["last_seq"]) for record in found]


async def add(
    connection: Connection, tenant: str, session_id: str, new: NewSummary, *, holder: str, now: datetime
) -> bool:
    """Add a summary; False when the lease is another's, or when the messages it covers have changed."""
    text = None if new.text is None else new.text.encode("utf-8", "replace")
    number = await connection.fetchval(
        ADD, tenant, session_id, new.first_seq, new.last_seq, new.purpose, new.basis, new.tokens, new.source, new.model,
        now, text, holder,
    )  # fmt: skip
    return number is not None


async def newest(
    connection: Connection,
    tenant: str,
    session_id: str,
    purposes: Sequence[str],
    *,
    up_to: int = NO_LIMIT,
    limit: int = 1,
) -> list[Summary]:
    """Return the newest ``limit`` valid summaries that cover nothing after ``up_to``, in the order of the history.

    Of several with the same end, the latest one comes last.
    """
    records = await connection.fetch(COUNTING, tenant, session_id, list(purposes), up_to, limit)
    return [_summary(record) for record in reversed(records)]


async def covered(connection: Connection, tenant: str, session_id: str, first: int, last: int) -> list[StoredMessage]:
    """Return the messages ``first`` to ``last`` that the model may see, in order, without instructions and Tersely's
    tool traffic.
    """
    return await fetch_messages(connection, COVERED, tenant, session_id, first, last)


async def first_and_last(
    connection: Connection, tenant: str, session_id: str, first: int, last: int, *, head: int, tail: int
) -> list[StoredMessage]:
    """Return the first ``head`` and the newest ``tail`` of what `covered` returns, in order."""
    return await fetch_messages(connection, ENDS, tenant, session_id, first, last, head, tail)


async def of_runs(
    connection: Connection, tenant: str, session_id: str, runs: Sequence[Run], *, limit: int
) -> list[StoredMessage]:
    """Return what the model may see of ``runs``, in order, as `covered` does; at most the newest ``limit``."""
    return await fetch_messages(connection, OF_RUNS, tenant, session_id, *_columns(runs), limit)


def _columns(runs: Sequence[Run]) -> tuple[list[int], list[int]]:
    return [first for first, _ in runs], [last for _, last in runs]


async def covered_tokens(connection: Connection, tenant: str, session_id: str, first: int, last: int) -> int:
    """Return the tokens of that."""
    found: int = await connection.fetchval(COVERED_TOKENS, tenant, session_id, first, last)
    return found


async def leaving(
    connection: Connection, tenant: str, session_id: str, before: Epoch | None, after: Epoch
) -> tuple[int, int]:
    """Return the number and the tokens of the messages that ``before`` shows word by word and ``after`` does not."""
    shown = (before.cut, list(before.kept)) if before is not None and not before.must_rebuild else (1, [])
    row = await connection.fetchrow(LEAVING, tenant, session_id, *shown, after.cut, list(after.kept))
    assert row is not None  # an aggregate always gives a row
    return row["messages"], row["tokens"]


async def size_of_runs(connection: Connection, tenant: str, session_id: str, runs: Sequence[Run]) -> tuple[int, int]:
    """Return the number and the tokens of the live messages in ``runs``."""
    row = await connection.fetchrow(SIZE_OF_RUNS, tenant, session_id, *_columns(runs))
    assert row is not None  # an aggregate always gives a row
    return row["messages"], row["tokens"]


async def last_turn_begins(connection: Connection, tenant: str, session_id: str) -> int:
    """Return the first sequence number of the last live turn; 1 if there is none."""
    turn = await connection.fetchval(LAST_LIVE_TURN, tenant, session_id)
    if turn is None:
        return 1
    turns = await turn_rows.span(connection, tenant, session_id, turn, turn)
    return await connection.fetchval(BEGINNING_OF_TURN, tenant, session_id, *turns) or 1


async def last_call(connection: Connection, tenant: str, session_id: str) -> LastCall:
    """Return the model and the host of the session's last call; empty if there was none."""
    row = await connection.fetchrow(LAST_CALL, tenant, session_id)
    return LastCall() if row is None else LastCall(row["model"], row["host"] or "", row["dialect"] or "")


async def forget(connection: Connection, tenant: str, session_id: str, first: int, last: int) -> None:
    """Delete what was made of any message from ``first`` to ``last``."""
    await connection.execute(FORGET, tenant, session_id, first, last)
