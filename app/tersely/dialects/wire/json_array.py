"""Parse a JSON array of objects that arrives in pieces, and keep every byte.

The joined ``raw`` of the elements equals the stream, byte for byte, however it was cut. An object without an array
around it is one element.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tersely.dialects.wire import raw_json
from tersely.dialects.wire.sse import MAX_EVENT, EventTooLarge

_OUTSIDE = re.compile(rb'["{}\[\]]')
_IN_STRING = re.compile(rb'["\\]')


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """``data`` is the object, or None for the text after the last one. ``raw``: the same with the preceding brackets,
    commas and blanks.
    """

    raw: bytes
    data: bytes | None = None

    def with_data(self, data: bytes) -> bytes:
        """Return the element's bytes with another object."""
        before = self.data or b""
        return self.raw[: len(self.raw) - len(before)] + raw_json.like_original(before, data)


class ArrayDecoder:
    """Takes bytes and returns whole elements. ``limit`` bounds the bytes of an incomplete element."""

    __slots__ = ("_begin", "_buffer", "_depth", "_in_string", "_limit", "_outer", "_scanned")

    def __init__(self, limit: int = MAX_EVENT) -> None:
        self._limit = limit
        self._buffer = b""
        self._scanned = 0
        self._depth = 0
        self._outer = 0  # the depth at which the open element began
        self._begin = -1  # where the element began; -1: none is open
        self._in_string = False

    def feed(self, chunk: bytes) -> list[Element]:
        """Return the elements that ``chunk`` completes.

        Raises ``EventTooLarge``; then ``close`` returns the rest.
        """
        self._buffer += chunk
        elements: list[Element] = []
        start = 0
        while (end := self._find_end()) > 0:
            elements.append(Element(raw=self._buffer[start:end], data=self._buffer[self._begin : end]))
            start, self._begin = end, -1
        self._buffer = self._buffer[start:]
        self._scanned -= start
        self._begin -= start if self._begin >= 0 else 0
        if len(self._buffer) > self._limit and not elements:
            raise EventTooLarge(f"an element is larger than {self._limit} bytes")
        return elements

    def close(self) -> list[Element]:
        """Return the bytes behind the last element: the closing bracket, or half an element."""
        rest, self._buffer, self._scanned = self._buffer, b"", 0
        return [Element(raw=rest)] if rest else []

    def _find_end(self) -> int:
        """Scan to the end of the open or next element. Return -1 if it has not arrived."""
        while match := (_IN_STRING if self._in_string else _OUTSIDE).search(self._buffer, self._scanned):
            token = match[0]
            if token == b"\\" and match.end() == len(self._buffer):
                self._scanned = match.start()  # the escaped character is yet to come
                return -1
            self._scanned = match.end() + (token == b"\\")
            if token == b'"':
                self._in_string = not self._in_string
            elif token in b"{[":
                if token == b"{" and self._begin < 0:
                    self._begin, self._outer = match.start(), self._depth
                self._depth += 1
            elif token in b"}]":
                self._depth -= 1
                if self._begin >= 0 and self._depth == self._outer:
                    return self._scanned
        self._scanned = len(self._buffer)
        return -1
