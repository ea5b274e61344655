"""The end of a stream: held back until the reply is on disk, and never mistaken for words about it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

from app.upstream.client import Reply

_MARK = re.compile(rb"data: ?\[DONE\]")
DONE = (b"data: [DONE]", b"data:[DONE]")
# How long after its end mark a stream may go on (seconds). A host that does not hang up must not hold the client.
TRAILER_WAIT = 0.25


async def until_end(reply: Reply, end: StreamEnd, heartbeat: float) -> AsyncIterator[bytes]:
    """The chunks of ``reply`` until it ends, or until ``end`` has seen its mark and what may come right after."""
    chunks = reply.chunks(heartbeat)
    while not end.is_seen:
        try:
            yield await anext(chunks)
        except StopAsyncIteration:
            return
    yield await reply.trailer(TRAILER_WAIT)


class StreamEnd:
    """Holds the end mark of a stream back, and knows whether a comment may be put in between.

    The mark is a line of its own: JSON has no line ends inside, so words about the mark are never taken for it.
    """

    __slots__ = ("_tail", "held", "is_seen")

    def __init__(self) -> None:
        self.held = b""
        self.is_seen = False
        self._tail = b"\n\n"

    def hold(self, out: bytes) -> bytes:
        """What may be forwarded of ``out``."""
        if self.is_seen:
            self.held += out
            return b""
        if not out:
            return b""
        block = self.held + out if self.held else out
        start = self._find(block)
        self.held, block = block[start:], block[:start]
        if block:
            self._tail = (self._tail + block)[-4:] if len(block) < 4 else block[-4:]
        return block

    def _find(self, block: bytes) -> int:
        """Where the mark begins, or what may become one; the length of ``block`` where nothing does."""
        is_line_start = self._tail.endswith((b"\n", b"\r"))
        at = block.find(b"[DONE]")
        while at >= 0:
            # The pattern is only tried where it can match: everywhere else it costs a hundred times the search.
            match = _MARK.match(block, max(0, at - 6)) or _MARK.match(block, max(0, at - 5))
            if match is not None and (block[match.start() - 1] in b"\r\n" if match.start() else is_line_start):
                self.is_seen = True
                return match.start()
            at = block.find(b"[DONE]", at + 1)
        last = max(block.rfind(b"\n"), block.rfind(b"\r")) + 1
        if last < len(block) and (last or is_line_start) and any(mark.startswith(block[last:]) for mark in DONE):
            return last
        return len(block)

    @property
    def is_between_events(self) -> bool:
        """Whether what was forwarded ends with a whole event."""
        return not self.held and self._tail.endswith((b"\n\n", b"\r\n\r\n"))


def whole_events(block: bytes) -> bytes:
    """``block`` without an event at its end that nobody will complete."""
    ends = (block.rfind(mark) + len(mark) for mark in (b"\n\n", b"\r\n\r\n") if mark in block)
    return block[: max(ends, default=0)]
