"""The log lines that an epoch cut, packed into one value of the epoch's row.

A line that no model wrote is stored when an epoch cuts its turn. As a row of ``terse`` it takes twice the bytes of its
text for ids, times and index entries. So an epoch keeps its lines together: columns of differences and the texts,
compressed. Lines of models stay rows of ``terse``; readers join both (`tersely.store.history.terse`).
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from typing import Final, TypeVar

import msgspec

from tersely.domain.history.history import TerseEntry
from tersely.domain.text.encodable import encodable
from tersely.store.db.connection import Connection
from tersely.store.history.messages import HERE, IS_EXCEPTION

_log = logging.getLogger(__name__)

Row = TypeVar("Row")
# Turn, sequence number, number within the message: where an entry stands in the log.
LogCursor = tuple[int, int, int]
LogLine = tuple[LogCursor, TerseEntry]

# Derived entries are numbered from here on, the model's own entries of the same message from 0.
DERIVED_FROM = 1000
ROLE: Final = "assistant"
SOURCE: Final = "derived"
COLUMNS = ("log", "log_first_turn", "log_last_turn", "log_lines")

# The condition of the index `epochs_log`.
HAS_LOG = "log_last_turn IS NOT NULL"
BETWEEN = f"""
SELECT log FROM epochs WHERE {HERE} AND {HAS_LOG} AND log_last_turn >= $3 AND log_first_turn <= $4 ORDER BY number
"""
WINDOW = f"""
SELECT max(log_last_turn) FROM (
    SELECT log_last_turn FROM epochs WHERE {HERE} AND {HAS_LOG} AND log_last_turn >= $3 ORDER BY log_last_turn LIMIT $4
) AS next
"""
NEWEST = f"""
SELECT log, log_last_turn, number FROM epochs WHERE {HERE} AND {HAS_LOG} AND (log_last_turn, number) < ($4, $5)
ORDER BY log_last_turn DESC, number DESC LIMIT $3
"""
LINES = f"SELECT coalesce(sum(log_lines), 0)::bigint FROM epochs WHERE {HERE} AND {HAS_LOG}"
ALL = f"SELECT number, log, log_first_turn, log_last_turn FROM epochs WHERE {HERE} AND {HAS_LOG}"
SET = f"""
UPDATE epochs SET log = $4, log_first_turn = $5, log_last_turn = $6, log_lines = $7 WHERE {HERE} AND number = $3
"""
# Of few messages the status is another one than live, and these have an index.
NOT_LIVE = f"""
SELECT seq FROM messages WHERE {HERE} AND seq BETWEEN $3 AND $4 AND {IS_EXCEPTION} AND status <> 'live'
"""
REMOVED = f"""
SELECT seq FROM messages WHERE {HERE} AND seq BETWEEN $3 AND $4 AND {IS_EXCEPTION} AND status = 'removed'
"""
# Packed logs that are read at once: at first, and at the most. A log may have one line, or hundreds.
FEWEST_LOGS, MOST_LOGS = 4, 64
# Greater than the number of any turn or epoch.
_BEHIND_ALL = 2**31 - 1
VERSION = b"\x01"
_START = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)

PackedLog = tuple[bytes | None, int | None, int | None, int | None]
"""The values of `COLUMNS`."""


class _Lines(msgspec.Struct, frozen=True, array_like=True):
    """Lines by column. Numbers are differences from the line before; times are in microseconds."""

    turns: list[int]
    seqs: list[int]
    numbers: list[int]
    times: list[int]
    texts: list[str]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Lines)


def number_entries(derived: Iterable[TerseEntry]) -> tuple[list[LogLine], list[LogLine]]:
    """Return the lines of an epoch with their cursors: those to pack, and those that are stored as rows."""
    packed: list[LogLine] = []
    rows: list[LogLine] = []
    for number, entry in enumerate(derived, start=DERIVED_FROM):
        fits = entry.role == ROLE and entry.source == SOURCE
        (packed if fits else rows).append(((entry.turn, entry.seq, number), entry))
    return packed, rows


def pack(lines: Sequence[LogLine]) -> PackedLog:
    """Return the columns of an epoch that keeps ``lines``, the derived lines of replies."""
    if not lines:
        return None, None, None, None
    turns = [cursor[0] for cursor, _ in lines]
    columns = _Lines(
        turns=_differences(turns),
        seqs=_differences([cursor[1] for cursor, _ in lines]),
        numbers=_differences([cursor[2] for cursor, _ in lines]),
        times=_differences([(entry.created_at - _START) // _MICROSECOND for _, entry in lines]),
        texts=[encodable(entry.text) for _, entry in lines],
    )
    return VERSION + zlib.compress(_encoder.encode(columns)), min(turns), max(turns), len(lines)


def unpack(packed: bytes) -> list[LogLine]:
    """Return the lines of a packed log, in the order in which they were packed. Raises `ValueError` for what is no
    packed log, or one of another version.
    """
    if not packed.startswith(VERSION):
        raise ValueError("a packed log of an unknown version")
    try:
        return _unpack(packed)
    except (zlib.error, msgspec.DecodeError, OverflowError, RecursionError) as error:
        raise ValueError("not a packed log") from error


def _unpack(packed: bytes) -> list[LogLine]:
    lines = _decoder.decode(zlib.decompress(packed[len(VERSION) :]))
    columns = map(accumulate, (lines.turns, lines.seqs, lines.numbers, lines.times))
    return [
        (
            (turn, seq, number),
            TerseEntry(
                turn=turn,
                seq=seq,
                role=ROLE,
                text=text,
                source=SOURCE,
                created_at=_START + time * _MICROSECOND,
            ),
        )
        for turn, seq, number, time, text in zip(*columns, lines.texts, strict=True)
    ]


def _read(packed: bytes) -> list[LogLine] | None:
    """Return the lines of a packed log; None for one that cannot be read, which must not stop readers of others."""
    try:
        return unpack(packed)
    except ValueError as error:
        _log.warning("log lines of an epoch are left out: %s", error)
        return None


def _differences(values: Sequence[int]) -> list[int]:
    return [value - before for before, value in zip((0, *values), values, strict=False)]


async def between(connection: Connection, tenant: str, session_id: str, first: int, last: int) -> list[LogLine]:
    """Return the packed lines of the turns ``first`` to ``last``, in order."""
    records = await connection.fetch(BETWEEN, tenant, session_id, first, last)
    return merge(line for record in records for line in _read(record["log"]) or () if first <= line[1].turn <= last)


async def not_live(
    connection: Connection, tenant: str, session_id: str, lines: Sequence[LogLine], sql: str = NOT_LIVE
) -> set[int]:
    """Return the messages of ``lines``, or some between them, that are no longer live; with `REMOVED` those whose
    content was removed.
    """
    if not lines:
        return set()
    seqs = [cursor[1] for cursor, _ in lines]
    return {r["seq"] for r in await connection.fetch(sql, tenant, session_id, min(seqs), max(seqs))}


async def newest(
    connection: Connection, tenant: str, session_id: str, *, limit: int, restored: Collection[int] | None = None
) -> list[LogLine]:
    """Return the newest ``limit`` packed lines, in order: of all messages, or with ``restored`` those of live messages
    and of these superseded ones.
    """
    found: list[LogLine] = []
    most = FEWEST_LOGS
    end = before = _BEHIND_ALL
    while True:
        records = await connection.fetch(NEWEST, tenant, session_id, most, end, before)
        lines = [line for record in records for line in _read(record["log"]) or ()]
        if restored is not None:
            left_out = await not_live(connection, tenant, session_id, lines) - set(restored)
            lines = [line for line in lines if line[1].seq not in left_out]
        found = merge([*found, *lines])
        if len(records) < most:
            break
        # Logs that were not read yet end with this turn at the latest.
        end, before = records[-1]["log_last_turn"], records[-1]["number"]
        if sum(line[1].turn > end for line in found) >= limit:
            break
        most = min(2 * most, MOST_LOGS)
    return found[-limit:]


async def page(
    connection: Connection,
    tenant: str,
    session_id: str,
    *,
    after: LogCursor,
    limit: int,
    last_turn: int,
    read_rows: Callable[[LogCursor, int, int], Awaitable[list[tuple[LogCursor, Row]]]],
    read_lines: Callable[[list[LogLine]], Awaitable[list[tuple[LogCursor, Row]]]],
) -> list[tuple[LogCursor, Row]]:
    """Return the next ``limit`` entries of the log behind ``after``, of turns up to ``last_turn``: rows of ``terse``
    together with packed lines.

    ``read_rows`` returns rows behind a cursor, up to a turn, as many as a limit; ``read_lines`` selects packed lines
    and gives them the form of rows. The turns of few packed logs are read at a time.
    """
    found: list[tuple[LogCursor, Row]] = []
    start = after
    most = FEWEST_LOGS
    while True:
        window = await connection.fetchval(WINDOW, tenant, session_id, start[0], most)
        end = last_turn if window is None else min(window, last_turn)
        rows = await read_rows(start, end, limit - len(found))
        if window is not None:
            lines = await between(connection, tenant, session_id, start[0], end)
            rows += await read_lines([line for line in lines if line[0] > start])
        found += merge(rows)
        if len(found) >= limit or end >= last_turn:
            return found[:limit]
        start = (end + 1, 0, -1)
        most = min(2 * most, MOST_LOGS)


async def count(connection: Connection, tenant: str, session_id: str) -> int:
    """Return the number of packed lines of a session."""
    found: int = await connection.fetchval(LINES, tenant, session_id)
    return found


async def forget(
    connection: Connection, tenant: str, session_id: str, *, turn: int | None = None, seq: int | None = None
) -> None:
    """Delete the packed lines of a turn, or of a message, for good. The session must be locked.

    A log that cannot be read goes as a whole where it may have such lines.
    """
    for record in await connection.fetch(ALL, tenant, session_id):
        lines = _read(record["log"])
        if lines is None:
            if turn is None or record["log_first_turn"] <= turn <= record["log_last_turn"]:
                await connection.execute(SET, tenant, session_id, record["number"], *pack(()))
            continue
        left = [line for line in lines if line[1].turn != turn and line[1].seq != seq]
        if len(left) < len(lines):
            await connection.execute(SET, tenant, session_id, record["number"], *pack(left))


def merge(lines: Iterable[tuple[LogCursor, Row]]) -> list[tuple[LogCursor, Row]]:
    """Return lines in the order of the log. Of lines in one place the first one counts, as it does for rows."""
    found: dict[LogCursor, tuple[LogCursor, Row]] = {}
    for line in lines:
        found.setdefault(line[0], line)
    return [found[cursor] for cursor in sorted(found)]
