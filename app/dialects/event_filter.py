"""A stream of server-sent events on its way to the client, changed event by event, or looked at alone."""

from __future__ import annotations

from abc import ABC, abstractmethod

from app.dialects.sse import EventTooLarge, SseDecoder, SseEvent


class EventFilter(ABC):
    """``is_changing``: what goes out is what ``_forward`` and ``_release`` say; else it is what came."""

    def __init__(self, *, is_changing: bool, max_event: int) -> None:
        self._is_changing = is_changing
        self._decoder = SseDecoder(limit=max_event)

    def feed(self, chunk: bytes) -> bytes:
        """What goes to the client now. An event over ``max_event`` bytes goes through unread."""
        try:
            events = self._decoder.feed(chunk)
        except EventTooLarge:
            out = self._release() + b"".join([event.raw for event in self._decoder.close()])
        else:
            out = b"".join([self._forward(event) for event in events])
        return out if self._is_changing else chunk

    def close(self) -> bytes:
        """The stream is over: what was held back, and an unfinished last event."""
        out = b"".join([self._forward(event) for event in self._decoder.close()]) + self._release()
        return out if self._is_changing else b""

    @abstractmethod
    def _forward(self, event: SseEvent) -> bytes:
        """Note an event; what may go out now."""

    @abstractmethod
    def _release(self) -> bytes:
        """Nothing is held back any longer: what of it goes out."""
