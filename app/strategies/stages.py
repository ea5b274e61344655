"""The stages that strategies are composed of. Each is a function that returns a `Stage`."""

from __future__ import annotations

from dataclasses import replace

from app.domain.history import Entry, Material, TerseEntry
from app.domain.tokens import Encode
from app.strategies.activity_log import derive_missing, derive_steps, read_activity_log, render_activity_log
from app.strategies.cutting import Cut, cut_to_tokens, cut_to_turns
from app.strategies.layers import exchange
from app.strategies.pipeline import Draft, Stage, count_entries
from app.strategies.prompts import ACTIVITY_LOG_ACK


def keep_all(floor: int = 1) -> Stage:
    """Every message from ``floor`` on that was loaded, in order; before it, what is kept."""

    def stage(draft: Draft) -> Draft:
        kept = tuple(entry for entry in draft.kept if entry.seq < floor)
        whole = (*draft.gone, *draft.kept, *draft.tail)
        return replace(draft, cut=floor, kept=kept, tail=tuple(e for e in whole if e.seq >= floor), gone=())

    return stage


def keep_recent_turns(turns: int) -> Stage:
    """The last ``turns`` turns in full; before them only what must stay (flo.monster, "Context Builder", step 2)."""

    def stage(draft: Draft) -> Draft:
        return _apply(draft, cut_to_turns(draft.kept, draft.tail, turns))

    return stage


def keep_within(target: int, *, recent_turns: int, hard: int | None = None) -> Stage:
    """Cut down to ``target`` tokens of kept and tail; untouched where it fits already."""

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


def insert_activity_log(material: Material, *, limit: int, encode: Encode, derive: bool, earlier: str = "") -> Stage:
    """The log of what the cut took, with its acknowledgement; nothing when nothing was cut.

    An entry is shown when the message it belongs to is before the cut. ``derive``: turns that are cut without
    any entry, and the steps that a cut inside a turn takes, get entries made without a model. ``earlier`` is the log of
    the last epoch, where the steps that were cut then are to be found.
    """

    def stage(draft: Draft) -> Draft:
        if draft.cut == 1:
            return draft
        terse = [entry for entry in material.terse if entry.seq < draft.cut]
        if derive:
            steps = _derived_steps(draft, terse, earlier)
            terse = _in_order([*terse, *_derived(draft, terse), *steps])
            # They are stored nowhere else: the next epoch takes them over.
            draft = replace(draft, told=draft.cut) if steps else draft
        text = render_activity_log(replace(material, terse=tuple(terse)), limit=limit, encode=encode)
        return draft.with_head(*exchange("activity_log", text, ACTIVITY_LOG_ACK, encode))

    return stage


def _derived(draft: Draft, terse: list[TerseEntry]) -> list[TerseEntry]:
    """Entries for the turns that are cut without any."""
    running = frozenset(entry.turn for entry in draft.tail)
    gone = {entry.turn for entry in draft.gone}
    past = [e for e in _by_seq([*draft.kept, *draft.gone]) if e.turn in gone and e.turn not in running]
    return [*derive_missing(past, terse)]


def _derived_steps(draft: Draft, terse: list[TerseEntry], earlier: str) -> list[TerseEntry]:
    """Entries for the steps that were cut, now and earlier, of turns that go on in the tail."""
    running = frozenset(entry.turn for entry in draft.tail)
    known = {(entry.turn, entry.text) for entry in terse}
    carried = [line for line in read_activity_log(earlier, running) if (line.turn, line.text) not in known]
    return [*carried, *derive_steps(entry for entry in draft.gone if entry.turn in running)]


def _by_seq(entries: list[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: entry.seq)


def _in_order(terse: list[TerseEntry]) -> list[TerseEntry]:
    return sorted(terse, key=lambda entry: (entry.turn, entry.seq))
