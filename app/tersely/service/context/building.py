"""Build a context from a loaded history: of the current epoch, or of the one that starts now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import msgspec
from msgspec import structs

from tersely.domain.history.context import Context
from tersely.domain.history.history import Entry, EpochInputs, TerseEntry
from tersely.domain.text.state import StateBlock
from tersely.service.common import tokens
from tersely.service.context.context_config import ContextConfig, TokenBudget, count_additions
from tersely.service.context.history import History
from tersely.service.context.visible_states import read_visible_states
from tersely.strategies.epochs.policies import StartEpoch
from tersely.strategies.planning import (
    build_context,
    plan_epoch,
    with_retrieved_turns,
)
from tersely.strategies.presets import Slim, Strategy, Tiered, Window
from tersely.strategies.summaries.activity_log import derive_missing, derive_outcomes


class BuiltContext(msgspec.Struct, frozen=True, kw_only=True):
    """A built context. ``starts_epoch``: whether a new epoch begins with it; then ``derived`` are the log entries that
    were written for the turns that the epoch cut, and ``states`` the state blocks that were read from replies.
    """

    context: Context
    starts_epoch: bool
    derived: tuple[TerseEntry, ...] = ()
    states: tuple[StateBlock, ...] = ()


def build(history: History, config: ContextConfig, budget: TokenBudget, model: str) -> BuiltContext:
    """Build the context of the current epoch, or of the epoch that starts now. Raises `ContextTooLarge`."""
    snapshot = history.snapshot
    name = tokens.encoding_for(model)
    if history.epoch_start is None and snapshot.epoch is not None:
        context = build_context(
            snapshot, snapshot.epoch, strategy=config.strategy, encode=partial(tokens.recount, name=name)
        )
        return BuiltContext(context=context, starts_epoch=False)
    epoch_start = history.epoch_start or StartEpoch(reason="first")
    inputs = history.epoch_inputs
    states: tuple[StateBlock, ...] = ()
    if isinstance(config.strategy, Window) and (snapshot.epoch is None or snapshot.epoch.must_rebuild):
        states = read_visible_states((*snapshot.kept, *snapshot.entries))
        if states and states[-1].seq > inputs.state_seq:
            inputs = structs.replace(inputs, state=states[-1].text, state_seq=states[-1].seq)
    epoch = plan_epoch(
        snapshot,
        inputs,
        strategy=config.strategy,
        policy=config.policy,
        epoch_start=epoch_start,
        now=budget.now,
        encode=partial(tokens.recount, name=name),
        overflows=history.overflows,
    )
    loaded = (*snapshot.kept, *snapshot.entries)
    gone = [entry for entry in loaded if entry.seq < epoch.cut]
    seen = sum(entry.tokens for entry in gone if entry not in snapshot.kept)
    epoch = structs.replace(epoch, older_tokens=snapshot.older_tokens + seen)
    derived: tuple[TerseEntry, ...] = ()
    if keeps_log_of_turns(config.strategy):
        running = {entry.turn for entry in loaded if entry.seq >= epoch.cut}
        past = [entry for entry in gone if entry.turn not in running]
        derived = derive_lines(config.strategy, past, history.epoch_inputs)
    whole = with_retrieved_turns(snapshot, history.epoch_inputs, epoch)
    context = build_context(whole, epoch, strategy=config.strategy, encode=partial(tokens.recount, name=name))
    after, before = count_additions(epoch, config), budget.added
    more = {"instructions": after.instructions - before.instructions, "tools": after.tools - before.tools}
    return BuiltContext(
        context=_with_more_fixed_tokens(context, more), starts_epoch=True, derived=derived, states=states
    )


def _with_more_fixed_tokens(context: Context, more: Mapping[str, int]) -> Context:
    """Return the context with ``more`` tokens added to layers: a new epoch may be the first that has instructions or
    tools.
    """
    report = context.report
    layers = tuple(structs.replace(layer, tokens=layer.tokens + more.get(layer.name, 0)) for layer in report.layers)
    added = sum(more.values())
    before, after = report.tokens_before + added, report.tokens_after + added
    return structs.replace(
        context, report=structs.replace(report, tokens_before=before, tokens_after=after, layers=layers)
    )


def derive_lines(strategy: Strategy, past: Sequence[Entry], inputs: EpochInputs) -> tuple[TerseEntry, ...]:
    """Return the entries without a model that a strategy that keeps a log stores of past turns when they are cut."""
    return derive_outcomes(past, inputs) if isinstance(strategy, Slim) else derive_missing(past, inputs.terse)


def keeps_log_of_turns(strategy: Strategy) -> bool:
    """Return whether every later epoch shows a log entry for each cut turn. Such entries are stored when the turn is
    cut.
    """
    return strategy.derive_terse if isinstance(strategy, Slim) else isinstance(strategy, Tiered)
