"""Positions: where a message stands in the history as it is seen, without reading the history.

Sequence numbers are gapless, and nearly every message is simply the next one of its history. So the few exceptions
(hidden messages, replies that were put between older ones) are enough to convert between sequence numbers and
positions, which count what can be seen from 1 on.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Exceptional:
    """A message that is not seen, or whose place is not its sequence number."""

    seq: int
    place: float
    is_hidden: bool


class Positions:
    """The seen messages of a session of ``last_seq`` messages, in order of place, then sequence number.

    Every method takes logarithmic time; ``exceptions`` may come in any order.
    """

    __slots__ = ("_between", "_between_at", "_exceptions", "_last_seq", "total")

    def __init__(self, last_seq: int, exceptions: Iterable[Exceptional]) -> None:
        # What came after `last_seq` was read is not looked at.
        found = [each for each in exceptions if each.seq <= last_seq]
        self._last_seq = last_seq
        self._exceptions = sorted(each.seq for each in found)
        self._between = sorted((each.place, each.seq) for each in found if not each.is_hidden)
        self.total = last_seq - len(self._exceptions) + len(self._between)
        # The n-th of those between (from 0 on) has n of its kind before it.
        self._between_at = [self._regular_up_to(*key) + n + 1 for n, key in enumerate(self._between)]

    def up_to(self, place: float, seq: int) -> int:
        """How many seen messages stand at or before that point of the history."""
        return self._regular_up_to(place, seq) + bisect_right(self._between, (place, seq))

    def of(self, seq: int) -> int | None:
        """The position of a message; None for one that is not seen or not there."""
        if not 1 <= seq <= self._last_seq:
            return None
        at = bisect_left(self._exceptions, seq)
        if at == len(self._exceptions) or self._exceptions[at] != seq:
            return self.up_to(float(seq), seq)
        return next((self.up_to(*key) for key in self._between if key[1] == seq), None)

    def seq_at(self, position: int) -> int:
        """The sequence number of the message at ``position``, which must be from 1 to ``total``."""
        n = bisect_left(self._between_at, position)
        if n < len(self._between_at) and self._between_at[n] == position:
            return self._between[n][1]
        return self._regular(position - n)

    def seqs(self, first: int, last: int) -> Sequence[int]:
        """The sequence numbers at the positions ``first`` to ``last``, as far as there are such."""
        return [self.seq_at(position) for position in range(max(1, first), min(last, self.total) + 1)]

    def _regular_up_to(self, place: float, seq: int) -> int:
        """Of the messages whose place is their number, how many stand at or before that point."""
        number = min(int(place), self._last_seq)
        if number == place and number > seq:
            number -= 1
        return number - bisect_right(self._exceptions, number)

    def _regular(self, count: int) -> int:
        """The ``count``-th of the messages whose place is their number."""
        low, high = count, min(self._last_seq, count + len(self._exceptions))
        while low < high:
            middle = (low + high) // 2
            if middle - bisect_right(self._exceptions, middle) < count:
                low = middle + 1
            else:
                high = middle
        return low
