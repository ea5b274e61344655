"""Requests that refer to items of replies instead of sending them: the items are put in, from the store.

So a history is known again, and a context can be built of it, whatever its client leaves to the host's memory.
"""

from __future__ import annotations

from dataclasses import replace

from tersely.dialects.dialect import Dialect
from tersely.service.common.offload import run_in_thread_if_large
from tersely.service.proxy.calls import Call
from tersely.store.commit import reply_ids
from tersely.store.db.connection import Database

MAX_REFERENCES = 4096


async def with_items(call: Call, dialect: Dialect, database: Database) -> Call:
    """The call with the items that are known here in place of references to them.

    Raises `StoreUnavailable`: without its history a call is not made.
    """
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
