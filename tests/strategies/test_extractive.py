"""Summaries without a model: bounded, deterministic, never empty, and they say what matters."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tersely.domain.tokens import estimate_text
from tersely.strategies.summaries.extractive import SINCE, digest_result, summarize_without_model
from tersely.strategies.summaries.facts import SECTIONS
from tests.builders import assistant, call, result, user
from tests.strategies.histories import conversations, place

SESSION = place(
    user("Fix the login bug in src/auth.py. Do not touch the schema."),
    assistant("Reading.", call("c1", "read", {"path": "src/auth.py"})),
    result("c1", "collected 3 items\nTypeError: 'NoneType' object is not subscriptable\n  at src/auth.py:45"),
    assistant("I decided to use a guard instead of a try block. TODO: a test for expired tokens."),
    user("Good, port 8484 please"),
    assistant("Running.", call("c2", "bash", {"cmd": "pytest tests/test_auth.py"})),
)


def lines(text: str) -> dict[str, str]:
    """The text of each section of a summary, without the dashes before its lines."""
    sections = (part.partition("\n") for part in text.removeprefix("## ").split("\n## "))
    return {name: body.strip().removeprefix("- ").replace("\n- ", "\n") for name, _, body in sections}


def test_summary_names_requests_decisions_files_errors_and_open_points():
    sections = lines(summarize_without_model(SESSION, limit=500, encode=estimate_text))
    assert list(sections) == list(SECTIONS)
    assert sections["Goals"].startswith("t1: Fix the login bug in src/auth.py. Do not touch the schema.")
    assert "guard instead of a try block" in sections["Decisions"]
    assert "t1: I decided to use a guard" in sections["Done"]
    assert "src/auth.py t1" in sections["Files and names"]
    assert "8484 t2" in sections["Files and names"]
    assert "t1: TypeError: 'NoneType' object is not subscriptable" in sections["Errors"]
    assert "TODO: a test for expired tokens" in sections["Open"]
    assert "no result yet of bash" in sections["Open"]


@pytest.mark.parametrize(
    "earlier",
    [
        summarize_without_model(SESSION[:4], limit=500, encode=estimate_text),
        "## Goal\nShip it\n\n## Decisions\n- JWT, because stateless\n## Next steps\n- write docs\nfree text",
    ],
    ids=["of its own", "of a model"],
)
def test_an_earlier_summary_stands_unchanged_before_the_later_one(earlier: str) -> None:
    text = summarize_without_model(SESSION[4:], limit=500, encode=estimate_text, earlier=earlier)
    front, _, later = text.partition(f"\n\n{SINCE}\n")
    assert front == earlier
    assert lines(later)["Goals"] == "t2: Good, port 8484 please"


def test_of_a_long_history_the_beginning_and_the_newest_are_read():
    history = place(
        *chain.from_iterable(
            (user(f"Do step {n} in src/mod_{n}.py"), assistant(f"I decided it {n}.")) for n in range(3_000)
        )
    )
    text = summarize_without_model(history, limit=2_000, encode=estimate_text)
    assert text == summarize_without_model([*history[:100], *history[-900:]], limit=2_000, encode=estimate_text)
    assert "t1: Do step 0" in text
    assert "I decided it 2999." in text


def test_summaries_of_summaries_do_not_grow():
    text = ""
    for _ in range(30):
        text = summarize_without_model(SESSION, limit=200, encode=estimate_text, earlier=text)
        assert estimate_text(text) <= 200
    assert "Fix the login bug" in text


def test_question_and_unanswered_message_are_open_ends():
    entries = place(user("go"), assistant("Done. Shall I push?"))
    assert "the assistant asked: Shall I push?" in summarize_without_model(entries, limit=200, encode=estimate_text)
    assert "not answered yet" in summarize_without_model(entries[:1], limit=200, encode=estimate_text)


def test_messages_without_words_are_counted():
    silent = place(user(""), assistant(""))
    assert summarize_without_model(silent, limit=100, encode=estimate_text)


def test_no_entries_give_an_empty_summary():
    assert summarize_without_model((), limit=100, encode=estimate_text) == ""


def test_a_tool_result_keeps_its_call_and_both_ends():
    text = digest_result("read src/auth.py", "first\n" + "x" * 5_000 + "\nlast", runes=800)
    assert len(text) <= 800
    assert text.startswith("read src/auth.py\nfirst")
    assert text.endswith("last")
    assert digest_result("", "", runes=800) == "(no output)"


@given(conversations, st.integers(1, 600), st.text(max_size=400))
def test_any_history_gives_a_bounded_text(turns, limit, earlier):
    entries = place(*chain.from_iterable(turns))
    for cut in (0, len(entries) // 2):
        text = summarize_without_model(entries[cut:], limit=limit, encode=estimate_text, earlier=earlier)
        assert text
        assert estimate_text(text) <= limit
        assert text == summarize_without_model(entries[cut:], limit=limit, encode=estimate_text, earlier=earlier)


@given(st.text(max_size=3_000), st.text(max_size=300), st.integers(40, 1_000))
def test_any_result_gives_a_bounded_digest(text, call, runes):
    digest = digest_result(call, text, runes=runes)
    assert digest
    assert len(digest) <= runes
