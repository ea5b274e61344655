"""A stream of server-sent events on its way to the client, changed event by event, or looked at alone."""

from __future__ import annotations

from abc import ABC, abstractmethod

from msgspec.structs import replace

from tersely.dialects.dialect import Reply
from tersely.dialects.undescribed import UNDESCRIBED, UnreadPayloads
from tersely.dialects.wire.sse import EventTooLarge, SseDecoder, SseEvent

# Bytes of an event that are looked at again when its rest has come, and of plain events that are read at once.
_MAX_AGAIN = 4 * 1024
_MAX_DEFERRED = 64 * 1024


class EventFilter(ABC):
    """``is_changing``: `_forward` and `_release` decide what goes out; otherwise the input goes out unchanged.

    An event of an unknown form goes out unchanged. Most events are plain: they go out unchanged too, and are read
    later, many at a time, because parsing is the most expensive step.
    """

    def __init__(self, *, is_changing: bool, max_event: int) -> None:
        self._is_changing = is_changing
        self._decoder = SseDecoder(limit=max_event)
        self._unread = UnreadPayloads()
        self._deferred: list[bytes] = []
        self._deferred_size = 0

    def feed(self, chunk: bytes) -> bytes:
        """Return the bytes that go to the client now. Events over ``max_event`` bytes pass unread."""
        held = None if b"\r" in chunk else self._decoder.take_back(_MAX_AGAIN)
        if held is None:
            out = self._feed(chunk)
        elif self._is_plain(out := held + chunk):
            self._defer(out)
        else:
            out = self._feed_mixed(out)
        return out if self._is_changing else chunk

    def _feed_mixed(self, block: bytes) -> bytes:
        """Process bytes without a CR that begin with an event, and are not all plain."""
        return self._feed(block)

    def _feed(self, chunk: bytes) -> bytes:
        try:
            events = self._decoder.feed(chunk)
        except EventTooLarge:
            return self._release_all() + b"".join([event.raw for event in self._decoder.close()])
        return b"".join([self._pass(event) for event in events])

    def _defer(self, block: bytes) -> None:
        self._deferred.append(block)
        self._deferred_size += len(block)
        if self._deferred_size > _MAX_DEFERRED:
            self._catch_up()

    def _catch_up(self) -> None:
        """Read the plain events that went out."""
        if self._deferred:
            block = b"".join(self._deferred)
            self._deferred, self._deferred_size = [], 0
            self._read_plain(block)

    def _release_all(self) -> bytes:
        self._catch_up()
        return self._release()

    def close(self) -> bytes:
        """The stream is over: what was held back, and an unfinished last event."""
        out = b"".join([self._pass(event) for event in self._decoder.close()]) + self._release_all()
        return out if self._is_changing else b""

    @property
    def reply(self) -> Reply:
        """Return the reply so far; it is complete after ``close``."""
        self._catch_up()
        unread = tuple(self._unread.payloads)
        try:
            return replace(self._reply(), unread=unread)
        except UNDESCRIBED:
            return Reply(unread=unread)

    def _pass(self, event: SseEvent) -> bytes:
        self._catch_up()
        if event.data is None:
            self._unread.add_if_no_event(event.raw)
        try:
            return self._forward(event)
        except UNDESCRIBED:
            self._note_unread(event)
            return self._release() + event.raw

    def _note_unread(self, event: SseEvent) -> None:
        """Keep an event that cannot be parsed. Half an event, at which a stream broke off, is dropped."""
        if event.data and event.is_whole:
            self._unread.add(event.data)

    @abstractmethod
    def _is_plain(self, block: bytes) -> bool:
        """Return whether bytes are plain events, after which nothing waits."""

    @abstractmethod
    def _read_plain(self, block: bytes) -> None:
        """Process plain events that have gone out."""

    @abstractmethod
    def _reply(self) -> Reply:
        """Return the reply so far, without events that could not be parsed."""

    @abstractmethod
    def _forward(self, event: SseEvent) -> bytes:
        """Process an event and return the bytes that go out now. May raise the errors in `UNDESCRIBED`."""

    @abstractmethod
    def _release(self) -> bytes:
        """Stop holding back, and return what was held for the client."""
