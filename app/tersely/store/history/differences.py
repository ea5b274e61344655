"""The difference of two texts of bytes: what stands between the beginning and the end that they share."""

from __future__ import annotations

from typing import NamedTuple


class Difference(NamedTuple):
    """``middle`` stands between the first ``prefix`` and the last ``suffix`` bytes of the other text."""

    prefix: int
    suffix: int
    middle: bytes


def difference(old: bytes, new: bytes) -> Difference:
    """Return what turns ``old`` into ``new``."""
    prefix = common_beginning(old, new)
    suffix = common_end(old, new, min(len(old), len(new)) - prefix)
    return Difference(prefix, suffix, new[prefix : len(new) - suffix])


def apply_difference(old: bytes, prefix: int, suffix: int, middle: bytes) -> bytes:
    """Return the text that ``old`` was turned into; the inverse of `difference`."""
    return old[:prefix] + middle + old[len(old) - suffix :]


def common_beginning(one: bytes, other: bytes) -> int:
    """Return with how many equal bytes both begin."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def common_end(one: bytes, other: bytes, most: int) -> int:
    """Return with how many equal bytes both end, at most ``most``."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if one[len(one) - middle : len(one) - low] == other[len(other) - middle : len(other) - low]:
            low = middle
        else:
            high = middle - 1
    return low
