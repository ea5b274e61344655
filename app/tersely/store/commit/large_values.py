"""Large messages, sent to the database in pieces.

The driver encodes a statement at once, on the event loop: with a message of 28 MiB that takes 40 ms and more. So a
message is inserted without its large values; these follow in statements of their own and are joined by the server.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tersely.store.db.connection import Connection
from tersely.store.db.statements import TABLES, Record

# Bytes. A larger value is sent in pieces of that size.
LARGE_VALUE = 2 * 1024 * 1024
PIECE = 1024 * 1024

_COLUMNS = ("session_id", *(name.strip() for name in TABLES["messages"][0].split(",")))
_SEQ = _COLUMNS.index("seq")
_LARGE = {name: _COLUMNS.index(name) for name in ("raw", "model_raw")}

ADD = """
INSERT INTO message_pieces (tenant_id, session_id, seq, part, number, content) VALUES ($1, $2, $3, $4, $5, $6)
"""
_JOINED = """
(SELECT string_agg(content, ''::bytea ORDER BY number) FROM message_pieces
 WHERE tenant_id = $1 AND session_id = $2 AND seq = $3 AND part = $4)
"""
JOIN = {
    part: f"UPDATE messages SET {part} = {_JOINED} WHERE tenant_id = $1 AND session_id = $2 AND seq = $3"
    for part in _LARGE
}
DELETE = "DELETE FROM message_pieces WHERE tenant_id = $1 AND session_id = $2 AND seq = $3 AND part = $4"


class LargeValue(msgspec.Struct, frozen=True, kw_only=True):
    """The value of the column ``part`` of a message."""

    session_id: str
    seq: int
    part: str
    content: bytes


def split_off(records: Sequence[Record]) -> tuple[list[Record], list[LargeValue]]:
    """Return records of messages with empty values in place of large ones, and the large ones."""
    found: list[LargeValue] = []
    left: list[Record] = []
    for record in records:
        large = {part: place for part, place in _LARGE.items() if len(record[place] or b"") > LARGE_VALUE}
        found += [
            LargeValue(session_id=record[0], seq=record[_SEQ], part=part, content=record[place])
            for part, place in large.items()
        ]
        places = set(large.values())
        left.append(tuple(b"" if place in places else value for place, value in enumerate(record)) if large else record)
    return left, found


async def write(connection: Connection, tenant: str, value: LargeValue) -> None:
    """Write a large value of a message that was inserted in the same transaction."""
    key = (tenant, value.session_id, value.seq, value.part)
    for number, start in enumerate(range(0, len(value.content), PIECE)):
        await connection.execute(ADD, *key, number, value.content[start : start + PIECE])
    await connection.execute(JOIN[value.part], *key)
    await connection.execute(DELETE, *key)
