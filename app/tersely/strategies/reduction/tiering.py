"""Assign turns to levels: working memory, kept or retrieved in full, or session memory only (Fifth)."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from msgspec.structs import replace

from tersely.domain.history.history import Entry, PastTurn
from tersely.domain.history.turns import Turn, group_turns
from tersely.domain.search.relevance import rank_turns
from tersely.strategies.epochs.cutting import must_stay
from tersely.strategies.pipeline import Draft, Stage, count_entries
from tersely.strategies.reduction.levels import Score, is_older, score_turns
from tersely.strategies.retrieval_rules import past_topics, repeated_errors

# A turn below this priority ("Low priority score") is neither recent nor related, and is not kept in full.
LOW_SCORE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionAges:
    """Seconds after which working and session memory are compressed."""

    working: float
    session: float
    now: datetime


def score_everything(entries: Sequence[Entry], past: Sequence[PastTurn], now: datetime) -> dict[int, Score]:
    """Return the priorities of the loaded turns and of those that may be retrieved.

    Relevance refers to the running turn's question. For past turns it may be known better, from the whole session.
    """
    turns = _by_number(past) | {turn.number: turn for turn in group_turns(entries)}
    ordered = [turns[number] for number in sorted(turns)]
    if not ordered:
        return {}
    task = "\n".join(entry.message.text for entry in ordered[-1].opening)
    relevance = {ranked.turn.number: ranked.relevance for ranked in rank_turns(ordered[:-1], task)}
    for each in past:
        relevance[each.turn] = max(each.relevance, relevance.get(each.turn, 0.0))
    return score_turns(ordered, relevance, now)


def _by_number(past: Iterable[PastTurn]) -> dict[int, Turn]:
    return {each.turn: Turn(number=each.turn, entries=each.entries) for each in past}


def keep_levels(
    *,
    past: Sequence[PastTurn],
    scores: Mapping[int, Score],
    ages: CompressionAges,
    working_budget: int,
    room: int,
    is_new_task: bool,
) -> Stage:
    """Make a stage that keeps working memory as the tail and puts retrieved turns before it while they fit into
    ``room``.

    ``room``: tokens for all whole turns, including the running one, and for messages that are pinned elsewhere. The
    running turn always stays; the watermarks cut what exceeds ``working_budget``, by steps. ``is_new_task``: the
    running turn starts a new task, so working and volatile memory are cleared.
    """

    def stage(draft: Draft) -> Draft:
        turns = group_turns(draft.entries)
        if not turns:
            return draft
        working = turns[-1:] if is_new_task else _working(turns, ages, working_budget)
        taken = {turn.number for turn in working}
        permanent = count_entries(e for e in must_stay(draft.kept, draft.tail) if e.turn not in taken)
        left = room - permanent - sum(turn.tokens for turn in working)
        chosen = _retrieve(turns, working, past, scores, left, is_new_task=is_new_task)
        first = _first_of(draft, taken)
        return _bring_back(draft, max(first, draft.cut), chosen)

    return stage


def _first_of(draft: Draft, turns: Container[int]) -> int:
    """Return the cut for which the tail contains all of ``turns``.

    A client that rebuilds its history puts new messages in front of older ones, so it may be before the first of them.
    """
    return min((entry.seq for entry in draft.tail if entry.turn in turns), default=draft.cut)


def _working(turns: Sequence[Turn], ages: CompressionAges, budget: int) -> list[Turn]:
    """Return the running turn, and before it as many as are young enough and fit."""
    *before, running = turns
    working = [running]
    left = budget - running.tokens
    for turn in reversed(before):
        left -= turn.tokens
        if left < 0 or is_older(turn, ages.working, ages.now):
            break
        working.insert(0, turn)
    return working


def _retrieve(
    turns: Sequence[Turn],
    working: Sequence[Turn],
    past: Sequence[PastTurn],
    scores: Mapping[int, Score],
    room: int,
    *,
    is_new_task: bool,
) -> list[Turn]:
    """Whole turns in the order of their claim: repeated errors, past topics, then by priority (volatile memory)."""
    running = working[-1]
    known = {turn.number for turn in working}
    aged = [turn for turn in turns if turn.number not in known]
    older = _by_number(past) | {turn.number: turn for turn in aged}
    candidates = [
        PastTurn(turn=number, entries=turn.entries, relevance=scores[number].relevance)
        for number, turn in older.items()
    ]
    candidates.sort(key=lambda each: -each.relevance)
    volatile = sorted(aged, key=lambda turn: -scores[turn.number].total)
    claims = [
        *(older[number] for number in (*repeated_errors(running.entries, candidates), *past_topics(candidates))),
        *(turn for turn in volatile if not is_new_task and scores[turn.number].total >= LOW_SCORE),
    ]
    chosen: dict[int, Turn] = {}
    for turn in claims:
        if turn.number in known or turn.number in chosen or turn.tokens > room:
            continue
        room -= turn.tokens
        chosen[turn.number] = turn
    return list(chosen.values())


def _bring_back(draft: Draft, first: int, turns: Iterable[Turn]) -> Draft:
    """Return the tail from ``first`` on, and before it what must stay and ``turns``, including turns that were cut long
    ago.
    """
    wanted = {entry.seq: entry for turn in turns for entry in turn.entries if entry.seq < first}
    permanent = {entry.seq: entry for entry in must_stay(draft.kept, draft.tail)}
    cut = draft.with_cut(first, [*wanted.values(), *permanent.values()])
    loaded = {entry.seq for entry in draft.entries}
    foreign = [entry for seq, entry in wanted.items() if seq not in loaded]
    if not foreign:
        return replace(cut, retrieved=tuple(sorted({entry.turn for entry in wanted.values()})))
    kept = sorted([*cut.kept, *foreign], key=lambda entry: entry.seq)
    return replace(cut, kept=tuple(kept), retrieved=tuple(sorted({entry.turn for entry in wanted.values()})))
