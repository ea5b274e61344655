"""Which stored message led to which: the chain of a message identifies its branch, equal text does not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tersely.domain.history.links import HIDDEN, StoredLink


class Predecessors:
    """The messages before each stored link, in the branches that contain it.

    A live message stands behind the live one before it, besides the one that it was stored behind: a late reply may
    have been placed in between. Hidden messages count as absent too, since clients may omit them or still send them.
    """

    def __init__(self, stored: Sequence[StoredLink], *, is_beginning: bool) -> None:
        """``stored`` are links in order. ``is_beginning``: no link comes before them."""
        self._rows = {row.seq: row for row in stored}
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
        return before in found or not found.isdisjoint(self._behind_hidden(before))

    def rows_before(self, row: StoredLink) -> Iterator[StoredLink]:
        """Return the messages that came directly before ``row``, the one that it was stored behind first."""
        for seq in self._numbers(row):
            before = self._rows.get(seq)
            if before is not None and before.position < row.position:
                yield before

    def _numbers(self, row: StoredLink) -> Iterator[int]:
        if row.follows is not None:
            yield row.follows
            yield from self._behind_hidden(row.follows)
        if row.seq in self._live:
            yield self._live[row.seq]

    def _behind_hidden(self, seq: int) -> Iterator[int]:
        """Return the number of the first message at or before ``seq`` that is not hidden, if ``seq`` is hidden."""
        row = self._rows.get(seq)
        if row is None or row.status not in HIDDEN:
            return
        while row is not None and row.status in HIDDEN and row.follows is not None and row.follows < row.seq:
            seq = row.follows
            row = self._rows.get(seq)
        yield seq
