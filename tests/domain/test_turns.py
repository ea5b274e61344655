"""Division of messages into turns and steps."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from tersely.domain.errors import InvalidRequest
from tersely.domain.history.history import Entry
from tersely.domain.history.turns import group_turns, number_turns, read_turn_id, write_turn_id
from tersely.domain.messages import Message, ToolResult
from tests.builders import assistant, call, message, result, system, user

NOW = datetime(2024, 1, 15, 10, 30, tzinfo=UTC)


def place(*messages: Message) -> tuple[Entry, ...]:
    turns = number_turns(messages)
    return tuple(
        Entry(seq=seq, turn=turn, message=m, tokens=5, created_at=NOW)
        for seq, (turn, m) in enumerate(zip(turns, messages, strict=True), start=1)
    )


def test_a_turn_is_a_user_message_and_everything_up_to_the_next() -> None:
    history = [user("a"), assistant(None, call("1")), result("1"), assistant("b"), user("c"), user("d")]
    assert number_turns(history) == (1, 1, 1, 1, 2, 3)


def test_a_user_message_of_results_only_starts_no_turn() -> None:
    carrier = message("user", ToolResult(call_id="1", text="ok"))
    assert number_turns([user("a"), assistant(None, call("1")), carrier]) == (1, 1, 1)


def test_messages_before_the_first_user_message_belong_to_its_turn() -> None:
    assert number_turns([assistant("hello"), user("hi"), user("there")]) == (1, 1, 2)
    assert number_turns([user("hi")], turn=1, opened=False) == (1,)


def test_instructions_belong_to_turn_0() -> None:
    assert number_turns([system("s"), user("a"), system("t"), assistant("b")]) == (0, 1, 0, 1)


def test_numbering_continues_from_the_session() -> None:
    assert number_turns([assistant("b"), user("c")], turn=7, opened=True) == (7, 8)


def test_a_step_is_an_assistant_message_with_its_results() -> None:
    entries = place(
        user("a"), assistant(None, call("1"), call("2")), result("1"), result("2"), assistant("b"), user("c")
    )
    first, second = group_turns(entries)
    assert [[e.seq for e in step.entries] for step in first.steps] == [[2, 3, 4], [5]]
    assert (first.opening, first.tokens, first.steps[0].tokens) == (entries[:1], 25, 15)
    assert (second.number, second.steps) == (2, ())


def test_turn_ids_are_written_as_the_document_shows_them() -> None:
    assert write_turn_id(7) == "t7"
    assert read_turn_id("t7") == 7


@pytest.mark.parametrize("text", ["", "7", "t0", "t-1", "T7", "t7 ", "t" + "9" * 30, "t٣"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_turn_id(text)
    assert refused.value.field == "turnId"
