"""Thresholds and split of `compact`, rule by rule of tiancaiamao/ai's "Context Management"."""

from __future__ import annotations

import pytest

from tersely.strategies.pipeline import Draft, run
from tersely.strategies.reduction.compacting import effective_limit, split_by_count, split_by_tokens, tokens_to_keep
from tests.builders import assistant, call, result, user
from tests.strategies.histories import chat, place, work


@pytest.mark.parametrize(
    ("window", "max_tokens", "expected"),
    [(128_000, 8_000, 111_616), (None, 8_000, 8_000), (0, 8_000, 8_000), (None, 0, None), (8_192, 8_000, 4_096)],
)
def test_effective_token_limit(window: int | None, max_tokens: int, expected: int | None) -> None:
    assert effective_limit(window, reserve_tokens=16_384, max_tokens=max_tokens) == expected


def test_keep_recent_tokens_is_clamped_to_half_of_the_limit() -> None:
    assert tokens_to_keep(20_000, 8_000) == 4_000
    assert tokens_to_keep(20_000, 111_616) == 20_000
    assert tokens_to_keep(20_000, None) == 20_000


def test_split_by_tokens_keeps_the_newest_that_fit() -> None:
    history = chat(6, size=400)
    draft = run(Draft(tail=history), (split_by_tokens(300),))
    assert draft.gone
    assert draft.tail[-1] is history[-1]
    assert sum(entry.tokens for entry in draft.tail) <= 300 < sum(entry.tokens for entry in draft.tail) + 130


def test_split_by_count_keeps_the_last_five() -> None:
    assert [entry.seq for entry in run(Draft(tail=chat(6)), (split_by_count(5),)).tail] == [7, 8, 9, 10, 11]


def test_a_split_never_parts_a_call_from_its_result_and_keeps_the_task() -> None:
    draft = run(Draft(tail=work(6)), (split_by_count(3),))
    assert [entry.seq for entry in draft.entries] == [1, 12, 13]


def test_one_message_larger_than_the_budget_stays() -> None:
    history = place(user("a"), assistant("b"), user("c" * 9_000))
    assert [entry.seq for entry in run(Draft(tail=history), (split_by_tokens(10),)).tail] == [3]


def test_a_step_larger_than_the_budget_stays_whole() -> None:
    history = place(user("a"), assistant(None, call("c1")), result("c1", "r" * 9_000))
    assert [entry.seq for entry in run(Draft(tail=history), (split_by_tokens(10),)).entries] == [1, 2, 3]
