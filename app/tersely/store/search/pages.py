"""The searchable text of long sessions: casefolded, in pages of fixed ranges of sequence numbers.

Page ``n`` (from 0 on) holds the messages ``n * PAGE + 1`` to ``(n + 1) * PAGE``, whatever their status, so that it
stays valid when messages are hidden or restored. A segment is a run of pages with the set of their words, some percent
of the text: pages are only searched if the words are in the set. Only the permanent removal of content invalidates
pages; it deletes them under the session's lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from tersely.store.db.connection import Connection
from tersely.store.search import embeddings, term_pages

PAGE = 128
"""Messages of a page."""
SEGMENT = 32
"""Pages of a segment."""

MISSING_PAGES = """
SELECT n.page FROM generate_series(0, $3::bigint - 1) AS n (page)
WHERE NOT EXISTS (SELECT FROM search_pages p
                  WHERE p.tenant_id = $1 AND p.session_id = $2 AND p.page = n.page)
ORDER BY n.page LIMIT $4
"""
MISSING_SEGMENTS = """
SELECT n.segment FROM generate_series(0, $3::bigint - 1) AS n (segment)
WHERE NOT EXISTS (SELECT FROM search_words w
                  WHERE w.tenant_id = $1 AND w.session_id = $2 AND w.segment = n.segment)
ORDER BY n.segment
"""
LAST_SEQ_AND_EDITS = "SELECT last_seq, edits FROM sessions WHERE tenant_id = $1 AND id = $2"
EDITS = "SELECT edits FROM sessions WHERE tenant_id = $1 AND id = $2"
LOCK_EDITS = EDITS + " FOR SHARE"
# The columns of `MessageColumns`, in its order.
CONTENT = """
SELECT seq, turn, dialect, raw FROM messages
WHERE tenant_id = $1 AND session_id = $2 AND seq BETWEEN $3 AND $4 ORDER BY seq
"""
CONTENT_OF = """
SELECT seq, turn, dialect, raw FROM messages WHERE tenant_id = $1 AND session_id = $2 AND seq = ANY($3::bigint[])
"""
ADD_PAGES = """
INSERT INTO search_pages (tenant_id, session_id, page, text)
SELECT $1, $2, u.page, u.text FROM unnest($3::bigint[], $4::text[]) AS u (page, text)
ON CONFLICT (tenant_id, session_id, page) DO NOTHING
"""
ADD_WORDS = """
INSERT INTO search_words (tenant_id, session_id, segment, words) VALUES ($1, $2, $3, $4)
ON CONFLICT (tenant_id, session_id, segment) DO NOTHING
"""
TEXTS = """
SELECT text FROM search_pages WHERE tenant_id = $1 AND session_id = $2 AND page = ANY($3::bigint[])
"""
FIND_SEGMENTS = """
SELECT segment FROM search_words WHERE tenant_id = $1 AND session_id = $2 AND {has_all} ORDER BY segment
"""
FIND_PAGES = """
SELECT page, text FROM search_pages
WHERE tenant_id = $1 AND session_id = $2 AND page = ANY($4::bigint[]) AND strpos(text, $3) > 0
ORDER BY page DESC LIMIT $5
"""
FORGET_PAGES = """
DELETE FROM search_pages WHERE tenant_id = $1 AND session_id = $2 AND page = ANY($3::bigint[])
"""
FORGET_WORDS = """
DELETE FROM search_words WHERE tenant_id = $1 AND session_id = $2 AND segment = ANY($3::bigint[])
"""


class MessageColumns(msgspec.Struct, frozen=True):
    """The columns that a message's text is made from."""

    seq: int
    turn: int
    dialect: str
    raw: bytes


def page_of(seq: int) -> int:
    """Return the page that a message belongs to, once it is full."""
    return (seq - 1) // PAGE


def pages_of(segment: int) -> range:
    """Return the pages of a segment."""
    return range(segment * SEGMENT, (segment + 1) * SEGMENT)


