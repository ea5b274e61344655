"""Find the stored message before each stored message: the chain of a message identifies its branch, equal text does
not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from tersely.domain.history.links import HIDDEN, StoredLink

# Hidden messages in front of a message that are looked at.
MAX_HIDDEN = 64


class Predecessors:
    """The messages before each stored link, in the branches that contain it.

    A live message stands behind the live one before it, besides the one that it was stored behind: a late reply may
    have been placed in between. Hidden messages count as absent too, since clients may omit them or still send them.
    """

    def __init__(self, stored: Sequence[StoredLink], *, is_beginning: bool) -> None:
        """``stored`` are links in order. ``is_beginning``: no link comes before them."""
        self._rows = {row.seq: row for row in stored}
        self._hidden = [row for row in stored if row.status in HIDDEN]
        self._live: dict[int, int] = {}
        before = 0 if is_beginning else None
        for row in stored:
            if row.status == "live":
                if before is not None:
                    self._live[row.seq] = before
                before = row.seq

    def lead(self, before: int, row: StoredLink) -> bool:
        """Return whether message ``before`` (0: none) came directly before ``row``."""
        found = set(self._numbers(row))
        return before in found or not found.isdisjoint(self._before_hidden(before))

    def rows_before(self, row: StoredLink) -> Iterator[StoredLink]:
        """Return the messages that may have come directly before ``row``, the one that it was stored behind first."""
        lower = row.position
        for seq in self._numbers(row):
            before = self._rows.get(seq)
            if before is not None and before.position < row.position:
                lower = min(lower, before.position)
                yield before
        end = bisect_left(self._hidden, row.position, key=lambda each: each.position)
        for hidden in reversed(self._hidden[max(0, end - MAX_HIDDEN) : end]):
            if hidden.position > lower:
                yield hidden

    def _numbers(self, row: StoredLink) -> Iterator[int]:
        if row.follows is not None:
            yield row.follows
            yield from self._before_hidden(row.follows)
        if row.seq in self._live:
            yield self._live[row.seq]

    def _before_hidden(self, seq: int) -> Iterator[int]:
        """Return the numbers of the messages that led to ``seq``, if it is hidden, up to the first that is not."""
        row = self._rows.get(seq)
        while row is not None and row.status in HIDDEN and row.follows is not None and row.follows < row.seq:
            yield row.follows
            row = self._rows.get(row.follows)
