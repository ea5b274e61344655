"""The stages of `trim`, rule by rule of CowAgent's "Short-term Memory"."""

from __future__ import annotations

from msgspec.structs import replace

from tersely.domain.history.history import Entry
from tersely.strategies.pipeline import Draft, run
from tersely.strategies.reduction.trimming import clear, drop_half_over_turns, fit_budget, keep_newest_turns, keep_texts
from tests.builders import assistant, call, result, user
from tests.strategies.histories import chat, place


def tool_turns(count: int, *, size: int = 0) -> tuple[Entry, ...]:
    """Turns of question, call, result and reply; the last one is only asked."""
    messages = []
    for turn in range(1, count + 1):
        messages += [user(f"question {turn}"), assistant("looking", call(f"c{turn}"))]
        messages += [result(f"c{turn}", "r" * size), assistant(f"answer {turn}")]
    return place(*messages[:-3])


def turns_of(draft: Draft) -> list[int]:
    return list(dict.fromkeys(entry.turn for entry in draft.entries))


def seqs(draft: Draft) -> list[int]:
    return [entry.seq for entry in draft.entries]


def test_2_turn_trimming_takes_the_oldest_half_of_the_complete_turns() -> None:
    draft = run(Draft(tail=chat(21)), (drop_half_over_turns(20),))
    assert turns_of(draft) == list(range(11, 22))
    assert [entry.turn for entry in draft.gone] == [turn for turn in range(1, 11) for _ in "ab"]


def test_2_as_many_turns_as_allowed_are_left_alone() -> None:
    draft = Draft(tail=chat(20))
    assert run(draft, (drop_half_over_turns(20),)) is draft


def test_2_turn_trimming_preserves_tool_call_chains() -> None:
    draft = run(Draft(tail=tool_turns(5)), (drop_half_over_turns(4),))
    assert turns_of(draft) == [3, 4, 5]
    assert draft.tail[0].message.starts_turn


def test_3_fewer_than_five_turns_keep_first_user_text_and_last_reply() -> None:
    history = tool_turns(4, size=4_000)
    draft = run(Draft(tail=history), (fit_budget(2_000),))
    assert seqs(draft) == [1, 4, 5, 8, 9, 12, 13]
    assert {edit.reason for edit in draft.edits} == {"question and reply"}


def test_3_five_turns_or_more_lose_the_first_half_again() -> None:
    draft = run(Draft(tail=tool_turns(6, size=4_000)), (fit_budget(2_000),))
    assert turns_of(draft) == [4, 5, 6]
    assert len(seqs(draft)) == 9


def test_3_within_the_budget_nothing_changes() -> None:
    draft = Draft(tail=tool_turns(6))
    assert run(draft, (fit_budget(draft.tokens),)) is draft


def test_4_overflow_keeps_at_most_five_turns() -> None:
    assert turns_of(run(Draft(tail=chat(9)), (keep_newest_turns(5),))) == [5, 6, 7, 8, 9]


def test_4_still_overflowing_the_context_is_cleared_but_for_the_question() -> None:
    assert seqs(run(Draft(tail=chat(9)), (clear(),))) == [17]
    in_a_step = place(user("do it"), assistant(None, call("c1")), result("c1"))
    assert seqs(run(Draft(tail=in_a_step), (clear(),))) == [1]


def test_restore_keeps_user_text_and_final_reply_of_the_newest_turns() -> None:
    draft = run(Draft(tail=tool_turns(6)), (keep_texts(3),))
    assert seqs(draft) == [9, 12, 13, 16, 17, 20, 21]


def test_reduced_turns_count_as_turns_and_are_trimmed_with_them() -> None:
    history = tool_turns(4, size=4_000)
    reduced = run(Draft(tail=history), (fit_budget(2_000),))
    assert turns_of(run(reduced, (drop_half_over_turns(3),))) == [3, 4]


def test_pinned_messages_stay_whatever_goes() -> None:
    history = chat(9)
    pinned = (replace(history[1], pinned=True), *history[2:])
    draft = run(Draft(tail=(history[0], *pinned)), (keep_newest_turns(2),))
    assert seqs(draft) == [2, 15, 16, 17]
