"""Convert between sequence numbers and message numbers, which count the visible messages from 1, without the history.

Sequence numbers are gapless, and nearly every message follows the one before it. So the few exceptions (hidden
messages, replies placed between older messages) are enough for the conversion.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

import msgspec


class NumberingException(msgspec.Struct, frozen=True, kw_only=True):
    """A message that is hidden, or whose position is not its sequence number."""

    seq: int
    position: float
    is_hidden: bool


class MessageNumbers:
    """The visible messages of a session of ``last_seq`` messages, in order of position, then sequence number.

    Every method takes logarithmic time. ``exceptions`` may come in any order.
    """

    __slots__ = ("_between", "_between_at", "_exceptions", "_last_seq", "total")

    def __init__(self, last_seq: int, exceptions: Iterable[NumberingException]) -> None:
        # Messages that were stored after `last_seq` was read do not count.
        found = [each for each in exceptions if each.seq <= last_seq]
        self._last_seq = last_seq
        self._exceptions = sorted(each.seq for each in found)
        self._between = sorted((each.position, each.seq) for each in found if not each.is_hidden)
        self.total = last_seq - len(self._exceptions) + len(self._between)
        # The n-th message between them (from 0 on) has n predecessors of its kind.
        self._between_at = [self._regular_up_to(*key) + n + 1 for n, key in enumerate(self._between)]

    def count_up_to(self, position: float, seq: int) -> int:
        """Return how many visible messages are at or before a position of the history."""
        return self._regular_up_to(position, seq) + bisect_right(self._between, (position, seq))

    def number_of(self, seq: int) -> int | None:
        """Return the number of a message; None for a hidden or missing one."""
        if not 1 <= seq <= self._last_seq:
            return None
        at = bisect_left(self._exceptions, seq)
        if at == len(self._exceptions) or self._exceptions[at] != seq:
            return self.count_up_to(float(seq), seq)
        return next((self.count_up_to(*key) for key in self._between if key[1] == seq), None)

    def seq_at(self, number: int) -> int:
        """Return the sequence number of message ``number``, which must be from 1 to ``total``."""
        n = bisect_left(self._between_at, number)
        if n < len(self._between_at) and self._between_at[n] == number:
            return self._between[n][1]
        return self._regular(number - n)

    def seqs(self, first: int, last: int) -> Sequence[int]:
        """Return the sequence numbers of messages ``first`` to ``last``, as far as they exist."""
        return [self.seq_at(position) for position in range(max(1, first), min(last, self.total) + 1)]

    def _regular_up_to(self, position: float, seq: int) -> int:
        """Return how many messages whose position equals their number are at or before a position."""
        number = min(int(position), self._last_seq)
        if number == position and number > seq:
            number -= 1
        return number - bisect_right(self._exceptions, number)

    def _regular(self, count: int) -> int:
        """Return the ``count``-th of the messages whose position is their number."""
        low, high = count, min(self._last_seq, count + len(self._exceptions))
        while low < high:
            middle = (low + high) // 2
            if middle - bisect_right(self._exceptions, middle) < count:
                low = middle + 1
            else:
                high = middle
        return low
