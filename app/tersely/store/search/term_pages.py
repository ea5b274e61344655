"""The stored pages of a session's term index: the same fixed ranges of sequence numbers as those of the search text.

A row holds one page, or `MERGED` of them from a multiple of `MERGED` on: most terms are in many pages, so that merged
ones take less room and are read faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tersely.store.db.connection import Connection

MERGED = 64
# Bytes of the pages that are merged into one row, at most: pages of very long messages stay as they are.
MERGED_BYTES = 16 * 1024 * 1024

READ = f"""
SELECT page, pages, terms FROM term_pages
WHERE tenant_id = $1 AND session_id = $2 AND page >= $3 - $3 % {MERGED} AND page + pages > $3 ORDER BY page LIMIT $4
"""
MISSING = f"""
SELECT n.page FROM generate_series(0, $3::bigint - 1) AS n (page)
WHERE NOT EXISTS (
    SELECT FROM term_pages p
    WHERE p.tenant_id = $1 AND p.session_id = $2
        AND p.page IN (n.page, n.page - n.page % {MERGED}) AND p.page + p.pages > n.page
)
ORDER BY n.page LIMIT $4
"""
ADD = """
INSERT INTO term_pages (tenant_id, session_id, page, terms)
SELECT $1, $2, u.page, u.terms FROM unnest($3::bigint[], $4::bytea[]) AS u (page, terms)
ON CONFLICT (tenant_id, session_id, page) DO NOTHING
"""
UNMERGED = f"""
SELECT min(page) FROM term_pages WHERE tenant_id = $1 AND session_id = $2 AND pages = 1
GROUP BY page / {MERGED} HAVING count(*) = {MERGED} AND sum(octet_length(terms)) <= {MERGED_BYTES}
ORDER BY 1 LIMIT 1
"""
TAKE = f"""
DELETE FROM term_pages
WHERE tenant_id = $1 AND session_id = $2 AND page >= $3 AND page < $3 + {MERGED} AND pages = 1
"""
ADD_MERGED = """
INSERT INTO term_pages (tenant_id, session_id, page, pages, terms) VALUES ($1, $2, $3, $4, $5)
"""
FORGET = f"""
DELETE FROM term_pages t USING unnest($3::bigint[]) AS u (page)
WHERE t.tenant_id = $1 AND t.session_id = $2
    AND t.page IN (u.page, u.page - u.page % {MERGED}) AND t.page + t.pages > u.page
"""


async def read(connection: Connection, tenant: str, session_id: str, first: int, limit: int) -> list[bytes]:
    """Return the stored pages from ``first`` on, at most ``limit`` rows of them, as far as none is missing. The first
    row may hold earlier pages too.
    """
    found: list[bytes] = []
    for record in await connection.fetch(READ, tenant, session_id, first, limit):
        if record["page"] > first:
            break
        end = record["page"] + record["pages"]
        if end > first:
            found.append(record["terms"])
            first = end
    return found


async def missing(connection: Connection, tenant: str, session_id: str, full: int, limit: int) -> list[int]:
    """Return the first ``limit`` of the pages below ``full`` that are not stored."""
    return [record["page"] for record in await connection.fetch(MISSING, tenant, session_id, full, limit)]


async def add(connection: Connection, tenant: str, session_id: str, pages: Sequence[tuple[int, bytes]]) -> None:
    """Store pages; an existing one stays."""
    await connection.execute(ADD, tenant, session_id, [page for page, _ in pages], [terms for _, terms in pages])


async def unmerged(connection: Connection, tenant: str, session_id: str) -> int | None:
    """Return the first of the next `MERGED` pages that can be merged; None if there are none."""
    first: int | None = await connection.fetchval(UNMERGED, tenant, session_id)
    return first


async def replace(connection: Connection, tenant: str, session_id: str, first: int, merged: bytes) -> None:
    """Store the `MERGED` pages from ``first`` on as one row, unless another process has done so."""
    deleted = await connection.execute(TAKE, tenant, session_id, first)
    if deleted == f"DELETE {MERGED}":
        await connection.execute(ADD_MERGED, tenant, session_id, first, MERGED, merged)


async def forget(connection: Connection, tenant: str, session_id: str, pages: Iterable[int]) -> None:
    """Delete pages whose messages were removed, with those that were merged with them."""
    await connection.execute(FORGET, tenant, session_id, list(pages))
