"""Server-sent events taken apart without I/O (WHATWG HTML, 9.2.6), every byte accounted for.

Lines end with CRLF, LF or CR, mixed as they come; a blank line ends an event. The events' ``raw`` joined
give the stream back, byte for byte, and do not depend on where the stream was cut.
"""

from __future__ import annotations

import re

import msgspec

from tersely.dialects.wire import raw_json

MAX_EVENT = 32 * 1024 * 1024
BOM = b"\xef\xbb\xbf"

# Atomic groups, so that the two bytes of one CRLF never count as two line ends.
_LEADING_BLANK = re.compile(rb"(?>\r\n|\r|\n)")
_END = re.compile(rb"(?>\r\n|\r|\n)(?>\r\n|\r|\n)")
_LINE_END = re.compile(rb"\r\n|\r|\n")
# Bytes of an event that are looked at again when its rest has come.
_MAX_AGAIN = 4 * 1024
# The form of most events.
_SIMPLE = re.compile(rb"(?:event: ([^\r\n]*+)\n)?data: ([^\r\n]*+)\n\n")


class EventTooLarge(ValueError):
    """An event is over the size limit."""


class SseEvent(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One event. ``data`` is None when it has no data line: comments, heartbeats, blank lines.

    ``raw`` is everything up to and with the blank line; the last event of a stream may lack it.
    """

    raw: bytes
    data: bytes | None = None
    event: str = ""
    is_comment: bool = False

    @property
    def is_whole(self) -> bool:
        """Return whether its blank line has come."""
        return self.raw.endswith((b"\n\n", b"\r\n\r\n", b"\r\r"))


class SseDecoder:
    """Takes bytes and returns whole events. ``limit`` bounds the bytes of an incomplete event."""

    __slots__ = ("_buffer", "_has_cr", "_limit", "_scanned")

    def __init__(self, limit: int = MAX_EVENT) -> None:
        self._buffer = b""
        self._has_cr = False  # without one the ends of lines are found faster
        self._limit = limit
        self._scanned = 0

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """Return the events that ``chunk`` completes. Raises ``EventTooLarge``; then ``close`` returns the rest."""
        if not self._buffer and (simple := _read_simple(chunk)) is not None:
            return [simple]
        self._buffer += chunk
        self._has_cr = self._has_cr or b"\r" in chunk
        events: list[SseEvent] = []
        start = 0
        while (end := self._find_end(start)) > 0:
            events.append(parse_event(self._buffer[start:end]))
            start = end
            self._scanned = 0
        self._buffer = self._buffer[start:]
        # A line end may lie across the cut: its last three bytes are looked at again.
        self._scanned = max(0, len(self._buffer) - 3)
        if len(self._buffer) > self._limit and not events:
            raise EventTooLarge(f"an event is larger than {self._limit} bytes")
        return events

    def close(self) -> list[SseEvent]:
        """Return the last event, when the stream ended without a blank line (or with a bare CR)."""
        rest, self._buffer, self._scanned = self._buffer, b"", 0
        return [parse_event(rest)] if rest else []

    def take_whole(self, block: bytes) -> bytes | None:
        """Return the bytes of the events that ``block`` completes, not taken apart.

        None, and nothing is done: lines may end with a CR, or an event is long.
        """
        if self._has_cr or b"\r" in block or len(self._buffer) > _MAX_AGAIN:
            return None
        block = self._buffer + block
        end = block.rfind(b"\n\n") + 2
        if end < 2:
            end = 0
        self._buffer = block[end:]
        self._scanned = max(0, len(self._buffer) - 3)
        return block[:end]

    def take_back(self, most: int) -> bytes | None:
        """Return the beginning of an event, which is forgotten; None if it has more than ``most`` bytes, or if lines
        may end with a CR.
        """
        if self._has_cr or len(self._buffer) > most:
            return None
        held, self._buffer, self._scanned = self._buffer, b"", 0
        return held

    def _find_end(self, start: int) -> int:
        if not self._has_cr:
            if self._buffer.startswith(b"\n", start):
                return start + 1
            end = self._buffer.find(b"\n\n", start + self._scanned)
            return end if end < 0 else end + 2
        match = _LEADING_BLANK.match(self._buffer, start) or _END.search(self._buffer, start + self._scanned)
        if match is None:
            return -1
        # After a CR at the end of the buffer an LF may follow, which belongs to the same line end.
        if match.end() == len(self._buffer) and self._buffer.endswith(b"\r"):
            return -1
        return match.end()


def parse_events(block: bytes) -> list[SseEvent]:
    """Return the events in a block of whole events."""
    return SseDecoder().feed(block)


def parse_event(raw: bytes) -> SseEvent:
    """Return the fields of one event's bytes."""
    if (simple := _read_simple(raw)) is not None:
        return simple
    data: list[bytes] = []
    event = ""
    is_comment = False
    lines = raw.removeprefix(BOM)
    for line in _LINE_END.split(lines) if b"\r" in lines else lines.split(b"\n"):
        name, colon, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            data.append(value)
        elif name == b"event":
            event = value.decode(errors="replace")
        elif not name and colon:
            is_comment = True
    return SseEvent(raw=raw, data=b"\n".join(data) if data else None, event=event, is_comment=is_comment)


def _read_simple(raw: bytes) -> SseEvent | None:
    """Return the only event in ``raw``, in the form of most events; None for any other form."""
    match = _SIMPLE.fullmatch(raw)
    if match is None:
        return None
    name, value = match.groups(b"")
    return SseEvent(raw=raw, data=value, event=name.decode(errors="replace"))


def with_data(event: SseEvent, data: bytes) -> bytes:
    """Return the bytes of ``event`` with other ``data`` on one line; its other lines, its line ends and its blanks
    stay.
    """
    if event.data and event.raw.count(event.data) == 1:
        return event.raw.replace(event.data, raw_json.like_original(event.data, data))
    line_end = _LINE_END.search(event.raw)
    newline = line_end[0] if line_end else b"\n"
    others = [line for line in _LINE_END.split(event.raw) if line and line.partition(b":")[0] != b"data"]
    # Blanks between the members may be line ends; strings have none.
    return newline.join([*others, b"data: " + _LINE_END.sub(b" ", data), b"", b""])


def beginnings(*types: bytes) -> tuple[bytes, ...]:
    """Return how the first line of an event of one of these types may begin."""
    lines = (b"event: %b", b"event:%b", b'data: {"type":"%b"', b'data: {"type": "%b"', b'data:{"type":"%b"')
    return tuple(line % kind for line in lines for kind in types)


_FIELDS = (b"event", b"id", b"retry")
_OTHER_FIELD = re.compile(rb":|(?:event|id|retry)(?::|\Z)")
_LINE = re.compile(rb"([^\r\n]*)(\r\n|\r|\n|\Z)")


class DataLines:
    """A stream reduced to its ``data`` lines, for clients that fail at comments and at every other field.

    Bytes in, bytes out; the kept lines keep their bytes. An event of which no line is kept loses its blank line too,
    and the stream its byte order mark.
    """

    __slots__ = ("_has_begun", "_has_dropped", "_has_kept", "_held", "_is_dropping", "_is_in_line")

    def __init__(self) -> None:
        self._held = b""
        self._has_begun = False
        self._is_in_line = self._is_dropping = False
        self._has_kept = self._has_dropped = False

    def feed(self, chunk: bytes) -> bytes:
        """Return the bytes that go out now. A line waits until it is known whether it is kept."""
        block, self._held = self._held + chunk, b""
        if not self._has_begun:
            if BOM.startswith(block):
                self._held = block
                return b""
            self._has_begun = True
            block = block.removeprefix(BOM)
        if block.endswith(b"\r"):  # a line feed may follow, which belongs to the same line end
            block, self._held = block[:-1], b"\r"
        out: list[bytes] = []
        for match in _LINE.finditer(block):
            text, end = match.groups()
            if not self._is_in_line:
                if not end and any(name.startswith(text) for name in _FIELDS):
                    self._held = text + self._held
                    break
                if not text:
                    out.append(self._end_event(end))
                    continue
                self._is_dropping = _OTHER_FIELD.match(text) is not None
            if self._is_dropping:
                self._has_dropped = True
            else:
                self._has_kept = True
                out.append(text + end)
            self._is_in_line = not end
        return b"".join(out)

    def close(self) -> bytes:
        """Return the beginning of a line that waited when the stream ended."""
        held, self._held = self._held, b""
        is_kept = self._has_begun and not (self._is_in_line and self._is_dropping)
        return held if is_kept else b""

    def _end_event(self, blank_line: bytes) -> bytes:
        is_emptied = self._has_dropped and not self._has_kept
        self._has_dropped = self._has_kept = False
        return b"" if is_emptied else blank_line
