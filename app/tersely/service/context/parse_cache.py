"""What was read once is not read again: clients resend the same bytes with every request."""

from __future__ import annotations

from tersely.dialects.dialect import Dialect
from tersely.domain.history.reconciliation import Incoming
from tersely.domain.messages import Message
from tersely.service.common.size_bounded_cache import SizeBoundedCache
from tersely.service.context.stored_messages import restore_reply
from tersely.service.recognition.incoming_history import identify


class ParseCache:
    """Messages of one dialect by their raw bytes, their identities, and replies with the model's words put back."""

    def __init__(self, dialect: Dialect, budget: int) -> None:
        """``budget`` in bytes of raw messages."""
        self._dialect = dialect
        self._messages: SizeBoundedCache[Message] = SizeBoundedCache(budget // 4)
        self._identities: SizeBoundedCache[Incoming] = SizeBoundedCache(budget // 4)
        self._restored: SizeBoundedCache[Message] = SizeBoundedCache(budget // 2)

    def read(self, raw: bytes) -> Message:
        """`Dialect.read_message`, remembered."""
        message = self._messages.get(raw, len(raw))
        if message is None:
            message = self._dialect.read_message(raw)
            self._messages.put(raw, message, len(raw))
        return message

    def identify(self, message: Message) -> Incoming:
        """`tersely.service.recognition.incoming_history.identify`, remembered."""
        known = self._identities.get(message.raw, len(message.raw))
        if known is None:
            known = identify(message)
            self._identities.put(message.raw, known, len(message.raw))
        return known

    def restore(self, echo: Message, model_raw: bytes, said_in: str) -> Message:
        """The client's echo of a reply with the model's own words put back; ``said_in`` is the dialect of these."""
        size = len(echo.raw) + len(model_raw)
        restored = self._restored.get((echo.raw, model_raw), size)
        if restored is None:
            restored = restore_reply(self._dialect, echo, model_raw, said_in)
            self._restored.put((echo.raw, model_raw), restored, size)
        return restored
