"""Messages: reading a session's rows, with or without their content."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime

import msgspec
from asyncpg import Record

from tersely.domain.history import failed_requests
from tersely.domain.history.history import CLIENT_LEFT, DEFAULT_PRIORITY, WINDOW_FULL, Status
from tersely.domain.history.links import StoredLink
from tersely.store.db.connection import Connection
from tersely.store.db.ranges import END
from tersely.store.history import large_rows, model_views, turn_rows


class StoredMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message with its content. ``raw`` is the client's view; ``model_raw`` is set where the model's differs."""

    seq: int
    turn: int
    position: float
    tokens: int
    role: str
    status: Status
    dialect: str
    client_visible: bool
    model_visible: bool
    pinned: bool
    priority: int
    finish: str | None
    call: int
    digest: bytes
    created_at: datetime
    raw: bytes
    model_raw: bytes | None


# From so many records on, rows are made of them in a thread, and messages are read in portions of so many.
MANY = 2_000

ROW = "seq, place, turn, tokens, role, status, digest, chain IS NOT NULL AS relayed, call, follows"
RAN_OUT = f"finish IS NOT DISTINCT FROM '{WINDOW_FULL}'"
# Calls to tools of Tersely's own and their results, which no client knows of. What is only hidden from the client's
# view a client may resend all the same.
UNKNOWN = "NOT client_visible AND call > 0 AND chain IS NULL"
TAIL = (
    f"{ROW}, dialect, pinned, priority, created_at, {model_views.model_raw()} AS model_raw, "
    f"{UNKNOWN} AS is_hidden, {RAN_OUT} AS ran_out"
)
FULL_COLUMNS = (
    "seq, turn, place AS position, tokens, role, status, dialect, client_visible, model_visible, pinned, priority, "
    "finish, call, digest, created_at"
)
FULL = large_rows.columns(FULL_COLUMNS)
HERE = "tenant_id = $1 AND session_id = $2"
# The condition of the index `messages_exceptions`, word for word: messages other than live ones in their place.
IS_EXCEPTION = """
    CASE WHEN status <> 'live' OR turn = 0 OR place <> seq::float8 OR NOT client_visible OR NOT model_visible
        THEN 1 ELSE 0 END = 1
"""
# Clients put their rules, skills and tools in front of the first question.
FIRST_MESSAGES = 16

# Instructions are found by an index of their own, so that the cost depends on the tail alone.
TURNS_FROM = (
    f"SELECT {TAIL} FROM messages WHERE {HERE} AND seq BETWEEN $3 AND {END} AND status <> 'superseded' AND turn > 0"
)
CURRENT_INSTRUCTIONS = f"SELECT {TAIL} FROM messages WHERE {HERE} AND turn = 0 AND status = 'live'"
TAIL_ROWS = f"{TURNS_FROM} UNION ALL {CURRENT_INSTRUCTIONS} ORDER BY place, seq"

ALL_ROWS = f"SELECT {TAIL} FROM messages WHERE {HERE} ORDER BY place, seq"

CONTENT = f"SELECT {FULL} FROM messages WHERE {HERE} AND seq = ANY($3::bigint[]) ORDER BY place, seq"

QUESTIONS_OF = f"""
SELECT {FULL} FROM messages
WHERE {HERE} AND status = 'live' AND model_visible AND turn > 0
  AND seq IN (SELECT follows FROM messages WHERE {HERE} AND seq = ANY($3::bigint[]))
ORDER BY place, seq
"""

LIVE_FROM = f"""
SELECT {FULL} FROM messages
WHERE {HERE} AND seq BETWEEN $3 AND {END} AND status = 'live' AND model_visible AND turn > 0
ORDER BY place, seq
"""
LIVE_BETWEEN = f"""
SELECT {FULL} FROM messages
WHERE {HERE} AND seq BETWEEN $3 AND $4 AND status = 'live' AND model_visible AND turn > 0
"""

