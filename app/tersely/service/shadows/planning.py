"""Plan the context that a shadow's strategy would have sent, by the code that plans real ones.

A shadow keeps an epoch of its own. All else is the call's: its messages, its window, its time, the session's log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import structs

from tersely.domain.history.history import LOG_ENTRIES, Entry, Epoch, EpochInputs, Snapshot, TerseEntry
from tersely.domain.messages import Message
from tersely.service.context.building import BuiltContext, build, derive_lines, keeps_log_of_turns
from tersely.service.context.context_config import ContextConfig, FixedCounts, TokenBudget, count_additions
from tersely.service.context.history import History, epoch_of
from tersely.service.context.loading import count_older_tokens
from tersely.service.recognition.session_lookup import SessionMatch
from tersely.strategies.epochs.policies import StartEpoch
from tersely.strategies.planning import decide


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredCall:
    """A call that was sent unchanged, and its ``replies``. ``snapshot`` has the whole history that the model saw,
    ``body`` is the client's, ``config`` the one that is tried out, ``budget`` that of the call.
    """

    match: SessionMatch
    snapshot: Snapshot
    config: ContextConfig
    budget: TokenBudget
    model: str
    body: bytes
    replies: Sequence[Message]

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All messages of the history without instructions, in order."""
        return (*self.snapshot.kept, *self.snapshot.entries)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingContext:
    """A context before it is built. ``epoch_start`` is set where an epoch starts; building it takes epoch inputs.
    ``added``: Tersely's own among the fixed tokens of ``snapshot``.
    """

    snapshot: Snapshot
    added: FixedCounts
    epoch_start: StartEpoch | None


def prepare_context(call: AnsweredCall, epoch: Epoch | None) -> PendingContext:
    """Return the snapshot of a call whose session had ``epoch``, with the decision on a new one."""
    config, match, sent = call.config, matched_with(call.match, epoch), call.snapshot
    basis = epoch_of(match, config)
    first = max(match.expanded_from, config.first_seq(basis))
    kept = frozenset(basis.kept) if basis is not None else frozenset()
    entries = tuple(entry for entry in call.entries if entry.seq >= first)
    added = count_additions(epoch, config)
    snapshot = structs.replace(
        sent,
        epoch=basis,
        entries=entries,
        kept=tuple(entry for entry in call.entries if entry.seq < first and entry.seq in kept),
        fixed_tokens=sent.fixed_tokens + added.total,
        tool_tokens=sent.tool_tokens + added.tools,
        edited=sent.edited or (basis is not None and basis.is_stale),
        older_tokens=0 if basis is None or first == 1 else count_older_tokens(basis, entries),
        read_back=config.read_back,
        instructions=config.instructions,
        folds_repeats=config.folds_repeats,
    )
    decision = decide(snapshot, strategy=config.strategy, policy=config.policy, now=call.budget.now)
    return PendingContext(
        snapshot=snapshot, added=added, epoch_start=decision if isinstance(decision, StartEpoch) else None
    )


def matched_with(match: SessionMatch, epoch: Epoch | None) -> SessionMatch:
    """Return the match of a session that had ``epoch``."""
    return (
        match if match.session is None else structs.replace(match, session=structs.replace(match.session, plan=epoch))
    )


def build_shadow(call: AnsweredCall, pending: PendingContext, inputs: EpochInputs) -> BuiltContext:
    """Build the context. Raises `ContextTooLarge`."""
    history = History(
        snapshot=pending.snapshot,
        epoch_start=pending.epoch_start,
        epoch_inputs=_with_log(call, pending.snapshot, inputs),
        is_verbatim=False,
    )
    return build(history, call.config, structs.replace(call.budget, added=pending.added), call.model)


def _with_log(call: AnsweredCall, snapshot: Snapshot, inputs: EpochInputs) -> EpochInputs:
    """Return the inputs with the log entries that the strategy would have had stored by now, made without a model."""
    if not keeps_log_of_turns(call.config.strategy):
        return inputs
    first = snapshot.epoch.cut if snapshot.epoch is not None else 1
    running = call.entries[-1].turn
    ended = [entry for entry in call.entries if entry.turn < running and entry.seq < first]
    return _newest([*inputs.terse, *derive_lines(call.config.strategy, ended, inputs)], inputs)


def _newest(log: list[TerseEntry], inputs: EpochInputs) -> EpochInputs:
    log.sort(key=lambda entry: (entry.turn, entry.seq))
    if len(log) < LOG_ENTRIES:
        return structs.replace(inputs, terse=tuple(log))
    newest = tuple(log[-LOG_ENTRIES:])
    return structs.replace(inputs, terse=newest, older_turns=max(0, newest[0].turn - 1), oldest_at=newest[0].created_at)
