"""Messages: reading a session's rows, with or without their content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import msgspec
from asyncpg import Record

from app.domain.history import DEFAULT_PRIORITY, WINDOW_FULL, Status
from app.domain.lineage import Row
from app.store.connection import Connection


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMessage:
    """A message with its content. ``raw`` is the client's view; ``model_raw`` is set where the model's differs."""

    seq: int
    turn: int
    place: float
    tokens: int
    role: str
    status: Status
    dialect: str
    client_visible: bool
    model_visible: bool
    pinned: bool
    priority: int
    finish: str | None
    digest: bytes
    created_at: datetime
    raw: bytes
    model_raw: bytes | None


ROW = "seq, place, turn, tokens, role, status, digest, chain IS NOT NULL AS relayed, call"
RAN_OUT = f"finish IS NOT DISTINCT FROM '{WINDOW_FULL}'"
TAIL = f"{ROW}, dialect, pinned, priority, created_at, model_raw, NOT client_visible AS is_hidden, {RAN_OUT} AS ran_out"
FULL = (
    "seq, turn, place, tokens, role, status, dialect, client_visible, model_visible, pinned, priority, finish, digest, "
    "created_at, raw, model_raw"
)
HERE = "tenant_id = $1 AND session_id = $2"

# Instructions are found by an index of their own, so that the cost depends on the tail alone.
TAIL_ROWS = f"""
SELECT {TAIL} FROM messages
WHERE {HERE} AND seq >= $3 AND status <> 'superseded' AND turn > 0
UNION ALL
SELECT {TAIL} FROM messages
WHERE {HERE} AND turn = 0 AND status = 'live'
ORDER BY place, seq
"""

ALL_ROWS = f"SELECT {TAIL} FROM messages WHERE {HERE} ORDER BY place, seq"

CONTENT = f"SELECT {FULL} FROM messages WHERE {HERE} AND seq = ANY($3::bigint[]) ORDER BY place, seq"

LIVE_FROM = f"""
SELECT {FULL} FROM messages
WHERE {HERE} AND seq >= $3 AND status = 'live' AND model_visible AND turn > 0
ORDER BY place, seq
"""

NEWEST_WITHIN = f"""
SELECT coalesce(min(seq), $3) FROM (
    SELECT seq, sum(tokens) OVER (ORDER BY seq DESC) AS spent FROM (
        SELECT seq, tokens FROM messages
        WHERE {HERE} AND seq >= $3 AND status = 'live' AND model_visible AND turn > 0 ORDER BY seq DESC LIMIT $5
    ) AS last
) AS counted WHERE spent <= $4
"""

# Only what was left behind has to be followed back: what is current is one history.
LEADING_TO = f"""
WITH RECURSIVE back AS (
    SELECT seq, follows, status FROM messages WHERE {HERE} AND seq = $3
    UNION ALL
    SELECT m.seq, m.follows, m.status FROM back JOIN messages m
        ON m.tenant_id = $1 AND m.session_id = $2 AND m.seq = back.follows
    WHERE back.status = 'superseded'
)
SELECT seq, follows, status FROM back
"""

CHAIN_OF = f"SELECT chain FROM messages WHERE {HERE} AND seq = $3"

INSTRUCTIONS = f"SELECT {FULL} FROM messages WHERE {HERE} AND turn = 0 AND status = 'live' ORDER BY place, seq"


LINKS_BEFORE = f"""
SELECT digest FROM messages
WHERE {HERE} AND seq < $3 AND status <> 'superseded' AND turn > 0 AND client_visible
ORDER BY place, seq
"""


class TailRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A row of the tail, with the model's view where it differs from the client's; ``dialect`` is that of both.

    ``is_hidden``: the client knows nothing of it, so that ``model_raw`` is all of it. ``ran_out``: a reply that broke
    off because the model's window was full.
    """

    row: Row
    dialect: str
    pinned: bool
    priority: int = DEFAULT_PRIORITY
    created_at: datetime
    model_raw: bytes | None
    is_hidden: bool = False
    ran_out: bool = False


def _row(record: Record) -> TailRow:
    return TailRow(
        row=Row(
            seq=record["seq"],
            place=record["place"],
            turn=record["turn"],
            tokens=record["tokens"],
            role=record["role"],
            status=record["status"],
            digest=record["digest"],
            relayed=record["relayed"],
            call=record["call"],
        ),
        dialect=record["dialect"],
        pinned=record["pinned"],
        priority=record["priority"],
        created_at=record["created_at"],
        model_raw=record["model_raw"],
        is_hidden=record["is_hidden"],
        ran_out=record["ran_out"],
    )


