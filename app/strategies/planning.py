"""What an epoch starts with, and the context that it gives for a snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cache, lru_cache
from typing import assert_never

from app.domain.context import Context, TurnReport
from app.domain.history import Entry, Epoch, Material, Snapshot
from app.domain.tokens import Encode
from app.strategies.epochs import (
    Advance,
    Auto,
    Decision,
    EveryRequest,
    Marks,
    Policy,
    Stride,
    decide_epoch,
    fingerprint,
    watermarks,
)
from app.strategies.pipeline import Draft, Stage, run, seal
from app.strategies.presets import DEFAULT_REFERENCES, Full, Slim, Strategy, strategy_needs, strategy_text
from app.strategies.stages import (
    insert_activity_log,
    insert_references,
    keep_all,
    keep_recent_turns,
    keep_within,
)

# Log and index each get at most this share of the low watermark, whatever their own limits allow.
HEAD_SHARE = 0.25
LOG_LIMIT = 2_000
# The size of a head follows from the cut and the cut from the size of the head: so many rounds at most.
ROUNDS = 3


@lru_cache(maxsize=1024)
def fingerprint_of(strategy: Strategy, policy: Policy) -> str:
    """Names strategy, parameters and policy; stored with each epoch."""
    return fingerprint(strategy_text(strategy), policy)


def decide(
    snapshot: Snapshot, *, strategy: Strategy, policy: Policy, now: datetime, overflow: bool = False
) -> Decision:
    """`decide_epoch` for a strategy."""
    current = fingerprint_of(strategy, policy)
    needs = strategy_needs(strategy)
    return decide_epoch(snapshot, policy, needs, now=now, current=current, overflow=overflow)


def load_from(epoch: Epoch | None, *, strategy: Strategy, policy: Policy) -> int:
    """The first sequence number that a snapshot's entries must reach back to.

    That is the epoch's cut, unless the configuration changed to one that shows more than the epoch did.
    """
    if epoch is None:
        return 1
    unchanged = epoch.fingerprint == fingerprint_of(strategy, policy)
    return epoch.cut if unchanged or not _may_widen(strategy, policy) else 1


def _may_widen(strategy: Strategy, policy: Policy) -> bool:
    """Whether a change to this configuration can bring back what the last epoch had cut."""
    return isinstance(strategy, Full) or isinstance(policy, EveryRequest)


def plan_epoch(
    snapshot: Snapshot,
    material: Material,
    *,
    strategy: Strategy,
    policy: Policy,
    advance: Advance,
    now: datetime,
    encode: Encode,
) -> Epoch:
    """The epoch that starts now: where it cuts, what stays before the cut, and its rendered head.

    The cost depends on ``snapshot.entries`` and on the bounds of ``material``, never on the session's length.
    """
    # The rounds of a plan count the same lines again and again; the memory of that ends with the plan.
    counted = cache(encode)
    draft = _plan_draft(snapshot, material, strategy=strategy, policy=policy, advance=advance, encode=counted)
    return Epoch(
        number=snapshot.epoch.number + 1 if snapshot.epoch else 1,
        cut=draft.cut,
        head=draft.head,
        kept=tuple(entry.seq for entry in draft.kept),
        reason=advance.reason,
        fingerprint=fingerprint_of(strategy, policy),
        references=draft.references,
        created_at=now,
    )


def build(snapshot: Snapshot, epoch: Epoch, *, strategy: Strategy) -> Context:
    """Head, kept and tail of ``epoch``, sealed. Raises `ContextTooLarge` when the window cannot hold them.

    ``full`` makes no promise about the window: whether a request fits is then for the upstream to say.
    """
    budget = snapshot.window if strategy_needs(strategy).cuts else None
    return seal(_restore(snapshot, epoch), snapshot=snapshot, epoch=epoch, budget=budget)


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
    )


def _loaded(snapshot: Snapshot) -> Sequence[Entry]:
    """Kept and entries, each message once, in order."""
    known = {entry.seq: entry for entry in (*snapshot.kept, *snapshot.entries)}
    return list(known.values())


def _plan_draft(
    snapshot: Snapshot, material: Material, *, strategy: Strategy, policy: Policy, advance: Advance, encode: Encode
) -> Draft:
    start = _starting_draft(snapshot, widen=_may_widen(strategy, policy))
    match strategy:
        case Full():
            if advance.reason != "overflow":
                return run(start, (keep_all(),))
            return _plan_slim(start, snapshot, material, Slim(recent_turns=1), policy, advance, encode)
        case Slim():
            return _plan_slim(start, snapshot, material, strategy, policy, advance, encode)
        case _:
            assert_never(strategy)


def _starting_draft(snapshot: Snapshot, *, widen: bool) -> Draft:
    """The current epoch without its head: a new one renders its own.

    ``widen``: where more was loaded than the epoch showed, start from all of it.
    """
    entries = snapshot.entries
    if snapshot.epoch is None or (widen and entries and entries[0].seq < snapshot.epoch.cut):
        return Draft(tail=entries)
    restored = _restore(snapshot, snapshot.epoch)
    if restored.tail or not snapshot.entries:
        # What an earlier cut took has been counted and indexed then.
        return replace(restored, head=(), gone=())
    # History was rewritten from before the cut: there is nothing left to keep of the old epoch.
    return Draft(tail=snapshot.entries)


def _plan_slim(
    start: Draft,
    snapshot: Snapshot,
    material: Material,
    strategy: Slim,
    policy: Policy,
    advance: Advance,
    encode: Encode,
) -> Draft:
    marks = watermarks(snapshot, policy, strategy_needs(strategy), overflow=advance.reason == "overflow")
    turns: tuple[Stage, ...] = () if isinstance(policy, Auto) else (keep_recent_turns(strategy.recent_turns),)
    log_limit, index_limit = _head_limits(strategy, policy, marks)
    head: tuple[Stage, ...] = (
        insert_activity_log(
            material,
            limit=log_limit,
            encode=encode,
            derive=strategy.derive_terse,
            earlier=_last_log(snapshot.epoch),
        ),
        insert_references(limit=index_limit, encode=encode),
    )
    limit, target = _limits(policy, marks, advance)
    draft = run(start, (*turns, *head))
    if limit is None or target is None or draft.tokens <= limit:
        return draft
    reserve = max(snapshot.epoch.head_tokens if snapshot.epoch else 0, index_limit + log_limit // 4)
    for _ in range(ROUNDS):
        draft = run(start, (*turns, _keep_within(target - reserve, strategy, marks), *head))
        if draft.tokens <= target or draft.head_tokens <= reserve:
            break
        reserve = draft.head_tokens
    if marks.room is not None and draft.tokens > marks.room:
        # Nothing that Tersely adds may be what keeps the task itself out of the window.
        return run(start, (*turns, _keep_within(marks.room, strategy, marks)))
    return draft


def _last_log(epoch: Epoch | None) -> str:
    head = epoch.head if epoch else ()
    return next((message.text for message in head if message.layer == "activity_log"), "")


def _keep_within(target: int, strategy: Slim, marks: Marks) -> Stage:
    return keep_within(max(0, target), recent_turns=strategy.recent_turns, hard=marks.room)


def _head_limits(strategy: Slim, policy: Policy, marks: Marks) -> tuple[int, int]:
    """Tokens for the activity log and for the reference index."""
    share = int(marks.low * HEAD_SHARE)
    default = 0 if isinstance(policy, EveryRequest) else DEFAULT_REFERENCES
    index = default if strategy.references is None else strategy.references
    return min(LOG_LIMIT, share), min(index, share)


def _limits(policy: Policy, marks: Marks, advance: Advance) -> tuple[int | None, int | None]:
    """Above how many tokens of content this plan has to cut, and down to how many; None: it need not."""
    if advance.reason == "overflow":
        return marks.low, marks.low
    match policy:
        case EveryRequest():
            return marks.room, marks.room
        case Stride():
            return marks.room, None if marks.room is None else marks.room * 3 // 4
        case Auto():
            lazy = advance.reason in {"first", "edit", "config"}
            return (marks.high if lazy else marks.low), marks.low
        case _:
            assert_never(policy)
