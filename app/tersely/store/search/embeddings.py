"""Embeddings of a session's messages: one row for each message, in order, also for messages without text."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from math import sqrt
from operator import mul

from asyncpg import BitString

from tersely.store.db.connection import Connection

LAST = "SELECT max(seq) FROM embeddings WHERE tenant_id = $1 AND session_id = $2 AND model = $3"
ADD = """
INSERT INTO embeddings (tenant_id, session_id, model, seq, signs, numbers)
SELECT $1, $2, $3, u.seq, u.signs, u.numbers FROM unnest($4::bigint[], $5::bit varying[], $6::bytea[])
    AS u (seq, signs, numbers)
ON CONFLICT (tenant_id, session_id, model, seq) DO NOTHING
"""
# Vectors of one direction have the same signs; comparing signs costs a hundredth of comparing vectors.
NEAREST = """
SELECT seq, numbers FROM embeddings
WHERE tenant_id = $1 AND session_id = $2 AND model = $3 AND length(signs) = $5 AND numbers IS NOT NULL
ORDER BY bit_count(signs # $4), seq DESC LIMIT $6
"""
HAS_VECTOR = """
SELECT EXISTS (SELECT FROM pg_attribute WHERE attrelid = 'embeddings'::regclass AND attname = 'meaning'
               AND NOT attisdropped)
"""
ADD_MEANING = """
INSERT INTO embeddings (tenant_id, session_id, model, seq, signs, meaning)
SELECT $1, $2, $3, u.seq, u.signs, u.meaning::vector FROM unnest($4::bigint[], $5::bit varying[], $6::text[])
    AS u (seq, signs, meaning)
ON CONFLICT (tenant_id, session_id, model, seq) DO NOTHING
"""
NEAREST_MEANING = """
SELECT seq, 1 - (meaning <=> $7::text::vector) AS cosine FROM (
    SELECT seq, meaning FROM embeddings
    WHERE tenant_id = $1 AND session_id = $2 AND model = $3 AND length(signs) = $5 AND meaning IS NOT NULL
    ORDER BY bit_count(signs # $4), seq DESC LIMIT $6
) AS near
"""
FORGET = "DELETE FROM embeddings WHERE tenant_id = $1 AND session_id = $2 AND seq = ANY($3::bigint[])"


def signs_of(vector: array[float]) -> BitString:
    """Return one bit for each number: whether it is above 0."""
    size = (len(vector) + 7) // 8
    bits = "".join("1" if number > 0 else "0" for number in vector).ljust(8 * size, "0")
    return BitString.frombytes(int(bits, 2).to_bytes(size, "big"), len(vector))


async def has_vector(connection: Connection) -> bool:
    """Return whether vectors are stored and compared by the database's extension."""
    return bool(await connection.fetchval(HAS_VECTOR))


async def last(connection: Connection, tenant: str, session_id: str, model: str) -> int:
    """Return the last embedded message; 0: none yet."""
    return await connection.fetchval(LAST, tenant, session_id, model) or 0


async def add(
    connection: Connection, tenant: str, session_id: str, model: str, rows: Sequence[tuple[int, array[float] | None]]
) -> None:
    """Store (seq, vector) pairs; vector None: the model refused the text. Existing rows stay."""
    seqs = [seq for seq, _ in rows]
    signs = [None if vector is None else signs_of(vector) for _, vector in rows]
    if await has_vector(connection):
        texts = [None if vector is None else _write(vector) for _, vector in rows]
        await connection.execute(ADD_MEANING, tenant, session_id, model, seqs, signs, texts)
    else:
        numbers = [None if vector is None else vector.tobytes() for _, vector in rows]
        await connection.execute(ADD, tenant, session_id, model, seqs, signs, numbers)


async def nearest(
    connection: Connection, tenant: str, session_id: str, model: str, vector: array[float], limit: int
) -> list[tuple[int, float]]:
    """Return the messages whose vectors lie in the direction of ``vector``, by their signs, with the cosines; in no
    order.
    """
    signs = signs_of(vector)
    found = (tenant, session_id, model, signs, len(vector), limit)
    if await has_vector(connection):
        records = await connection.fetch(NEAREST_MEANING, *found, _write(vector))
        return [(record["seq"], record["cosine"]) for record in records]
    records = await connection.fetch(NEAREST, *found)
    return [(record["seq"], _cosine(vector, array("f", record["numbers"]))) for record in records]


def _write(vector: array[float]) -> str:
    return f"[{','.join(map(str, vector))}]"


def _cosine(one: array[float], other: array[float]) -> float:
    lengths = sqrt(sum(map(mul, one, one))) * sqrt(sum(map(mul, other, other)))
    return sum(map(mul, one, other)) / lengths if lengths else 0.0


async def forget(connection: Connection, tenant: str, session_id: str, seqs: Iterable[int]) -> None:
    """Delete the embeddings of removed messages."""
    await connection.execute(FORGET, tenant, session_id, list(seqs))
