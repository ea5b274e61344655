"""Rounds with Tersely's tools, which no client knows of, stay with the reply that they end in."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tersely.domain.history.history import Entry
from tersely.strategies.epochs.cutting import cut_places, cut_to_tokens, must_stay
from tersely.strategies.pipeline import Draft, run
from tersely.strategies.reduction.compacting import split_by_count
from tests.builders import assistant, call, result, user
from tests.strategies.histories import place


def history(*, pinned: frozenset[int] = frozenset()) -> tuple[Entry, ...]:
    """Two questions, the first of which is answered after two rounds: messages 2 to 5."""
    placed = place(
        user("Where was it?"),
        assistant(None, call("1", "context_search", {"query": "it"})),
        result("1", "in the first message"),
        assistant(None, call("2", "context_search", {"query": "first"})),
        result("2", "here"),
        assistant("It was here."),
        user("Thank you."),
        pinned=pinned,
    )
    return tuple(replace(entry, is_ours=2 <= entry.seq <= 5) for entry in placed)


def test_no_cut_parts_them() -> None:
    assert [history()[index].seq for index in cut_places(history())] == [1, 2, 7]
    for target in range(sum(entry.tokens for entry in history())):
        assert cut_to_tokens((), history(), target=target, recent_turns=1).first in (1, 2, 7)


@pytest.mark.parametrize("count", range(1, 8))
def test_no_split_parts_them(count: int) -> None:
    tail = run(Draft(tail=history()), (split_by_count(count),)).tail
    assert tail[0].seq in (1, 2, 7)


def test_a_pinned_reply_brings_them() -> None:
    entries = history(pinned=frozenset({6}))
    assert [entry.seq for entry in must_stay((), entries)] == [2, 3, 4, 5, 6, 7]
