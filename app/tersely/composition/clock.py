"""The clock and the ids of the service: the only place that reads the time."""

from __future__ import annotations

import os
import string
import time
from datetime import UTC, datetime

_DIGITS = string.digits + string.ascii_uppercase + string.ascii_lowercase
# Seconds. Ids of one unit of time stand together in an index.
_UNIT = 256
_TIME_DIGITS = 4
# 83 bits of 88.
_RANDOM_DIGITS = 14
_RANDOM_BYTES = 11


def clock() -> datetime:
    """Return the time."""
    return datetime.now(UTC)


def new_id(kind: str = "s") -> str:
    """Return a new id: sortable by time to a few minutes, unguessable. Those of sessions begin with an ``s``.

    Ids stand in every row and index entry of a session, so they are short: 18 letters and digits.
    """
    at = _write(int(time.time()) // _UNIT, _TIME_DIGITS)
    return f"{kind}{at}{_write(int.from_bytes(os.urandom(_RANDOM_BYTES)), _RANDOM_DIGITS)}"


def _write(number: int, digits: int) -> str:
    """Return the last ``digits`` digits of a number to the base 62."""
    found = []
    for _ in range(digits):
        number, digit = divmod(number, 62)
        found.append(_DIGITS[digit])
    return "".join(reversed(found))
