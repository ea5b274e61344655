"""Summaries are foreseen before they are wanted, and never of more than what is cut then."""

from __future__ import annotations

from app.strategies.epochs import Auto
from app.strategies.foresight import Foreseen, after_cut, foresee
from app.strategies.presets import Compact, Full, Slim, Tiered, Trim, Window
from tests.strategies.histories import call_model, chat, load, work

AUTO = Auto()


def test_what_needs_no_model_foresees_nothing() -> None:
    snapshot = load(chat(40, size=4_000), None)
    assert [foresee(each, snapshot) for each in (Full(), Slim(), Window())] == [(), (), ()]


def test_trim_foresees_the_half_that_will_go() -> None:
    assert foresee(Trim(), load(chat(14), None)) == ()
    (early,) = foresee(Trim(), load(chat(16), None))
    assert early == Foreseen(purpose="trim", first_seq=1, last_seq=16)
    history = chat(21)
    epoch = call_model(load(history, None), strategy=Trim(), policy=AUTO).epoch
    (cut,) = after_cut(Trim(), load(history, None), epoch)
    assert (cut.first_seq, cut.last_seq) == (1, 20)
    assert early.last_seq <= cut.last_seq


def test_trim_foresees_by_tokens_too() -> None:
    assert foresee(Trim(), load(chat(6, size=4_000), None)) == ()
    assert foresee(Trim(max_context_tokens=6_000), load(chat(6, size=4_000), None))


def test_a_checkpoint_is_foreseen_from_the_beginning_and_fits_when_it_is_wanted() -> None:
    small = Compact(max_tokens=4_000, keep_recent_tokens=1_000)
    assert foresee(small, load(chat(5, size=1_200), None)) == ()
    (early,) = foresee(small, load(chat(11, size=1_200), None))
    assert (early.purpose, early.first_seq) == ("checkpoint", 1)
    due = call_model(load(chat(15, size=1_200), None), strategy=small, policy=AUTO)
    assert early.last_seq < due.epoch.cut


def test_a_checkpoint_is_not_asked_for_with_every_message() -> None:
    small = Compact(max_tokens=20_000)
    wanted = [foresee(small, load(work(steps, size=1_200), None, fixed_tokens=2_000)) for steps in range(30, 50)]
    checkpoints = {found for each in wanted for found in each if found.purpose == "checkpoint"}
    assert 2 <= len(checkpoints) <= 5
    assert foresee(Compact(max_tokens=8_000), load(chat(3), None, fixed_tokens=9_000)) == ()


def test_results_are_made_ready_before_they_are_archived() -> None:
    found = [f for f in foresee(Compact(max_tokens=0), load(work(10), None)) if f.purpose == "tool_result"]
    assert [f.first_seq for f in found] == [3, 5]
    assert found[0].given.startswith("read ")
    assert foresee(Compact(max_tokens=0, tool_summary_strategy="off"), load(work(12), None)) == ()


def test_a_task_is_summarised_once_it_is_complete() -> None:
    assert foresee(Tiered(), load(chat(1), None)) == ()
    found = foresee(Tiered(), load(chat(3), None))
    assert [(f.purpose, f.first_seq, f.last_seq) for f in found] == [("task", 1, 2), ("task", 3, 4)]
