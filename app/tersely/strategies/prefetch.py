"""Predict the summaries that a strategy will need at its next epoch, so that they can be made in advance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import assert_never

from tersely.domain.history.history import Epoch, Snapshot, Summary
from tersely.domain.history.turns import Turn, group_turns
from tersely.strategies.composition import compact_limit, needs_of, split_of
from tersely.strategies.epochs.cutting import must_stay
from tersely.strategies.epochs.policies import content_tokens
from tersely.strategies.pipeline import Draft, run
from tersely.strategies.planning import AHEAD
from tersely.strategies.presets import Compact, Full, Slim, Strategy, Tiered, Trim, Window
from tersely.strategies.reduction.archiving import results_to_archive
from tersely.strategies.summaries.prompts import Purpose

# Such summaries go into the tenant's memory of the day.
MEMORY_UPDATE: Purpose = "trim"
# Turns are summarised together, with a line for each.
TASKS: Purpose = "tasks"
# Tokens from which on a single turn is worth a call.
LONG_TASK = 2_000
# From this share of a limit on, the messages of the coming cut are summarised. A prediction never covers more than the
# later cut, so the summary always fits. A checkpoint is made in advance once in so many messages; messages after it are
# summarised without a model.
CHECKPOINT_STEP = 8
# Results are archived one by one during a loop: so many summaries are made in advance.
RESULTS_AHEAD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryNeed:
    """A summary of the messages from ``first_seq`` to ``last_seq`` that will be needed.

    ``earlier``: for a tool result, its call. ``epoch``: for the memory, the epoch that cut the messages. ``is_ahead``:
    only a model's summary is useful; without a model the same text is written when it is needed.
    """

    purpose: Purpose
    first_seq: int
    last_seq: int
    earlier: str = ""
    epoch: int | None = None
    is_ahead: bool = False


def prefetches_summaries(strategy: Strategy) -> bool:
    """Return whether `upcoming_summaries` may return anything."""
    return isinstance(strategy, Trim | Compact)


def upcoming_summaries(strategy: Strategy, snapshot: Snapshot) -> tuple[SummaryNeed, ...]:
    """Return the summaries that the strategy will need of a snapshot's messages."""
    match strategy:
        case Full() | Slim() | Window() | Tiered():
            return ()
        case Trim():
            return _halves(strategy, snapshot)
        case Compact():
            return (*_checkpoint(strategy, snapshot), *_results(strategy, snapshot))
        case _:
            assert_never(strategy)


def after_cut(
    strategy: Strategy, snapshot: Snapshot, epoch: Epoch, made: Sequence[Summary] = ()
) -> tuple[SummaryNeed, ...]:
    """Return the summaries that a new epoch needs of its cut messages; ``made`` are the existing ones.

    Trimmed messages go to the daily memory (CowAgent). A checkpoint may not have been ready in time. Turns that left
    working memory are summarised together.
    """
    if not isinstance(strategy, Trim | Compact | Tiered):
        return ()
    staying = set(epoch.kept)
    gone = [e.seq for e in (*snapshot.kept, *snapshot.entries) if e.seq < epoch.cut and e.seq not in staying]
    if not gone:
        return ()
    if isinstance(strategy, Compact):
        return (SummaryNeed(purpose="checkpoint", first_seq=_floor(snapshot), last_seq=max(gone)),)
    if isinstance(strategy, Tiered):
        left = [entry for entry in (*snapshot.kept, *snapshot.entries) if entry.seq in set(gone)]
        shown = {entry.turn for entry in snapshot.entries if entry.seq >= epoch.cut}
        covered = [(summary.first_seq, summary.last_seq) for summary in made if summary.purpose == TASKS]
        uncovered = [e for e in left if e.turn not in shown and not any(a <= e.seq <= b for a, b in covered)]
        return _tasks(group_turns(uncovered))
    # Only the stored epochs show which messages were cut: another replica may have stored this one.
    return (SummaryNeed(purpose=MEMORY_UPDATE, first_seq=min(gone), last_seq=max(gone), epoch=epoch.number),)


