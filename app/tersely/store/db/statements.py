"""The writing statements: one for a session's whole part of a batch, and those for rows of many sessions.

A session's part takes plain parameters. That makes several statements, one for each combination of tables, but each has
one good plan whatever the planner knows about the tables, and the driver encodes a value in a fraction of the time of
an array.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

# More rows than this go as arrays: what a client carries in at once has any length, and shapes must be few.
INLINE_ROWS = 4

# Column -> type, in the order of `tersely.store.commit.records.State`, without the session's id.
COUNTERS = {
    "last_seq": "bigint", "turns": "integer", "tokens": "bigint", "version": "bigint", "edits": "bigint",
    "edited": "boolean", "calls": "bigint", "epoch": "integer", "cut": "bigint", "plan": "bytea",
    "open_chain": "bytea", "last_call_at": "timestamptz", "updated_at": "timestamptz", "last_strategy": "text",
    "last_epoch_policy": "text",
}  # fmt: skip
# What a write adds to a session's figures, in the order of `tersely.store.commit.records.figures_of`.
FIGURES = {
    "title": "text", "client": "text", "model": "text", "tokens_saved": "bigint", "input_tokens": "bigint",
    "cached_tokens": "bigint", "output_tokens": "bigint", "cost_sent": "float8", "cost_full": "float8",
    "priced_calls": "bigint", "call_hour": "timestamptz",
}  # fmt: skip
NEW = {"parent": "text", "client_id": "text", "strategy": "text", "epoch_policy": "text", "metadata": "bytea"}
# Table -> its columns after tenant and session, and their types.
TABLES: dict[str, tuple[str, str]] = {
    "messages": (
        "seq, turn, tokens, place, role, status, dialect, client_visible, model_visible, pinned, finish, "
        "call, digest, chain, created_at, raw, model_raw, model_prefix, model_suffix, model_middle, follows, exchange, "
        "newest_turn",
        "bigint, integer, integer, float8, text, text, text, boolean, boolean, boolean, text, "
        "bigint, bytea, bytea, timestamptz, bytea, bytea, integer, integer, bytea, bigint, text, integer",
    ),
    "reply_ids": ("seq, id, keeper, usage, conversation", "bigint, text, text, bytea, text"),
    "terse": (
        "turn, seq, number, role, source, created_at, text",
        "integer, bigint, integer, text, text, timestamptz, bytea",
    ),
    "states": ("seq, number, source, created_at, text", "bigint, integer, text, timestamptz, bytea"),
    "calls": (
        "number, turn, model, strategy, epoch, cut, last_seq, tools, tokens_before, tokens_after, "
        "input_tokens, cached_tokens, output_tokens, status, created_at, finished_at, exchange, weight, "
        "sent, client, request_id, overhead_ms, cost_sent, cost_full, host",
        "bigint, integer, text, text, integer, bigint, bigint, bytea, integer, integer, "
        "integer, integer, integer, integer, timestamptz, timestamptz, text, integer, "
        "bytea, text, text, float8, float8, float8, text",
    ),
    "epochs": (
        "number, cut, reason, head_tokens, tokens_before, tokens_after, created_at, plan, "
        "log, log_first_turn, log_last_turn, log_lines",
        "integer, bigint, text, integer, integer, integer, timestamptz, bytea, bytea, integer, integer, integer",
    ),
    "pending_memory": (
        "epoch, first_seq, last_seq, runs, strategy, dialect, model, due_at, host",
        "integer, bigint, bigint, bytea, text, text, text, timestamptz, text",
    ),
    "attributes": ("digest, kind, created_at, raw", "bytea, text, timestamptz, bytea"),
    "artifacts": ("sha256, seq, call_id, chars, created_at", "bytea, bigint, bytea, integer, timestamptz"),
    "appends": (
        "key, digest, first_seq, last_seq, turn, created_at",
        "text, bytea, bigint, bigint, integer, timestamptz",
    ),
}
# What a retry writes again is the same.
_SKIPPING = frozenset({"artifacts", "attributes", "terse", "states", "calls", "pending_memory", "reply_ids"})
# Of these a call may bring rows that are stored already, of the others only an epoch that starts. A write that expects
# a version cannot be a retry, and a plain insert costs the database less. A host may answer a question that is sent
# again with the same id, and both times without a message.
_REPEATING = frozenset({"artifacts", "attributes", "reply_ids"})

Record = tuple[Any, ...]


class _Parameters:
    """Numbers the parameters of a statement."""

    def __init__(self, count: int) -> None:
        self.count = count

    def take(self, types: Iterable[str], suffix: str = "") -> str:
        """As many parameters as there are ``types``."""
        parts = []
        for kind in types:
            self.count += 1
            parts.append(f"${self.count}::{kind.strip()}{suffix}")
        return ", ".join(parts)


def _insert(table: str) -> str:
    """Rows of many sessions. ``$1`` is the tenant, then come arrays."""
    columns, types = TABLES[table]
    arrays = _Parameters(1).take(["text", *types.split(",")], "[]")
    return (
        f"INSERT INTO {table} (tenant_id, session_id, {columns}) "
        f"SELECT $1, u.* FROM unnest({arrays}) AS u{_conflict(table)} RETURNING 1"
    )


def _conflict(table: str, skipping: frozenset[str] = _SKIPPING) -> str:
    return " ON CONFLICT DO NOTHING" if table in skipping else ""


INSERTS: dict[str, str] = {table: _insert(table) for table in TABLES}


def as_arrays(rows: Sequence[Record]) -> list[list[object]]:
    """Return the columns of ``rows``."""
    return [list(column) for column in zip(*rows, strict=True)]


def _assignments(first: int) -> str:
    """``SET`` for the counters and the figures, which are parameters from ``first`` on. Without a plan the session
    keeps its own.
    """
    counters = [
        f"{name} = COALESCE(${n}::{kind}, plan)" if name == "plan" else f"{name} = ${n}::{kind}"
        for n, (name, kind) in enumerate(COUNTERS.items(), first)
    ]
    placeholders = {name: f"${n}::{kind}" for n, (name, kind) in enumerate(FIGURES.items(), first + len(COUNTERS))}
    tokens = f"${first + list(COUNTERS).index('tokens')}::bigint"
    figures = [
        f"title = COALESCE(sessions.title, {placeholders['title']})",
        f"client = COALESCE({placeholders['client']}, sessions.client)",
        f"models = {_models(placeholders['model'])}",
        *(f"{name} = sessions.{name} + {placeholders[name]}" for name in _SUMS),
        f"call_hour = COALESCE({placeholders['call_hour']}, sessions.call_hour)",
        f"saved_rank = {_rank('sessions.tokens_saved + ' + placeholders['tokens_saved'])}",
        f"tokens_rank = {_rank(tokens)}",
    ]
    return ", ".join((*counters, *figures))


_SUMS = (
    "tokens_saved", "input_tokens", "cached_tokens", "output_tokens", "cost_sent", "cost_full", "priced_calls",
)  # fmt: skip
# The figures of a session that is made, from the parameters of `FIGURES`.
_MADE = ("title", "client", "models", *_SUMS, "call_hour", "saved_rank", "tokens_rank")


def _models(model: str) -> str:
    return (
        f"CASE WHEN {model} IS NULL OR {model} = ANY(sessions.models) OR cardinality(sessions.models) >= 20 "
        f"THEN sessions.models ELSE sessions.models || {model} END"
    )


def _rank(value: str) -> str:
    # Coarse: a change of an indexed column makes an update write to all indexes of its table.
    return f"floor(2 * ln(1 + ({value})::float8))::smallint"


# Of a session that is locked. Parameters: tenant, session, counters, figures.
UPDATE_SESSION = f"UPDATE sessions SET {_assignments(3)} WHERE tenant_id = $1 AND id = $2"


def _insert_row(table: str) -> str:
    """One row: the tenant, the session, then the columns."""
    columns, types = TABLES[table]
    values = _Parameters(0).take(["text", "text", *types.split(",")])
    return f"INSERT INTO {table} (tenant_id, session_id, {columns}) VALUES ({values}){_conflict(table)}"


INSERT_ROW: dict[str, str] = {table: _insert_row(table) for table in TABLES}
Shape = tuple[tuple[str, int], ...]


def shape_of(counts: Iterable[tuple[str, int]]) -> Shape:
    """Return the tables with their row counts; 0 stands for more rows than a statement has placeholders for."""
    return tuple([(table, count if count <= INLINE_ROWS else 0) for table, count in counts if count])


@lru_cache(maxsize=256)
def write_at_once(shape: Shape, *, makes: bool) -> str:
    """Create or update one session and add its rows, or do nothing if its version differs. Returns its id on success.

    Parameters: tenant, session, counters, figures, then `NEW` if it ``makes`` the session, else the expected version;
    then the rows of each table of ``shape``, value by value, or by column as arrays.
    """
    parameters = _Parameters(2)
    parts = [f"held AS ({_hold_session(parameters, makes=makes)})"]
    skipping = _SKIPPING if any(table == "epochs" for table, _ in shape) else _REPEATING
    for table, count in shape:
        columns, types = TABLES[table]
        kinds = types.split(",")
        if count:
            source = f"(VALUES {', '.join(f'({parameters.take(kinds)})' for _ in range(count))})"
        else:
            source = f"unnest({parameters.take(kinds, '[]')})"
        parts.append(
            f"to_{table} AS (INSERT INTO {table} (tenant_id, session_id, {columns}) "
            f"SELECT $1, $2, u.* FROM held, {source} AS u{_conflict(table, skipping)} RETURNING 1)"
        )
    return f"WITH {', '.join(parts)} SELECT id FROM held"


def _hold_session(parameters: _Parameters, *, makes: bool) -> str:
    """Make a session, or update it if its version is the expected one. Returns its id on success.

    Parameters: tenant, session, counters, figures, then `NEW` if it ``makes`` the session, else the expected version.
    """
    if makes:
        columns = ", ".join((*COUNTERS, *_MADE, *NEW))
        counters = parameters.take(COUNTERS.values())
        placeholders = {name: f"${parameters.count + n}::{kind}" for n, (name, kind) in enumerate(FIGURES.items(), 1)}
        parameters.count += len(FIGURES)
        tokens = f"${2 + list(COUNTERS).index('tokens') + 1}::bigint"
        made = placeholders | {
            "models": f"array_remove(ARRAY[{placeholders['model']}], NULL)",
            "saved_rank": _rank(placeholders["tokens_saved"]),
            "tokens_rank": _rank(tokens),
        }
        values = ", ".join((counters, *(made[name] for name in _MADE), parameters.take(NEW.values())))
        touched = 2 + list(COUNTERS).index("updated_at") + 1
        return (
            f"INSERT INTO sessions (tenant_id, id, {columns}, created_at) VALUES ($1, $2, {values}, ${touched}) "
            "ON CONFLICT (tenant_id, id) DO NOTHING RETURNING id"
        )
    parameters.count += len(COUNTERS) + len(FIGURES)
    expected = parameters.take(["bigint"])
    return (
        f"UPDATE sessions SET {_assignments(3)} WHERE tenant_id = $1 AND id = $2 AND version = {expected} RETURNING id"
    )


HOLD_SESSION = _hold_session(_Parameters(2), makes=False)
MAKE_SESSION = _hold_session(_Parameters(2), makes=True)


def flat(rows: Sequence[Record]) -> list[object]:
    """Return the arguments for ``rows`` of one session, without the session's id, which is first in each row."""
    if len(rows) > INLINE_ROWS:
        return list(as_arrays(rows)[1:])
    return [value for row in rows for value in row[1:]]
