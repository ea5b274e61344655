"""Golden contexts of `trim`: CowAgent's "Short-term Memory" under ``every_request``, and its form under ``auto``."""

from __future__ import annotations

from datetime import datetime, timedelta
from itertools import pairwise

import pytest

from tersely.domain.history.context import Context
from tersely.domain.history.history import Entry, Epoch, EpochInputs, Summary
from tersely.domain.messages import Message
from tersely.strategies import prompts
from tersely.strategies.composition import overflow_tries
from tersely.strategies.epochs.policies import Auto, EveryRequest, Policy
from tersely.strategies.prefetch import after_cut
from tersely.strategies.presets import Slim, Trim
from tests.builders import assistant, call, result, user
from tests.strategies.histories import START, call_model, chat, load, place, work

LITERAL = EveryRequest()


def tool_turns(count: int, *, size: int = 0) -> tuple[Entry, ...]:
    """Turns of question, call, result and reply; the last one is only asked."""
    messages: list[Message] = []
    for turn in range(1, count + 1):
        messages += [user(f"question {turn}"), assistant("looking", call(f"c{turn}"))]
        messages += [result(f"c{turn}", "r" * size), assistant(f"answer {turn}")]
    return place(*messages[:-3])


def literal(history: tuple[Entry, ...], strategy: Trim | None = None, *summaries: Summary) -> Context:
    return call_model(
        load(history, None), strategy=strategy or Trim(), policy=LITERAL, material=EpochInputs(summaries=summaries)
    )


def refused(history: tuple[Entry, ...], times: int) -> Context:
    return call_model(
        load(history, None, window=60_000), strategy=Trim(), policy=Auto(), overflow=True, overflows=times
    )


def entries(context: Context) -> list[Entry]:
    return [message for message in context.messages if isinstance(message, Entry)]


def seqs(context: Context) -> list[int]:
    return [entry.seq for entry in entries(context)]


def turns(context: Context) -> list[int]:
    return list(dict.fromkeys(entry.turn for entry in entries(context)))


def results(context: Context) -> list[str]:
    return [part.text for entry in entries(context) for part in entry.message.results]


def summary(last: int, text: str = "We chose sqlite.") -> Summary:
    return Summary(first_seq=1, last_seq=last, purpose="trim", text=text, tokens=4, source="model", created_at=START)


def test_key_configuration_defaults() -> None:
    trim = Trim()
    assert (trim.max_context_tokens, trim.max_context_turns, trim.max_steps) == (50_000, 20, 15)
    assert trim.max_result_chars == 20_000


def test_context_structure_everything_is_retained_until_a_limit_is_passed() -> None:
    history = tool_turns(20, size=4_000)
    assert literal(history).is_whole


def test_key_configuration_a_turn_of_15_steps_is_asked_to_answer() -> None:
    assert literal(work(14)).is_whole
    context = literal(work(15))
    assert context.must_answer
    request = context.messages[-1]
    assert not isinstance(request, Entry)
    assert (request.role, request.text) == ("user", prompts.ANSWER_NOW.format(steps=15))
    again = (*work(15), *place(*[e.message for e in work(15)], assistant("done"), user("next"))[-2:])
    assert not literal(again).must_answer


def test_1_past_results_over_20000_characters_keep_beginning_and_end_with_a_notice() -> None:
    text = "A" * 15_000 + "B" * 15_000
    messages = [user("go"), assistant(None, call("c1")), result("c1", text), assistant("done"), user("next")]
    (shown,) = results(literal(place(*messages)))
    assert len(shown) <= 20_000
    assert (shown[0], shown[-1]) == ("A", "B")
    assert "[TRUNCATED 30000 characters to 20000]" in shown
    exact = [user("go"), assistant(None, call("c1")), result("c1", "x" * 20_000), assistant("done"), user("next")]
    assert literal(place(*exact)).is_whole


def test_1_results_of_the_current_turn_are_not_affected() -> None:
    history = place(user("go"), assistant(None, call("c1")), result("c1", "x" * 60_000))
    assert literal(history).is_whole


def test_2_more_than_20_turns_lose_the_oldest_half_of_the_complete_ones() -> None:
    assert turns(literal(chat(20))) == list(range(1, 21))
    assert turns(literal(chat(21))) == list(range(11, 22))
    assert turns(literal(chat(22))) == list(range(12, 23))  # of 21 complete turns the larger half goes


