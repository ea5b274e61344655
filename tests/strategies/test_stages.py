"""Stages by themselves: what each keeps, cuts and adds to a draft."""

from __future__ import annotations

import pytest

from tersely.domain.history.history import EpochInputs, TerseEntry
from tersely.domain.tokens import estimate_text
from tersely.strategies.head.layers import exchange, insert_text
from tersely.strategies.pipeline import Draft, count_entries
from tersely.strategies.prompts import ACTIVITY_LOG_ACK
from tersely.strategies.stages import insert_activity_log, keep_all, keep_recent_turns, keep_within
from tests.strategies.histories import START, chat, work


def seqs(draft: Draft) -> tuple[list[int], list[int]]:
    """Return the numbers of the tail and of the messages that were left out."""
    return [entry.seq for entry in draft.tail], [entry.seq for entry in draft.gone]


@pytest.mark.parametrize("turns", [1, 2, 5, 9])
def test_keep_recent_turns_cuts_before_the_last_turns(turns: int) -> None:
    history = chat(5)
    draft = keep_recent_turns(turns)(Draft(tail=history))
    assert {entry.turn for entry in draft.tail} == set(range(max(1, 6 - turns), 6))
    assert {entry.turn for entry in draft.gone} == set(range(1, max(1, 6 - turns)))


def test_keep_all_restores_what_an_earlier_stage_left_out() -> None:
    history = chat(4)
    cut = keep_recent_turns(1)(Draft(tail=history))
    assert cut.gone
    assert seqs(keep_all()(cut)) == ([entry.seq for entry in history], [])


def test_keep_within_changes_nothing_that_fits_and_cuts_what_does_not() -> None:
    history = work(12)
    total = count_entries(history)
    assert keep_within(total, recent_turns=1)(Draft(tail=history)) == Draft(tail=history)
    cut = keep_within(total // 2, recent_turns=1)(Draft(tail=history))
    assert cut.gone
    assert count_entries(cut.entries) <= total // 2
    assert cut.tail[-1] == history[-1]


def test_activity_log_has_the_entries_before_the_cut_alone() -> None:
    history = chat(4)
    terse = tuple(
        TerseEntry(turn=turn, seq=2 * turn, text=f"did {turn}", created_at=START, role="assistant", source="model")
        for turn in range(1, 4)
    )
    inputs = EpochInputs(terse=terse)
    stage = insert_activity_log(inputs, limit=1000, encode=estimate_text, derive=False)
    assert stage(Draft(tail=history)).head == ()
    user, acknowledgement = stage(keep_recent_turns(2)(Draft(tail=history))).head
    assert "did 2" in user.text
    assert "did 3" not in user.text
    assert (acknowledgement.role, acknowledgement.text) == ("assistant", ACTIVITY_LOG_ACK)


def test_exchange_alternates_roles_and_is_empty_without_a_text() -> None:
    assert exchange("state", "", "ok", estimate_text) == ()
    messages = exchange("state", "Goal: x", "ok", estimate_text)
    assert [(each.layer, each.role, each.text) for each in messages] == [
        ("state", "user", "Goal: x"),
        ("state", "assistant", "ok"),
    ]
    assert all(each.tokens > 0 for each in messages)


def test_inserted_text_follows_its_title_and_covers_its_message() -> None:
    draft = insert_text("state", "State:", "Goal: x", "ok", encode=estimate_text, seq=7)(Draft())
    assert [each.text for each in draft.head] == ["State:\nGoal: x", "ok"]
    assert draft.head_covers_to == 8
    assert insert_text("state", "State:", " \n", "ok", encode=estimate_text)(Draft()) == Draft()
