"""What was read once is not read again: clients resend the same bytes with every request."""

from __future__ import annotations

from app.dialects.dialect import Dialect
from app.domain.lineage import Incoming
from app.domain.messages import Message
from app.service.arrival import identify
from app.service.bounded import Memo
from app.service.contexts import restore_reply


class MessageMemo:
    """Messages of one dialect by their raw bytes, their identities, and replies with the model's words put back."""

    def __init__(self, dialect: Dialect, budget: int) -> None:
        """``budget`` in bytes of raw messages."""
        self._dialect = dialect
        self._messages: Memo[Message] = Memo(budget // 4)
        self._identities: Memo[Incoming] = Memo(budget // 4)
        self._restored: Memo[Message] = Memo(budget // 2)

    def read(self, raw: bytes) -> Message:
        """`Dialect.read_message`, remembered."""
        message = self._messages.get(raw, len(raw))
        if message is None:
            message = self._dialect.read_message(raw)
            self._messages.put(raw, message, len(raw))
        return message

    def identify(self, message: Message) -> Incoming:
        """`app.service.arrival.identify`, remembered."""
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
