"""What an epoch starts with, and the context that it gives for a snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cache, lru_cache

from app.domain.context import Context, TurnReport
from app.domain.history import Entry, Epoch, Material, Snapshot
from app.domain.tiers import Way
from app.domain.tokens import Encode, estimate_text
from app.strategies.compositions import Composition, Start, closing_of, compose, needs_of
from app.strategies.cutting import must_stay
from app.strategies.epochs import (
    PROGRESS,
    Advance,
    Decision,
    EveryRequest,
    Policy,
    Stride,
    decide_epoch,
    fingerprint,
    watermarks,
)
from app.strategies.pipeline import Draft, Stage, run, seal
from app.strategies.presets import Full, Slim, Strategy, Window, strategy_text
from app.strategies.shortening import apply_tiers, shorten_results
from app.strategies.stages import keep_within

# The size of a head follows from the cut and the cut from the size of the head: so many rounds at most.
ROUNDS = 3
# Between the two parts of a fingerprint.
_WITH = " with "


@lru_cache(maxsize=1024)
def fingerprint_of(strategy: Strategy, policy: Policy, way: Way = "") -> str:
    """Names strategy, parameters and policy, and the tool that what is shortened is looked up with; stored with each
    epoch.
    """
    named = fingerprint(strategy_text(strategy), policy)
    return f"{named}{_WITH}{way}" if way else named


def way_of(epoch: Epoch) -> str:
    """The tools that the epoch's texts were shortened for, as in its fingerprint."""
    return epoch.fingerprint.partition(_WITH)[2]


def decide(
    snapshot: Snapshot, *, strategy: Strategy, policy: Policy, now: datetime, overflow: bool = False
) -> Decision:
    """`decide_epoch` for a strategy."""
    current = fingerprint_of(strategy, policy, snapshot.way)
    shown = as_shown(snapshot)
    needs = needs_of(strategy, shown)
    return decide_epoch(shown, policy, needs, now=now, current=current, overflow=overflow)


def as_shown(snapshot: Snapshot) -> Snapshot:
    """The snapshot as its epoch shows it: what is shortened counts for what is left of it."""
    tiers = snapshot.epoch.tiers if snapshot.epoch else ()
    if not tiers:
        return snapshot
    return replace(
        snapshot,
        kept=apply_tiers(snapshot.kept, tiers, encode=estimate_text),
        entries=apply_tiers(snapshot.entries, tiers, encode=estimate_text),
    )


def load_from(epoch: Epoch | None, *, strategy: Strategy, policy: Policy) -> int:
    """The first sequence number that a snapshot's entries must reach back to.

    That is the epoch's cut, unless the configuration changed to one that shows more than the epoch did, or the next
    epoch cannot go on from this one.
    """
    if epoch is None:
        return 1
    if epoch.is_void:
        return epoch.floor
    unchanged = epoch.fingerprint.partition(_WITH)[0] == fingerprint_of(strategy, policy)
    return epoch.cut if unchanged or not _may_widen(strategy, policy) else epoch.floor


def turns_to_load(strategy: Strategy) -> int | None:
    """Where more is loaded than the epoch showed: so many of the last turns are enough; None: all of them."""
    return needs_of(strategy).recent_turns if isinstance(strategy, Slim) else None


def _may_widen(strategy: Strategy, policy: Policy) -> bool:
    """Whether a change to this configuration can bring back what the last epoch had cut."""
    if isinstance(strategy, Slim | Window):
        return isinstance(policy, EveryRequest)
    return isinstance(strategy, Full)