# The client's view. Text that was stripped from a reply is only in `model_raw`.
REPLIES_WITH = f"""
SELECT {FULL} FROM messages
WHERE {HERE} AND seq BETWEEN $3 AND {END} AND status = 'live' AND model_visible AND client_visible AND turn > 0
  AND role = 'assistant' AND position($4::bytea IN raw) > 0
ORDER BY place, seq
"""

NEWEST_WITHIN = f"""
SELECT coalesce(min(seq), $3) FROM (
    SELECT seq, sum(tokens) OVER (ORDER BY seq DESC) AS spent FROM (
        SELECT seq, tokens FROM messages
        WHERE {HERE} AND seq BETWEEN $3 AND {END} AND status = 'live' AND model_visible AND turn > 0
        ORDER BY seq DESC LIMIT $5
    ) AS last
) AS counted WHERE spent <= $4
"""

LAST_TURN_BEFORE = f"""
SELECT turn FROM messages WHERE {HERE} AND seq < $3 AND status = 'live' AND turn > 0 ORDER BY seq DESC LIMIT 1
"""
OF_TURN_BEFORE = f"""
SELECT seq FROM {turn_rows.of_turns("seq", "seq < $7 AND status = 'live' AND model_visible")} ORDER BY seq
"""

PINNED_BEFORE = f"""
SELECT seq FROM messages WHERE {HERE} AND seq < $3 AND pinned AND status = 'live' AND model_visible AND turn > 0
ORDER BY seq
"""

# Late replies stand between older messages; of the messages that came last, one is the last by place. Found from the
# end, so that it costs the same in every session.
LAST_LINK = f"""
SELECT seq, turn FROM (
    SELECT turn, place, seq FROM messages WHERE {HERE} AND status = 'live' AND turn > 0 ORDER BY seq DESC LIMIT 64
) AS newest ORDER BY place DESC, seq DESC LIMIT 1
"""

# Only superseded messages need `follows`: the current ones form one history.
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


LINKS_SINCE = f"""
SELECT {TAIL} FROM messages
WHERE {HERE} AND seq > $3 AND seq <= {END} AND status = 'live' AND turn > 0 AND client_visible ORDER BY place, seq
"""

INSTRUCTION_ROWS = f"{CURRENT_INSTRUCTIONS} ORDER BY place, seq"

# For a reply its finish; otherwise the end of the newest call that ended with this message. `calls` is read from its
# newest rows on.
END_OF_CALL = f"""
SELECT finish, created_at AS ended_at, true AS is_question FROM messages WHERE {HERE} AND seq = $4
UNION ALL
SELECT NULL, max(finished_at), EXISTS (
    SELECT FROM messages AS q WHERE q.tenant_id = $1 AND q.session_id = $2 AND q.seq = $3 AND q.exchange IS NOT NULL
        AND NOT EXISTS (
            SELECT FROM messages AS n
            WHERE n.tenant_id = $1 AND n.session_id = $2 AND n.seq = $3 + 1 AND n.exchange = q.exchange
        )
) FROM calls WHERE {HERE} AND $4 = 0 AND number > $5 AND number <= {END} AND last_seq = $3
"""
CALLS_LOOKED_AT = 1_000
ENDED_CALLS = f"""
SELECT last_seq FROM calls WHERE {HERE} AND number > $4 AND number <= {END} AND last_seq = ANY($3::bigint[])
    AND NOT EXISTS (
        SELECT FROM reply_ids AS r WHERE r.tenant_id = $1 AND r.session_id = $2 AND r.seq = calls.last_seq
    )
"""

NEWEST_AT = f"SELECT created_at FROM messages WHERE {HERE} AND turn > 0 ORDER BY seq DESC LIMIT 1"

HIDDEN_WORDS = f"""
SELECT {FULL} FROM messages
WHERE {HERE} AND {IS_EXCEPTION} AND status IN ('dropped', 'undone') AND role <> 'assistant' AND turn > 0
ORDER BY place, seq
"""

