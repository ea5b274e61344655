"""Stored messages in the form that a dialect takes: as the model saw them, or as their client saw them."""

from __future__ import annotations

from tersely.dialects.dialect import Dialect
from tersely.dialects.registry import DIALECTS
from tersely.domain.history.chain import CALLS_AS_TEXT
from tersely.domain.history.isolation import StoredInDialect, share_messages, text_only
from tersely.domain.messages import (
    Message,
)
from tersely.store.history.messages import StoredMessage

# Stands where the client has nothing to echo.
NOT_ECHOED = Message(role="user", parts=(), raw=b"")


def restore_reply(dialect: Dialect, echo: Message, model_raw: bytes, said_in: str) -> Message:
    """The client's echo of a reply with the model's own words put back; a user's message as the model was shown it, and
    so what the client does not know of: nothing, where that was said in a dialect which does not share its messages.

    ``said_in``: the dialect of these words.
    """
    if not share_messages(said_in, dialect.name):
        if not echo.raw:
            return NOT_ECHOED
        text = DIALECTS[said_in].read_reply(model_raw).text  # type: ignore[index]
        return dialect.read_message(dialect.with_text(echo.raw, text))
    if echo.role == "user":
        return dialect.read_message(model_raw)
    if CALLS_AS_TEXT in echo.text:
        return echo  # a client that writes calls as text shows more than the reply's own words
    return dialect.read_message(dialect.restore_reply(echo.raw, model_raw))


def stored_message(stored: StoredMessage, dialect: Dialect) -> Message | None:
    """A stored message as the model saw it, without memos, in a form in which a provider takes it; of another
    dialect's the words, if there are any.
    """
    said = read_stored(stored, dialect)
    return said.message if said.is_own else text_only(said.message)


def read_stored(stored: StoredMessage, dialect: Dialect) -> StoredInDialect:
    """A stored message as the model saw it, without memos; of ``dialect`` in a form in which a provider takes it."""
    raw = stored.model_raw if stored.model_raw is not None and stored.role != "user" else stored.raw
    return _read_view(stored, raw, dialect)


def read_client_view(stored: StoredMessage, dialect: Dialect) -> StoredInDialect:
    """A stored message as its client was shown it; of ``dialect`` in a form in which a provider takes it."""
    return _read_view(stored, stored.raw, dialect)


def _read_view(stored: StoredMessage, raw: bytes, dialect: Dialect) -> StoredInDialect:
    if not share_messages(stored.dialect, dialect.name):
        own = DIALECTS[stored.dialect]  # type: ignore[index]
        return StoredInDialect(
            message=own.read_reply(raw) if stored.role == "assistant" else own.read_message(raw), is_own=False
        )
    return StoredInDialect(message=dialect.read_message(dialect.as_input(raw) if stored.role == "assistant" else raw))


def stored_instruction(stored: StoredMessage, dialect: Dialect) -> bytes:
    """Instructions in wire form."""
    if share_messages(stored.dialect, dialect.name):
        return stored.raw
    text = DIALECTS[stored.dialect].read_message(stored.raw).text  # type: ignore[index]
    return dialect.write_text("system", text)
