"""Runs of sequence numbers are sets: checked against Python's own."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tersely.domain.history.runs import Run, overlap, runs_of, subtract

numbers = st.integers(1, 40)
sets = st.frozensets(numbers, max_size=25)
any_runs = st.lists(st.tuples(numbers, st.integers(0, 8)).map(lambda run: (run[0], run[0] + run[1])), max_size=6)


def members(runs: tuple[Run, ...] | list[Run]) -> set[int]:
    return {seq for first, last in runs for seq in range(first, last + 1)}


def test_runs_of_joins_neighbours_and_sorts() -> None:
    assert runs_of([5, 1, 2, 2, 7, 6]) == ((1, 2), (5, 7))
    assert runs_of([]) == ()


@given(sets)
def test_runs_of_holds_the_same_numbers_in_the_fewest_runs(seqs: frozenset[int]) -> None:
    runs = runs_of(seqs)

    assert members(runs) == seqs
    assert all(last + 1 < first for (_, last), (first, _) in itertools.pairwise(runs))


@given(any_runs, any_runs)
def test_subtract_is_the_difference_of_sets_whatever_overlaps(runs: list[Run], others: list[Run]) -> None:
    left = subtract(runs, others)

    assert members(left) == members(runs) - members(others)
    assert sum(last - first + 1 for first, last in left) == len(members(left)), "runs of the result overlap"


@given(sets, numbers, st.integers(0, 10))
def test_overlap_finds_any_common_number(seqs: frozenset[int], first: int, length: int) -> None:
    assert overlap(runs_of(seqs), first, first + length) == any(first <= seq <= first + length for seq in seqs)
