"""One stream on its way from the model host to the client, over all rounds of a call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from tersely.dialects.dialect import ClientView, Dialect, Reply
from tersely.dialects.tool_rounds import FinishedRounds
from tersely.service.common.offload import LONG_REPLY, finish_in_thread
from tersely.service.proxy.streams.limited_reader import LimitedReader
from tersely.service.proxy.streams.stream_end import terminal_detector, whole_events

# Bytes of short events that are read in one callback of the event loop.
_PART = 16 * 1024
# Bytes of short events that may be released in one callback.
_MUCH_WITHHELD = 64 * 1024


async def split_into_parts(chunk: bytes) -> AsyncIterator[bytes]:
    """Yield a chunk part by part, at least one; the event loop serves others between two parts."""
    for start in range(0, len(chunk) or 1, _PART):
        if start:
            await asyncio.sleep(0)
        yield chunk[start : start + _PART]


class ClientStream:
    """Bytes of the host in, bytes for the client out: tags stripped, the end held back, all rounds as one stream.

    ``reader`` reads the current round, ``end`` finds the end of it.
    """

    def __init__(
        self, dialect: Dialect, max_reply: int, view: ClientView, *, tools: frozenset[str] = frozenset()
    ) -> None:
        """``max_reply``: how many bytes of a round are read. ``tools`` are Tersely's own, whose calls are hidden."""
        self._dialect = dialect
        self._max_reply = max_reply
        self._rounds = dialect.rounds.open(tools) if dialect.rounds and tools else None
        self._held = b""
        self._open_round(view)

    def _open_round(self, view: ClientView) -> None:
        self.reader = LimitedReader(self._dialect.open_stream(view), self._max_reply)
        self.end = terminal_detector(self._dialect.streaming)
        self._event_size = 0  # bytes of the event that is being read
        self._withheld = 0  # bytes of the round that are held back, or were stripped
        self._is_long = False  # the round has had a long event, or much at once that waits: a thread reads on

    @property
    def is_cut(self) -> bool:
        """True if the round passed the size limit."""
        return self.reader.is_cut

    @property
    def size(self) -> int:
        """Bytes of the round that were read."""
        return self.reader.size

    @property
    def is_between_events(self) -> bool:
        """True if the client has whole events only, so that another event may follow."""
        return self._rounds is not None or self.end.is_between_events

    async def feed_part(self, chunk: bytes, start: int) -> tuple[bytes, int]:
        """Return what goes to the client now, and where the next part of ``chunk`` starts. This one is at ``start``.

        The event loop serves others between two parts. Where one part may take long, a thread reads on from there.
        """
        if start:
            await asyncio.sleep(0)
        part = chunk[start : start + _PART]
        if self._grows_long(part) and not self.is_cut:
            return await finish_in_thread(self.feed, chunk[start:]), len(chunk) or _PART
        return self._feed_short(part), start + _PART

    def feed_at_once(self, piece: bytes) -> bytes | None:
        """Return what goes to the client now. None: `feed_part` has to read the piece, which may take long or passes
        the size limit.
        """
        if len(piece) > _PART or self.reader.size + len(piece) > self._max_reply or self._grows_long(piece):
            return None
        return self._feed_short(piece)

    def _grows_long(self, part: bytes) -> bool:
        ended = len(whole_events(part))
        self._event_size = len(part) - ended if ended else self._event_size + len(part)
        self._is_long = self._is_long or self._event_size > LONG_REPLY or self._withheld > _MUCH_WITHHELD
        return self._is_long

    def _feed_short(self, part: bytes) -> bytes:
        out = self.feed(part)
        self._withheld += len(part) - len(out)
        return out

    def feed(self, chunk: bytes) -> bytes:
        """Return what goes to the client now."""
        out = self.end.hold_back(self.reader.feed(chunk))
        return out if self._rounds is None else self._rounds.feed(out)

    async def end_round(self) -> bytes:
        """End the round; return what goes to the client though it may not be the last round."""
        return await finish_in_thread(self._end_round) if self._is_long else self._end_round()

    def _end_round(self) -> bytes:
        rest = self.end.held + self.reader.close()
        if self._rounds is not None:
            return self._rounds.feed(rest)
        self._held = rest
        return b""

    async def reply(self) -> Reply:
        """Return what was read of the round."""
        return await self.reader.reply()

    def next_round(self, view: ClientView, finished: FinishedRounds) -> bytes:
        """Drop the end of the round and begin another. Return the held-back bytes that the client may see."""
        assert self._rounds is not None
        out = self._rounds.next_round(finished)
        self._open_round(view)
        return out

    def close(self) -> bytes:
        """Return the end of the last round, and all else that was held back."""
        return self._held if self._rounds is None else self._rounds.close()

    def break_off(self) -> bytes:
        """End a round whose host broke off; return the whole events that the client can still be sent."""
        rest = self.end.hold_back_rest(whole_events(self.reader.close()))
        return rest if self._rounds is None else b""
