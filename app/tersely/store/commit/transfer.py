"""Export and import a session's rows: the data that a document of messages does not contain.

Rows are dictionaries of column to JSON value: times in ISO 8601, bytes in base64. What comes in is checked by the
columns' types; the caller checks its meaning.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import asyncpg

from tersely.domain.errors import InvalidRequest
from tersely.domain.times import to_stored_time
from tersely.store.db.connection import Connection
from tersely.store.db.statements import TABLES
from tersely.store.history import artifacts, model_views, packed_log, turn_rows
from tersely.store.history.artifacts import Artifact
from tersely.store.history.packed_log import LogCursor, LogLine

HERE = "tenant_id = $1 AND session_id = $2"
# Table -> its key after tenant and session.
BESIDE: Mapping[str, tuple[str, ...]] = {
    "terse": ("turn", "seq", "number"),
    "states": ("seq", "number"),
    "scratchpads": ("updated_at",),
    "summaries": ("number",),
    "epochs": ("number",),
    "calls": ("number",),
    "attributes": ("digest",),
    "events": ("number",),
}
_OTHERS = {
    "scratchpads": ("updated_at, text", "timestamptz, bytea"),
    "summaries": (
        "number, purpose, first_seq, last_seq, basis, tokens, source, model, created_at, text",
        "bigint, text, bigint, bigint, bytea, integer, text, text, timestamptz, bytea",
    ),
    "events": ("number, kind, created_at, body", "bigint, text, timestamptz, bytea"),
}
# What may be NULL.
_NULLABLE = frozenset(
    {"finish", "digest", "raw", "model_raw", "follows", "tools", "input_tokens", "cached_tokens", "output_tokens",
     "status", "finished_at", "plan", "last_call_at", "last_strategy", "last_epoch_policy", "weight",
     "sent", "client", "request_id", "overhead_ms", "cost_sent", "cost_full", "host"}
)  # fmt: skip
_RANGES = {"bigint": 2**53, "integer": 2**31 - 1, "smallint": 100}
MAX_NAME = 1_000
# The counters of a session that cannot be derived from its messages.
SESSION = {
    "edits": "bigint", "edited": "boolean", "calls": "bigint", "last_call_at": "timestamptz", "plan": "bytea",
    "last_strategy": "text", "last_epoch_policy": "text",
}  # fmt: skip
RESTORE = """
UPDATE sessions SET last_seq = $3, turns = $4, tokens = $5, version = 1, edits = $6, edited = $7, calls = $8,
    epoch = $9, cut = $10, plan = $11, last_call_at = $12, last_strategy = $13, last_epoch_policy = $14
WHERE tenant_id = $1 AND id = $2
"""
COUNTERS = f"SELECT {', '.join(SESSION)} FROM sessions WHERE tenant_id = $1 AND id = $2"
SET_PRIORITY = """
UPDATE messages SET priority = u.priority FROM unnest($3::bigint[], $4::smallint[]) AS u (seq, priority)
WHERE tenant_id = $1 AND session_id = $2 AND messages.seq = u.seq
"""
LOG_ROWS = f"""
SELECT {TABLES["terse"][0]} FROM terse WHERE {HERE} AND (turn, seq, number) > ($3, $4, $5) AND turn <= $7
ORDER BY turn, seq, number LIMIT $6
"""
PORTION = 1_000

TableRow = dict[str, Any]


def columns(table: str) -> dict[str, str]:
    """Column -> type, in order."""
    names, types = TABLES[table] if table in TABLES else _OTHERS[table]
    found = dict(zip(names.split(", "), types.split(", "), strict=True))
    found.pop("exchange", None)  # the id of a write, of no use to a copy
    found.pop("newest_turn", None)  # follows from the turns
    if table == "epochs":
        for name in packed_log.COLUMNS:  # a document has all log lines under ``terse``
            del found[name]
    return found


# A message without ids that are unique within the tenant: the copy is another message.
_CONTENT = frozenset({"raw", "model_raw", *model_views.COLUMNS, "chain"})
_STORED = {name: kind for name, kind in columns("messages").items() if name not in _CONTENT}
MESSAGE = _STORED | {"priority": "smallint", "raw": "bytea", "model_raw": "bytea"}


def write_value(value: object) -> object:
    """A column's value as JSON has it."""
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    return b64encode(value).decode() if isinstance(value, bytes) else value


