"""Cache parsed messages by their bytes: clients resend the same messages with every request."""

from __future__ import annotations

from tersely.dialects.dialect import Dialect
from tersely.domain.history.links import MessageIdentity
from tersely.domain.messages import Message
from tersely.service.common.size_bounded_cache import SizeBoundedCache
from tersely.service.context.stored_messages import restore_reply
from tersely.service.recognition.incoming_history import identify


class ParseCache:
    """Messages of one dialect by their raw bytes, their identities, and replies with the model's text restored."""

    def __init__(self, dialect: Dialect, budget: int) -> None:
        """Limit the caches to ``budget`` bytes of raw messages in total."""
        self._dialect = dialect
        self._messages: SizeBoundedCache[Message] = SizeBoundedCache(budget // 4)
        self._identities: SizeBoundedCache[MessageIdentity] = SizeBoundedCache(budget // 4)
        self._restored: SizeBoundedCache[Message] = SizeBoundedCache(budget // 2)

    def read(self, raw: bytes) -> Message:
        """Return `Dialect.read_message` of ``raw``, cached."""
        message = self._messages.get(raw, len(raw))
        if message is None:
            message = self._dialect.read_message(raw)
            self._messages.put(raw, message, len(raw))
        return message

    def identify(self, message: Message) -> MessageIdentity:
        """Return `incoming_history.identify` of ``message``, cached."""
        known = self._identities.get(message.raw, len(message.raw))
        if known is None:
            known = identify(message)
            self._identities.put(message.raw, known, len(message.raw))
        return known

    def restore(self, echo: Message, model_raw: bytes, model_dialect: str) -> Message:
        """Restore the model's text in the client's echo of a reply, cached. ``model_dialect``: the dialect of
        ``model_raw``.
        """
        size = len(echo.raw) + len(model_raw)
        restored = self._restored.get((echo.raw, model_raw), size)
        if restored is None:
            restored = restore_reply(self._dialect, echo, model_raw, model_dialect)
            self._restored.put((echo.raw, model_raw), restored, size)
        return restored
