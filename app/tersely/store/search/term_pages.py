"""The stored pages of a session's term index: the same fixed ranges of sequence numbers as those of the search text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tersely.store.db.connection import Connection

READ = """
SELECT page, terms FROM term_pages WHERE tenant_id = $1 AND session_id = $2 AND page >= $3 ORDER BY page LIMIT $4
"""
MISSING = """
SELECT n.page FROM generate_series(0, $3::bigint - 1) AS n (page)
WHERE NOT EXISTS (SELECT FROM term_pages p WHERE p.tenant_id = $1 AND p.session_id = $2 AND p.page = n.page)
ORDER BY n.page LIMIT $4
"""
ADD = """
INSERT INTO term_pages (tenant_id, session_id, page, terms)
SELECT $1, $2, u.page, u.terms FROM unnest($3::bigint[], $4::bytea[]) AS u (page, terms)
ON CONFLICT (tenant_id, session_id, page) DO NOTHING
"""
FORGET = "DELETE FROM term_pages WHERE tenant_id = $1 AND session_id = $2 AND page = ANY($3::bigint[])"


async def read(connection: Connection, tenant: str, session_id: str, first: int, limit: int) -> list[bytes]:
    """Return the stored pages from ``first`` on, at most ``limit``, as far as none is missing."""
    records = await connection.fetch(READ, tenant, session_id, first, limit)
    return [record["terms"] for at, record in enumerate(records, first) if record["page"] == at]


async def missing(connection: Connection, tenant: str, session_id: str, full: int, limit: int) -> list[int]:
    """Return the first ``limit`` of the pages below ``full`` that are not stored."""
    return [record["page"] for record in await connection.fetch(MISSING, tenant, session_id, full, limit)]


async def add(connection: Connection, tenant: str, session_id: str, pages: Sequence[tuple[int, bytes]]) -> None:
    """Store pages; an existing one stays."""
    await connection.execute(ADD, tenant, session_id, [page for page, _ in pages], [terms for _, terms in pages])


async def forget(connection: Connection, tenant: str, session_id: str, pages: Iterable[int]) -> None:
    """Delete pages whose messages were removed."""
    await connection.execute(FORGET, tenant, session_id, list(pages))
