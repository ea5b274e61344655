"""A stream of server-sent events on its way to the client, changed event by event, or looked at alone."""

from __future__ import annotations

from abc import ABC, abstractmethod

from msgspec.structs import replace

from tersely.dialects.dialect import Reply
from tersely.dialects.undescribed import UNDESCRIBED, UnreadPayloads
from tersely.dialects.wire.sse import EventTooLarge, SseDecoder, SseEvent


class EventFilter(ABC):
    """``is_changing``: `_forward` and `_release` decide what goes out; otherwise the input goes out unchanged.

    An event of an unknown form goes out unchanged.
    """

    def __init__(self, *, is_changing: bool, max_event: int) -> None:
        self._is_changing = is_changing
        self._decoder = SseDecoder(limit=max_event)
        self._unread = UnreadPayloads()

    def feed(self, chunk: bytes) -> bytes:
        """Return the bytes that go to the client now. Events over ``max_event`` bytes pass unread."""
        try:
            events = self._decoder.feed(chunk)
        except EventTooLarge:
            out = self._release() + b"".join([event.raw for event in self._decoder.close()])
        else:
            out = b"".join([self._pass(event) for event in events])
        return out if self._is_changing else chunk

    def close(self) -> bytes:
        """The stream is over: what was held back, and an unfinished last event."""
        out = b"".join([self._pass(event) for event in self._decoder.close()]) + self._release()
        return out if self._is_changing else b""

    @property
    def reply(self) -> Reply:
        """Return the reply so far; it is complete after ``close``."""
        unread = tuple(self._unread.payloads)
        try:
            return replace(self._reply(), unread=unread)
        except UNDESCRIBED:
            return Reply(unread=unread)

    def _pass(self, event: SseEvent) -> bytes:
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
    def _reply(self) -> Reply:
        """Return the reply so far, without events that could not be parsed."""

    @abstractmethod
    def _forward(self, event: SseEvent) -> bytes:
        """Process an event and return the bytes that go out now. May raise the errors in `UNDESCRIBED`."""

    @abstractmethod
    def _release(self) -> bytes:
        """Stop holding back, and return what was held for the client."""
