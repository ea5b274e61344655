"""Choose the cut of an epoch: which messages stay when they cannot all stay.

Whole turns are cut first, and whole steps inside a long turn if that does not suffice (docs/decisions.md). A call and
its result stay together. The user message of the running turn, pinned messages and, if they fit, the user messages of
the promised turns stay verbatim before the cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import msgspec

from tersely.domain.history.history import Entry
from tersely.domain.history.pairing import safe_cuts
from tersely.domain.history.turns import group_steps
from tersely.strategies.pipeline import count_entries

# A cut at a turn's beginning is preferred as long as it leaves at least this share of the target in use.
TURN_CUT_FILL = 0.6
# The newest steps of the running turn stay even above the low watermark: a model that no longer sees what it has just
# read would read it again.
FRESH_STEPS = 2


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """The tail begins at sequence number ``first``; ``kept`` stay verbatim before it. ``tokens``: both together."""

    first: int
    kept: tuple[Entry, ...]
    tokens: int


def cut_to_turns(kept: Sequence[Entry], entries: Sequence[Entry], turns: int) -> Cut:
    """Return the last ``turns`` turns in full, and before them only messages that must stay."""
    numbers = list(dict.fromkeys(entry.turn for entry in entries))
    oldest = numbers[-turns:][0] if numbers else 0
    index = next((i for i, entry in enumerate(entries) if entry.turn >= oldest), 0)
    return _Cutter(kept, entries, recent_turns=turns).cut_at(index, target=None)


def cut_to_tokens(
    kept: Sequence[Entry], entries: Sequence[Entry], *, target: int, recent_turns: int, hard: int | None = None
) -> Cut:
    """Return the longest tail that fits into ``target`` tokens together with the messages kept before it.

    If none fits, return the smallest sensible tail: the newest steps of the running turn, or only the last step if
    these exceed ``hard``.
    """
    cutter = _Cutter(kept, entries, recent_turns=recent_turns)
    whole = cutter.cut_at(0, target=target)
    if whole.tokens <= target or not entries:
        return whole
    by_turn = cutter.first_fit(cutter.turn_starts, target)
    if by_turn is not None and by_turn.tokens >= TURN_CUT_FILL * target:
        return by_turn
    by_step = cutter.first_fit(cutter.starts, target)
    if by_step is not None:
        return by_step
    fresh = cutter.cut_at(cutter.fresh_start, target=target)
    if hard is not None and fresh.tokens > hard:
        return cutter.cut_at(cutter.starts[-1], target=target)
    return fresh


def must_stay(kept: Sequence[Entry], entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """Return the entries that no cut removes: the running turn's user message, and pinned messages with their calls and
    results.
    """
    everything = (*kept, *entries)
    running = everything[-1].turn if everything else 0
    pinned = pinned_seqs(everything)
    return tuple([e for e in everything if e.seq in pinned or (e.turn == running and e.message.starts_turn)])


def pinned_seqs(entries: Sequence[Entry]) -> frozenset[int]:
    """Pinned sequence numbers; a pinned call or result brings the whole step along, a pinned reply its rounds."""
    seqs = {entry.seq for entry in entries if entry.pinned}
    if seqs:
        for step in group_steps(entries):
            traffic = [e.seq for e in step.entries if e.message.calls or e.message.results]
            if seqs.intersection(traffic):
                seqs.update(traffic)
        rounds: list[int] = []
        for entry in entries:
            if entry.is_ours:
                rounds.append(entry.seq)
                continue
            if entry.seq in seqs and entry.message.role == "assistant":
                seqs.update(rounds)
            rounds = []
    return frozenset(seqs)


def cut_places(entries: Sequence[Entry]) -> list[int]:
    """Return the indexes of the entries before which a cut may be: of the user's and the model's messages, but for a
    place between a call and its result, or between a reply and the rounds with Tersely's tools before it.
    """
    safe = safe_cuts([entry.message for entry in entries])
    roles = [entry.message.role for entry in entries]
    return [
        index
        for index, role in enumerate(roles)
        if safe[index] and (role == "user" or (role == "assistant" and not (index and entries[index - 1].is_ours)))
    ]


class CutDistances(NamedTuple):
    """Tokens between successive places where a cut may be, at most; the beginning counts as such a place.

    ``step``: between any two of them and the end; ``turn``: between any two that begin a turn; ``open``: behind the
    last one that begins a turn.
    """

    step: int = 0
    turn: int = 0
    open: int = 0

    def with_added(self, added: Sequence[Entry]) -> CutDistances:
        """Return the distances with entries behind the others: a reply, the results of its calls, and questions."""
        step, turn, opened = 0, self.turn, self.open
        for entry in added:
            message = entry.message
            if message.starts_turn and not message.results:
                turn, opened = max(turn, opened), 0
            opened += entry.tokens
            step += entry.tokens
        return CutDistances(max(self.step, step), turn, opened)


def cut_distances(entries: Sequence[Entry]) -> CutDistances:
    """Return the distances between the places of ``entries`` where a cut may be."""
    step = turn = since_step = since_turn = 0
    places = frozenset(cut_places(entries))
    for index, entry in enumerate(entries):
        if index in places:
            step, since_step = max(step, since_step), 0
            if entry.message.starts_turn:
                turn, since_turn = max(turn, since_turn), 0
        since_step += entry.tokens
        since_turn += entry.tokens
    return CutDistances(max(step, since_step), turn, since_turn)


class _Cutter:
    """The possible cuts of one history, with the tokens of each."""

    def __init__(self, kept: Sequence[Entry], entries: Sequence[Entry], *, recent_turns: int) -> None:
        self.kept = tuple(kept)
        self.entries = tuple(entries)
        everything = (*self.kept, *self.entries)
        self._openings = [entry for entry in everything if entry.message.starts_turn]
        opening = {entry.seq for entry in self._openings}
        self.starts = cut_places(self.entries) or [0]
        self.turn_starts = [index for index in self.starts if self.entries and self.entries[index].seq in opening]
        self._after = [*accumulate([entry.tokens for entry in reversed(self.entries)], initial=0)][::-1]
        stay = {entry.seq for entry in must_stay(self.kept, self.entries)}
        self._staying = [entry for entry in everything if entry.seq in stay]
        # Late replies stand before messages with lower numbers, which must not be lost. Messages that stay in any case
        # do not count: an old message that the client moved to the end would otherwise prevent every cut.
        numbers_behind = [math.inf if entry.seq in stay else entry.seq for entry in reversed(self.entries)]
        behind = [*accumulate(numbers_behind, min, initial=math.inf)][::-1]
        self._first = [int(min(entry.seq, behind[index])) for index, entry in enumerate(self.entries)]
        self._promised = frozenset(list(dict.fromkeys([entry.turn for entry in everything]))[-recent_turns:])

    @property
    def fresh_start(self) -> int:
        """Return the last cut that leaves the newest steps of the running turn whole."""
        running = [i for i in self.starts if self.entries[i].turn == self.entries[-1].turn]
        return running[-FRESH_STEPS:][0] if running else self.starts[-1]

    def cut_at(self, index: int, *, target: int | None) -> Cut:
        """Return the cut before ``entries[index]``, with as many promised user messages as ``target`` has room for."""
        if not self.entries:
            return Cut(first=1, kept=self.kept, tokens=count_entries(self.kept))
        first = self._first[index]
        tail = self._after[index]
        kept = {e.seq: e for e in self._staying if e.seq < first}
        room = None if target is None else target - tail - count_entries(kept.values())
        for opening in reversed(self._openings):
            if opening.seq >= first or opening.seq in kept:
                continue
            if opening.turn not in self._promised and opening.turn != self.entries[index].turn:
                break
            if room is not None:
                room -= opening.tokens
                if room < 0:
                    break
            kept[opening.seq] = opening
        ordered = tuple([e for e in (*self.kept, *self.entries) if e.seq in kept])
        return Cut(first=first, kept=ordered, tokens=tail + count_entries(ordered))

    def first_fit(self, starts: Sequence[int], target: int) -> Cut | None:
        """Return the earliest of ``starts`` at which everything fits."""
        for index in starts:
            # Cheap test first: the tail alone, before what is kept is collected.
            if self._after[index] <= target:
                cut = self.cut_at(index, target=target)
                if cut.tokens <= target:
                    return cut
        return None
