"""Calls and results: what is mended, that the outcome is valid, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tersely.domain.history.history import Entry
from tersely.domain.history.pairing import EMPTY_MESSAGE, NO_RESULT, UnpairedMessages, prove_pairing, repair, safe_cuts
from tersely.domain.messages import Message, Part, Reasoning, Text, ToolCall, ToolResult
from tests.builders import assistant, call, result, system, user

NOW = datetime(2024, 1, 15, 10, 30, tzinfo=UTC)


def entries(*messages: Message) -> tuple[Entry, ...]:
    return tuple(
        Entry(seq=seq, turn=1, message=message, tokens=10, created_at=NOW)
        for seq, message in enumerate(messages, start=1)
    )


def shape(mended: Sequence[Entry]) -> list[str]:
    """One line per message: role, words, calls, results; ``*`` marks what was synthesised."""
    lines = []
    for entry in mended:
        message = entry.message
        words = [message.text] if message.text else []
        words += [f"call {c.id}" for c in message.calls]
        words += [f"{r.call_id}={r.text}" for r in message.results]
        lines.append(f"{'' if message.raw else '*'}{message.role}: {', '.join(words)}")
    return lines


def mends(*messages: Message) -> tuple[list[str], list[tuple[str, str, int]]]:
    mended, repairs = repair(entries(*messages))
    prove_pairing([entry.message for entry in mended])
    return shape(mended), [(r.kind, r.call_id, r.seq) for r in repairs]


def test_valid_history_is_unchanged_by_pairing() -> None:
    history = entries(
        user("q"), assistant("a", call("1"), call("2")), result("2"), result("1"), assistant("done"), user("next")
    )
    assert repair(history) == (history, ())


def test_a_call_without_a_result_gets_one_right_behind_it() -> None:
    assert mends(user("q"), assistant(None, call("1")), user("never mind")) == (
        ["user: q", "assistant: call 1", f"*tool: 1={NO_RESULT}", "user: never mind"],
        [("missing_result", "1", 2)],
    )


def test_of_parallel_calls_only_the_unanswered_ones_are_mended() -> None:
    assert mends(user("q"), assistant(None, call("1"), call("2"), call("3")), result("2")) == (
        [
            "user: q",
            "assistant: call 1, call 2, call 3",
            "tool: 2=ok",
            f"*tool: 1={NO_RESULT}",
            f"*tool: 3={NO_RESULT}",
        ],
        [("missing_result", "1", 2), ("missing_result", "3", 2)],
    )


def test_a_result_without_its_call_is_left_out() -> None:
    assert mends(result("0"), user("q"), assistant("a")) == (
        ["user: q", "assistant: a"],
        [("orphan_result", "0", 1)],
    )


def test_of_two_results_the_first_wins() -> None:
    assert mends(user("q"), assistant(None, call("1")), result("1", "first"), result("1", "second")) == (
        ["user: q", "assistant: call 1", "tool: 1=first"],
        [("duplicate_result", "1", 4)],
    )


def test_a_late_result_is_moved_behind_its_call() -> None:
    assert mends(user("q"), assistant(None, call("1")), user("hurry"), assistant("yes"), result("1", "late")) == (
        ["user: q", "assistant: call 1", "tool: 1=late", "user: hurry", "assistant: yes"],
        [("moved_result", "1", 5)],
    )


def test_an_id_that_is_used_again_pairs_with_the_nearest_call_before_it() -> None:
    history = entries(
        user("q"), assistant(None, call("1")), result("1", "a"), assistant(None, call("1")), result("1", "b")
    )
    assert repair(history) == (history, ())


def test_an_id_that_is_used_twice_in_one_message_is_called_once() -> None:
    assert mends(user("q"), assistant("a", call("1"), call("1")), result("1"), result("1")) == (
        ["user: q", "*assistant: a, call 1", "tool: 1=ok"],
        [("duplicate_call", "1", 2), ("duplicate_result", "1", 4)],
    )


@pytest.mark.parametrize("parts", [(), (Text(text=""),), (Text(text=" \n"),), (Reasoning(text="hm"),)])
def test_an_assistant_message_without_words_or_calls_is_left_out(parts: tuple[Part, ...]) -> None:
    empty = Message(role="assistant", parts=parts, raw=b"{}")
    assert mends(user("q"), empty, user("r")) == (["user: q", "user: r"], [("empty_message", "", 2)])


def test_an_empty_user_message_keeps_its_place() -> None:
    assert mends(user(""), assistant("a")) == (
        [f"*user: {EMPTY_MESSAGE}", "assistant: a"],
        [("empty_content", "", 1)],
    )


def test_text_beside_results_closes_the_group() -> None:
    both = Message(role="user", parts=(ToolResult(call_id="1", text="ok"), Text(text="go on")), raw=b"{}")
    assert mends(user("q"), assistant(None, call("1"), call("2")), both) == (
        ["user: q", "assistant: call 1, call 2", f"*tool: 2={NO_RESULT}", "user: go on, 1=ok"],
        [("missing_result", "2", 2)],
    )


def test_text_beside_late_results_keeps_its_place() -> None:
    both = Message(role="user", parts=(ToolResult(call_id="1", text="ok"), Text(text="go on")), raw=b"{}")
    assert mends(user("q"), assistant(None, call("1")), user("w"), both) == (
        ["user: q", "assistant: call 1", "*user: 1=ok", "user: w", "*user: go on"],
        [("moved_result", "1", 4)],
    )


@pytest.mark.parametrize(
    "messages",
    [
        [assistant(None, call("1"))],
        [assistant(None, call("1")), user("q"), result("1")],
        [result("1")],
        [assistant(None, call("1")), result("1"), result("1")],
        [assistant(None, call("1"), call("1")), result("1")],
        [Message(role="assistant", parts=(), raw=b"{}")],
        [Message(role="user", parts=(Text(text=""),), raw=b"{}")],
        [Message(role="tool", parts=(Text(text="ok"),), raw=b"{}")],
        [assistant(None, call("1")), assistant(None, call("2")), result("1"), result("2")],
    ],
)
def test_the_proof_refuses(messages: list[Message]) -> None:
    with pytest.raises(UnpairedMessages):
        prove_pairing(messages)


def test_a_context_never_begins_between_a_call_and_its_result() -> None:
    history = [user("q"), assistant(None, call("1")), user("w"), result("1"), assistant("a"), user("r")]
    assert safe_cuts(history) == (True, True, False, False, True, True)


ids = st.sampled_from(["1", "2", "3"])
words = st.sampled_from(["", " ", "a", "b"])
mixed_parts = st.lists(
    st.one_of(st.builds(ToolResult, call_id=ids, text=words), st.builds(Text, text=words)), max_size=3
)
messages = st.one_of(
    st.builds(user, words),
    st.builds(lambda text, calls: assistant(text, *[call(c) for c in calls]), words, st.lists(ids, max_size=3)),
    st.builds(result, ids, words),
    st.builds(system, words),
    st.builds(lambda parts: Message(role="user", parts=tuple(parts), raw=b"{}"), mixed_parts),
)
histories = st.lists(messages, max_size=14).map(lambda found: entries(*found))


@given(histories)
def test_paired_history_is_valid_for_any_input(history: tuple[Entry, ...]) -> None:
    mended, _ = repair(history)
    assert is_paired([entry.message for entry in mended])


def is_paired(messages: Sequence[Message]) -> bool:
    try:
        prove_pairing(messages)
    except UnpairedMessages:
        return False
    return True


@given(histories)
def test_a_valid_history_is_not_repaired(history: tuple[Entry, ...]) -> None:
    mended, repairs = repair(history)
    try:
        prove_pairing([entry.message for entry in history])
    except UnpairedMessages:
        assert repairs
    else:
        assert (mended, repairs) == (history, ())


@given(histories)
def test_mending_twice_is_mending_once(history: tuple[Entry, ...]) -> None:
    mended, repairs = repair(history)
    assert repair(mended) == (mended, ())
    assert repair(history) == (mended, repairs)


@given(histories)
def test_every_change_of_a_history_is_reported_as_a_repair(history: tuple[Entry, ...]) -> None:
    mended, repairs = repair(history)
    if not repairs:
        assert mended == history
    noted = {r.seq for r in repairs}
    real = [entry for entry in mended if entry.message.raw]
    assert all(entry in history for entry in real)
    missing = [entry.seq for entry in history if entry not in real]
    split = {e.seq for e in mended if not e.message.raw}
    assert set(missing) <= noted | split


@given(histories)
def test_pairing_keeps_all_text_in_order(history: tuple[Entry, ...]) -> None:
    def words_of(sequence: Sequence[Entry]) -> list[str]:
        return [
            t for e in sequence if (t := e.message.text.strip()) and t != EMPTY_MESSAGE and e.message.role != "tool"
        ]

    assert words_of(repair(history)[0]) == words_of(history)


@given(histories)
def test_calls_survive_and_the_first_result_of_each_wins(history: tuple[Entry, ...]) -> None:
    mended, _ = repair(history)
    made = [sorted({c.id for c in e.message.calls}) for e in history if e.message.calls]
    assert [sorted(c.id for c in e.message.calls) for e in mended if e.message.calls] == made


@given(histories)
def test_no_safe_cut_parts_a_call_from_its_result(history: tuple[Entry, ...]) -> None:
    whole = [entry.message for entry in history]
    for index, safe in enumerate(safe_cuts(whole)):
        if safe:
            parts = [*repair(history[:index])[0], *repair(history[index:])[0]]
            orphaned = [r for r in repair(history[index:])[1] if r.kind == "orphan_result"]
            before = {r.seq for r in repair(history)[1]}
            assert all(r.seq in before for r in orphaned)
            prove_pairing([entry.message for entry in parts])


def test_growing_history_keeps_its_paired_prefix() -> None:
    history = entries(user("q"), assistant(None, call("1")), user("w"), assistant(None, call("2")), result("2"))
    longer = (*history, *(replace(e, seq=e.seq + 5) for e in entries(assistant("a"), user("r"))))
    first, _ = repair(history)
    assert repair(longer)[0][: len(first)] == first


def test_a_reused_call_is_a_call_of_its_own() -> None:
    message = Message(role="assistant", parts=(ToolCall(id="1", name="n", arguments="{}"),), raw=b"{}")
    assert [r.kind for r in repair(entries(message, message, result("1")))[1]] == ["missing_result"]
