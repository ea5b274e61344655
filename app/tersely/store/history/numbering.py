"""The exceptions of a session: the rows from which all positions follow, found by an index of their own."""

from __future__ import annotations

import msgspec

from tersely.domain.history.history import Status
from tersely.store.db.connection import Connection


class ExceptionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row that is not simply the next message of the history that client and model see."""

    seq: int
    position: float
    turn: int
    tokens: int
    status: Status
    client_visible: bool
    model_visible: bool


# The condition is that of the index `messages_exceptions`, word for word.
EXCEPTIONS = """
SELECT seq, place AS position, turn, tokens, status, client_visible, model_visible FROM messages
WHERE tenant_id = $1 AND session_id = $2
  AND CASE WHEN status <> 'live' OR turn = 0 OR place <> seq::float8 OR NOT client_visible OR NOT model_visible
      THEN 1 ELSE 0 END = 1
"""


async def exceptions(connection: Connection, tenant: str, session_id: str) -> list[ExceptionRow]:
    """Return all exceptional rows of a session."""
    return [ExceptionRow(**dict(record)) for record in await connection.fetch(EXCEPTIONS, tenant, session_id)]
