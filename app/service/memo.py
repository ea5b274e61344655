"""What was read once is not read again: clients resend the same bytes with every request."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from app.dialects.dialect import Dialect
from app.domain.lineage import Incoming
from app.domain.messages import Message
from app.service.arrival import identify
from app.service.contexts import restore_reply

V = TypeVar("V")


class Memo(Generic[V]):
    """Values of pure functions by their arguments, of at most ``budget`` bytes in all (as the caller says).

    Two generations: what was asked for since the last change of generations survives the next one. Keys are contents,
    so nothing ever has to be invalidated.
    """

    def __init__(self, budget: int) -> None:
        self._half = budget // 2
        self._young: dict[Hashable, V] = {}
        self._old: dict[Hashable, V] = {}
        self._size = 0

    def get(self, key: Hashable, size: int) -> V | None:
        """The value of ``key``, if it is remembered. ``size`` is what it counts for."""
        value = self._young.get(key)
        if value is None:
            value = self._old.get(key)
            if value is not None:
                self.put(key, value, size)
        return value

    def put(self, key: Hashable, value: V, size: int) -> None:
        """Remember a value."""
        if self._size + size > self._half:
            self._old, self._young, self._size = self._young, {}, 0
        if size <= self._half:
            self._young[key] = value
            self._size += size


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

    def restore(self, echo: Message, model_raw: bytes) -> Message:
        """The client's echo of a reply with the model's own words put back."""
        size = len(echo.raw) + len(model_raw)
        restored = self._restored.get((echo.raw, model_raw), size)
        if restored is None:
            restored = restore_reply(self._dialect, echo, model_raw)
            self._restored.put((echo.raw, model_raw), restored, size)
        return restored
