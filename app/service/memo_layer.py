"""Memos that bear on a user's message, put in front of it for the model alone (std::slop, "Semantic Memo System").

The document puts them into the system text at each call. There they would change the prompt's beginning with every new
message; in front of the message they stay as they were found, as long as the message itself is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from app.dialects.dialect import Dialect
from app.service.arrival import Arrival
from app.service.contexts import History
from app.service.identity import Found
from app.service.memo_choice import choose, most_of, with_memos_of
from app.store.connection import Database
from app.store.writes import Said
from app.strategies.presets import Strategy


async def with_memos(
    database: Database,
    tenant: str,
    found: Found,
    history: History,
    strategy: Strategy,
    arrival: Arrival,
    dialect: Dialect,
) -> tuple[History, Mapping[int, Said]]:
    """``history`` with memos in front of the request's new user message, and what is to be stored beside its words.

    Raises `StoreUnavailable`.
    """
    entries = history.snapshot.entries
    most = most_of(strategy)
    if not (most and entries and entries[-1].message.starts_turn):
        return history, {}
    last = entries[-1]
    placed = {place.seq: index for index, place in enumerate(found.decision.placed) if place.is_new}
    index = placed.get(last.seq)
    if index is None or not last.message.text:
        return history, {}
    async with database.reading(tenant) as connection:
        (text,) = await choose(connection, tenant, [last.message.text], most=most)
    if not text:
        return history, {}
    snapshot = replace(history.snapshot, entries=(*entries[:-1], with_memos_of(last, text)))
    said = Said(model_raw=dialect.with_prefix(arrival.messages[index].raw, text))
    return replace(history, snapshot=snapshot, is_verbatim=False), {index: said}