FIRST_QUESTIONS = f"""
SELECT {FULL} FROM messages
WHERE {HERE} AND seq < $3 AND seq <= {FIRST_MESSAGES} AND status = 'live' AND model_visible AND role = 'user'
ORDER BY place, seq
"""

REPLIES_BEFORE = f"""
SELECT {FULL} FROM messages
WHERE {HERE} AND seq = ANY(ARRAY(
    SELECT (
        SELECT seq FROM messages WHERE {HERE} AND seq < later.seq AND status = 'live' AND role = 'assistant'
        ORDER BY seq DESC LIMIT 1
    ) FROM unnest($3::bigint[]) AS later(seq)
))
ORDER BY place, seq
"""

LINKS_BEFORE = f"""
SELECT digest FROM messages
WHERE {HERE} AND seq < $3 AND status <> 'superseded' AND turn > 0 AND NOT ({UNKNOWN})
ORDER BY place, seq
"""


class TailRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A row of the tail, with the model's view if it differs from the client's; ``dialect`` is that of both.

    ``is_hidden``: the client does not know the message, and ``model_raw`` is all of it. ``ran_out``: a reply that broke
    off because the model's window was full.
    """

    row: StoredLink
    dialect: str
    pinned: bool
    priority: int = DEFAULT_PRIORITY
    created_at: datetime
    model_raw: bytes | None
    is_hidden: bool = False
    ran_out: bool = False


def _rows_up_to(records: Sequence[Record], last: int | None) -> list[TailRow]:
    return [_row(record) for record in _up_to(records, last)]


async def _rows(records: Sequence[Record], last: int | None) -> list[TailRow]:
    """Return the rows of the records up to the sequence number ``last``, made in a thread where there are many."""
    if len(records) <= MANY:
        return _rows_up_to(records, last)
    return await asyncio.to_thread(_rows_up_to, records, last)


def _row(record: Record) -> TailRow:
    return TailRow(
        row=StoredLink(
            seq=record["seq"],
            position=record["place"],
            turn=record["turn"],
            tokens=record["tokens"],
            role=record["role"],
            status=record["status"],
            digest=record["digest"],
            relayed=record["relayed"],
            call=record["call"],
            follows=record["follows"],
        ),
        dialect=record["dialect"],
        pinned=record["pinned"],
        priority=record["priority"],
        created_at=record["created_at"],
        model_raw=record["model_raw"],
        is_hidden=record["is_hidden"],
        ran_out=record["ran_out"],
    )


async def fetch_messages(
    connection: Connection, sql: str, tenant: str, session_id: str, *arguments: object
) -> list[StoredMessage]:
    """Return the messages of a session that ``sql`` selects with the columns of `FULL`."""
    records = await connection.fetch(sql, tenant, session_id, *arguments)
    return await messages_from(connection, tenant, session_id, records)


async def messages_from(
    connection: Connection, tenant: str, session_id: str, records: Sequence[Record]
) -> list[StoredMessage]:
    """Return records with the columns of `FULL` as values, in a thread where there are many."""
    large = await large_rows.read(connection, tenant, session_id, records)
    if len(records) < MANY:
        return _messages_from(records, large)
    return await asyncio.to_thread(_messages_from, records, large)


def _messages_from(records: Sequence[Record], large: Mapping[tuple[int, str], bytes]) -> list[StoredMessage]:
    return [StoredMessage(**large_rows.complete(record, large)) for record in records]


# Successive statements see what was committed in between. ``last``, in the functions below, is the session's last
# sequence number as it was read: messages stored since have numbers that a request on that session gives to its own
# messages.
def _up_to(records: Sequence[Record], last: int | None) -> Sequence[Record]:
    return records if last is None else [record for record in records if record["seq"] <= last]


async def tail_rows(
    connection: Connection, tenant: str, session_id: str, cut: int, *, last: int | None = None
) -> list[TailRow]:
    """Return the current rows from ``cut`` on and the current instructions, in order, without their content."""
    return await _rows(await connection.fetch(TAIL_ROWS, tenant, session_id, cut), last)


async def tail_rows_in_steps(connection: Connection, tenant: str, session_id: str, cut: int) -> list[TailRow]:
    """Return the same with two simple statements, for a distributed Postgres."""
    records = [
        *await connection.fetch(TURNS_FROM, tenant, session_id, cut),
        *await connection.fetch(CURRENT_INSTRUCTIONS, tenant, session_id),
    ]
    return sorted(await _rows(records, None), key=lambda tail: (tail.row.position, tail.row.seq))


async def links_before(connection: Connection, tenant: str, session_id: str, cut: int) -> list[bytes]:
    """Return the digests of the links before ``cut`` in the history that the client knows.

    O(length).
    """
    return [row["digest"] for row in await connection.fetch(LINKS_BEFORE, tenant, session_id, cut)]


async def all_rows(connection: Connection, tenant: str, session_id: str, *, last: int | None = None) -> list[TailRow]:
    """Return every row, superseded and hidden ones included."""
    return await _rows(await connection.fetch(ALL_ROWS, tenant, session_id), last)


async def newest_at(connection: Connection, tenant: str, session_id: str) -> datetime | None:
    """Return the time of the session's newest message; None without messages."""
    found: datetime | None = await connection.fetchval(NEWEST_AT, tenant, session_id)
    return found


