"""Conversations that a model host keeps, as far as a session has them: their last reply and their links."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tersely.domain.history.conversations import links_in_conversation
from tersely.domain.history.links import StoredLink
from tersely.domain.history.sessions import Session
from tersely.store.db.connection import Connection
from tersely.store.history import messages

# Replies of calls that ran at once may be stored in another order than that of their places.
LAST_REPLY = """
SELECT m.seq FROM (
    SELECT seq FROM reply_ids
    WHERE tenant_id = $1 AND session_id = $2 AND seq BETWEEN 1 AND $4 AND conversation = $3 ORDER BY seq DESC LIMIT 64
) AS newest
CROSS JOIN LATERAL (
    SELECT seq, place FROM messages WHERE tenant_id = $1 AND session_id = $2 AND seq = newest.seq OFFSET 0
) AS m
ORDER BY m.place DESC, m.seq DESC LIMIT 1
"""
# Of replies from before conversations were noted it is not known.
OUTSIDE = """
SELECT DISTINCT seq FROM reply_ids
WHERE tenant_id = $1 AND session_id = $2 AND seq BETWEEN $3 AND $4 AND conversation <> $5
"""


class ConversationLinks(msgspec.Struct, frozen=True, kw_only=True):
    """Sequence numbers of a session's links: ``failed`` are those of requests whose call failed, ``staying`` those that
    no call of the conversation supersedes.
    """

    failed: frozenset[int] = frozenset()
    staying: frozenset[int] = frozenset()


async def last_reply(connection: Connection, tenant: str, session: Session, conversation: str) -> int:
    """Return the number of the conversation's last reply in the session as it was read; 0 where none is noted."""
    return await connection.fetchval(LAST_REPLY, tenant, session.id, conversation, session.last_seq) or 0


async def links_of(
    connection: Connection, tenant: str, session_id: str, conversation: str, rows: Sequence[StoredLink], *, calls: int
) -> ConversationLinks:
    """Return the links of a conversation among the session's ``rows``, which are in order; ``calls``: how many calls
    of the session there were.
    """
    failed = await messages.failed_links(connection, tenant, session_id, rows, calls=calls)
    seqs = [row.seq for row in rows if row.relayed]
    outside: set[int] = set()
    if seqs and conversation:
        found = await connection.fetch(OUTSIDE, tenant, session_id, min(seqs), max(seqs), conversation)
        outside = {record["seq"] for record in found}
    return ConversationLinks(failed=failed, staying=links_in_conversation(rows, failed=failed, outside=outside))