def _halves(strategy: Trim, snapshot: Snapshot) -> tuple[SummaryNeed, ...]:
    """Return the half that will be cut: by its number of turns, or about half of the limit's tokens.

    It stays the same at each call until it is cut, so that it is read once.
    """
    turns = group_turns((*snapshot.kept, *snapshot.entries))
    most = (strategy.max_context_turns + 1) // 2
    if len(turns) >= AHEAD * strategy.max_context_turns and len(turns) > most:
        return _ahead("ahead", turns[:most], snapshot)
    high = needs_of(strategy, snapshot).high or 0
    if content_tokens(snapshot) < AHEAD * high:
        return ()
    half = _within(turns[:-1], int(high * AHEAD / 2))
    return _ahead("ahead", half, snapshot) if len(half) <= len(turns) // 2 else ()


def _within(turns: Sequence[Turn], tokens: int) -> tuple[Turn, ...]:
    """Return the oldest of ``turns`` that have at most so many tokens together."""
    spent = accumulate(turn.tokens for turn in turns)
    return tuple(turn for turn, so_far in zip(turns, spent, strict=True) if so_far <= tokens)


def _ahead(purpose: Purpose, turns: Sequence[Turn], snapshot: Snapshot) -> tuple[SummaryNeed, ...]:
    """Return the turns that the next cut will take."""
    permanent = {entry.seq for entry in must_stay(snapshot.kept, snapshot.entries)}
    seqs = [entry.seq for turn in turns for entry in turn.entries if entry.seq not in permanent]
    return (SummaryNeed(purpose=purpose, first_seq=min(seqs), last_seq=max(seqs), is_ahead=True),) if seqs else ()


def _checkpoint(strategy: Compact, snapshot: Snapshot) -> tuple[SummaryNeed, ...]:
    limit, high = compact_limit(strategy, snapshot), needs_of(strategy, snapshot).high
    if high is None:
        is_near = len(snapshot.kept) + len(snapshot.entries) >= AHEAD * strategy.max_messages
    else:
        is_near = content_tokens(snapshot) >= AHEAD * high
    if not is_near:
        return ()
    gone = run(Draft(kept=snapshot.kept, tail=snapshot.entries), (split_of(strategy, limit),)).gone
    # A checkpoint includes the one before it: it covers everything from the beginning on.
    last = max((entry.seq for entry in gone), default=0) // CHECKPOINT_STEP * CHECKPOINT_STEP
    first = _floor(snapshot)
    return (SummaryNeed(purpose="checkpoint", first_seq=first, last_seq=last, is_ahead=True),) if last > first else ()


def _results(strategy: Compact, snapshot: Snapshot) -> tuple[SummaryNeed, ...]:
    if strategy.tool_summary_strategy != "llm":
        return ()
    entries = (*snapshot.kept, *snapshot.entries)
    calls = {call.id: f"{call.name} {call.arguments}" for entry in entries for call in entry.message.calls}
    return tuple(
        SummaryNeed(
            purpose="tool_result",
            first_seq=entry.seq,
            last_seq=entry.seq,
            earlier="\n".join(calls.get(result.call_id, "") for result in entry.message.results),
        )
        for entry in results_to_archive(entries, cutoff=max(1, strategy.tool_call_cutoff - RESULTS_AHEAD))
    )


def _tasks(turns: Sequence[Turn]) -> tuple[SummaryNeed, ...]:
    """Return the finished tasks that left working memory with one cut (Fifth, "Agent Loop", step 6): one summary, a
    line each.

    A single turn gets one only if it is long.
    """
    if not turns or (len(turns) == 1 and turns[0].tokens < LONG_TASK):
        return ()
    seqs = [entry.seq for turn in turns for entry in turn.entries]
    return (SummaryNeed(purpose=TASKS, first_seq=min(seqs), last_seq=max(seqs), is_ahead=True),)


def _floor(snapshot: Snapshot) -> int:
    return snapshot.epoch.cleared_at if snapshot.epoch else 1
