"""Requests that refer to items of replies instead of sending them: the items are put in, from the store.

So a history is known again, and a context can be built of it, whatever its client leaves to the host's memory.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from app.dialects.dialect import Dialect
from app.domain.errors import StoreUnavailable
from app.service.aside import aside
from app.service.calls import Call
from app.store import reply_ids
from app.store.connection import Database

MAX_REFERENCES = 4096

_log = logging.getLogger(__name__)


async def with_items(call: Call, dialect: Dialect, database: Database) -> Call:
    """The call with the items that are known here in place of references to them."""
    references = dialect.references
    if references is None or references.mark not in call.body:
        return call
    wanted = await aside(len(call.body), references.referred, call.body)
    if not wanted:
        return call
    try:
        async with database.reading(call.tenant) as connection:
            replies = await reply_ids.replies(connection, call.tenant, wanted[-MAX_REFERENCES:])
    except StoreUnavailable as error:
        _log.warning("references stay as they are: %s", error)
        return call
    known = {name: raw for reply in replies for name, raw in references.items_by_id(reply).items()}
    return replace(call, body=await aside(len(call.body), references.with_items, call.body, known)) if known else call
