"""Instructions and tools are added to a session: not before a share of the watermark, and without a re-write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from tersely.domain.history.context import Context
from tersely.domain.history.history import Entry
from tersely.domain.messages import Message
from tersely.strategies.composition import needs_of
from tersely.strategies.epochs.additions import is_due, may_be_due, note_of
from tersely.strategies.epochs.policies import (
    Auto,
    EveryRequest,
    Policy,
    StartEpoch,
    content_tokens,
    fingerprint,
    parse_policy,
)
from tersely.strategies.planning import decide, with_tiers_applied
from tersely.strategies.presets import Compact, Full, Slim, Strategy, Tiered, Trim, Window
from tests.builders import assistant, call, result, user
from tests.strategies.histories import START, call_model, conversations, load, place, play_calls
from tests.strategies.test_properties import quick

NOTE = "End each reply with a line about it."
POLICY = Auto(high=2_000, low=800, instructions_at=0.25)
SHARE = 500
every_strategy = st.sampled_from(
    [Full(), Slim(), Window(), Trim(), Compact(), Tiered(total_budget=3_000), Compact(max_tokens=0, max_messages=200)]
)
policies = st.sampled_from([POLICY, replace(POLICY, instructions_at=0.6)])


def play(
    batches: Sequence[list[Message]], strategy: Strategy, policy: Policy, instructions: str | None = NOTE
) -> list[tuple[tuple[Entry, ...], Context]]:
    return play_calls(
        batches,
        strategy,
        policy,
        lambda history, epoch, number: load(
            history, epoch, calls=number, instructions=instructions, read_back="context_search"
        ),
        has_log=False,
    )


def shown(context: Context) -> list[tuple[str, str]]:
    """Return the text of each message, and the text in front of it."""
    return [(m.prefix, repr(m.message)) if isinstance(m, Entry) else ("", m.text) for m in context.messages]


def chat(*sizes: int) -> list[list[Message]]:
    """Batches of a chat: a question each, behind an answer of so many tokens."""
    answers = [[assistant(f"Answer {n}. " + "x" * (4 * size))] for n, size in enumerate(sizes, start=1)]
    return [[*(answers[n - 1] if n else []), user(f"Question {n + 1}?")] for n in range(len(sizes) + 1)]


@quick
@given(conversations, every_strategy, policies)
def test_before_the_share_is_reached_everything_is_as_the_client_sent_it(
    batches: list[list[Message]], strategy: Strategy, policy: Policy
) -> None:
    for history, context in play(batches, strategy, policy):
        if sum(entry.tokens for entry in history) >= SHARE:
            return
        assert context.epoch.is_plain
        assert not context.epoch.prefixes
        if not context.repairs and not context.must_answer:
            assert context.is_whole
            assert [m.message for m in context.messages if isinstance(m, Entry)] == [e.message for e in history]


@quick
@given(conversations, every_strategy, policies)
def test_adding_instructions_keeps_the_prefix(batches: list[list[Message]], strategy: Strategy, policy: Policy) -> None:
    for (_, first), (_, second) in pairwise(play(batches, strategy, policy)):
        if second.epoch.is_plain:
            assert first.epoch.is_plain
            before = shown(first)
            assert shown(second)[: len(before)] == before


@quick
@given(conversations, every_strategy, policies)
def test_instructions_stand_once_and_stay(batches: list[list[Message]], strategy: Strategy, policy: Policy) -> None:
    note = None
    for _, context in play(batches, strategy, policy):
        count = sum(NOTE in message.prefix for message in context.messages if isinstance(message, Entry))
        if not context.epoch.is_plain:
            assert count == 0
            note = None
        elif note is not None:
            assert note_of(context.epoch) == note
            assert count == 1
        else:
            note = note_of(context.epoch)
            assert count == (note is not None)


@quick
@given(conversations, every_strategy)
def test_every_request_is_never_plain(batches: list[list[Message]], strategy: Strategy) -> None:
    assert not any(context.epoch.is_plain for _, context in play(batches, strategy, EveryRequest()))


@pytest.mark.parametrize("strategy", [Slim(), Window()], ids=["slim", "window"])
def test_the_first_question_past_the_share_carries_the_instructions(strategy: Strategy) -> None:
    calls = [context for _, context in play(chat(200, 200, 200, 10), strategy, POLICY)]

    notes = [note_of(context.epoch) for context in calls]
    assert notes[:3] == [None, None, None]
    assert notes[3] is not None
    question = calls[3].messages[-1]
    assert isinstance(question, Entry)
    assert notes[3].seq == question.seq
    assert notes[4] == notes[3]
    assert [context.epoch.reason for context in calls] == ["first"] * 3 + ["instructions"] * 2


def test_a_running_turn_waits_for_its_next_question() -> None:
    batches = [[user("Go.")], *([assistant("x" * 1_200), user("")] for _ in range(3))]
    batches[1][1] = batches[2][1] = batches[3][1] = assistant("")
    plain = [[user("Go.")], [assistant("y" * 4_000), user("Next?")]]

    assert all(note_of(context.epoch) is None for _, context in play(batches, Slim(), POLICY))
    assert note_of(play(plain, Slim(), POLICY)[-1][1].epoch) is not None


def test_a_session_that_is_first_seen_past_the_share_has_everything_in_front() -> None:
    ((_, context),) = play([[user("x" * 4 * SHARE)]], Slim(), POLICY)

    assert not context.epoch.is_plain
    assert not context.epoch.prefixes


def test_share_zero_adds_from_the_first_request() -> None:
    ((_, context),) = play([[user("Hello.")]], Slim(), replace(POLICY, instructions_at=0.0))

    assert not context.epoch.is_plain


def test_a_cut_ends_the_plain_epoch() -> None:
    context = play(chat(*[300] * 9), Slim(), POLICY)[-1][1]

    assert context.epoch.cut > 1
    assert not context.epoch.is_plain
    assert not any(NOTE in message.prefix for message in context.messages if isinstance(message, Entry))


def test_without_instructions_to_give_nothing_starts() -> None:
    reasons = {context.epoch.reason for _, context in play(chat(200, 200, 200, 200), Slim(), POLICY, None)}

    assert reasons == {"first"}


def test_a_request_that_takes_no_instructions_is_shown_none() -> None:
    history, context = play(chat(200, 200, 200), Slim(), POLICY)[-1]
    assert note_of(context.epoch) is not None

    other = call_model(load(history, context.epoch, instructions=None), strategy=Slim(), policy=POLICY)
    later = call_model(
        load(history, other.epoch, instructions=NOTE, read_back="context_search"), strategy=Slim(), policy=POLICY
    )

    assert other.is_whole
    assert shown(later) == shown(context)


def test_the_question_that_is_taken_back_takes_the_instructions_along() -> None:
    history, context = play(chat(200, 200, 200), Slim(), POLICY)[-1]
    before = note_of(context.epoch)
    assert before is not None
    again = (*history[:-1], structs.replace(history[-1], seq=history[-1].seq + 1, message=user("Another?")))
    snapshot = load(again, context.epoch.without_messages([before.seq]), edited=True, instructions=NOTE)

    after = call_model(snapshot, strategy=Slim(), policy=POLICY)

    note = note_of(after.epoch)
    assert note is not None
    assert note.seq == again[-1].seq
    assert shown(after)[:-1] == shown(context)[:-1]


def test_shortened_result_offers_the_tools_that_read_it() -> None:
    batches = [[user("Read it.")], [assistant("", call("c1", "read", {})), result("c1", "line\n" * 3_000)]]

    first, second = [context for _, context in play(batches, Compact(), Auto(high=200_000, instructions_at=0.5))]

    assert first.epoch.is_plain
    assert not second.epoch.is_plain


def test_the_share_is_no_part_of_the_fingerprint() -> None:
    assert fingerprint("slim", POLICY) == fingerprint("slim", replace(POLICY, instructions_at=0.9))
    assert parse_policy({"instructions_at": 0.3}) == Auto(instructions_at=0.3)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 20), st.integers(20, 400))
def test_additions_depend_on_stored_messages_alone(turns: int, size: int) -> None:
    """A process that has never seen the session decides as the one which has."""
    history, context = play(chat(*[size] * turns), Slim(), POLICY)[-1]
    stored = load(history, context.epoch, instructions=NOTE, read_back="context_search", calls=turns)

    again = decide(stored, strategy=Slim(), policy=POLICY, now=START)

    assert not (isinstance(again, StartEpoch) and again.reason == "instructions")


def test_instructions_and_memos_in_front_of_one_message_are_both_shown() -> None:
    history = place(*[message for batch in chat(200, 200, 200) for message in batch])
    _, context = play(chat(200, 200), Slim(), POLICY)[-1]
    last = structs.replace(history[-1], prefix="[Memos]", tokens=history[-1].tokens + 2)
    snapshot = load((*history[:-1], last), context.epoch, instructions=NOTE)

    shown_last = call_model(snapshot, strategy=Slim(), policy=POLICY).messages[-1]

    assert isinstance(shown_last, Entry)
    assert shown_last.prefix == f"{NOTE}\n\n[Memos]"


@quick
@given(conversations, every_strategy, policies)
def test_token_sums_never_miss_a_due_epoch(batches: list[list[Message]], strategy: Strategy, policy: Policy) -> None:
    messages: list[Message] = []
    calls = play(batches, strategy, policy)
    for number, (_, context) in enumerate(calls[:-1]):
        messages = [message for batch in batches[: number + 2] for message in batch]
        snapshot = load(place(*messages), context.epoch, instructions=NOTE, read_back="context_search")
        needs = needs_of(strategy, snapshot)
        if is_due(with_tiers_applied(snapshot), policy, needs):
            assert may_be_due(snapshot, policy, needs, content=content_tokens(snapshot))
