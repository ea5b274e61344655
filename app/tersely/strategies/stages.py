"""The stages that strategies are composed of. Each is a function that returns a `Stage`."""

from __future__ import annotations

from msgspec.structs import replace

from tersely.domain.history.history import Entry, EpochInputs, TerseEntry
from tersely.domain.tokens import Encode
from tersely.strategies.epochs.cutting import Cut, cut_to_tokens, cut_to_turns
from tersely.strategies.head.layers import exchange
from tersely.strategies.pipeline import Draft, Stage, count_entries
from tersely.strategies.prompts import ACTIVITY_LOG_ACK
from tersely.strategies.summaries.activity_log import (
    derive_outcomes,
    derive_steps,
    read_activity_log,
    render_activity_log,
)


def keep_all(first_seq: int = 1) -> Stage:
    """Make a stage that keeps the messages of ``kept``, and of the others those from ``first_seq`` on, in order."""

    def stage(draft: Draft) -> Draft:
        kept = tuple(entry for entry in draft.kept if entry.seq < first_seq)
        whole = (*draft.gone, *draft.kept, *draft.tail)
        return replace(draft, cut=first_seq, kept=kept, tail=tuple(e for e in whole if e.seq >= first_seq), gone=())

    return stage


def keep_recent_turns(turns: int) -> Stage:
    """Make a stage that keeps the last ``turns`` turns in full, and before them only messages that must stay
    (flo.monster, "Context Builder", step 2).
    """

    def stage(draft: Draft) -> Draft:
        return _apply(draft, cut_to_turns(draft.kept, draft.tail, turns))

    return stage


def keep_within(target: int, *, recent_turns: int, hard: int | None = None) -> Stage:
    """Make a stage that cuts kept messages and tail down to ``target`` tokens. A draft that fits stays as it is."""

    def stage(draft: Draft) -> Draft:
        if count_entries(draft.entries) <= target:
            return draft
        cut = cut_to_tokens(draft.kept, draft.tail, target=target, recent_turns=recent_turns, hard=hard)
        if draft.tail and len(cut.kept) < len(draft.kept):
            return draft.with_cut(cut.first, cut.kept)
        return _apply(draft, cut)

    return stage


def _apply(draft: Draft, cut: Cut) -> Draft:
    return draft.with_cut(cut.first, cut.kept) if draft.tail and cut.first > draft.tail[0].seq else draft


def insert_activity_log(inputs: EpochInputs, *, limit: int, encode: Encode, derive: bool, earlier: str = "") -> Stage:
    """Return the log of cut turns, with its acknowledgement; nothing if nothing was cut.

    An entry is shown if its message is before the cut. ``derive``: turns that are cut without an entry, and the steps
    that a cut inside a turn removes, get entries without a model. ``earlier`` is the log of the last epoch, which has
    the entries of steps that were cut then.
    """

    def stage(draft: Draft) -> Draft:
        if draft.cut == 1:
            return draft
        terse = [entry for entry in inputs.terse if entry.seq < draft.cut]
        older = inputs.older_turns
        if derive:
            past = _past(draft)
            steps = _derived_steps(draft, terse, earlier)
            terse = _in_order([*terse, *derive_outcomes(past, inputs), *steps])
            # They are stored nowhere else: the next epoch carries them over.
            draft = replace(draft, summary_covers_to=draft.cut) if steps else draft
            if terse and any(entry.turn < terse[0].turn for entry in past):
                older = terse[0].turn - 1
        log = replace(inputs, terse=tuple(terse), older_turns=older)
        text = render_activity_log(log, limit=limit, encode=encode)
        return draft.with_head(*exchange("activity_log", text, ACTIVITY_LOG_ACK, encode))

    return stage


def _past(draft: Draft) -> list[Entry]:
    """Return the messages of the turns before the cut."""
    running = frozenset(entry.turn for entry in draft.tail)
    return [entry for entry in _by_seq([*draft.kept, *draft.gone]) if entry.turn not in running]


def _derived_steps(draft: Draft, terse: list[TerseEntry], earlier: str) -> list[TerseEntry]:
    """Return entries for the cut steps of turns that continue in the tail."""
    running = frozenset(entry.turn for entry in draft.tail)
    known = {(entry.turn, entry.text) for entry in terse}
    carried = [line for line in read_activity_log(earlier, running) if (line.turn, line.text) not in known]
    return [*carried, *derive_steps(entry for entry in draft.gone if entry.turn in running)]


def _by_seq(entries: list[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: entry.seq)


def _in_order(terse: list[TerseEntry]) -> list[TerseEntry]:
    return sorted(terse, key=lambda entry: (entry.turn, entry.seq))
