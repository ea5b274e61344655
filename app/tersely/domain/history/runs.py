"""Sets of sequence numbers as runs: (first, last) pairs, inclusive, ascending, without overlaps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

Run = tuple[int, int]


def runs_of(seqs: Iterable[int]) -> tuple[Run, ...]:
    """Return the runs of ``seqs``."""
    runs: list[Run] = []
    for seq in sorted(set(seqs)):
        if runs and runs[-1][1] == seq - 1:
            runs[-1] = (runs[-1][0], seq)
        else:
            runs.append((seq, seq))
    return tuple(runs)


def subtract(runs: Iterable[Run], others: Iterable[Run]) -> tuple[Run, ...]:
    """Return ``runs`` without ``others``. Both may be unordered and overlap."""
    left: list[Run] = []
    excluded = sorted(others)
    reached = 0
    for start, last in sorted(runs):
        first = max(start, reached)
        reached = max(reached, last + 1)
        left += _outside(first, last, excluded)
    return tuple(left)


def _outside(first: int, last: int, excluded: Iterable[Run]) -> Iterator[Run]:
    for start, end in excluded:
        if first <= end and start <= last:
            if start > first:
                yield first, start - 1
            first = end + 1
    if first <= last:
        yield first, last


def overlap(runs: Iterable[Run], first: int, last: int) -> bool:
    """Return whether ``runs`` hold any number from ``first`` to ``last``."""
    return any(start <= last and end >= first for start, end in runs)