def read_row(given: object, table: str, field: str) -> TableRow:
    """Return a row with the values that the database takes. Raises `InvalidRequest` naming what is wrong."""
    kinds = {"session": SESSION, "messages": MESSAGE}.get(table) or columns(table)
    nullable = _NULLABLE | {"text"} if table == "summaries" else _NULLABLE
    if not isinstance(given, dict):
        raise InvalidRequest(f"{field} must be an object", field=field)
    unknown = next((name for name in given if name not in kinds), None)
    if unknown is not None:
        raise InvalidRequest(f"{field} has no {unknown[:60]!r}", field=field)
    return {
        name: None if given.get(name) is None and name in nullable else _read(given.get(name), kind, f"{field}.{name}")
        for name, kind in kinds.items()
    }


def _read(value: object, kind: str, field: str) -> object:
    try:
        if kind in _RANGES and isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _RANGES[kind]:
            return value
        if kind == "float8" and isinstance(value, int | float) and abs(value) <= _RANGES["bigint"]:
            return float(value)
        if kind == "boolean" and isinstance(value, bool):
            return value
        if kind == "text" and isinstance(value, str) and len(value) <= MAX_NAME and "\0" not in value:
            value.encode()
            return value
        if kind == "timestamptz" and isinstance(value, str) and (at := datetime.fromisoformat(value)).tzinfo:
            return to_stored_time(at)
        if kind == "bytea" and isinstance(value, str):
            return b64decode(value, validate=True)
    except (ValueError, OverflowError):
        pass
    raise InvalidRequest(f"{field} is no {kind} in this document", field=field)


async def counters(connection: Connection, tenant: str, session_id: str) -> TableRow:
    """Return the session's counters, as JSON has them."""
    found = await connection.fetchrow(COUNTERS, tenant, session_id)
    return {name: write_value(value) for name, value in (dict(found) if found else {}).items()}


async def table_page(
    connection: Connection, tenant: str, session_id: str, table: str, after: Sequence[object], limit: int
) -> tuple[list[TableRow], list[object]]:
    """Return the next rows of a table as JSON values, and the key of the last one. Messages are not included."""
    if table == "terse":
        return await _log_page(connection, tenant, session_id, after, limit)
    key = BESIDE[table]
    kinds = columns(table)
    behind = ""
    if after:
        places = ", ".join(f"${number}::{kinds[name]}" for number, name in enumerate(key, 4))
        behind = f"AND ({', '.join(key)}) > ({places})"
    found = await connection.fetch(
        f"SELECT {', '.join(kinds)} FROM {table} WHERE {HERE} {behind} ORDER BY {', '.join(key)} LIMIT $3",
        tenant, session_id, limit, *after,
    )  # fmt: skip
    rows = [{name: write_value(value) for name, value in dict(record).items()} for record in found]
    return rows, [found[-1][name] for name in key] if len(found) == limit else []


async def _log_page(
    connection: Connection, tenant: str, session_id: str, after: Sequence[object], limit: int
) -> tuple[list[TableRow], list[object]]:
    """Return the next entries of the log, of messages with any status, as rows of ``terse``; packed ones included."""
    kinds = columns("terse")

    async def read_rows(start: LogCursor, end: int, most: int) -> list[tuple[LogCursor, TableRow]]:
        found = [dict(r) for r in await connection.fetch(LOG_ROWS, tenant, session_id, *start, most, end)]
        return [((row["turn"], row["seq"], row["number"]), row) for row in found]

    async def read_lines(lines: list[LogLine]) -> list[tuple[LogCursor, TableRow]]:
        # Older code that removes a turn leaves its packed lines.
        removed = await packed_log.not_live(connection, tenant, session_id, lines, packed_log.REMOVED)
        return [
            (cursor, dict(zip(kinds, (*cursor, e.role, e.source, e.created_at, e.text.encode()), strict=True)))
            for cursor, e in lines
            if e.seq not in removed
        ]

    turn, seq, number = after or (0, 0, -1)
    assert isinstance(turn, int)
    assert isinstance(seq, int)
    assert isinstance(number, int)
    found = await packed_log.page(
        connection, tenant, session_id, after=(turn, seq, number), limit=limit, last_turn=turn_rows.LAST_TURN,
        read_rows=read_rows, read_lines=read_lines,
    )  # fmt: skip
    rows = [{name: write_value(value) for name, value in row.items()} for _, row in found]
    return rows, list(found[-1][0]) if len(found) == limit else []


