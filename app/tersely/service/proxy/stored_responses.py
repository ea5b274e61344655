"""Replies that a client asks for again by their ids: as it was given them, whatever the host has of them.

The host has a reply as the model said it, and of one in several rounds the first alone; it repeats a request to which
instructions and tools were added.
"""

from __future__ import annotations

from tersely.dialects.dialect import Dialect
from tersely.domain.errors import InvalidRequest
from tersely.domain.tools.catalog import TOOLS
from tersely.service.common.offload import run_in_thread_if_large
from tersely.service.recognition.incoming_history import digest
from tersely.store.commit import reply_ids
from tersely.store.db.connection import Database
from tersely.strategies.prompts import HISTORY_GUIDELINES, TERSE_INSTRUCTIONS

_INSTRUCTIONS = (TERSE_INSTRUCTIONS, HISTORY_GUIDELINES)
_TOOLS = {tool.name: tool.description for tool in TOOLS.values()}


async def restore_client_view(
    body: bytes, reply_id: str, *, tenant: str, dialect: Dialect, database: Database
) -> bytes:
    """The host's ``body`` as the client was given that reply; as it is where the reply is not known here.

    Raises `StoreUnavailable`.
    """
    if dialect.restore_response is None or not reply_id.isprintable():
        return body
    async with database.reading(tenant) as connection:
        known = await reply_ids.stored_response(connection, tenant, reply_id)
    return await run_in_thread_if_large(len(body), _patch, body, *known, dialect) if known else body


def _patch(body: bytes, given: bytes, usage: bytes, dialect: Dialect) -> bytes:
    assert dialect.restore_response is not None
    try:
        # What the client asks to be included besides (`include`) stays where the host has the same.
        is_same = digest(dialect.read_reply(body))[0] == digest(dialect.read_reply(given))[0]
        shown = None if is_same else given
        return dialect.restore_response(body, shown, instructions=_INSTRUCTIONS, tools=_TOOLS, usage=usage)
    except (ValueError, InvalidRequest):  # no response
        return body