def message_from(record: Record) -> StoredMessage:
    """A record with the columns of `FULL` as a value."""
    return StoredMessage(**dict(record))


async def tail_rows(connection: Connection, tenant: str, session_id: str, cut: int) -> list[TailRow]:
    """The current rows from ``cut`` on and the current instructions, in order, without their content."""
    return [_row(record) for record in await connection.fetch(TAIL_ROWS, tenant, session_id, cut)]


async def links_before(connection: Connection, tenant: str, session_id: str, cut: int) -> list[bytes]:
    """The digests of what stands before ``cut`` in the history that the client knows. Costs what that is long."""
    return [row["digest"] for row in await connection.fetch(LINKS_BEFORE, tenant, session_id, cut)]


async def all_rows(connection: Connection, tenant: str, session_id: str) -> list[TailRow]:
    """Every row, superseded and hidden ones too."""
    return [_row(record) for record in await connection.fetch(ALL_ROWS, tenant, session_id)]


async def content(connection: Connection, tenant: str, session_id: str, seqs: Sequence[int]) -> list[StoredMessage]:
    """The messages with these sequence numbers, whatever their status, in order."""
    return [message_from(r) for r in await connection.fetch(CONTENT, tenant, session_id, list(seqs))]


async def live_from(connection: Connection, tenant: str, session_id: str, cut: int) -> list[StoredMessage]:
    """What the model may see from ``cut`` on, in order, without instructions."""
    return [message_from(r) for r in await connection.fetch(LIVE_FROM, tenant, session_id, cut)]


async def newest_within(
    connection: Connection, tenant: str, session_id: str, *, since: int, tokens: int, most: int
) -> int:
    """The first sequence number, from ``since`` on, of the newest messages that come to at most ``tokens`` and are at
    most ``most``. Costs what these cost.
    """
    found: int = await connection.fetchval(NEWEST_WITHIN, tenant, session_id, since, tokens, most)
    return found


async def leading_to(
    connection: Connection, tenant: str, session_id: str, rows: Sequence[Row], seq: int
) -> list[Row] | None:
    """Those of the session's ``rows`` (all, in order) that are the history up to the message ``seq``, that included.

    Nothing for 0; None where it cannot be told any more.
    """
    if not seq:
        return []
    last = next((row for row in rows if row.seq == seq), None)
    if last is None:
        return None
    left: set[int] = set()
    place = last.place
    if last.status == "superseded":
        back = await connection.fetch(LEADING_TO, tenant, session_id, seq)
        left = _with_beside({record["seq"] for record in back if record["status"] == "superseded"}, rows)
        if back[-1]["status"] != "superseded":
            place = next(row.place for row in rows if row.seq == back[-1]["seq"])
        elif back[-1]["follows"] == 0:
            place = float("-inf")
        else:
            return None
    return [row for row in rows if row.seq in left or (row.status != "superseded" and row.place <= place)]


def _with_beside(seqs: set[int], rows: Sequence[Row]) -> set[int]:
    """``seqs`` and the instructions that came with them, directly before each."""
    beside = {row.seq for row in rows if not row.is_link}
    found = set(seqs)
    for seq in seqs:
        before = seq - 1
        while before in beside:
            found.add(before)
            before -= 1
    return found


async def chain_of(connection: Connection, tenant: str, session_id: str, seq: int) -> bytes:
    """The identity of the history up to a relayed reply; empty for any other message."""
    return await connection.fetchval(CHAIN_OF, tenant, session_id, seq) or b""


async def instructions(connection: Connection, tenant: str, session_id: str) -> list[StoredMessage]:
    """The session's current instructions, in order."""
    return [message_from(r) for r in await connection.fetch(INSTRUCTIONS, tenant, session_id)]


KEPT_ROWS = f"SELECT {TAIL} FROM messages WHERE {HERE} AND seq = ANY($3::bigint[])"


async def rows_of(connection: Connection, tenant: str, session_id: str, seqs: Sequence[int]) -> list[TailRow]:
    """The rows with these sequence numbers, without their content."""
    return [_row(r) for r in await connection.fetch(KEPT_ROWS, tenant, session_id, list(seqs))]


SIZES = f"""
SELECT seq, octet_length(raw) + coalesce(octet_length(model_raw), 0) AS size FROM messages
WHERE {HERE} AND seq = ANY($3::bigint[])
"""


async def sizes(connection: Connection, tenant: str, session_id: str, seqs: Sequence[int]) -> dict[int, int]:
    """Sequence number -> bytes of a message's content, which is not read for that."""
    return {r["seq"]: r["size"] for r in await connection.fetch(SIZES, tenant, session_id, list(seqs))}