async def content(connection: Connection, tenant: str, session_id: str, seqs: Sequence[int]) -> list[StoredMessage]:
    """Return the messages with these sequence numbers, whatever their status, in order."""
    return await fetch_messages(connection, CONTENT, tenant, session_id, list(seqs))


async def live_from(
    connection: Connection, tenant: str, session_id: str, cut: int, *, last: int | None = None
) -> list[StoredMessage]:
    """Return the messages that the model may see from ``cut`` on, in order, without instructions.

    Long stretches are read in portions.
    """
    if last is None or last - cut < MANY:
        records = _up_to(await connection.fetch(LIVE_FROM, tenant, session_id, cut), last)
        return await messages_from(connection, tenant, session_id, records)
    found: list[StoredMessage] = []
    for start in range(cut, last + 1, MANY):
        end = min(start + MANY - 1, last)
        found += await fetch_messages(connection, LIVE_BETWEEN, tenant, session_id, start, end)
    return await asyncio.to_thread(_in_order, found)


def _in_order(found: list[StoredMessage]) -> list[StoredMessage]:
    return sorted(found, key=lambda message: (message.position, message.seq))


async def live_replies_with(
    connection: Connection, tenant: str, session_id: str, marker: bytes, since: int
) -> list[StoredMessage]:
    """Return the live replies from ``since`` on whose client was shown ``marker``, in order."""
    return await fetch_messages(connection, REPLIES_WITH, tenant, session_id, since, marker)


async def newest_within(
    connection: Connection, tenant: str, session_id: str, *, since: int, tokens: int, limit: int
) -> int:
    """Return the first sequence number, from ``since`` on, of the newest messages with at most ``tokens`` tokens and at
    most ``limit`` messages. The cost depends on these messages.
    """
    found: int = await connection.fetchval(NEWEST_WITHIN, tenant, session_id, since, tokens, limit)
    return found


async def pinned_before(connection: Connection, tenant: str, session_id: str, seq: int) -> list[int]:
    """Return the numbers of the live pinned messages before ``seq``. O(history)."""
    return [record["seq"] for record in await connection.fetch(PINNED_BEFORE, tenant, session_id, seq)]


async def of_turn_before(connection: Connection, tenant: str, session_id: str, seq: int, *, turn: int = 0) -> list[int]:
    """Return the sequence numbers before ``seq`` of a turn's messages that contexts may show. ``turn`` 0: the last one
    that has any.
    """
    turn = turn or await connection.fetchval(LAST_TURN_BEFORE, tenant, session_id, seq) or 0
    if not turn:
        return []
    span = await turn_rows.span(connection, tenant, session_id, turn, turn)
    return [record["seq"] for record in await connection.fetch(OF_TURN_BEFORE, tenant, session_id, *span, seq)]


