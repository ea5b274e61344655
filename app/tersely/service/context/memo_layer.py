"""Put relevant memos in front of a user's message, for the model alone (std::slop, "Semantic Memo System").

The document puts them into the system text at each call. There they would change the beginning of the prompt with every
new message. In front of the message they stay the same as long as the message is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from msgspec.structs import replace

from tersely.dialects.dialect import Dialect
from tersely.service.context.history import History
from tersely.service.memos.selection import choose_memos, memo_limit, with_memos_of
from tersely.service.recognition.incoming_history import IncomingHistory
from tersely.service.recognition.session_lookup import SessionMatch
from tersely.store.commit.records import HiddenReplyParts
from tersely.store.db.connection import Connection
from tersely.strategies.presets import Strategy


class ConnectionSource(Protocol):
    """A source of connections: a database, or a transaction of it."""

    def reading(self, tenant: str, *, limit: float | None = None) -> AbstractAsyncContextManager[Connection]:
        """Return a connection to read with."""


async def with_memos(
    source: ConnectionSource,
    tenant: str,
    match: SessionMatch,
    history: History,
    strategy: Strategy,
    incoming: IncomingHistory,
    dialect: Dialect,
) -> tuple[History, Mapping[int, HiddenReplyParts]]:
    """Return ``history`` with memos in front of the request's new user message, and the model's view of that message to
    store.

    Raises `StoreUnavailable`.
    """
    entries = history.snapshot.entries
    most = memo_limit(strategy)
    if not (most and entries and entries[-1].message.starts_turn):
        return history, {}
    last = entries[-1]
    placed = {message.seq: index for index, message in enumerate(match.decision.placed) if message.is_new}
    index = placed.get(last.seq)
    if index is None or not last.message.text:
        return history, {}
    async with source.reading(tenant) as connection:
        (text,) = await choose_memos(connection, tenant, [last.message.text], limit=most)
    if not text:
        return history, {}
    snapshot = replace(history.snapshot, entries=(*entries[:-1], with_memos_of(last, text)))
    hidden_parts = HiddenReplyParts(model_raw=dialect.with_prefix(incoming.messages[index].raw, text))
    return replace(history, snapshot=snapshot, is_verbatim=False), {index: hidden_parts}