def plan_epoch(
    snapshot: Snapshot,
    material: Material,
    *,
    strategy: Strategy,
    policy: Policy,
    advance: Advance,
    now: datetime,
    encode: Encode,
    overflows: int = 0,
) -> Epoch:
    """The epoch that starts now: where it cuts, what stays before the cut, and its rendered head.

    ``overflows`` counts how often the upstream has refused this very call, if that is the reason. The cost depends on
    ``snapshot.entries`` and on the bounds of ``material``, never on the session's length.
    """
    # The rounds of a plan count the same lines again and again; the memory of that ends with the plan.
    needs = needs_of(strategy, snapshot)
    start = Start(
        draft=_starting_draft(snapshot, widen=_may_widen(strategy, policy)),
        snapshot=snapshot,
        material=_above_floor(material, _floor(snapshot)),
        policy=policy,
        advance=advance,
        marks=watermarks(snapshot, policy, needs, halved=advance.reason in {"overflow", "compact"}),
        now=now,
        encode=cache(encode),
        overflows=overflows,
    )
    draft = _plan_draft(start, strategy)
    return Epoch(
        number=snapshot.epoch.number + 1 if snapshot.epoch else 1,
        cut=draft.cut,
        head=draft.head,
        kept=tuple(entry.seq for entry in draft.kept),
        reason=advance.reason,
        fingerprint=fingerprint_of(strategy, policy, snapshot.way),
        references=draft.references,
        created_at=now,
        tiers=draft.tiers,
        prefixes=draft.prefixes,
        retrieved=draft.retrieved,
        floor=draft.cut if advance.reason == "clear" else _floor(snapshot),
        told=draft.told,
        quoted=draft.quoted,
        settled=material.settled,
    )


def _floor(snapshot: Snapshot) -> int:
    return snapshot.epoch.floor if snapshot.epoch else 1


def _above_floor(material: Material, floor: int) -> Material:
    """``material`` without what came before the session was last cleared."""
    if floor == 1:
        return material
    terse = tuple(entry for entry in material.terse if entry.seq >= floor)
    return replace(
        material,
        terse=terse,
        older_turns=material.older_turns if len(terse) == len(material.terse) > 0 else 0,
        summaries=tuple(summary for summary in material.summaries if summary.first_seq >= floor),
        past=tuple(past for past in material.past if past.entries[0].seq >= floor),
    )


def with_retrieved(snapshot: Snapshot, material: Material, epoch: Epoch) -> Snapshot:
    """``snapshot`` with what ``epoch`` brought back from before it, as the next snapshot will have it loaded."""
    loaded = {entry.seq for entry in (*snapshot.kept, *snapshot.entries)}
    wanted = set(epoch.kept) - loaded
    found = {entry.seq: entry for past in material.past for entry in past.entries if entry.seq in wanted}
    if not found:
        return snapshot
    return replace(snapshot, kept=tuple(sorted((*snapshot.kept, *found.values()), key=lambda entry: entry.seq)))


def build(snapshot: Snapshot, epoch: Epoch, *, strategy: Strategy, encode: Encode) -> Context:
    """Head, kept and tail of ``epoch``, sealed; ``encode`` recounts what the epoch shortens.

    Raises `ContextTooLarge` when the window cannot hold them. ``full`` makes no promise about the window: whether a
    request fits is then for the upstream to say.
    """
    budget = None if isinstance(strategy, Full) else snapshot.window
    stages = (shorten_results(epoch.tiers, encode=encode), *closing_of(strategy, encode))
    return seal(run(_restore(snapshot, epoch), stages), snapshot=snapshot, epoch=epoch, budget=budget)


def report_cut_turns(epoch: Epoch, turns: Iterable[int]) -> tuple[TurnReport, ...]:
    """What became of ``turns`` that an epoch cut earlier and a snapshot does not load."""
    logged = any(message.layer == "activity_log" for message in epoch.head)
    return tuple(
        TurnReport(
            turn=turn,
            kept="terse" if logged else "left_out",
            tokens=0,
            reason="in the activity log" if logged else "before the cut",
        )
        for turn in turns
    )