async def messages(connection: Connection, tenant: str, session_id: str, after: int, limit: int) -> list[TableRow]:
    """Return the next messages by number, as JSON has them: without content where that is in the client's history."""
    found = await connection.fetch(
        f"""
        SELECT {", ".join(_STORED)}, priority,
            CASE WHEN (status = 'live' OR (status = 'dropped' AND NOT model_visible)) AND client_visible
                THEN NULL ELSE raw END AS raw,
            {model_views.model_raw()} AS model_raw
        FROM messages WHERE {HERE} AND seq > $3 ORDER BY seq LIMIT $4
        """,
        tenant, session_id, after, limit,
    )  # fmt: skip
    return [{name: write_value(value) for name, value in dict(record).items()} for record in found]


async def restore(
    connection: Connection,
    tenant: str,
    session_id: str,
    *,
    counted: Sequence[object],
    stored: Sequence[TableRow],
    beside: Mapping[str, Sequence[TableRow]],
    outputs: Mapping[int, Sequence[Artifact]],
) -> None:
    """Fill an empty session. ``counted``: its counters in the order of `RESTORE`; ``stored``: its messages, with
    content; ``outputs``: the oversized tool outputs in them, by number. Raises `InvalidRequest` for rows that repeat a
    key, and for such as lack something.
    """
    try:
        await _insert(connection, tenant, session_id, "messages", _as_stored(stored))
        marked = [row for row in stored if row["priority"] != 50]
        if marked:
            priorities = [row["priority"] for row in marked]
            await connection.execute(SET_PRIORITY, tenant, session_id, [row["seq"] for row in marked], priorities)
        for table, rows in beside.items():
            await _insert(connection, tenant, session_id, table, rows)
        names = columns("artifacts")
        pointers = [
            dict(zip(names, artifacts.row(session_id, row["seq"], each, row["created_at"])[1:], strict=True))
            for row in stored
            for each in outputs.get(row["seq"], ())
        ]
        await _insert(connection, tenant, session_id, "artifacts", pointers)
        await connection.execute(RESTORE, tenant, session_id, *counted)
    except (asyncpg.IntegrityConstraintViolationError, asyncpg.DataError) as error:
        raise InvalidRequest("the document has duplicate rows, or rows are missing", field="tersely") from error


def _as_stored(messages: Sequence[TableRow]) -> list[TableRow]:
    """Return the rows of messages with what follows from their content and their turns."""
    names = ("model_raw", *model_views.COLUMNS)
    rows = sorted(messages, key=lambda row: row["seq"])
    newest = turn_rows.newest_turns(row["turn"] for row in rows)
    return [
        {
            **row,
            **dict(zip(names, model_views.columns_of(row["raw"], row["model_raw"]), strict=True)),
            "chain": None,
            "newest_turn": newest_turn,
        }
        for row, newest_turn in zip(rows, newest, strict=True)
    ]


async def _insert(connection: Connection, tenant: str, session_id: str, table: str, rows: Sequence[TableRow]) -> None:
    kinds = columns(table)
    if table == "messages":
        kinds["newest_turn"] = "integer"
    arrays = ", ".join(f"${number}::{kind}[]" for number, kind in enumerate(kinds.values(), 3))
    names = ", ".join(("tenant_id", "session_id", *kinds))
    # Citus takes this under row-level security only with RETURNING.
    sql = f"INSERT INTO {table} ({names}) SELECT $1, $2, u.* FROM unnest({arrays}) AS u RETURNING 1"
    for start in range(0, len(rows), PORTION):
        some = rows[start : start + PORTION]
        await connection.execute(sql, tenant, session_id, *([row.get(name) for row in some] for name in kinds))
