"""Memos as database rows."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from asyncpg import Record

from tersely.domain.memos import Memo
from tersely.store.db.connection import Connection

COLUMNS = "id, session_id, tags, created_at, content"
ADD = """
INSERT INTO memos (tenant_id, id, session_id, tags, terms, created_at, content) VALUES ($1, $2, $3, $4, $5, $6, $7)
"""
GET = f"SELECT {COLUMNS} FROM memos WHERE tenant_id = $1 AND id = $2"
DELETE = "DELETE FROM memos WHERE tenant_id = $1 AND id = $2 RETURNING id"
DELETE_ALL = "DELETE FROM memos WHERE tenant_id = $1 AND ($2::text[] IS NULL OR tags && $2) RETURNING 1"
NEWEST = f"""
SELECT {COLUMNS} FROM memos
WHERE tenant_id = $1 AND ($2::timestamptz IS NULL OR (created_at, id) < ($2, $3))
  AND ($4::text[] IS NULL OR tags && $4)
ORDER BY created_at DESC, id DESC LIMIT $5
"""

CANDIDATES = """
SELECT id, terms FROM memos
WHERE tenant_id = $1 AND ($2::text[] IS NULL OR tags && $2) AND terms && $3 ORDER BY created_at DESC, id DESC LIMIT $4
"""
BY_IDS = f"SELECT {COLUMNS} FROM memos WHERE tenant_id = $1 AND id = ANY($2::text[])"

# Time and id: where a memo stands in the list.
MemoCursor = tuple[datetime, str]


async def add(connection: Connection, tenant: str, memo: Memo, terms: Sequence[str]) -> None:
    """Store a memo with its search terms."""
    content = memo.content.encode("utf-8", "replace")
    await connection.execute(
        ADD, tenant, memo.id, memo.session_id, list(memo.tags), list(terms), memo.created_at, content
    )


async def get(connection: Connection, tenant: str, memo_id: str) -> Memo | None:
    """Return the memo with that id, if the tenant has one."""
    record = await connection.fetchrow(GET, tenant, memo_id)
    return None if record is None else _memo(record)


async def delete(connection: Connection, tenant: str, memo_id: str) -> bool:
    """Delete a memo; False when it was not there."""
    return await connection.fetchval(DELETE, tenant, memo_id) is not None


async def delete_all(connection: Connection, tenant: str, *, tags: Sequence[str] | None) -> int:
    """Delete the memos with any of ``tags``, or all if none are given. Return their number."""
    return len(await connection.fetch(DELETE_ALL, tenant, tags))


async def newest(
    connection: Connection,
    tenant: str,
    *,
    before: MemoCursor | None = None,
    tags: Sequence[str] | None = None,
    limit: int,
) -> list[Memo]:
    """Return the newest memos first, made before ``before``, with any of ``tags`` if given."""
    records = await connection.fetch(NEWEST, tenant, *(before or (None, None)), tags, limit)
    return [_memo(record) for record in records]


async def with_any(
    connection: Connection, tenant: str, terms: Sequence[str], *, tags: Sequence[str] | None = None, limit: int
) -> list[tuple[str, list[str]]]:
    """Ids and sorted terms of the memos with any of ``terms`` (and of ``tags``, if given), the newest first."""
    records = await connection.fetch(CANDIDATES, tenant, tags, terms, limit)
    return [(record["id"], record["terms"]) for record in records]


async def by_ids(connection: Connection, tenant: str, ids: Sequence[str]) -> dict[str, Memo]:
    """Return the existing memos with these ids."""
    records = await connection.fetch(BY_IDS, tenant, list(ids))
    return {record["id"]: _memo(record) for record in records}


def _memo(record: Record) -> Memo:
    return Memo(
        id=record["id"],
        content=record["content"].decode("utf-8", "replace"),
        tags=tuple(record["tags"]),
        session_id=record["session_id"],
        created_at=record["created_at"],
    )
