"""Read large messages in pieces.

The driver builds a value at once, on the event loop: a message of 28 MiB takes 20 ms and more. So a statement omits
large values, and another one reads them as rows of `PIECE` bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from asyncpg import Record

from tersely.store.db.connection import Connection
from tersely.store.history import model_views

# Bytes. A larger value is read in pieces of `PIECE`.
LARGE_VALUE = 2 * 1024 * 1024
PIECE = 1024 * 1024
PARTS = ("raw", "model_raw")
VALUES = {"raw": "raw", "model_raw": model_views.model_raw()}

# The subquery reads and unpacks the value once, not once for each piece.
_PIECES = """
SELECT n, substring(value FROM n + 1 FOR {piece}) AS piece FROM (
    SELECT ({value}) || ''::bytea AS value FROM messages WHERE tenant_id = $1 AND session_id = $2 AND seq = $3 OFFSET 0
) AS whole, LATERAL generate_series(0, octet_length(value) - 1, {piece}) AS n
ORDER BY n
"""
PIECES = {part: _PIECES.format(value=VALUES[part], piece=PIECE) for part in PARTS}


def columns(others: str, *, table: str = "") -> str:
    """Return ``others`` and the columns of a message's bytes, without large values; ``table`` is put before each."""
    prefix = f"{table}." if table else ""
    values = {
        "raw": (f"{prefix}raw", f"octet_length({prefix}raw)"),
        "model_raw": (model_views.model_raw(table), model_views.model_size(table)),
    }
    bytes_of = [
        f"CASE WHEN {size} <= {LARGE_VALUE} THEN {value} END AS {part}, {size} > {LARGE_VALUE} AS has_large_{part}"
        for part, (value, size) in values.items()
    ]
    return ", ".join([*(prefix + column for column in others.split(", ")), *bytes_of])


async def read(
    connection: Connection, tenant: str, session_id: str, records: Iterable[Record]
) -> dict[tuple[int, str], bytes]:
    """Return the large values that the session's ``records`` leave out, by sequence number and column."""
    found: dict[tuple[int, str], bytes] = {}
    for record in records:
        for part in PARTS:
            if record[f"has_large_{part}"]:
                pieces = await connection.fetch(PIECES[part], tenant, session_id, record["seq"])
                found[record["seq"], part] = await asyncio.to_thread(_join, pieces)
    return found


def _join(pieces: Iterable[Record]) -> bytes:
    return b"".join(piece["piece"] for piece in pieces)


def complete(record: Record, large: Mapping[tuple[int, str], bytes]) -> dict[str, Any]:
    """Return the columns of a record by name, with its large values."""
    found: dict[str, Any] = dict(record)
    for part in PARTS:
        if found.pop(f"has_large_{part}"):
            found[part] = large[record["seq"], part]
    return found
