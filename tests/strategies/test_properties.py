"""Properties of every context, over generated histories with several calls in a row."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from tersely.domain.errors import ContextTooLarge
from tersely.domain.history.context import Context
from tersely.domain.history.history import Entry, HeadMessage
from tersely.domain.history.pairing import UnpairedMessages, prove_pairing
from tersely.domain.messages import Message
from tersely.strategies.epochs.cutting import cut_distances, must_stay
from tersely.strategies.epochs.policies import Auto, ContinueEpoch, EveryRequest, Policy, Stride, TokenSums
from tersely.strategies.pipeline import count_entries
from tersely.strategies.planning import decide, surely_keeps
from tersely.strategies.presets import Compact, Full, Slim, Strategy, Tiered, Trim, Window
from tests.strategies.histories import START, conversations, load, play_calls, rendered

SMALL = Auto(high=2_000, low=800)
policies = st.sampled_from([SMALL, Auto(high=1_000, low=500), Stride(stride=2), EveryRequest()])
strategies = st.one_of(
    st.just(Full()),
    st.builds(
        Slim, recent_turns=st.integers(1, 4), references=st.sampled_from([None, 0, 100]), derive_terse=st.booleans()
    ),
    st.builds(Window, context_size=st.integers(0, 3), recent_results=st.integers(0, 3), older_chars=st.just(100)),
    st.builds(
        Trim,
        max_context_tokens=st.sampled_from([1_000, 2_000, 50_000]),
        max_context_turns=st.integers(1, 6),
        max_result_chars=st.just(100),
    ),
    st.builds(
        Compact,
        max_tokens=st.sampled_from([0, 1_000, 3_000]),
        max_messages=st.integers(2, 12),
        keep_recent_tokens=st.sampled_from([0, 300, 20_000]),
        tool_call_cutoff=st.integers(1, 4),
        tool_summary_strategy=st.sampled_from(["llm", "heuristic", "off"]),
        max_lines=st.just(3),
    ),
    st.builds(
        Tiered,
        working_budget=st.sampled_from([500, 8_000]),
        total_budget=st.sampled_from([1_000, 3_000]),
        session_budget=st.integers(0, 400),
        working_age=st.integers(0, 600),
    ),
)
quick = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def play(
    batches: Sequence[list[Message]],
    strategy: Strategy,
    policy: Policy,
    window: int | None = None,
    edits: frozenset[int] = frozenset(),
) -> list[tuple[tuple[Entry, ...], Context]]:
    """A call after each batch; at ``edits`` the client has taken the last message before it back."""
    return play_calls(
        batches,
        strategy,
        policy,
        lambda history, epoch, number: load(history, epoch, window=window, edited=number in edits, calls=number),
    )


@quick
@given(conversations, strategies, policies, st.frozensets(st.integers(0, 14), max_size=2))
def test_every_context_is_valid_and_keeps_the_running_task(
    batches: list[list[Message]], strategy: Strategy, policy: Policy, edits: frozenset[int]
) -> None:
    for history, context in play(batches, strategy, policy, edits=edits):
        prove_pairing([m.message for m in context.messages if isinstance(m, Entry)])
        task = next(e for e in reversed(history) if e.message.starts_turn)
        assert task.message in [m.message for m in context.messages if isinstance(m, Entry) and m.seq == task.seq]
        tail = [m for m in context.messages if isinstance(m, Entry)]
        assert tail[-1].seq == history[-1].seq or context.repairs


@settings(quick, max_examples=200)
@given(
    conversations,
    st.sampled_from([Slim(), Slim(recent_turns=1), Full()]),
    st.sampled_from([SMALL, Auto(high=1_000, low=500), Auto(high=4_000, low=500), Stride(stride=2)]),
    st.sampled_from([None, 700, 3_000]),
    st.sampled_from([0, 10, 1_000]),
    st.integers(0, 20),
)
def test_may_need_epoch_is_false_only_where_decide_keeps_the_epoch(
    batches: list[list[Message]], strategy: Strategy, policy: Policy, window: int | None, wait: int, calls: int
) -> None:
    try:
        played = play(batches, strategy, policy, window=window)
    except ContextTooLarge:
        return
    now = START + timedelta(seconds=wait)
    for number, ((_, context), (history, _)) in enumerate(pairwise(played), start=1):
        epoch = context.epoch
        snapshot = load(history, epoch, window=window, calls=number + calls, last_call_at=START)
        everything = (*snapshot.kept, *snapshot.entries)
        sums = TokenSums(
            kept=count_entries(snapshot.kept),
            tail=count_entries(snapshot.entries),
            required=count_entries(must_stay(snapshot.kept, snapshot.entries)),
            steps=sum(entry.message.role == "assistant" for entry in snapshot.entries),
        )
        distances = cut_distances(snapshot.entries)
        sure = surely_keeps(snapshot, strategy=strategy, policy=policy, sums=sums, distances=distances, now=now)
        event(f"{sure} of {len(everything) > 3}")
        if sure:
            assert decide(snapshot, strategy=strategy, policy=policy, now=now) == ContinueEpoch()


@quick
@given(conversations)
def test_growing_cut_distances_are_never_too_small(batches: list[list[Message]]) -> None:
    entries = play(batches, Full(), SMALL)[-1][0]
    replies = [index for index, entry in enumerate(entries) if entry.message.role == "assistant"]
    grown = cut_distances(entries[: replies[0]] if replies else entries)
    for start, end in pairwise([*replies, len(entries)]):
        try:
            prove_pairing([entry.message for entry in entries[:end]])
        except UnpairedMessages:
            return  # such a call is no live call
        grown = grown.with_added(entries[start:end])
        exact = cut_distances(entries[:end])
        assert grown.step >= exact.step
        assert grown.turn >= exact.turn
        assert grown.open >= exact.open


@quick
@given(conversations, strategies, policies)
def test_within_an_epoch_each_context_is_a_prefix_of_the_next(
    batches: list[list[Message]], strategy: Strategy, policy: Policy
) -> None:
    calls = play(batches, strategy, policy)
    for (_, first), (_, second) in pairwise(calls):
        if first.epoch.number == second.epoch.number:
            before = rendered(first)
            assert rendered(second)[: len(before)] == before


@quick
@given(conversations, strategies, policies)
def test_the_same_input_gives_the_same_context(
    batches: list[list[Message]], strategy: Strategy, policy: Policy
) -> None:
    assert play(batches, strategy, policy) == play(batches, strategy, policy)


@quick
@given(conversations, strategies, policies)
def test_the_report_adds_up(batches: list[list[Message]], strategy: Strategy, policy: Policy) -> None:
    for history, context in play(batches, strategy, policy):
        sent = sum(message.tokens for message in context.messages)
        report = context.report
        assert report.tokens_after == sent == sum(layer.tokens for layer in report.layers)
        assert report.tokens_before == sum(entry.tokens for entry in history)
        body = sum(m.tokens for m in context.messages if isinstance(m, Entry))
        assert sum(turn.tokens for turn in report.turns) == body
        assert [t.turn for t in report.turns] == sorted({t.turn for t in report.turns})


@quick
@given(conversations, strategies.filter(lambda each: not isinstance(each, Full)), policies, st.integers(60, 3_000))
def test_no_context_is_over_the_window(
    batches: list[list[Message]], strategy: Strategy, policy: Policy, window: int
) -> None:
    try:
        calls = play(batches, strategy, policy, window=window)
    except ContextTooLarge as refused:
        assert refused.budget == window < refused.needed  # noqa: PT017 -- either outcome is right
        return
    assert all(context.report.tokens_after <= window for _, context in calls)


@quick
@given(conversations, policies)
def test_full_sends_everything(batches: list[list[Message]], policy: Policy) -> None:
    for history, context in play(batches, Full(), policy):
        if not context.repairs:
            assert context.messages == history
            assert context.is_whole


@quick
@given(conversations)
def test_the_head_stays_well_inside_the_low_watermark(batches: list[list[Message]]) -> None:
    for _, context in play(batches, Slim(), SMALL):
        head = sum(m.tokens for m in context.messages if isinstance(m, HeadMessage))
        assert head <= SMALL.low * 0.95


@quick
@given(conversations)
def test_a_window_too_small_for_the_task_itself_is_refused_with_numbers(batches: list[list[Message]]) -> None:
    with pytest.raises(ContextTooLarge):
        play(batches, Slim(), SMALL, window=1)
