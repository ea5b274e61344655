"""`context_search` as flo.monster's "Context Management" prints it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tersely.domain.errors import InvalidRequest
from tersely.domain.history.turns import number_turns
from tersely.domain.messages import Media, Message, Reasoning, Text
from tersely.domain.search.excerpts import (
    NOTHING_FOUND,
    ExcerptRow,
    FirstMessages,
    LastMessages,
    Range,
    TextSearch,
    TurnMessages,
    find_excerpts,
    matches,
    parse_lookup,
    plan_windows,
    render_excerpts,
    render_row,
)
from tests.builders import assistant, call, message, result, user


def rows(*messages: Message) -> list[ExcerptRow]:
    turns = number_turns(messages)
    return [
        ExcerptRow(number=n, turn=t, message=m) for n, (t, m) in enumerate(zip(turns, messages, strict=True), start=1)
    ]


# The document's "Example result", rule "Search Mode - Find Messages by Keyword".
EXAMPLE = """\
--- messages 14-18 of 42 ---
[user t7] Can you make a colour palette?
[assistant t7] I'll create a nature-inspired palette. [tool: dom({action: 'create', ...})]
[tool t7] done
[user t8] Can you make the greens warmer?
[assistant t8] Updated the palette with warmer greens."""


def test_the_example_of_the_document() -> None:
    messages = [
        (7, user("Can you make a colour palette?")),
        (7, assistant("I'll create a nature-inspired palette.", call("1", "dom", {"action": "create", "html": "<p>"}))),
        (7, result("1", "done")),
        (8, user("Can you make the greens warmer?")),
        (8, assistant("Updated the palette with warmer greens.")),
    ]
    shown = [ExcerptRow(number=n, turn=turn, message=m) for n, (turn, m) in enumerate(messages, start=14)]
    ranges = plan_windows([15, 16, 17], before=1, after=1, total=42)
    assert render_excerpts(ranges, shown, 42) == EXAMPLE


def test_ranges_that_overlap_or_touch_are_merged() -> None:
    # 3 and 8 touch (1-5, 6-10), 20 stands alone, 49 runs into the end.
    assert plan_windows([8, 3, 20, 49], before=2, after=2, total=50) == (
        Range(first=1, last=10),
        Range(first=18, last=22),
        Range(first=47, last=50),
    )


@given(st.sets(st.integers(-3, 60)), st.integers(0, 5), st.integers(0, 5), st.integers(0, 50))
def test_windows_cover_exactly_the_neighbours_of_matches(found: set[int], before: int, after: int, total: int) -> None:
    ranges = plan_windows(found, before=before, after=after, total=total)
    covered = [n for r in ranges for n in range(r.first, r.last + 1)]
    real = [p for p in found if 1 <= p <= total]
    assert covered == [n for n in range(1, total + 1) if any(p - before <= n <= p + after for p in real)]
    assert all(a.last + 1 < b.first for a, b in pairwise(ranges))


def test_a_search_looks_at_text_tool_names_inputs_and_results_whatever_the_case() -> None:
    message = assistant("Straße", call("1", "read_file", {"path": "SRC/App.py"}))
    assert all(matches(message, query) for query in ("STRASSE", "Read_File", "src/app"))
    assert matches(result("1", "Found it"), "found IT")
    assert not matches(Message(role="assistant", parts=(Reasoning(text="secret"),), raw=b""), "secret")


def test_the_four_modes_of_a_search() -> None:
    history = rows(user("a"), assistant("b"), user("c"), assistant("d"), user("e"), assistant("f"))
    assert find_excerpts(TextSearch(query="C", before=1, after=0), history) == (Range(first=2, last=3),)
    assert find_excerpts(LastMessages(last=2), history) == (Range(first=5, last=6),)
    assert find_excerpts(FirstMessages(first=99), history) == (Range(first=1, last=6),)
    assert find_excerpts(TurnMessages(turn=2), history) == (Range(first=3, last=4),)
    assert find_excerpts(TurnMessages(turn=2, before=1, after=1), history) == (Range(first=1, last=6),)
    assert find_excerpts(TurnMessages(turn=9), history) == ()
    assert find_excerpts(LastMessages(last=0), history) == ()
    assert render_excerpts((), [], 6) == NOTHING_FOUND


# The document's "Parameters Reference".
@pytest.mark.parametrize(
    ("arguments", "lookup"),
    [
        ({"mode": "search", "query": "x"}, TextSearch(query="x", before=2, after=2)),
        ({"mode": "search", "query": "x", "before": 0, "after": 5.0}, TextSearch(query="x", before=0, after=5)),
        ({"mode": "tail"}, LastMessages(last=10)),
        ({"mode": "head", "first": 3, "query": "", "turnId": None}, FirstMessages(first=3)),
        ({"mode": "turn", "turnId": "t5"}, TurnMessages(turn=5, before=0, after=0)),
        ({"mode": "turn", "turnId": "t5", "before": 2, "after": 1}, TurnMessages(turn=5, before=2, after=1)),
    ],
)
def test_defaults_are_the_documented_ones(arguments: dict[str, object], lookup: object) -> None:
    assert parse_lookup(arguments) == lookup


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({}, "mode"),
        ({"mode": None}, "mode"),
        ({"mode": "grep"}, "mode"),
        ({"mode": ["tail"]}, "mode"),
        ({"mode": "search"}, "query"),
        ({"mode": "search", "query": " "}, "query"),
        ({"mode": "search", "query": 5}, "query"),
        ({"mode": "search", "query": "x" * 1001}, "query"),
        ({"mode": "search", "query": "x", "before": -1}, "before"),
        ({"mode": "search", "query": "x", "after": "2"}, "after"),
        ({"mode": "search", "query": "x", "after": True}, "after"),
        ({"mode": "tail", "last": 1001}, "last"),
        ({"mode": "head", "first": 1.5}, "first"),
        ({"mode": "turn"}, "turnId"),
        ({"mode": "turn", "turnId": 5}, "turnId"),
        ({"mode": "turn", "turnId": "five"}, "turnId"),
        ({"mode": "tail", "lats": 5}, "lats"),
    ],
)
def test_undocumented_parameters_are_refused_by_name(arguments: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_lookup(arguments)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("{}", "{}"),
        ("", "{}"),
        ('{"a": 1}', "{a: 1}"),
        ('{"a-b": "it\'s\\n", "c": 2}', "{'a-b': 'it\\'s\\n', ...}"),
        ("[1, 2]", "[1, 2]"),
        ("{broken", "{broken"),
        ('{"text": "' + "x" * 100 + '"}', "{text: '" + "x" * 77 + "...'}"),
    ],
)
def test_calls_are_shown_with_their_first_argument(arguments: str, shown: str) -> None:
    row = ExcerptRow(number=1, turn=3, message=assistant(None, call("1", "dom", arguments)))
    assert render_row(row) == f"[assistant t3] [tool: dom({shown})]"


def test_media_are_named() -> None:
    row = ExcerptRow(number=1, turn=1, message=message("user", Text(text="look"), Media(kind="image", digest="d")))
    assert render_row(row) == "[user t1] look [image]"
