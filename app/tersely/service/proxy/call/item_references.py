"""Requests that reference items of earlier replies instead of sending them: the items are inserted from the store.

With them the history can be recognised, and a context can be built from it.
"""

from __future__ import annotations

from msgspec.structs import replace

from tersely.dialects.dialect import Dialect
from tersely.service.common.offload import run_in_thread_if_large
from tersely.service.proxy.call.call import Call
from tersely.store.commit import reply_ids
from tersely.store.db.connection import Database

MAX_REFERENCES = 4096


async def with_items(call: Call, dialect: Dialect, database: Database) -> Call:
    """Replace references by the items that are stored here. Raises `StoreUnavailable`."""
    references = dialect.references
    if references is None or references.mark not in call.body:
        return call
    wanted = await run_in_thread_if_large(len(call.body), references.referenced_ids, call.body)
    if not wanted:
        return call
    async with database.reading(call.tenant) as connection:
        replies = await reply_ids.replies(connection, call.tenant, wanted[-MAX_REFERENCES:])
    known = {name: raw for reply in replies for name, raw in references.items_by_id(reply).items()}
    return (
        replace(call, body=await run_in_thread_if_large(len(call.body), references.with_items, call.body, known))
        if known
        else call
    )
