"""A text of bytes as pieces of another one.

Clients send a reply back in their own spelling: without members, with members in another order, or as one of several
items. Its long texts are the same. So a patch lists, in order, what is copied from the old text and what is put in
between.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tersely.store.history.differences import common_beginning, common_end, difference

Patch = tuple[int | bytes, ...]
"""Bytes are put in; two numbers in a row, the first and the last + 1, say what is copied. Negative numbers count from
the end, and a second number 0 is the end: so most replies of one client take the same patch, whatever their length.
"""
# A JSON string from its first character on. Shorter ones, such as keys and names, are not worth a copy.
_STRING = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*(?=")', re.DOTALL)
_LONG = 16
# A copy begins at most about so many bytes before its first long string.
_FAR = 4 * 1024
LARGEST = 256 * 1024
"""Bytes. A longer text is compared at its beginning and its end alone."""
NUMBER_BYTES = 3
# So many strings are looked for from the beginning: each time may take a look at the whole text.
MOST_MISSED = 16
# With so few bytes put in, no shorter patch is looked for.
_FEW = 32


def find_patch(old: bytes, new: bytes, most: int) -> Patch | None:
    """Return a patch of at most ``most`` bytes that turns ``old`` into ``new``; None if none was found."""
    prefix, suffix, middle = difference(old, new)
    patch: Patch | None = _patch(old, [(0, prefix), middle, (len(old) - suffix, len(old))])
    assert patch is not None
    size = size_of(patch)
    if size > most:
        patch, size = None, most + 1
    if len(middle) > _FEW and max(len(old), len(new)) <= LARGEST:
        pieces = _pieces(old, new, size - 1)
        other = None if pieces is None else _patch(old, pieces)
        if other is not None and size_of(other) < size and _copied(len(old), other) <= len(old):
            return other
    return patch


def apply_patch(old: bytes, patch: Patch) -> bytes:
    """Return what ``patch`` makes of ``old``. Raises `ValueError` for one that copies more than ``old`` has."""
    if _copied(len(old), patch) > len(old):
        raise ValueError("the patch copies more than there is")
    parts: list[bytes] = []
    numbers: list[int] = []
    for piece in patch:
        if isinstance(piece, bytes):
            parts.append(piece)
            continue
        numbers.append(piece)
        if len(numbers) == 2:
            start, stop = numbers
            parts.append(old[start : stop or None])
            numbers.clear()
    return b"".join(parts)


def size_of(patch: Patch) -> int:
    """Return how many bytes the patch takes where it is stored, about."""
    return sum(NUMBER_BYTES if isinstance(piece, int) else len(piece) for piece in patch)


def puts_in(patch: Patch) -> bool:
    """Return whether bytes of the result are in the patch itself."""
    return any(isinstance(piece, bytes) and piece for piece in patch)


def is_patch(pieces: Sequence[object]) -> bool:
    """Return whether ``pieces`` are bytes and pairs of numbers."""
    kinds = "".join("b" if isinstance(piece, bytes) else "n" if isinstance(piece, int) else "?" for piece in pieces)
    return re.fullmatch("(b|nn)*", kinds) is not None


def _copied(size: int, patch: Patch) -> int:
    numbers = [piece for piece in patch if isinstance(piece, int)]
    return sum(
        len(range(*slice(start, stop or None).indices(size)))
        for start, stop in zip(numbers[::2], numbers[1::2], strict=True)
    )


def _patch(old: bytes, pieces: Sequence[bytes | tuple[int, int]]) -> Patch:
    """Write pieces, of which copies are given by their places in ``old``; empty ones are left out."""
    found: list[int | bytes] = []
    for piece in pieces:
        if isinstance(piece, bytes):
            if piece:
                found.append(piece)
        elif piece[0] < piece[1]:
            found += (_place(piece[0], len(old)), _place(piece[1], len(old)))
    return tuple(found)


def _place(at: int, size: int) -> int:
    """Return a place as the distance from the nearer end."""
    return at if at <= size - at else at - size


def _pieces(old: bytes, new: bytes, most: int) -> list[bytes | tuple[int, int]] | None:
    """Return the pieces of ``new``: places in ``old`` for its long strings, bytes for the text between them.

    None if these take more than ``most`` bytes.
    """
    if (whole := old.find(new)) >= 0:
        return [(whole, whole + len(new))]
    pieces: list[bytes | tuple[int, int]] = []
    position = done = reached = missed = 0
    while (quote := new.find(b'"', position)) >= 0:
        match = _STRING.match(new, quote + 1)
        if match is None:
            break
        start, stop = match.span()
        position = stop + 1
        if start - done > most + _FAR:
            return None
        if start < done or stop - start < _LONG:
            continue
        at = old.find(match[0], reached)
        if at < 0 and reached:
            at = old.find(match[0])
        if at < reached:
            missed += 1
            if missed > MOST_MISSED:
                break
        if at < 0:
            continue
        gap = start - done
        before = common_end(old[max(0, at - gap) : at], new[done:start], min(at, gap))
        length = stop - start
        length += _common_length(old, at + length, new, stop)
        pieces += [new[done : start - before], (at - before, at + length)]
        most -= start - before - done + 2 * NUMBER_BYTES
        if most < 0:
            return None
        done, reached = start + length, at + length
    return [*pieces, new[done:]]


def _common_length(old: bytes, at: int, new: bytes, start: int) -> int:
    """Return how many bytes are the same in both texts from these places on."""
    size = 16
    while old[at : at + size] == new[start : start + size] and start + size < len(new):
        size *= 2
    return common_beginning(old[at : at + size], new[start : start + size])