async def last_link(connection: Connection, tenant: str, session_id: str) -> tuple[int, int]:
    """Return the sequence number and the turn of the last live link; zeros if there is none.

    Costs the same in every session.
    """
    record = await connection.fetchrow(LAST_LINK, tenant, session_id)
    return (record["seq"], record["turn"]) if record else (0, 0)


async def questions_of(
    connection: Connection, tenant: str, session_id: str, replies: Sequence[int]
) -> list[StoredMessage]:
    """Return the live messages that these replies answer, in order."""
    return await fetch_messages(connection, QUESTIONS_OF, tenant, session_id, list(replies))


async def leading_to(
    connection: Connection, tenant: str, session_id: str, rows: Sequence[StoredLink], seq: int
) -> list[StoredLink] | None:
    """Return the session's ``rows`` (all, in order) that form the history up to and including message ``seq``.

    Empty for 0; None if the history cannot be determined any more.
    """
    if not seq:
        return []
    last = next((row for row in rows if row.seq == seq), None)
    if last is None:
        return None
    left: set[int] = set()
    position = last.position
    if last.status == "superseded":
        back = await connection.fetch(LEADING_TO, tenant, session_id, seq)
        left = _with_beside({record["seq"] for record in back if record["status"] == "superseded"}, rows)
        if back[-1]["status"] != "superseded":
            position = next(row.position for row in rows if row.seq == back[-1]["seq"])
        elif back[-1]["follows"] == 0:
            position = float("-inf")
        else:
            return None
    return [row for row in rows if row.seq in left or (row.status != "superseded" and row.position <= position)]


def _with_beside(seqs: set[int], rows: Sequence[StoredLink]) -> set[int]:
    """Return ``seqs`` and the instructions that came with them, directly before each."""
    instructions = {row.seq for row in rows if not row.is_link}
    found = set(seqs)
    for seq in seqs:
        before = seq - 1
        while before in instructions:
            found.add(before)
            before -= 1
    return found


async def chain_of(connection: Connection, tenant: str, session_id: str, seq: int) -> bytes:
    """Return the identity of the history up to a relayed reply; empty for any other message."""
    return await connection.fetchval(CHAIN_OF, tenant, session_id, seq) or b""


async def instructions(connection: Connection, tenant: str, session_id: str) -> list[StoredMessage]:
    """Return the session's current instructions, in order."""
    return await fetch_messages(connection, INSTRUCTIONS, tenant, session_id)


async def hidden_texts(connection: Connection, tenant: str, session_id: str) -> list[StoredMessage]:
    """Return the client's messages in turns that were dropped or undone. Their injected blocks still count."""
    return await fetch_messages(connection, HIDDEN_WORDS, tenant, session_id)


async def first_questions(connection: Connection, tenant: str, session_id: str, cut: int) -> list[StoredMessage]:
    """Return the user messages among the first `FIRST_MESSAGES` of a session, before ``cut``."""
    return await fetch_messages(connection, FIRST_QUESTIONS, tenant, session_id, cut)


KEPT_ROWS = f"SELECT {TAIL} FROM messages WHERE {HERE} AND seq = ANY($3::bigint[])"


async def replies_before(
    connection: Connection, tenant: str, session_id: str, seqs: Sequence[int]
) -> list[StoredMessage]:
    """Return the newest live reply before each of these sequence numbers, in order."""
    return await fetch_messages(connection, REPLIES_BEFORE, tenant, session_id, list(seqs))


async def rows_of(connection: Connection, tenant: str, session_id: str, seqs: Sequence[int]) -> list[TailRow]:
    """Return the rows with these sequence numbers, without their content."""
    return [_row(r) for r in await connection.fetch(KEPT_ROWS, tenant, session_id, list(seqs))]


async def links_since(connection: Connection, tenant: str, session_id: str, seq: int) -> list[StoredLink]:
    """Return the live links after sequence number ``seq`` that the client knows of, in order."""
    return [_row(r).row for r in await connection.fetch(LINKS_SINCE, tenant, session_id, seq)]


