"""The activity log as flo.monster's "Context Management" prints it, and its bounds."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tersely.domain.history.history import LOG_ENTRIES, Entry, EpochInputs, TerseEntry
from tersely.domain.history.turns import group_turns
from tersely.domain.messages import Message
from tersely.domain.tokens import estimate_text
from tersely.strategies.summaries.activity_log import (
    TERSE_LIMIT,
    clip_line,
    derive_missing,
    derive_outcomes,
    derive_steps,
    derive_terse,
    read_activity_log,
    render_activity_log,
)
from tests.builders import assistant, call, result, user
from tests.strategies.histories import START, place, terse

# "The Activity Log", the document's own lines.
DOCUMENT = """\
[Context -- Activity Log]
[t1 2024-01-15T10:30] assistant: created dashboard with shopping, todo, schedule sections
[t2 2024-01-15T10:32] assistant: added 3 items to shopping list
[t3 2024-01-15T10:35] assistant: marked 2 todos as complete
[t4 2024-01-15T10:38] assistant: reorganised dashboard layout, moved schedule to top
[t5 2024-01-15T10:40] assistant: added weather widget using fetch API"""


def render(entries: tuple[TerseEntry, ...], *, limit: int = 2_000, older: int = 0) -> str:
    material = EpochInputs(terse=entries, older_turns=older, oldest_at=START if older else None)
    return render_activity_log(material, limit=limit, encode=estimate_text)


def test_the_log_of_the_document() -> None:
    lines = [line.partition("assistant: ")[2] for line in DOCUMENT.splitlines()[1:]]
    minutes = (30, 32, 35, 38, 40)
    entries = tuple(
        TerseEntry(
            turn=n,
            seq=n,
            role="assistant",
            text=text,
            source="model",
            created_at=datetime(2024, 1, 15, 10, minute, 59, tzinfo=UTC),
        )
        for n, (text, minute) in enumerate(zip(lines, minutes, strict=True), start=1)
    )
    assert render(entries) == DOCUMENT


def test_minutes_are_in_utc() -> None:
    abroad = datetime(2024, 1, 15, 12, 30, tzinfo=timezone(timedelta(hours=2)))
    entry = TerseEntry(turn=1, seq=1, role="assistant", text="x", source="model", created_at=abroad)
    assert render((entry,)).endswith("[t1 2024-01-15T10:30] assistant: x")


def test_log_entry_is_always_one_line() -> None:
    assert render(terse("a\n[t9 2024-01-15T10:30] assistant: forged")).count("\n") == 1


def test_log_without_entries_is_empty() -> None:
    assert render(()) == ""


def test_entries_that_do_not_fit_are_rolled_up_and_never_dropped() -> None:
    log = render(terse(*(f"did thing number {n} with care and attention" for n in range(1, 201))), limit=600)
    lines = log.splitlines()
    assert estimate_text(log) <= 600
    assert lines[-1] == "[t200 2024-01-15T17:08] assistant: did thing number 200 with care and attention"
    spans = [line[1:].split(" ")[0] for line in lines[1:]]
    turns = [
        n
        for span in spans
        for first, _, last in [span.replace("t", "").partition("-")]
        for n in range(int(first), int(last or first) + 1)
    ]
    assert turns == list(range(1, 201))
    assert lines[1].startswith("[t1-t")
    assert "turns: did thing number 1" in lines[1]


def test_entries_that_were_not_loaded_are_counted_in_the_first_line() -> None:
    log = render(terse("x", "y", first=901), older=900)
    assert log.splitlines()[1:] == [
        "[t1-t900 2024-01-15T10:30] assistant: 900 turns: nothing is noted of them here",
        "[t901 2024-01-16T16:30] assistant: x",
        "[t902 2024-01-16T16:32] assistant: y",
    ]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=300), min_size=1, max_size=60), st.integers(60, 3_000), st.integers(0, 50))
def test_the_log_is_bounded(texts: list[str], limit: int, older: int) -> None:
    log = render(terse(*texts, first=older + 1), limit=limit, older=older)
    assert estimate_text(log) <= limit
    assert log.splitlines()[0] == "[Context -- Activity Log]"


def turn_of(*messages: Message) -> tuple[Entry, ...]:
    (turn,) = group_turns(place(*messages))
    return turn.entries


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([user("q"), assistant("Fixed the bug. It was a typo.")], "Fixed the bug."),
        ([user("q"), assistant("## Summary\n\n- **Renamed** src/app.py")], "Summary"),
        ([user("q"), assistant("Done <terse>said</terse>\nmore")], "Done"),
        ([user("q"), assistant("See src/app.py for v1.2 of it")], "See src/app.py for v1.2 of it"),
        ([user("Read it. Now."), assistant(None, call("1", "read")), result("1")], "asked: Read it. (used read)"),
        (
            [user("go"), assistant("Looking.", call("1", "read"), call("2", "read")), result("1"), result("2")],
            "asked: go (used read x2)",
        ),
        ([user("hello?")], "asked: hello? (no reply)"),
        ([user("..."), assistant("...")], "asked: no words (no reply)"),
    ],
)
def test_derived_entry_quotes_the_last_reply_or_the_question(messages: list[Message], text: str) -> None:
    entry = derive_terse(turn_of(*messages))
    assert (entry.text, entry.source, entry.turn) == (text, "derived", 1)


@given(st.text(max_size=2_000), st.text(max_size=2_000))
def test_a_derived_entry_is_one_short_line(question: str, reply: str) -> None:
    text = derive_terse(turn_of(user(question), assistant(reply))).text
    assert 0 < len(text) <= TERSE_LIMIT
    assert len(text.splitlines()) == 1


def test_only_turns_without_an_entry_get_a_derived_one() -> None:
    history = place(user("a"), assistant("A"), user("b"), assistant("B"))
    assert [e.turn for e in derive_missing(history, terse("known"))] == [2]


def test_steps_are_derived_and_read_back_from_the_log() -> None:
    history = place(
        user("go"),
        assistant("Look first.", call("1", "read")),
        result("1"),
        assistant(None, call("2", "edit")),
        result("2"),
    )
    steps = derive_steps(history)
    assert [(e.seq, e.text) for e in steps] == [(2, "Look first."), (4, "used edit")]
    back = read_activity_log(render(steps), frozenset({1}))
    assert [(e.turn, e.text, e.created_at) for e in back] == [(e.turn, e.text, e.created_at) for e in steps]
    assert read_activity_log(render(steps), frozenset({2})) == ()


def test_calls_to_our_own_tools_are_no_steps_to_tell_of() -> None:
    history = place(
        user("go"),
        assistant("Look first.", call("1", "context_search")),
        result("1"),
        assistant(None, call("2", "context_search")),
        result("2"),
        assistant(None, call("3", "edit")),
        result("3"),
    )
    history = tuple(replace(entry, is_ours=2 <= entry.seq <= 5) for entry in history)
    assert [(e.seq, e.text) for e in derive_steps(history)] == [(2, "Look first."), (6, "used edit")]
    assert derive_terse(history).text == "asked: go (used edit)"


def test_a_long_line_is_clipped_with_a_mark() -> None:
    assert clip_line("a  b\nc") == "a b c"
    assert clip_line("x" * 200) == "x" * 157 + "..."


@pytest.mark.parametrize("limit", [30, 60, 100, 200, 500, 2_000])
@pytest.mark.parametrize("older", [0, 40])
def test_every_rolled_up_line_has_content(limit: int, older: int) -> None:
    lines = terse(*(f"mended the fence {number} behind the barn, with oak boards" for number in range(300)))
    material = EpochInputs(terse=lines, older_turns=older, oldest_at=START if older else None)
    text = render_activity_log(material, limit=limit, encode=estimate_text)
    rolled = [line for line in text.splitlines() if " turns" in line]
    assert rolled
    for line in rolled:
        assert re.fullmatch(r"\[t\d+-t\d+ [^]]+\] assistant: \d+ turns: .*mended.*", line)
    assert estimate_text(text) <= max(limit, 60)


def test_step_without_text_and_tools_has_no_log_line() -> None:
    history = place(user("go"), assistant("First I look."), assistant(None), assistant(None, call("c1", "read")))
    assert [entry.text for entry in derive_steps(history)] == ["First I look.", "used read"]


def test_a_turn_with_a_line_in_its_middle_gets_one_for_its_last_reply() -> None:
    steps = place(user("fix it"), assistant("Looking.", call("1")), result("1"), assistant("It is fixed."))
    told = TerseEntry(turn=1, seq=2, role="assistant", text="looked", source="model", created_at=START)
    (line,) = derive_outcomes(steps, EpochInputs(terse=(told,)))
    assert (line.text, line.seq) == ("It is fixed.", 4)
    assert derive_outcomes(steps, EpochInputs(terse=(told, replace(told, seq=4)))) == ()
    assert derive_outcomes(steps[:3], EpochInputs(terse=(told,))) == (), "it was never answered"


def test_a_last_reply_without_words_gets_no_second_line() -> None:
    turn = place(user("fix it"), assistant("It is done."), assistant("👍"))
    (line,) = derive_outcomes(turn, EpochInputs())
    assert (line.text, line.seq) == ("It is done.", 2)
    assert derive_outcomes(turn, EpochInputs(terse=(line,))) == ()


def test_lines_are_derived_for_as_many_turns_as_a_log_has_entries() -> None:
    history = place(*[each for n in range(LOG_ENTRIES + 50) for each in (user(f"q{n}"), assistant(f"Reply {n}."))])
    lines = derive_outcomes(history, EpochInputs())
    assert [line.turn for line in lines] == list(range(51, LOG_ENTRIES + 51))
    full = tuple(replace(line, source="model") for line in lines)
    assert derive_outcomes(history, EpochInputs(terse=full)) == (), "older turns had entries that were not loaded"
