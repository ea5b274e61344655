"""The end of a stream, which is held back until the reply is on disk."""

from __future__ import annotations

import re

from typing_extensions import override

from tersely.dialects.dialect import StreamEvents

_EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
_BLANK_LINE = re.compile(rb"\n\n|\r\n\r\n|\r\r")
# An end mark is within so many bytes of the beginning of its line.
_MARK_WITHIN = 40
# Of an event that is incomplete, so many bytes are held back where an error may take its place.
_HELD_INCOMPLETE = 64 * 1024


def terminal_detector(streaming: StreamEvents) -> StreamEnd:
    """Return the detector for the streams of a dialect."""
    return FinishedEnd(streaming) if streaming.finish_key else StreamEnd(streaming)


class StreamEnd:
    """Holds back the last event of a stream, and knows whether another event may be inserted.

    The mark of the last event is at the beginning of a line. JSON contains no line ends, so a reply that quotes the
    mark is not mistaken for the end.
    """

    __slots__ = ("_is_marked", "_streaming", "_tail", "held", "is_seen")

    def __init__(self, streaming: StreamEvents) -> None:
        self.held = b""
        self.is_seen = False
        self._is_marked = False
        self._streaming = streaming
        self._tail = b"\n\n"

    def hold_back(self, out: bytes) -> bytes:
        """Return the part of ``out`` that may be forwarded."""
        if self._is_marked:
            self.held += out
            self._look_for_end()
            return b""
        if not out:
            return b""
        block = self.held + out if self.held else out
        start = self._find(block)
        self.held, block = block[start:], block[:start]
        self._look_for_end()
        if block:
            self._tail = (self._tail + block)[-4:] if len(block) < 4 else block[-4:]
        return block

    def hold_back_rest(self, rest: bytes) -> bytes:
        """Drop what is held, and return what may be forwarded of ``rest``, the last bytes of a broken stream."""
        self.held = b""
        return self.hold_back(rest)

    def _look_for_end(self) -> None:
        """Note whether the last event, which may be long, is complete."""
        if self._is_marked and not self.is_seen:
            self.is_seen = self._streaming.is_mark_whole or _BLANK_LINE.search(self.held) is not None

    def _find(self, block: bytes) -> int:
        """Return where a mark, or the beginning of one, starts; the length of ``block`` if there is none."""
        is_line_start = self._tail.endswith((b"\n", b"\r"))
        marks = self._streaming.end_marks
        for word in self._streaming.end_texts:
            at = block.find(word)
            while at >= 0:
                line = _line_start(block, at)
                if line >= 0 and block.startswith(marks, line) and (line or is_line_start):
                    self._is_marked = True
                    return line
                at = block.find(word, at + 1)
        last = max(block.rfind(b"\n"), block.rfind(b"\r")) + 1
        if last < len(block) and (last or is_line_start) and any(mark.startswith(block[last:]) for mark in marks):
            return last
        return len(block)

    @property
    def is_between_events(self) -> bool:
        """True if the forwarded bytes end with a whole event."""
        return not self.held and self._tail.endswith(_EVENT_ENDS)


class FinishedEnd(StreamEnd):
    """For streams that end with the connection. The event with the last finish key, all later events, and an incomplete
    event are held back, so that an error event can replace them.

    A long event, and a JSON array, which has no blank lines, are held back from the key on. Inside a JSON string the
    quotation marks of the key would be escaped.
    """

    __slots__ = ()

    @override
    def _find(self, block: bytes) -> int:
        key = self._streaming.finish_key
        at = block.rfind(key)
        event = self._event_start(block, at if at >= 0 else len(block))
        if event >= 0 and (at >= 0 or len(block) - event <= _HELD_INCOMPLETE):
            return event
        if at >= 0:
            return at
        near_end = max(0, len(block) - len(key) + 1)
        at = block.find(b'"', near_end)
        while at >= 0 and not key.startswith(block[at:]):
            at = block.find(b'"', at + 1)
        return at if at >= 0 else len(block)

    def _event_start(self, block: bytes, before: int) -> int:
        """Return where the event that contains the byte ``before`` begins; -1 if that has been forwarded."""
        start = max(end + len(mark) if (end := block.rfind(mark, 0, before)) >= 0 else -1 for mark in _EVENT_ENDS)
        if start < 0 and self._tail.endswith(_EVENT_ENDS) and not block.lstrip().startswith((b"[", b",")):
            return 0
        return start


def whole_events(block: bytes) -> bytes:
    """Return ``block`` without an incomplete event at its end."""
    if block.endswith(_EVENT_ENDS):
        return block
    ends = (block.rfind(mark) + len(mark) for mark in _EVENT_ENDS if mark in block)
    return block[: max(ends, default=0)]


def _line_start(block: bytes, at: int) -> int:
    """Return where the line that contains ``at`` begins; -1 if that is too far away."""
    first = max(0, at - _MARK_WITHIN)
    end = max(block.rfind(b"\n", first, at), block.rfind(b"\r", first, at))
    return end + 1 if end >= 0 or not first else -1
