"""Questions about a whole conversation: which they are, where topics start, and which turns cover a session."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tersely.domain.search.cues import is_about_whole
from tersely.domain.search.excerpts import OverviewSearch, RelevanceSearch, parse_lookup
from tersely.domain.search.overview import (
    OTHER_LINE,
    ROOM,
    USER_LINE,
    fit_turns,
    order_turns,
    shorten_line,
    topic_starts,
)
from tersely.domain.search.relevance import Ranked, build_corpus, tokenize

TOPICS = ("garden tomato soil seed", "engine piston valve oil", "violin bow string concert")


def talk(length: int) -> list[list[str]]:
    return [tokenize(topic) for topic in TOPICS for _ in range(length)]


@pytest.mark.parametrize(
    "question",
    [
        "In which order did we discuss the features?",
        "Can you walk me through the order in which I brought up my plans?",
        "Please summarize what we decided so far",
        "Give me a summary of how my plans changed",
        "How has the budget developed over time?",
        "an overview of our project",
    ],
)
def test_questions_about_the_whole_conversation_ask_for_an_overview(question: str) -> None:
    assert is_about_whole(question)
    assert parse_lookup({"mode": "relevant", "query": question}) == OverviewSearch(query=question, most=1_000)
    assert parse_lookup({"mode": "relevant", "query": question, "first": 3}) == OverviewSearch(query=question, most=3)
    arguments = {"mode": "relevant", "query": question, "before": 2}
    assert parse_lookup(arguments) == RelevanceSearch(query=question, before=2)


@pytest.mark.parametrize(
    "question",
    ["When is my order delivered?", "summary.py", "the summary function", "which islands are warm?", "sort in order"],
)
def test_other_questions_do_not(question: str) -> None:
    assert isinstance(parse_lookup({"mode": "relevant", "query": question}), RelevanceSearch)


def test_topics_start_where_the_words_change() -> None:
    assert topic_starts(build_corpus(talk(10))) == [0, 10, 20]
    assert topic_starts(build_corpus([["same", "words"]] * 40)) == [0]
    assert topic_starts(build_corpus([])) == []


@given(st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=6), max_size=60))
def test_topics_start_in_order_and_within_the_session(documents: list[list[str]]) -> None:
    starts = topic_starts(build_corpus(documents))
    assert starts == sorted(set(starts))
    assert starts[:1] == [0][: len(documents)]
    assert all(0 <= start < len(documents) for start in starts)


def test_turns_of_a_topic_count_less_after_each_other() -> None:
    """Turns 0 to 2 are one topic and slightly better than those of the other one: the two take turns."""
    found = [Ranked(number=n, score=9.0 - n / 100) for n in (0, 2, 4, 10, 12)]
    turns = {0: 0, 2: 1, 4: 2, 10: 5, 12: 6}
    assert [*order_turns(found, turns, [0, 8]).items()] == [(0, 0), (5, 10), (1, 2), (6, 12), (2, 4)]
    assert [*order_turns(found, turns, [0])] == [0, 1, 2, 5, 6]
    clearly = [Ranked(number=n, score=9.0 - n) for n in (0, 2, 4, 10, 12)]
    assert [*order_turns(clearly, turns, [0, 8])] == [0, 1, 2, 5, 6]


def test_messages_without_a_turn_are_left_out() -> None:
    found = [Ranked(number=n, score=1.0) for n in (1, 2, 3)]
    assert order_turns(found, {2: 7, 3: 7}, [0]) == {7: 2}


def test_turns_that_fit_come_in_time_order() -> None:
    lines = {9: ["x" * 50], 2: ["y" * 5_000], 4: ["z" * 40, "z"]}
    assert fit_turns(lines, room=200) == [4, 9]
    assert fit_turns(lines) == [2, 4, 9]


@given(st.dictionaries(st.integers(1, 99), st.lists(st.text(max_size=300), max_size=3)))
def test_turns_never_take_more_than_the_room(lines: dict[int, list[str]]) -> None:
    chosen = fit_turns(lines, room=1_000)
    assert sum(len(text) for turn in chosen for text in lines[turn]) <= 1_000 < ROOM


def test_lines_are_cut_and_say_so() -> None:
    assert shorten_line("short\n  and clear", is_users=True) == "short and clear"
    assert shorten_line("word " * 100, is_users=False) == ("word " * 20).strip() + " ..."
    assert len(shorten_line("x" * 10_000, is_users=True)) == USER_LINE + 4
    assert shorten_line(" " * 5_000 + "late", is_users=False).endswith("...")
    assert OTHER_LINE < USER_LINE