async def last_seq_and_edits(connection: Connection, tenant: str, session_id: str) -> tuple[int, int] | None:
    """Return a session's last sequence number and its count of edits; None if there is no such session."""
    record = await connection.fetchrow(LAST_SEQ_AND_EDITS, tenant, session_id)
    return None if record is None else (record["last_seq"], record["edits"])


async def missing_pages(connection: Connection, tenant: str, session_id: str, full: int, limit: int) -> list[int]:
    """Return the first ``limit`` of the pages below ``full`` that are not there."""
    return [record["page"] for record in await connection.fetch(MISSING_PAGES, tenant, session_id, full, limit)]


async def missing_segments(connection: Connection, tenant: str, session_id: str, full: int) -> list[int]:
    """Return the segments below ``full`` whose words are not there."""
    return [record["segment"] for record in await connection.fetch(MISSING_SEGMENTS, tenant, session_id, full)]


async def content(connection: Connection, tenant: str, session_id: str, first: int, last: int) -> list[MessageColumns]:
    """Return the messages ``first`` to ``last``, whatever their status, in order of sequence number."""
    return [MessageColumns(*record) for record in await connection.fetch(CONTENT, tenant, session_id, first, last)]


async def content_of(
    connection: Connection, tenant: str, session_id: str, seqs: Iterable[int]
) -> dict[int, MessageColumns]:
    """Return the messages of these sequence numbers, by them."""
    records = await connection.fetch(CONTENT_OF, tenant, session_id, list(seqs))
    return {record["seq"]: MessageColumns(*record) for record in records}


async def edits(connection: Connection, tenant: str, session_id: str, *, lock: bool = False) -> int | None:
    """Return the session's count of edits.

    With ``lock`` it cannot change until the transaction ends. None: the session does not exist.
    """
    found: int | None = await connection.fetchval(LOCK_EDITS if lock else EDITS, tenant, session_id)
    return found


async def texts(connection: Connection, tenant: str, session_id: str, pages: Iterable[int]) -> list[str]:
    """Return the text of those pages that exist."""
    return [record["text"] for record in await connection.fetch(TEXTS, tenant, session_id, list(pages))]


async def add_pages(connection: Connection, tenant: str, session_id: str, pages: Sequence[tuple[int, str]]) -> None:
    """Store pages; an existing one stays."""
    await connection.execute(ADD_PAGES, tenant, session_id, [page for page, _ in pages], [text for _, text in pages])


async def add_words(connection: Connection, tenant: str, session_id: str, segment: int, words: str) -> None:
    """Store the words of a segment."""
    await connection.execute(ADD_WORDS, tenant, session_id, segment, words)


async def find_segments(connection: Connection, tenant: str, session_id: str, words: Sequence[str]) -> list[int]:
    """Return the segments each of whose ``words`` (not empty) is part of some word of theirs."""
    has_all = " AND ".join(f"strpos(words, ${number}) > 0" for number in range(3, 3 + len(words)))
    records = await connection.fetch(FIND_SEGMENTS.format(has_all=has_all), tenant, session_id, *words)
    return [record["segment"] for record in records]


async def find_pages(
    connection: Connection, tenant: str, session_id: str, folded: str, *, among: Iterable[int], limit: int
) -> list[tuple[int, str]]:
    """Return the last ``limit`` of these pages whose text contains ``folded``, newest first, with their text."""
    records = await connection.fetch(FIND_PAGES, tenant, session_id, folded, list(among), limit)
    return [(record["page"], record["text"]) for record in records]


async def forget_pages(connection: Connection, tenant: str, session_id: str, seqs: Iterable[int]) -> None:
    """Delete the pages of removed messages; the next search makes them again."""
    seqs = list(seqs)
    pages = sorted({page_of(seq) for seq in seqs})
    await connection.execute(FORGET_PAGES, tenant, session_id, pages)
    await connection.execute(FORGET_WORDS, tenant, session_id, sorted({page // SEGMENT for page in pages}))
    await term_pages.forget(connection, tenant, session_id, pages)
    await embeddings.forget(connection, tenant, session_id, seqs)
