"""Reads a streamed reply up to a size limit."""

from __future__ import annotations

from msgspec.structs import replace

from tersely.dialects.dialect import Reply, ReplyReader
from tersely.service.common.offload import run_in_thread_if_large
from tersely.service.proxy.streams.stream_end import whole_events

# The finish reason of a stored reply that was longer than the limit.
OVERSIZED = "oversized"


class LimitedReader:
    """Reads a stream until its size passes ``limit`` bytes, and the event at that place ends. Later bytes pass through
    unread; so does the rest of an event that is longer than ``limit`` by itself.

    ``is_cut``: the limit was passed. ``size``: bytes that were read.
    """

    __slots__ = ("_limit", "_reader", "is_cut", "size")

    def __init__(self, reader: ReplyReader, limit: int) -> None:
        self._reader = reader
        self._limit = limit
        self.is_cut = False
        self.size = 0

    def feed(self, chunk: bytes) -> bytes:
        """Return what goes to the client now."""
        if self.is_cut:
            return chunk
        self.size += len(chunk)
        if self.size <= self._limit:
            return self._reader.feed(chunk)
        end = len(whole_events(chunk))
        if not end and self.size <= 2 * self._limit:
            return self._reader.feed(chunk)
        self.is_cut = True
        return self._reader.feed(chunk[:end]) + self._reader.close() + chunk[end:]

    def close(self) -> bytes:
        """End the stream; return what still has to go to the client."""
        return b"" if self.is_cut else self._reader.close()

    async def reply(self) -> Reply:
        """Return the reply as far as it was read. A long reply is assembled in a thread."""
        return await run_in_thread_if_large(self.size, self.reply_so_far)

    def reply_so_far(self) -> Reply:
        """Return the reply as far as it was read. O(size of the reply)."""
        reply = self._reader.reply
        if not self.is_cut:
            return reply
        return replace(reply, choices=tuple(replace(choice, finish_reason=OVERSIZED) for choice in reply.choices))
