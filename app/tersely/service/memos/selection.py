"""Choose which memos stand in front of which message of a session.

The memos of a new message are stored as part of the model's view of it and stay for the rest of the epoch. When the
next epoch starts, memos are chosen again for all messages that are shown then and become part of its plan; those stored
with the messages no longer count.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from tersely.dialects.registry import dialect_named
from tersely.domain.history.history import Entry, Epoch, Prefix
from tersely.domain.tokens import estimate_text
from tersely.service.memos.memos import relevant
from tersely.store.db.connection import Connection
from tersely.strategies.head.memo_layer import LAYER, memos_in, render_memos
from tersely.strategies.presets import Strategy, Window

# Of the users' messages that an epoch starts with, so many of the newest get memos.
MESSAGES = 50


def memo_limit(strategy: Strategy) -> int:
    """Return how many memos a message may get; 0 where the strategy has none."""
    return strategy.memos if isinstance(strategy, Window) else 0


async def choose_memos(connection: Connection, tenant: str, texts: Sequence[str], *, limit: int) -> list[str]:
    """Return the memos about each text, as the model is shown them; an empty text if there are none."""
    return [render_memos(found) for found in await relevant(connection, tenant, texts, limit=limit)]


async def choose_for_entries(
    connection: Connection, tenant: str, entries: Sequence[Entry], strategy: Strategy
) -> tuple[Prefix, ...]:
    """Return the memos in front of messages that an epoch starts with."""
    most = memo_limit(strategy)
    questions = [entry for entry in entries if entry.message.starts_turn and entry.message.text][-MESSAGES:]
    if not (most and questions):
        return ()
    texts = await choose_memos(connection, tenant, [entry.message.text for entry in questions], limit=most)
    return tuple(
        Prefix(layer=LAYER, seq=entry.seq, text=text, tokens=estimate_text(text))
        for entry, text in zip(questions, texts, strict=True)
        if text
    )


def memos_in_message(model_raw: bytes, client_text: str) -> str:
    """Return the memos that were stored with a user's message, from the model's view of it. ``client_text``:
    its dialect.
    """
    return memos_in(dialect_named(client_text).read_message(model_raw).text)


def memos_in_epoch(entries: Sequence[Entry], strategy: Strategy, epoch: Epoch | None) -> list[Entry]:
    """Return ``entries`` with the memos that were stored with them and still count."""
    chosen_to = epoch.memos_chosen_to if epoch else 0
    is_shown = memo_limit(strategy) > 0
    return [entry if is_shown and entry.seq > chosen_to else without_memos(entry) for entry in entries]


def with_memos_of(entry: Entry, text: str) -> Entry:
    """``entry`` behind memos."""
    return replace(entry, prefix=text, tokens=entry.tokens + estimate_text(text)) if text else entry


def without_memos(entry: Entry) -> Entry:
    """``entry`` by itself."""
    return replace(entry, prefix="", tokens=entry.tokens - estimate_text(entry.prefix)) if entry.prefix else entry
