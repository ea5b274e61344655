"""Stored messages in the form that a dialect takes: as the model saw them, or as their client saw them."""

from __future__ import annotations

from tersely.dialects.dialect import Dialect
from tersely.dialects.registry import dialect_named
from tersely.domain.history.chain import CALLS_AS_TEXT
from tersely.domain.history.isolation import StoredInDialect, share_messages, text_only
from tersely.domain.messages import (
    Message,
)
from tersely.store.history.messages import StoredMessage

# Used where the client has no echo of a message.
NOT_ECHOED = Message(role="user", parts=(), raw=b"")


def restore_reply(dialect: Dialect, echo: Message, model_raw: bytes, model_dialect: str) -> Message:
    """Restore the model's view of a message: the model's text in the client's echo of a reply, or a user message with
    memos.

    Returns `NOT_ECHOED` for a message without an echo whose dialect does not share messages with ``dialect``.
    ``model_dialect``: the dialect of ``model_raw``.
    """
    if not share_messages(model_dialect, dialect.name):
        if not echo.raw:
            return NOT_ECHOED
        text = dialect_named(model_dialect).read_reply(model_raw).text
        return dialect.read_message(dialect.with_text(echo.raw, text))
    if echo.role == "user":
        return dialect.read_message(model_raw)
    if CALLS_AS_TEXT in echo.text:
        return echo  # a client that writes calls as text shows more than the text of the reply
    return dialect.read_message(dialect.restore_reply(echo.raw, model_raw))


def stored_message(stored: StoredMessage, dialect: Dialect) -> Message | None:
    """Return a stored message as the model saw it, without memos, in a form that a provider accepts.

    A message of another dialect is reduced to its text; None if it has no text.
    """
    read = read_stored(stored, dialect)
    return read.message if read.is_own else text_only(read.message)


def read_stored(stored: StoredMessage, dialect: Dialect) -> StoredInDialect:
    """Read a stored message as the model saw it, without memos. One of ``dialect`` has a form that a
    provider accepts.
    """
    raw = stored.model_raw if stored.model_raw is not None and stored.role != "user" else stored.raw
    return _read_view(stored, raw, dialect)


def read_client_view(stored: StoredMessage, dialect: Dialect) -> StoredInDialect:
    """Read a stored message as its client was shown it. One of ``dialect`` has a form that a provider accepts."""
    return _read_view(stored, stored.raw, dialect)


def _read_view(stored: StoredMessage, raw: bytes, dialect: Dialect) -> StoredInDialect:
    if not share_messages(stored.dialect, dialect.name):
        own = dialect_named(stored.dialect)
        return StoredInDialect(
            message=own.read_reply(raw) if stored.role == "assistant" else own.read_message(raw), is_own=False
        )
    return StoredInDialect(message=dialect.read_message(dialect.as_input(raw) if stored.role == "assistant" else raw))


def stored_instruction(stored: StoredMessage, dialect: Dialect) -> bytes:
    """Return stored instructions in the wire form of ``dialect``."""
    if share_messages(stored.dialect, dialect.name):
        return stored.raw
    text = dialect_named(stored.dialect).read_message(stored.raw).text
    return dialect.write_text("system", text)
