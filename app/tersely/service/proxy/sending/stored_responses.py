"""Replies that a client requests again by their ids: returned as the client saw them.

The host has the reply as the model wrote it, and only the first of several rounds. It also repeats the request, with
the instructions and tools that Tersely added.
"""

from __future__ import annotations

from tersely.dialects.dialect import Dialect
from tersely.domain.errors import InvalidRequest
from tersely.domain.tools.catalog import TOOLS
from tersely.service.common.offload import run_in_thread_if_large
from tersely.service.recognition.incoming_history import digest
from tersely.store.commit import reply_ids
from tersely.store.commit.reply_ids import RecalledReply
from tersely.store.db.connection import Database
from tersely.strategies.prompts import HISTORY_GUIDELINES, TERSE_INSTRUCTIONS

_INSTRUCTIONS = (TERSE_INSTRUCTIONS, HISTORY_GUIDELINES)
_TOOLS = {tool.name: tool.description for tool in TOOLS.values()}


async def restore_client_view(
    body: bytes, reply_id: str, *, tenant: str, dialect: Dialect, database: Database
) -> bytes:
    """Return the host's ``body`` as the client saw that reply; unchanged if the reply is not stored here.

    Raises `StoreUnavailable`.
    """
    if dialect.restore_response is None or not reply_id.isprintable():
        return body
    async with database.reading(tenant) as connection:
        stored = await reply_ids.stored_response(connection, tenant, reply_id)
    return await run_in_thread_if_large(len(body), _patch, body, stored, dialect) if stored else body


def _patch(body: bytes, stored: RecalledReply, dialect: Dialect) -> bytes:
    assert dialect.restore_response is not None
    try:
        # If the host has the same message, keep its body: it holds what the client's `include` asks for.
        seen = stored.raw
        is_same = bool(seen) and digest(dialect.read_reply(body))[0] == digest(dialect.read_reply(seen))[0]
        finish = stored.finish if stored.usage else ""
        return dialect.restore_response(
            body, None if is_same else seen, instructions=_INSTRUCTIONS, tools=_TOOLS, usage=stored.usage, finish=finish
        )
    except (ValueError, InvalidRequest):  # the body is no response
        return body
