"""Scores, levels and situations, rule by rule of Fifth's "Context Manager"."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
from msgspec.structs import replace

from tersely.domain.history.history import IMPORTANT, PastTurn
from tersely.domain.history.turns import Turn, group_turns
from tersely.strategies.reduction.levels import Score, is_older, recency, score_turns
from tersely.strategies.retrieval_rules import error_signatures, past_topics, repeated_errors
from tests.builders import assistant, call, result, user
from tests.strategies.histories import START, place


def turns(*texts: str) -> tuple[Turn, ...]:
    return group_turns(place(*[user(text) for text in texts]))


def bring_back(turn: Turn, relevance: float = 0.0) -> PastTurn:
    return PastTurn(turn=turn.number, entries=turn.entries, relevance=relevance)


def test_priority_scoring_weights() -> None:
    assert Score(recency=1, references=0, relevance=0, explicit=0).total == pytest.approx(0.3)
    assert Score(recency=0, references=1, relevance=0, explicit=0).total == pytest.approx(0.2)
    assert Score(recency=0, references=0, relevance=1, explicit=0).total == pytest.approx(0.4)
    assert Score(recency=0, references=0, relevance=0, explicit=1).total == pytest.approx(0.1)


@pytest.mark.parametrize(("minutes", "expected"), [(0, 1.0), (1, 0.5), (9, 0.1), (-5, 1.0)])
def test_recency_is_one_over_one_plus_minutes(minutes: int, expected: float) -> None:
    assert recency(START, START + timedelta(minutes=minutes)) == pytest.approx(expected)


def test_references_are_later_mentions_over_all_mentions() -> None:
    history = turns("write src/app.py", "run src/app.py and src/app.py", "rest")
    scores = score_turns(history, {}, START)
    assert scores[1].references == pytest.approx(2 / 3)
    assert scores[2].references == 0
    assert scores[3].references == 0


def test_scores_of_many_turns_cost_no_more_than_their_number() -> None:
    history = turns(*(" ".join(f"src/module_{n}_{i}.py" for i in range(10)) for n in range(3_000)))
    started = time.process_time()
    assert len(score_turns(history, {}, START)) == 3_000
    # What counts all names anew for each turn takes some ten times as long.
    assert time.process_time() - started < 2


def test_relevance_is_given_and_bounded() -> None:
    scores = score_turns(turns("a", "b"), {1: 0.7, 2: 9.0}, START)
    assert (scores[1].relevance, scores[2].relevance) == (0.7, 1.0)


def test_explicit_is_one_if_marked_important() -> None:
    history = place(user("a"), user("b"), user("c"))
    marked = (history[0], replace(history[1], priority=IMPORTANT), replace(history[2], pinned=True))
    assert [score.explicit for score in score_turns(group_turns(marked), {}, START).values()] == [0, 1, 1]


def test_levels_by_age() -> None:
    (turn,) = turns("a")
    assert not is_older(turn, 300, START + timedelta(seconds=300))
    assert is_older(turn, 300, START + timedelta(seconds=301))


def test_a_past_topic_is_expanded_the_rest_stays_away() -> None:
    first, second, third = turns("a", "b", "c")
    past = [bring_back(first, 0.9), bring_back(second, 0.3), bring_back(third, 0.1)]
    assert past_topics(past) == (1,)


def test_a_repeating_error_brings_back_the_turn_that_met_it() -> None:
    failing = "Traceback (most recent call last)\nValueError: invalid literal for int() with base 10: '%s' at line %d"
    history = place(
        user("run it"),
        assistant(None, call("c1")),
        result("c1", failing % ("x", 3)),
        assistant("fixed by stripping"),
        user("again"),
        assistant(None, call("c2")),
        result("c2", failing % ("yy", 14)),
    )
    before, running = group_turns(history)
    assert repeated_errors(running.entries, [bring_back(before)]) == (1,)
    assert repeated_errors(running.entries[:1], [bring_back(before)]) == ()


def test_error_signatures_are_bounded_in_time_and_number() -> None:
    huge = "error: " + "a" * 5_000_000 + "\n" + "\n".join(f"error: kind{'z' * i}" for i in range(100))
    assert 0 < len(error_signatures(result("c1", huge))) <= 20
