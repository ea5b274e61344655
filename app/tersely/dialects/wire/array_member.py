"""Find the end of an array member of a JSON object, so that a body can be extended without parsing it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from tersely.dialects.wire import raw_json

_BLANKS = b" \t\r\n"
_KEY = re.compile(rb'[ \t\r\n]*"[^"\\]*(?:\\.[^"\\]*)*"[ \t\r\n]*:[ \t\r\n]*', re.DOTALL)
_SEPARATOR = re.compile(rb"[ \t\r\n]*[{,]")
_BLANK = re.compile(rb"[ \t\r\n]*")
_array_decoder = msgspec.json.Decoder(list[msgspec.Raw])
# Deeper elements are left to the parser of whole bodies, which reports the limit.
_MAX_OPEN = 400


def find_array(body: bytes, path: Sequence[str]) -> tuple[int, int] | None:
    """Return where the elements of an array in the object ``body`` begin, and the offset behind the last one. ``path``:
    the members that lead to the array.

    None where ``body`` has no such array with an element, or an object on the path names a member twice. O(length).
    """
    start, end = 0, len(body)
    for name in path:
        found = find_member(body[start:end], name)
        if found is None:
            return None
        start, end = start + found[0], start + found[1]
    if body[start : start + 1] != b"[":
        return None
    elements = body[start + 1 : end - 1].rstrip(_BLANKS)
    return (start + 1, start + 1 + len(elements)) if elements else None


def find_array_end(body: bytes, path: Sequence[str]) -> int | None:
    """Return the offset behind the last element, see `find_array`."""
    found = find_array(body, path)
    return None if found is None else found[1]


def find_member(body: bytes, name: str) -> tuple[int, int] | None:
    """Return where the value of the member ``name`` begins and ends; None where there is none, or a member is named
    twice. O(length).
    """
    try:
        members = raw_json.split_object(body)
    except ValueError:
        return None
    found = None
    at = 0
    for key, value in members.items():
        separator = _SEPARATOR.match(body, at)
        start = _KEY.match(body, separator.end()) if separator else None
        if start is None or not body.startswith(value, start.end()):
            return None
        at = start.end() + len(value)
        if key == name:
            found = start.end(), at
    end = _BLANK.match(body, at)
    if end is None or body[end.end() : end.end() + 1] != b"}" or body[end.end() + 1 :].strip(_BLANKS):
        return None  # a member is named twice
    return found


def read_more(more: bytes) -> list[bytes] | None:
    """Return the elements that ``more`` appends to an array: each follows a comma.

    None if ``more`` has another form, or if the parser of whole bodies must decide.
    """
    more = more.lstrip(_BLANKS)
    if not more.startswith(b","):
        return None
    try:
        more.decode()
        items = [bytes(item) for item in _array_decoder.decode(b"[" + more[1:] + b"]")]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    # Code in a text has many brackets, which open nothing.
    if _count_open(more) > _MAX_OPEN and _count_open(_without_strings(more)) > _MAX_OPEN:
        return None
    return items or None


def _without_strings(text: bytes) -> bytes:
    """Return valid JSON without its strings."""
    return b"".join(text.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])


def _count_open(text: bytes) -> int:
    return text.count(b"{") + text.count(b"[")
