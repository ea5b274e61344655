"""Count the elements of a body's lists before parsing it.

A body of some megabytes may contain a million messages. To parse them takes minutes and gigabytes; to count them up to
a limit takes less than to parse a permitted body.
"""

from __future__ import annotations

import re

from tersely.domain.errors import TooLarge

# A string (or an unterminated one, so that no part of it is scanned twice), or a structural character.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*"?|[\[\]{},]', re.DOTALL)
_OPENING, _CLOSING, _COMMA = b"[{", b"]}", b","[0]
# Bytes that are searched at once: others have their turn in between.
_SLICE = 512 * 1024
# A nesting that no JSON parser accepts: the parser reports it.
_TOO_DEEP = 2_000


def may_be_too_long(body: bytes, limit: int) -> bool:
    """Return False only where `check_lengths` passes; takes some microseconds for a body of 100 KB."""
    return len(body) > 2 * limit and (len(body) > _SLICE or _count_commas(body, limit) >= limit)


def check_lengths(body: bytes, limit: int) -> None:
    """Raise `TooLarge` where a list or an object in a JSON body has more than ``limit`` elements."""
    if len(body) <= 2 * limit or _count_commas(body, limit) < limit:
        return
    counts = [0]
    for token in _TOKEN.finditer(body):
        sign = body[token.start()]
        if sign == _COMMA:
            counts[-1] += 1
            if counts[-1] >= limit:
                raise TooLarge(
                    f"a list in the request has more than {limit} elements, such as messages: the limit is "
                    "TERSELY_MAX_MESSAGES"
                )
        elif sign in _OPENING:
            counts.append(0)
            if len(counts) > _TOO_DEEP:
                return
        elif sign in _CLOSING and len(counts) > 1:
            counts.pop()


def _count_commas(body: bytes, enough: int) -> int:
    """Return how many commas there are, in texts too; no more than about ``enough`` are counted."""
    count = 0
    for start in range(0, len(body), _SLICE):
        count += body.count(b",", start, start + _SLICE)
        if count >= enough:
            break
    return count
