"""A cleared context begins anew: nothing of what came before is shown or told of, under any strategy."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tersely.domain.history.context import Context
from tersely.domain.history.history import Entry, Epoch, EpochInputs, HeadMessage
from tersely.strategies.epochs.policies import Auto, EveryRequest, Policy
from tersely.strategies.planning import first_seq_needed
from tersely.strategies.presets import STRATEGIES, Strategy
from tersely.strategies.summaries.activity_log import derive_missing
from tests.builders import assistant, user
from tests.strategies.histories import call_model, chat, clear, load, place

EVERY = [kind() for kind in STRATEGIES.values()]
AUTO = Auto(high=2_000, low=800)


def cleared(history: tuple[Entry, ...], strategy: Strategy, policy: Policy) -> Epoch:
    before = call_model(load(history, None), strategy=strategy, policy=policy).epoch
    return clear(history, before, strategy, policy)


def go_on(history: tuple[Entry, ...], epoch: Epoch, strategy: Strategy, policy: Policy) -> Context:
    """A call after the clear, with as much loaded as the service would load, and a log that knows everything."""
    reach = first_seq_needed(epoch, strategy=strategy, policy=policy)
    snapshot = replace(load(history, epoch), entries=tuple(entry for entry in history if entry.seq >= reach))
    material = EpochInputs(terse=derive_missing(list(history), ()))
    return call_model(snapshot, strategy=strategy, policy=policy, material=material)


@pytest.mark.parametrize("policy", [AUTO, EveryRequest()], ids=["auto", "every_request"])
@pytest.mark.parametrize("strategy", EVERY, ids=list(STRATEGIES))
def test_nothing_before_the_clear_is_in_the_context(strategy: Strategy, policy: Policy) -> None:
    old = (*chat(6, size=300)[:-1],)
    epoch = cleared(old, strategy, policy)
    assert (epoch.cleared_at, epoch.head, epoch.kept) == (old[-1].seq + 1, (), ())
    messages = [entry.message for entry in old]
    for turn in range(1, 40):
        messages += [user(f"fresh question {turn}"), assistant(f"fresh answer {turn}. " + "y" * 300)]
        history = place(*messages)
        context = go_on(history[:-1], epoch, strategy, policy)
        epoch = context.epoch
        assert epoch.cleared_at == old[-1].seq + 1
        for message in context.messages:
            text = message.text if isinstance(message, HeadMessage) else message.message.text
            assert "question 1" not in text.replace("fresh question", "")
            assert " answer" not in text.replace("fresh answer", "")
            assert not isinstance(message, Entry) or message.seq > old[-1].seq


@pytest.mark.parametrize("strategy", EVERY, ids=list(STRATEGIES))
def test_pinned_messages_stay_after_a_clear(strategy: Strategy) -> None:
    history = chat(4)
    pinned = (history[0], replace(history[1], pinned=True), *history[2:])
    assert cleared(pinned, strategy, AUTO).kept == (2,)
