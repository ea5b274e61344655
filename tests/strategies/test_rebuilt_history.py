"""Histories that a client has rebuilt: what was stored last may be said first, and nothing behind it is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tersely.domain.history.history import Entry
from tersely.strategies.epochs.policies import Auto, EveryRequest, Policy
from tersely.strategies.presets import Compact, Full, Slim, Strategy, Tiered, Trim, Window
from tests.strategies.histories import call_model, chat, load

ROOMY: list[Strategy] = [
    Full(),
    Slim(recent_turns=3),
    Window(context_size=3),
    Trim(max_context_turns=3),
    Compact(max_messages=4, keep_recent_tokens=0),
    Compact(max_messages=4, keep_recent_tokens=20_000),
    Tiered(),
]


def rebuilt(turns: int, left: int) -> tuple[Entry, ...]:
    """A chat of ``turns`` turns, of which the client still sends the last ``left`` behind a summary of its own."""
    entries = chat(turns, size=40)
    *older, question = (entry for entry in entries if entry.turn > turns - left)
    summary = chat(1)[0]
    newest = entries[-1].seq + 1
    return (
        replace(summary, seq=newest, turn=turns - left),
        *older,
        replace(question, seq=newest + 1),
    )


@pytest.mark.parametrize("policy", [EveryRequest(), Auto(high=100_000, low=50_000)], ids=["every_request", "auto"])
@pytest.mark.parametrize("strategy", ROOMY, ids=lambda strategy: type(strategy).__name__)
@given(turns=st.integers(3, 8), left=st.integers(2, 6))
@settings(deadline=None, max_examples=25)
def test_messages_behind_the_cut_are_sent(strategy: Strategy, policy: Policy, turns: int, left: int) -> None:
    history = rebuilt(turns, min(left, turns - 1))
    context = call_model(load(history, None, edited=True), strategy=strategy, policy=policy)
    sent = {message.seq for message in context.messages if isinstance(message, Entry)}
    newest = {entry.turn for entry in history[-3:]}
    assert {entry.seq for entry in history if entry.turn in newest} <= sent
    if isinstance(policy, Auto) and not isinstance(strategy, Trim | Compact):
        assert {entry.seq for entry in history} == sent