def test_2_trimmed_messages_stay_trimmed() -> None:
    first = literal(chat(21))
    second = call_model(load(chat(22), first.epoch), strategy=Trim(), policy=LITERAL)
    assert turns(second) == list(range(11, 23))


@pytest.mark.parametrize("policy", [LITERAL, Auto()], ids=["every_request", "auto"])
def test_2_trimmed_messages_never_return(policy: Policy) -> None:
    epoch, gone = None, 0
    for number in range(15, 90):
        context = call_model(load(chat(number), epoch), strategy=Trim(), policy=policy)
        epoch = context.epoch
        first = entries(context)[0].seq
        assert first >= gone
        assert len(set(turns(context))) <= 20
        gone = first
    assert gone > 100


@pytest.mark.parametrize("refusals", [0, 1])
def test_4_the_ranges_for_the_memory_follow_each_other_without_overlap(refusals: int) -> None:
    """Whatever leaves the context, by an overflow or by trimming, is to be told once."""
    epoch, ranges = None, []
    for number in range(9, 70):
        snapshot = load(chat(number), epoch)
        is_refused = refusals and number == 9
        context = call_model(snapshot, strategy=Trim(), policy=LITERAL, overflow=bool(is_refused), overflows=refusals)
        if epoch is None or context.epoch.cut != epoch.cut:
            ranges += [(each.first_seq, each.last_seq) for each in after_cut(Trim(), snapshot, context.epoch)]
        epoch = context.epoch
    assert len(ranges) >= 3
    assert ranges[0][0] == 1
    assert all(later[0] == earlier[1] + 1 for earlier, later in pairwise(ranges))


def test_2_tool_call_chains_stay_whole() -> None:
    context = literal(tool_turns(21))
    assert entries(context)[0].message.text == "question 11"
    assert not context.repairs


def test_2_trimmed_messages_are_to_be_summarised_for_the_days_memory() -> None:
    snapshot = load(chat(21), None)
    context = literal(chat(21))
    (wanted,) = after_cut(Trim(), snapshot, context.epoch)
    assert (wanted.purpose, wanted.first_seq, wanted.last_seq) == ("trim", 1, 20)


def test_2_finished_summary_precedes_the_first_retained_user_message() -> None:
    first = literal(chat(21))
    before = entries(first)[0].prefix
    assert "question 1" in before  # until the model's is ready, what can be said without one
    later = call_model(
        load(chat(22), first.epoch), strategy=Trim(), policy=LITERAL, material=EpochInputs(summaries=(summary(20),))
    )
    shown = entries(later)[0]
    assert shown.seq == 21
    assert shown.prefix == f"{prompts.SUMMARY_TITLE}\nWe chose sqlite.\n{prompts.SUMMARY_END}\n\n"
    assert [entry.prefix for entry in entries(later)[1:]] == [""] * (len(entries(later)) - 1)


def test_2_under_auto_the_summary_comes_with_the_next_epoch_and_the_prefix_stays() -> None:
    first = call_model(load(chat(21), None), strategy=Trim(), policy=Auto())
    ready = EpochInputs(summaries=(summary(20),))
    later = call_model(load(chat(22), first.epoch), strategy=Trim(), policy=Auto(), material=ready)
    assert later.epoch.number == first.epoch.number
    assert later.messages[: len(first.messages)] == first.messages
    due = call_model(load(chat(32), later.epoch), strategy=Trim(), policy=Auto(), material=ready)
    assert due.epoch.number == first.epoch.number + 1
    assert "We chose sqlite." in entries(due)[0].prefix
    assert "We chose sqlite." not in entries(later)[0].prefix


def test_3_fewer_than_5_turns_keep_the_first_user_text_and_the_last_reply() -> None:
    context = literal(tool_turns(4, size=19_000), Trim(max_context_tokens=6_000))
    assert seqs(context) == [1, 4, 5, 8, 9, 12, 13]


def test_3_first_half_of_5_or_more_turns_becomes_a_summary() -> None:
    context = literal(tool_turns(6, size=19_000), Trim(max_context_tokens=6_000))
    assert turns(context) == [4, 5, 6]
    assert "question 1" in entries(context)[0].prefix


def test_3_the_budget_is_looked_at_after_the_turns() -> None:
    """In the other order one half of the 21 turns would be enough."""
    context = literal(chat(21, size=4_000), Trim(max_context_tokens=9_000))
    assert turns(context) == list(range(16, 22))


