"""Beginnings and ends of texts, cut so that no character is torn: accents, joined emoji and line ends stay whole.

Sizes are code points of Python's strings.
"""

from __future__ import annotations

import unicodedata

_JOINER = "\u200d"
# A cut moves back at most so far: text can be made of nothing but accents.
_LONGEST = 32


def head(text: str, chars: int) -> str:
    """Return the beginning of ``text``, at most ``chars`` long."""
    return text[: _break_before(text, chars)]


def tail(text: str, chars: int) -> str:
    """Return the end of ``text``, at most ``chars`` long."""
    if chars <= 0:
        return ""
    start = max(0, len(text) - chars)
    end = min(len(text), start + _LONGEST)
    return text[next((at for at in range(start, end) if not _is_inside(text, at)), start) :]


def ends(text: str, chars: int, marker: str) -> str:
    """Beginning and end of ``text`` around ``marker``, in all at most ``chars`` long; whole where it fits.

    Where not even the marker fits, as much of the beginning as does.
    """
    if len(text) <= chars:
        return text
    room = chars - len(marker)
    if room <= 0:
        return head(text, chars)
    return head(text, room - room // 2) + marker + tail(text, room // 2)


def head_bytes(text: str, limit: int) -> str:
    """Return the beginning of ``text``, at most ``limit`` bytes in UTF-8; a lone surrogate counts three."""
    encoded = text.encode("utf-8", "surrogatepass")
    if len(encoded) <= limit:
        return text
    at = max(0, limit)
    while at > 0 and encoded[at] & 0xC0 == 0x80:
        at -= 1
    return head(text, len(encoded[:at].decode("utf-8", "surrogatepass")))


def count_bytes(text: str) -> int:
    """Bytes of ``text`` in UTF-8; a lone surrogate counts three."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _break_before(text: str, at: int) -> int:
    if at <= 0 or at >= len(text):
        return max(0, at)
    first = max(0, at - _LONGEST)
    return next((index for index in range(at, first, -1) if not _is_inside(text, index)), at)


def _is_inside(text: str, at: int) -> bool:
    """Return whether a cut before ``text[at]`` would split one visible character."""
    if not 0 < at < len(text):
        return False
    before, after = text[at - 1], text[at]
    if before == "\r":
        return after == "\n"
    if after < "\u0300":
        return False
    if "\ud800" <= before <= "\udbff" and "\udc00" <= after <= "\udfff":
        return True
    return before == _JOINER or after == _JOINER or unicodedata.category(after).startswith("M") or _is_skin(after)


def _is_skin(char: str) -> bool:
    return "\U0001f3fb" <= char <= "\U0001f3ff"
