"""Identifiers: which texts count as one, how candidates are ranked and carried, and how the index is written."""

from __future__ import annotations

import re
from time import perf_counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tersely.domain.history.history import Entry, Reference
from tersely.domain.tokens import estimate_text
from tersely.strategies.summaries.references import (
    MAX_CANDIDATES,
    extract_identifiers,
    gather,
    render_references,
    visible_names,
)
from tests.builders import assistant, call, result, user
from tests.strategies.histories import place, work


@pytest.mark.parametrize(
    "name",
    [
        "src/app.py",
        "/etc/hosts",
        "./run.sh",
        "../lib/x.ts",
        "~/notes/a.md",
        "src/app.py:42",
        "https://example.org/a/b?c=1",
        "main.py",
        "os.path.join",
        "get_user_details",
        "TuiRenderer",
        "omar_rossi_1241",
        "HAT001",
        "4OG6T3",
        "call_bBCSl18JfUFYImNzDOraInzM",
        "88c82f6",
        "550e8400-e29b-41d4-a716-446655440000",
        "user@example.org",
        "fix-the-log",
        "#4321",
        "84720",
        "API_KEY",
    ],
)
def test_identifiers_of_a_text(name: str) -> None:
    assert extract_identifiers(f"see ({name}), then go on.") == [name]
    assert extract_identifiers(f'"{name}"') == [name]


@pytest.mark.parametrize(
    "words", ["and so on.", "I/O or", "it was 12 of 999", "Yes. No, e.g. this", "well-known", "a = b", "=====", "3.14"]
)
def test_ordinary_words_and_small_numbers_are_no_identifiers(words: str) -> None:
    assert [name for name in extract_identifiers(words) if name != "I/O"] == []


def test_names_the_model_pointed_at_come_first_then_the_late_then_the_frequent() -> None:
    history = place(
        user("look at early_name and often_name"),
        assistant("often_name often_name", call("1", "read", {"path": "used_name"})),
        result("1", "late_name"),
    )
    assert [r.text for r in gather((), history)] == ["used_name", "late_name", "often_name", "early_name"]


def test_paths_come_before_names_that_the_model_used() -> None:
    history = place(
        user("look at src/listed.py, src/app.py:42 and src/late.py"),
        assistant(None, call("1", "run", {"x": "used_name"})),
    )
    assert [r.text for r in gather((), history)] == ["src/late.py", "src/listed.py", "used_name", "src/app.py:42"]


def test_a_name_in_a_long_argument_was_not_pointed_at() -> None:
    written = "x " * 300 + "inner_name"
    history = place(user("go"), assistant(None, call("1", "write", {"path": "outer_name", "content": written})))
    assert {r.text: r.used_by_model for r in gather((), history)} == {"outer_name": True, "inner_name": False}


def test_arguments_are_read_without_their_escapes() -> None:
    history = place(
        user("go"), assistant(None, call("1", "run", {"cmd": "cd a_b\nrun c_d"}), call("2", "run", '{"bad\\nx_y'))
    )
    assert {r.text for r in gather((), history)} == {"a_b", "c_d", "x_y"}


def test_candidates_are_merged_with_those_carried_on() -> None:
    known = (Reference(text="a_b", turn=1, last_seq=2, mentions=3, used_by_model=True),)
    (merged,) = gather(known, place(user("x"), user("a_b again")))
    assert merged == Reference(text="a_b", turn=2, last_seq=2, mentions=4, used_by_model=True)


def test_calls_of_our_own_tools_are_no_mentions() -> None:
    history = place(user("see src/app.py"), assistant(None, call("1", "context_search", {"query": "src/late.py"})))
    entries = [*history[:1], *(replace(entry, is_ours=True) for entry in history[1:])]
    assert [each.text for each in gather((), entries)] == ["src/app.py"]


def test_gathering_in_two_goes_is_gathering_in_one() -> None:
    history = work(30)
    assert gather(gather((), history[:31]), history[31:]) == gather((), history)


def test_candidates_are_bounded() -> None:
    history = place(user(" ".join(f"name_{n}" for n in range(3 * MAX_CANDIDATES))))
    assert len(gather((), history)) == MAX_CANDIDATES


def index(references: tuple[Reference, ...], **values: object) -> list[str]:
    options: dict[str, Any] = {"title": "[Index]", "limit": 500, "encode": estimate_text} | values
    return render_references(references, **options).splitlines()


def test_the_index_has_one_line_per_turn() -> None:
    history = place(user("src/app.py and some_name"), user("src/b.py"))
    assert index(gather((), history)) == ["[Index]", "t1: src/app.py some_name", "t2: src/b.py"]
    assert index(gather((), history), shown=visible_names(history[1:])) == ["[Index]", "t1: src/app.py some_name"]
    assert index(gather((), history), head="read src/app.py") == ["[Index]", "t1: some_name", "t2: src/b.py"]
    assert index(gather((), history), limit=3) == []


def test_a_name_inside_a_longer_listed_name_is_not_repeated() -> None:
    known = (Reference(text="src/deep/app.py", turn=3, last_seq=9, mentions=9, used_by_model=True),)
    assert index(gather(known, place(user("app.py other.py")))) == ["[Index]", "t1: other.py", "t3: src/deep/app.py"]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.text(max_size=200), max_size=20), st.integers(0, 300))
def test_the_index_is_bounded_and_names_never_break_a_line(texts: list[str], limit: int) -> None:
    references = gather((), place(*(user(text + " some_name") for text in texts)))
    lines = index(references, limit=limit)
    assert estimate_text("\n".join(lines)) <= limit
    assert all(re.fullmatch(r"t\d+:( \S+)+", line) for line in lines[1:])


@pytest.mark.parametrize(
    "text", ["-" * 10**6, "a/" * 10**5 + "!", "=" * 10**5, "x." * 10**5, "A1" * 10**5, "/" * 10**5 + "a"]
)
def test_no_text_makes_extraction_slow(text: str) -> None:
    started = perf_counter()
    assert extract_identifiers(text) == []
    assert perf_counter() - started < 1


def test_a_tail_of_32k_tokens_is_indexed_in_milliseconds() -> None:
    history: tuple[Entry, ...] = work(60, size=0)
    text = " ".join(f"word{n % 97} src/mod_{n % 500}/file.py plain words between them" for n in range(2_500))
    long = place(user(text), *(e.message for e in history))
    best = min(_timed(long) for _ in range(3))
    assert best < 0.25


def _timed(history: tuple[Entry, ...]) -> float:
    started = perf_counter()
    gather((), history)
    return perf_counter() - started
