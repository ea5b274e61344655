"""Summaries that a strategy will want at its next epoch, so that they are made before they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import assert_never

from app.domain.history import Entry, Epoch, Snapshot, Summary
from app.domain.turns import group_turns
from app.strategies.archiving import results_to_archive
from app.strategies.compositions import compact_limit, needs_of, split_of
from app.strategies.epochs import content_tokens
from app.strategies.pipeline import Draft, run
from app.strategies.presets import Compact, Full, Slim, Strategy, Tiered, Trim, Window
from app.strategies.summary_prompts import Purpose
from app.strategies.trimming import drop_half_over_turns

# Such summaries go into the tenant's memory of the day.
MEMORY: Purpose = "trim"
# From this share of a limit on, what the cut will take is summarised. What is foreseen earlier is never more than what
# is cut later, so a summary that was made ahead always fits.
AHEAD = 0.75
# A checkpoint is made ahead once in so many messages, not with each: what it leaves out is told without a model.
CHECKPOINT_STEP = 8
# Results are archived one by one in the course of a loop: this many are made ready beforehand.
RESULTS_AHEAD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """A summary that will be wanted, of the messages from ``first_seq`` to ``last_seq``.

    ``given``: for a tool result the call that it answers.
    """

    purpose: Purpose
    first_seq: int
    last_seq: int
    given: str = ""


def foresee(strategy: Strategy, snapshot: Snapshot) -> tuple[Foreseen, ...]:
    """What the strategy will want of the messages of ``snapshot``."""
    match strategy:
        case Full() | Slim() | Window():
            return ()
        case Trim():
            return _halves(strategy, snapshot)
        case Compact():
            return (*_checkpoint(strategy, snapshot), *_results(strategy, snapshot))
        case Tiered():
            return _tasks(snapshot)
        case _:
            assert_never(strategy)


def after_cut(
    strategy: Strategy, snapshot: Snapshot, epoch: Epoch, made: Sequence[Summary] = ()
) -> tuple[Foreseen, ...]:
    """What an epoch that has just started wants of what it cut, for the next one; ``made`` are those that count.

    Messages that are trimmed go to the day's memory (CowAgent); a checkpoint may not have been ready in time.
    """
    if not isinstance(strategy, Trim | Compact):
        return ()
    staying = set(epoch.kept)
    gone = [e.seq for e in (*snapshot.kept, *snapshot.entries) if e.seq < epoch.cut and e.seq not in staying]
    if not gone:
        return ()
    if isinstance(strategy, Compact):
        return (Foreseen(purpose="checkpoint", first_seq=_floor(snapshot), last_seq=max(gone)),)
    if not (snapshot.epoch and snapshot.epoch.is_void):
        return (Foreseen(purpose=MEMORY, first_seq=min(gone), last_seq=max(gone)),)
    # What was trimmed before is in the memory already, as far as it is still so.
    told = [(summary.first_seq, summary.last_seq) for summary in made if summary.purpose == MEMORY]
    runs = groupby(sorted(gone), key=lambda seq: sum(first <= seq for first, _ in told))
    untold = [[seq for seq in run if not any(first <= seq <= last for first, last in told)] for _, run in runs]
    return tuple(Foreseen(purpose=MEMORY, first_seq=run[0], last_seq=run[-1]) for run in untold if run)


def _halves(strategy: Trim, snapshot: Snapshot) -> tuple[Foreseen, ...]:
    draft = Draft(kept=snapshot.kept, tail=snapshot.entries)
    turns = group_turns(draft.entries)
    high = needs_of(strategy, snapshot).high or 0
    if len(turns) < 2 or (len(turns) < AHEAD * strategy.max_context_turns and content_tokens(snapshot) < AHEAD * high):
        return ()
    return _range("trim", run(draft, (drop_half_over_turns(1),)).gone)


def _checkpoint(strategy: Compact, snapshot: Snapshot) -> tuple[Foreseen, ...]:
    limit, high = compact_limit(strategy, snapshot), needs_of(strategy, snapshot).high
    if high is None:
        is_near = len(snapshot.kept) + len(snapshot.entries) >= AHEAD * strategy.max_messages
    else:
        is_near = content_tokens(snapshot) >= AHEAD * high
    if not is_near:
        return ()
    gone = run(Draft(kept=snapshot.kept, tail=snapshot.entries), (split_of(strategy, limit),)).gone
    # A checkpoint takes up the one before it: it stands for everything from the beginning on.
    last = max((entry.seq for entry in gone), default=0) // CHECKPOINT_STEP * CHECKPOINT_STEP
    first = _floor(snapshot)
    return (Foreseen(purpose="checkpoint", first_seq=first, last_seq=last),) if last > first else ()


def _results(strategy: Compact, snapshot: Snapshot) -> tuple[Foreseen, ...]:
    if strategy.tool_summary_strategy != "llm":
        return ()
    entries = (*snapshot.kept, *snapshot.entries)
    calls = {call.id: f"{call.name} {call.arguments}" for entry in entries for call in entry.message.calls}
    return tuple(
        Foreseen(
            purpose="tool_result",
            first_seq=entry.seq,
            last_seq=entry.seq,
            given="\n".join(calls.get(result.call_id, "") for result in entry.message.results),
        )
        for entry in results_to_archive(entries, cutoff=max(1, strategy.tool_call_cutoff - RESULTS_AHEAD))
    )


def _tasks(snapshot: Snapshot) -> tuple[Foreseen, ...]:
    """A task is summarised once it is complete (Fifth, "Agent Loop", step 6)."""
    complete = group_turns((*snapshot.kept, *snapshot.entries))[:-1]
    return tuple(found for turn in complete for found in _range("task", turn.entries))


def _range(purpose: Purpose, entries: Sequence[Entry]) -> tuple[Foreseen, ...]:
    seqs = [entry.seq for entry in entries]
    return (Foreseen(purpose=purpose, first_seq=min(seqs), last_seq=max(seqs)),) if seqs else ()


def _floor(snapshot: Snapshot) -> int:
    return snapshot.epoch.floor if snapshot.epoch else 1