async def instruction_rows(connection: Connection, tenant: str, session_id: str) -> list[StoredLink]:
    """Return the session's current instructions without their content, in order."""
    return [_row(r).row for r in await connection.fetch(INSTRUCTION_ROWS, tenant, session_id)]


class EndOfCall(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a question's call. ``client_left``: its client went away before the end of the reply. Without a
    time (``ended_at``) the call is under way, unless ``is_question`` is false: the message was appended without a call,
    or in front of the question of one.
    """

    client_left: bool = False
    ended_at: datetime | None = None
    is_question: bool = True


async def end_of_call(
    connection: Connection, tenant: str, session_id: str, question: int, reply: int, *, calls: int
) -> EndOfCall:
    """Return how the call of ``question`` ended. ``reply`` is its last reply (0: there is none), ``calls`` is how many
    calls the session has had.
    """
    oldest = calls - CALLS_LOOKED_AT
    found = EndOfCall(is_question=False)
    for record in await connection.fetch(END_OF_CALL, tenant, session_id, question, reply, oldest):
        if record["ended_at"] is not None:
            return EndOfCall(client_left=record["finish"] == CLIENT_LEFT, ended_at=record["ended_at"])
        found = EndOfCall(is_question=record["is_question"])
    return found


async def failed_links(
    connection: Connection, tenant: str, session_id: str, rows: Sequence[StoredLink], *, calls: int
) -> frozenset[int]:
    """Return the links of requests whose call has ended without a reply. ``rows`` are in order; ``calls``: how many
    calls of the session there were.
    """
    seqs = failed_requests.links_without_reply(rows)
    if not seqs:
        return frozenset()
    records = await connection.fetch(ENDED_CALLS, tenant, session_id, seqs, calls - CALLS_LOOKED_AT)
    return failed_requests.failed_links(rows, {record["last_seq"] for record in records})


# Text that was stripped from a reply is a row of `terse` or `states`, and part of the model's view of the reply.
def _was_taken_out(rows: str) -> str:
    """Return the condition that live replies have ``rows``: a table of taken-out text, joined with the messages."""
    replies = f"""
    EXISTS (
        SELECT FROM messages m JOIN {rows}
        WHERE m.tenant_id = $1 AND m.session_id = $2 AND m.seq {{which}} AND m.status = 'live'
          AND (m.model_raw IS NOT NULL OR m.model_middle IS NOT NULL) AND t.source = 'model'
    )"""
    return replies.format(which=f"BETWEEN $3 AND {END}") + " OR" + replies.format(which="= ANY($4::bigint[])")


_SAME = "t.tenant_id = m.tenant_id AND t.session_id = m.session_id AND t.seq = m.seq"
TAKEN_OUT = f"""
SELECT {_was_taken_out(f"terse t ON {_SAME} AND t.turn = m.turn")} AS terse,
    {_was_taken_out(f"states t ON {_SAME}")} AS state
"""


async def stripped_kinds(
    connection: Connection, tenant: str, session_id: str, *, since: int, kept: Sequence[int]
) -> tuple[bool, bool]:
    """Return whether live replies from ``since`` on, or among ``kept``, had terse tags taken out, and state blocks."""
    row = await connection.fetchrow(TAKEN_OUT, tenant, session_id, since, list(kept))
    assert row is not None  # there is no FROM
    return row["terse"], row["state"]


SIZES = f"""
SELECT seq, octet_length(raw) + coalesce({model_views.model_size()}, 0) AS size FROM messages
WHERE {HERE} AND seq = ANY($3::bigint[])
"""


async def sizes(connection: Connection, tenant: str, session_id: str, seqs: Sequence[int]) -> dict[int, int]:
    """Map sequence numbers to the bytes of each message's content, without reading it."""
    return {r["seq"]: r["size"] for r in await connection.fetch(SIZES, tenant, session_id, list(seqs))}
