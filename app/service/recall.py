"""Replies that a client asks for again by their ids: as it was given them, whatever the host has of them.

The host has a reply as the model said it, and of one in several rounds the first alone; it repeats a request to which
instructions and tools were added.
"""

from __future__ import annotations

from app.dialects.dialect import Dialect
from app.domain.errors import InvalidRequest
from app.domain.tool_catalog import TOOLS
from app.service.arrival import digest
from app.service.aside import aside
from app.store import reply_ids
from app.store.connection import Database
from app.strategies.prompts import HISTORY_GUIDELINES, TERSE_INSTRUCTIONS

_INSTRUCTIONS = (TERSE_INSTRUCTIONS, HISTORY_GUIDELINES)
_TOOLS = {tool.name: tool.description for tool in TOOLS.values()}


async def as_given(body: bytes, reply_id: str, *, tenant: str, dialect: Dialect, database: Database) -> bytes:
    """The host's ``body`` as the client was given that reply; as it is where the reply is not known here.

    Raises `StoreUnavailable`.
    """
    if dialect.as_shown is None or not reply_id.isprintable():
        return body
    async with database.reading(tenant) as connection:
        known = await reply_ids.replies(connection, tenant, [reply_id])
    return await aside(len(body), _patch, body, known[-1], dialect) if known else body


def _patch(body: bytes, given: bytes, dialect: Dialect) -> bytes:
    assert dialect.as_shown is not None
    try:
        # What the client asks to be included besides (`include`) stays where the host has the same.
        is_same = digest(dialect.read_reply(body))[0] == digest(dialect.read_reply(given))[0]
        return dialect.as_shown(body, None if is_same else given, instructions=_INSTRUCTIONS, tools=_TOOLS)
    except (ValueError, InvalidRequest):  # no response
        return body