def _restore(snapshot: Snapshot, epoch: Epoch) -> Draft:
    staying = frozenset(epoch.kept)
    before = [entry for entry in _loaded(snapshot) if entry.seq < epoch.cut]
    return Draft(
        head=epoch.head,
        cut=epoch.cut,
        kept=tuple(entry for entry in before if entry.seq in staying),
        tail=tuple(entry for entry in snapshot.entries if entry.seq >= epoch.cut),
        gone=tuple(entry for entry in before if entry.seq not in staying),
        references=epoch.references,
        prefixes=epoch.prefixes,
        retrieved=epoch.retrieved,
    )


def _loaded(snapshot: Snapshot) -> Sequence[Entry]:
    """Kept and entries, each message once, in order."""
    known = {entry.seq: entry for entry in (*snapshot.kept, *snapshot.entries)}
    return list(known.values())


def _plan_draft(start: Start, strategy: Strategy) -> Draft:
    composition = compose(strategy, start)
    draft = run(start.draft, (*composition.shape, *composition.head))
    limit, target = _limits(start, cuts_itself=composition.cuts_itself, by_turns=needs_of(strategy).by_turns)
    if composition.is_everything or limit is None or target is None or draft.tokens <= limit:
        return draft
    return _fit(start, composition, target)


def _fit(start: Start, composition: Composition, target: int) -> Draft:
    """Cut further until head and all fit ``target`` tokens: the head depends on the cut, and the cut on the head."""

    def keep(tokens: int) -> Stage:
        hard = start.marks.room
        return keep_within(max(0, tokens), recent_turns=composition.recent_turns, hard=hard)

    reserve = max(start.snapshot.epoch.head_tokens if start.snapshot.epoch else 0, composition.head_reserve)
    draft = start.draft
    for _ in range(ROUNDS):
        draft = run(start.draft, (*composition.shape, keep(target - reserve), *composition.head))
        if draft.tokens <= target or draft.head_tokens <= reserve:
            break
        reserve = draft.head_tokens
    room = start.marks.room
    if room is not None and draft.tokens > room:
        # Nothing that Tersely adds may be what keeps the task itself out of the window.
        return run(start.draft, (*composition.shape, keep(room)))
    return draft


def _starting_draft(snapshot: Snapshot, *, widen: bool) -> Draft:
    """The current epoch without its head: a new one renders its own.

    ``widen``: where more was loaded than the epoch showed, start from that.
    """
    entries = snapshot.entries
    if snapshot.epoch is None:
        return Draft(tail=entries)
    if (widen or snapshot.epoch.is_void) and entries and entries[0].seq < snapshot.epoch.cut:
        if not snapshot.older_tokens:
            return Draft(tail=entries)
        first = entries[0].seq
        standing = tuple(entry for entry in must_stay(snapshot.kept, entries) if entry.seq < first)
        references = snapshot.epoch.references
        if snapshot.epoch.is_void:
            references = tuple(reference for reference in references if reference.position < first)
        return Draft(cut=first, kept=standing, tail=entries, references=references)
    restored = _restore(snapshot, snapshot.epoch)
    if restored.tail or not snapshot.entries:
        # What an earlier cut took has been counted and indexed then.
        return replace(restored, head=(), gone=(), prefixes=(), retrieved=())
    # History was rewritten from before the cut: there is nothing left to keep of the old epoch.
    return Draft(tail=snapshot.entries)


def _limits(start: Start, *, cuts_itself: bool, by_turns: bool) -> tuple[int | None, int | None]:
    """Above how many tokens of content this plan has to cut, and down to how many; None: it need not."""
    marks = start.marks
    if start.is_overflow or start.advance.reason == "compact":
        return marks.low, marks.low
    if isinstance(start.policy, EveryRequest):
        return marks.room, marks.room
    if isinstance(start.policy, Stride) and by_turns:
        return marks.room, None if marks.room is None else marks.room * 3 // 4
    if start.advance.reason in {"first", "edit", "config"}:
        return marks.high, marks.low
    # A strategy's own cut that leaves hardly less than the limit would be due again at once.
    return (int(marks.high * PROGRESS) if cuts_itself else marks.low), marks.low