def test_3_under_auto_half_of_the_budget_is_for_messages() -> None:
    small = Trim(max_context_tokens=8_000)
    fits, over = chat(10, size=1_600), chat(11, size=1_600)
    assert sum(entry.tokens for entry in fits) < 4_000 < sum(entry.tokens for entry in over)
    first = call_model(load(fits, None, fixed_tokens=15_000), strategy=small, policy=Auto())
    assert first.is_whole
    assert turns(call_model(load(over, first.epoch, fixed_tokens=15_000), strategy=small, policy=Auto()))[0] > 1


def test_3_the_budget_counts_instructions_and_tools() -> None:
    history = tool_turns(6, size=4_000)
    context = call_model(load(history, None, fixed_tokens=48_000), strategy=Trim(), policy=LITERAL)
    assert turns(context) == [4, 5, 6]


def test_4_an_overflow_leaves_5_turns_with_10k_of_each_result_and_user_text() -> None:
    messages = [user(f"question {n} " + "q" * 15_000) for n in range(1, 8)]
    replies = [[assistant(None, call(f"c{n}")), result(f"c{n}", "r" * 15_000), assistant("ok")] for n in range(1, 7)]
    history = place(*(m for q, more in zip(messages, [*replies, []], strict=True) for m in (q, *more)))
    context = refused(history, 1)
    assert set(turns(context)) <= {3, 4, 5, 6, 7}
    assert all(len(text) <= 10_000 for text in results(context))
    assert all(len(entry.message.text) <= 10_000 for entry in entries(context))
    assert entries(context)[-1].message.text.startswith("question 7")


def test_4_small_turns_are_limited_to_5_all_the_same() -> None:
    context = call_model(load(chat(9, size=400), None), strategy=Trim(), policy=LITERAL, overflow=True, overflows=1)
    assert turns(context)[-1] == 9
    assert len(turns(context)) <= 5


def test_4_messages_are_summarised_before_they_leave() -> None:
    history = chat(9)
    (wanted,) = after_cut(Trim(), load(history, None), refused(history, 1).epoch)
    assert (wanted.purpose, wanted.first_seq) == ("trim", 1)


def test_4_a_second_overflow_clears_everything_but_the_question() -> None:
    assert seqs(refused(chat(9), 2)) == [17]
    assert refused(chat(9), 2).epoch.head == ()
    assert (overflow_tries(Trim()), overflow_tries(Slim())) == (2, 1)


def resumed(history: tuple[Entry, ...], epoch: Epoch, policy: Policy, pause: timedelta, trim: Trim) -> Context:
    now: datetime = START + pause
    return call_model(load(history, epoch, last_call_at=START), strategy=trim, policy=policy, now=now)


def test_persistence_a_session_taken_up_again_starts_from_3_turns_of_text() -> None:
    for policy in (LITERAL, Auto()):
        before = call_model(load(tool_turns(8), None), strategy=Trim(), policy=policy)
        context = resumed(tool_turns(9), before.epoch, policy, timedelta(hours=5), Trim())
        assert seqs(context) == [21, 24, 25, 28, 29, 32, 33]
        assert context.report.reason == "resume"
        assert not results(context)


def test_persistence_the_number_is_a_sixth_of_the_turns_if_that_is_more() -> None:
    trim = Trim(max_context_turns=30)
    before = call_model(load(chat(11), None), strategy=trim, policy=LITERAL)
    assert len(turns(resumed(chat(12), before.epoch, LITERAL, timedelta(hours=5), trim))) == 5 + 1


def test_persistence_a_short_pause_is_no_restart() -> None:
    before = call_model(load(tool_turns(8), None), strategy=Trim(), policy=Auto())
    context = resumed(tool_turns(9), before.epoch, Auto(), timedelta(hours=3), Trim())
    assert context.is_whole


def test_under_auto_nothing_happens_within_the_limits() -> None:
    context = call_model(load(tool_turns(20, size=4_000), None), strategy=Trim(), policy=Auto())
    assert context.is_whole


def test_under_auto_a_first_plan_over_a_long_history_is_enough_for_the_next_call() -> None:
    history = chat(150, size=1_200)
    first = call_model(load(history[:-2], None), strategy=Trim(), policy=Auto())
    assert len({entry.turn for entry in first.messages if isinstance(entry, Entry)}) <= 20
    second = call_model(load(history, first.epoch), strategy=Trim(), policy=Auto())
    assert second.epoch.number == first.epoch.number
