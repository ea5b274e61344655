"""Summaries are foreseen before they are wanted, and never of more than what is cut then."""

from __future__ import annotations

from msgspec import structs

from tersely.strategies.epochs.policies import Auto
from tersely.strategies.prefetch import SummaryNeed, after_cut, upcoming_summaries
from tersely.strategies.presets import Compact, Full, Slim, Tiered, Trim, Window
from tests.strategies.histories import call_model, chat, load, work

AUTO = Auto()


def test_a_strategy_without_model_summaries_needs_none_ahead() -> None:
    snapshot = load(chat(40, size=4_000), None)
    assert [upcoming_summaries(each, snapshot) for each in (Full(), Slim(), Window())] == [(), (), ()]


def test_trim_foresees_the_half_that_will_go_and_always_the_same() -> None:
    assert upcoming_summaries(Trim(), load(chat(14), None)) == ()
    early = {upcoming_summaries(Trim(), load(chat(turns), None)) for turns in range(15, 21)}
    assert early == {(SummaryNeed(purpose="ahead", first_seq=1, last_seq=20, is_ahead=True),)}
    history = chat(21)
    epoch = call_model(load(history, None), strategy=Trim(), policy=AUTO).epoch
    assert after_cut(Trim(), load(history, None), epoch) == (
        SummaryNeed(purpose="trim", first_seq=1, last_seq=20, epoch=1),
    )


def test_summary_needs_by_tokens_stay_bounded() -> None:
    strategy = Trim(max_context_tokens=6_000, max_context_turns=1_000)
    wanted = [upcoming_summaries(strategy, load(chat(turns, size=400), None)) for turns in range(1, 50)]
    assert len({each for each in wanted if each}) == 1


def test_trim_foresees_by_tokens_too() -> None:
    assert upcoming_summaries(Trim(), load(chat(6, size=4_000), None)) == ()
    assert upcoming_summaries(Trim(max_context_tokens=6_000), load(chat(6, size=4_000), None))


def test_checkpoint_is_prefetched_early_and_fits_when_needed() -> None:
    small = Compact(max_tokens=4_000, keep_recent_tokens=1_000)
    assert upcoming_summaries(small, load(chat(5, size=1_200), None)) == ()
    (early,) = upcoming_summaries(small, load(chat(11, size=1_200), None))
    assert (early.purpose, early.first_seq) == ("checkpoint", 1)
    due = call_model(load(chat(15, size=1_200), None), strategy=small, policy=AUTO)
    assert early.last_seq < due.epoch.cut


def test_checkpoint_is_not_requested_with_every_message() -> None:
    small = Compact(max_tokens=20_000)
    wanted = [
        upcoming_summaries(small, load(work(steps, size=1_200), None, fixed_tokens=2_000)) for steps in range(30, 50)
    ]
    checkpoints = {found for each in wanted for found in each if found.purpose == "checkpoint"}
    assert 2 <= len(checkpoints) <= 5
    assert upcoming_summaries(Compact(max_tokens=8_000), load(chat(3), None, fixed_tokens=9_000)) == ()


def test_results_are_made_ready_before_they_are_archived() -> None:
    found = [f for f in upcoming_summaries(Compact(max_tokens=0), load(work(10), None)) if f.purpose == "tool_result"]
    assert [f.first_seq for f in found] == [3, 5]
    assert found[0].earlier.startswith("read ")
    assert upcoming_summaries(Compact(max_tokens=0, tool_summary_strategy="off"), load(work(12), None)) == ()


def test_tasks_are_summarised_together_once_they_have_left_working_memory() -> None:
    strategy = Tiered(total_budget=2_000, working_budget=500)
    history = chat(12, size=800)
    epoch = call_model(load(history, None), strategy=strategy, policy=AUTO).epoch
    assert epoch.cut > 3
    assert upcoming_summaries(strategy, load(history, None)) == ()
    (found,) = after_cut(strategy, load(history, None), epoch)
    assert (found.purpose, found.first_seq, found.last_seq) == ("tasks", 1, epoch.cut - 1)
    assert after_cut(strategy, load(chat(1), None), structs.replace(epoch, cut=1)) == ()
