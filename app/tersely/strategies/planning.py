"""Plan an epoch, and build its context for a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import cache, lru_cache
from itertools import takewhile

import msgspec
from msgspec import structs

from tersely.domain.history.context import Context, Kept, TurnReport
from tersely.domain.history.history import Entry, Epoch, EpochInputs, Repeats, Snapshot
from tersely.domain.history.tiers import ReadBack
from tersely.domain.tokens import Encode, estimate_text
from tersely.strategies.composition import Composition, EpochStartInputs, closing_of, compose, needs_of
from tersely.strategies.epochs.additions import (
    LAYER,
    additions_from,
    is_due,
    may_be_due,
    place_note,
    shown_prefixes,
    stays_plain,
)
from tersely.strategies.epochs.cutting import CutDistances, must_stay
from tersely.strategies.epochs.policies import (
    PROGRESS,
    Auto,
    ContinueEpoch,
    EpochDecision,
    EveryRequest,
    Policy,
    StartEpoch,
    Stride,
    TokenSums,
    compute_watermarks,
    decide_epoch,
    fingerprint,
    keeps_by_sums,
)
from tersely.strategies.head.injection import blocks_for_head, count_other_blocks, must_restate, write_blocks
from tersely.strategies.pipeline import Draft, Stage, run, seal
from tersely.strategies.presets import Compact, Full, Slim, Strategy, Trim, strategy_text
from tersely.strategies.reduction.repeats import carry_over, fold_repeats
from tersely.strategies.reduction.shortening import apply_tiers, shorten_results
from tersely.strategies.stages import keep_within

# The size of a head follows from the cut and the cut from the size of the head: so many rounds at most.
ROUNDS = 3
# Layers with summaries that cover a growing beginning of the history.
PREFIX_PURPOSES = frozenset({"checkpoint", "trim", "ahead"})
# From this share of a limit on, the cut at the limit is prepared for.
AHEAD = 0.75
# Between the two parts of a fingerprint.
_WITH = " with "


@lru_cache(maxsize=1024)
def fingerprint_of(strategy: Strategy, policy: Policy, read_back: ReadBack = "") -> str:
    """Return the text that names strategy, parameters, policy and read-back tools. It is stored with each epoch."""
    named = fingerprint(strategy_text(strategy), policy)
    return f"{named}{_WITH}{read_back}" if read_back else named


def read_back_of(epoch: Epoch) -> str:
    """Return the tools that the epoch's texts were shortened for, as in its fingerprint."""
    return epoch.fingerprint.partition(_WITH)[2]


def decide(
    snapshot: Snapshot, *, strategy: Strategy, policy: Policy, now: datetime, overflow: bool = False
) -> EpochDecision:
    """`decide_epoch` for a strategy."""
    current = fingerprint_of(strategy, policy, snapshot.read_back)
    snapshot = _on_basis(snapshot, strategy, policy)
    is_same = snapshot.epoch is not None and not (snapshot.edited or snapshot.epoch.must_rebuild)
    if is_same and must_restate(snapshot):
        snapshot = structs.replace(snapshot, edited=True)
    shown = with_tiers_applied(snapshot)
    needs = needs_of(strategy, shown)
    decision = decide_epoch(shown, policy, needs, now=now, current=current, overflow=overflow)
    if isinstance(decision, ContinueEpoch) and is_due(shown, policy, needs):
        return StartEpoch(reason="instructions")
    return decision


def surely_keeps(
    snapshot: Snapshot, *, strategy: Strategy, policy: Policy, sums: TokenSums, distances: CutDistances, now: datetime
) -> bool:
    """Return True only where `decide` keeps the epoch. Do not read the messages.

    Every block that the client injected must be shown. ``distances``: see `keeps_by_sums`.
    """
    epoch = snapshot.epoch
    if epoch is None or snapshot.edited or snapshot.ran_out or not isinstance(strategy, Slim | Full):
        return False
    if epoch.must_rebuild or epoch.tiers or epoch.folds_repeats or epoch.injected:
        return False
    if epoch.fingerprint != fingerprint_of(strategy, policy, snapshot.read_back):
        return False
    needs = needs_of(strategy)
    if may_be_due(snapshot, policy, needs, content=epoch.head_tokens + sums.kept + sums.tail):
        return False
    return keeps_by_sums(snapshot, policy, needs, sums=sums, distances=distances, now=now)


class ContentSize(msgspec.Struct, frozen=True, kw_only=True):
    """The size of an epoch's content, its head included: tokens, messages, turns; ``idle``: seconds since the last
    call.
    """

    tokens: int
    messages: int
    turns: int
    idle: float = 0.0


def may_need_epoch(
    epoch: Epoch | None,
    size: ContentSize,
    *,
    strategy: Strategy,
    policy: Policy,
    read_back: ReadBack,
    window: int | None,
    model_window: int | None,
) -> bool:
    """Return False only if `decide` keeps ``epoch`` and no summary is made ahead. It needs no messages.

    Without an epoch: False only if the first epoch would show everything unchanged.
    """
    if isinstance(policy, EveryRequest):
        return True
    if epoch is not None and (epoch.is_stale or epoch.fingerprint != fingerprint_of(strategy, policy, read_back)):
        return True
    if epoch is None and (isinstance(policy, Stride) or isinstance(strategy, Trim | Compact)):
        # `trim` and `compact` shorten single results at any size; so does `window` where the policy is not ``auto``,
        # and a first epoch by turns cuts as soon as there is a turn too many.
        return not isinstance(strategy, Full)
    # Instructions of any size leave at least the strategy's least share of its limit.
    needs = needs_of(strategy, Snapshot(entries=(), fixed_tokens=1 << 40, model_window=model_window))
    if not needs.cuts:
        return False
    auto = policy if isinstance(policy, Auto) else Auto()
    small = min(auto.low, (needs.high or auto.high) * 3 // 4)
    if auto.instructions_at and (epoch is None or epoch.is_plain):
        small = min(small, int(additions_from(policy, needs)))
    if size.tokens > (small if window is None else min(small, window // 2)):
        return True
    if needs.resume_idle is not None and size.idle > needs.resume_idle:
        return True
    if isinstance(policy, Stride) and needs.by_turns and size.turns >= needs.recent_turns + policy.stride:
        return True
    match strategy:
        case Trim():
            return size.turns >= AHEAD * strategy.max_context_turns
        case Compact():
            return needs.high is None and size.messages >= AHEAD * strategy.max_messages
        case _:
            return False


def is_unchanged(epoch: Epoch) -> bool:
    """Return whether ``epoch`` shows everything unchanged, so that it need not be stored."""
    return epoch.cut == 1 and not (epoch.head or epoch.kept or epoch.tiers or epoch.prefixes or epoch.folds_repeats)


def with_tiers_applied(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot as its epoch shows it: shortened messages count with their remaining tokens.

    Repeated text counts whole, though a reference stands for it: so a session is cut where it would be cut without
    references, each of its requests is the same but for shorter messages, and no price makes it dearer.
    """
    epoch = snapshot.epoch
    if epoch is None or not epoch.tiers:
        return snapshot
    kept = apply_tiers(snapshot.kept, epoch.tiers, encode=estimate_text)
    return structs.replace(
        snapshot, kept=kept, entries=apply_tiers(snapshot.entries, epoch.tiers, encode=estimate_text)
    )


def needs_full_plan(epoch: Epoch, *, strategy: Strategy, policy: Policy) -> bool:
    """Return whether the next epoch must look at all live messages, instead of continuing from ``epoch``'s cut.

    It must after a change of strategy, of its parameters or of the epoch policy: the new configuration may show what
    the last one cut. A change of the read-back tools (`Snapshot.read_back`) does not count.
    """
    return epoch.must_rebuild or epoch.fingerprint.partition(_WITH)[0] != fingerprint_of(strategy, policy)


def planning_basis(epoch: Epoch | None, *, strategy: Strategy, policy: Policy) -> Epoch | None:
    """Return the epoch that the next one is based on: marked for rebuild if all must be planned again."""
    if epoch is None or epoch.must_rebuild or not needs_full_plan(epoch, strategy=strategy, policy=policy):
        return epoch
    return epoch.marked_for_rebuild()


def _on_basis(snapshot: Snapshot, strategy: Strategy, policy: Policy) -> Snapshot:
    basis = planning_basis(snapshot.epoch, strategy=strategy, policy=policy)
    return snapshot if basis is snapshot.epoch else structs.replace(snapshot, epoch=basis)


def first_seq_needed(epoch: Epoch | None, *, strategy: Strategy, policy: Policy) -> int:
    """Return the first sequence number that a snapshot's entries must include.

    It is the epoch's cut, unless the next epoch cannot continue from this one.
    """
    if epoch is None:
        return 1
    return epoch.cleared_at if needs_full_plan(epoch, strategy=strategy, policy=policy) else epoch.cut


def plan_epoch(
    snapshot: Snapshot,
    inputs: EpochInputs,
    *,
    strategy: Strategy,
    policy: Policy,
    epoch_start: StartEpoch,
    now: datetime,
    encode: Encode,
    overflows: int = 0,
) -> Epoch:
    """Return the epoch that starts now: where it cuts, what stays before the cut, and its rendered head.

    ``overflows`` counts how often the upstream has refused this very call, if that is the reason. The cost depends on
    ``snapshot.entries`` and on the bounds of ``inputs``, never on the session's length.
    """
    snapshot = _on_basis(snapshot, strategy, policy)
    if epoch_start.reason == "instructions" and snapshot.epoch is not None:
        return _with_additions(snapshot, snapshot.epoch, strategy=strategy, policy=policy, now=now, encode=encode)
    # The rounds of a plan count the same lines again and again; the memory of that ends with the plan.
    needs = needs_of(strategy, snapshot)
    start = EpochStartInputs(
        draft=_starting_draft(snapshot),
        snapshot=snapshot,
        inputs=_without_extracts(_since_cleared(_with_unread_turns(inputs, snapshot), _cleared_at(snapshot)), snapshot),
        policy=policy,
        epoch_start=epoch_start,
        watermarks=compute_watermarks(snapshot, policy, needs, halved=epoch_start.reason in {"overflow", "compact"}),
        now=now,
        encode=cache(encode),
        overflows=overflows,
    )
    draft = _plan_draft(start, strategy)
    blocks = blocks_for_head(snapshot.injected, draft)
    is_plain = not blocks and stays_plain(snapshot, draft, policy, needs)
    note = place_note(snapshot, policy, needs, encode) if is_plain else None
    return Epoch(
        number=snapshot.epoch.number + 1 if snapshot.epoch else 1,
        cut=draft.cut,
        head=draft.head,
        kept=(
            *(entry.seq for entry in draft.kept),
            *_taken_by_clear(snapshot, draft),
            *_answered_late(snapshot, draft, epoch_start),
        ),
        reason=epoch_start.reason,
        fingerprint=fingerprint_of(strategy, policy, snapshot.read_back),
        references=draft.references,
        excerpts=draft.excerpts,
        created_at=now,
        tiers=draft.tiers,
        prefixes=draft.prefixes if note is None else (note, *draft.prefixes),
        retrieved=draft.retrieved,
        whole=_whole_turns(draft, snapshot),
        cleared_at=draft.cut if epoch_start.reason == "clear" else _cleared_at(snapshot),
        summary_covers_to=draft.summary_covers_to,
        head_covers_to=draft.head_covers_to,
        covered=draft.covered,
        memos_chosen_to=inputs.memos_chosen_to,
        injected=blocks,
        has_injected=True,
        is_plain=is_plain,
        folds_repeats=snapshot.folds_repeats,
        repeats=_carry_over_repeats(snapshot, draft),
    )


def _with_additions(
    snapshot: Snapshot, epoch: Epoch, *, strategy: Strategy, policy: Policy, now: datetime, encode: Encode
) -> Epoch:
    """Return the plain ``epoch`` with instructions in front of the newest question; or, where something is shortened,
    no longer plain. All else stays, so that the cached prefix does.
    """
    note = place_note(snapshot, policy, needs_of(strategy, snapshot), encode)
    others = tuple(prefix for prefix in epoch.prefixes if prefix.layer != LAYER)
    is_shortened = any(entry.is_shortened for entry in apply_tiers(snapshot.entries, epoch.tiers, encode=estimate_text))
    return structs.replace(
        epoch,
        number=epoch.number + 1,
        reason="instructions",
        created_at=now,
        prefixes=others if is_shortened or note is None else (note, *others),
        is_plain=not is_shortened,
    )


def _carry_over_repeats(snapshot: Snapshot, draft: Draft) -> Repeats | None:
    """Return the last epoch's decisions on repeated text, for the epoch of ``draft``; None if it replaced nothing."""
    before = snapshot.epoch
    if before is None or not (snapshot.folds_repeats and before.folds_repeats):
        return None
    shown = run(_restore(snapshot, before), (shorten_results(before.tiers, encode=estimate_text),))
    repeats = carry_over(shown.entries, before.repeats)
    # A message that has left the context is not decided again.
    left = {entry.seq for entry in draft.entries}
    repeats = structs.replace(repeats, asked_again=tuple(seq for seq in repeats.asked_again if seq in left))
    return repeats if repeats.replaced or repeats.asked_again else None


def _whole_turns(draft: Draft, snapshot: Snapshot) -> tuple[int, ...]:
    """Return the turns that are completely among the messages kept before the cut."""
    # Of what an earlier epoch kept, the rest is not loaded.
    known = set(snapshot.epoch.whole) if snapshot.epoch else set()
    partly = {entry.turn for entry in draft.gone} | ({entry.turn for entry in snapshot.kept} - known)
    kept = {entry.turn for entry in draft.kept}
    return tuple(sorted((kept - partly) | (kept & set(draft.retrieved))))


def _cleared_at(snapshot: Snapshot) -> int:
    return snapshot.epoch.cleared_at if snapshot.epoch else 1


def _with_unread_turns(inputs: EpochInputs, snapshot: Snapshot) -> EpochInputs:
    """Return ``inputs`` that count the turns before the loaded messages, where a plan of the whole history reads its
    newest part alone: turns that no epoch has cut yet have no entries.
    """
    epoch, entries = snapshot.epoch, snapshot.entries
    if inputs.older_turns or epoch is None or not (epoch.must_rebuild and snapshot.older_tokens) or not entries:
        return inputs
    first = min([entries[0].turn, *[entry.turn for entry in inputs.terse[:1]]])
    return structs.replace(inputs, older_turns=max(0, first - 1))


def _since_cleared(inputs: EpochInputs, cleared_at: int) -> EpochInputs:
    """Return ``inputs`` without anything from before the session was last cleared."""
    if cleared_at == 1:
        return inputs
    terse = tuple(entry for entry in inputs.terse if entry.seq >= cleared_at)
    return structs.replace(
        inputs,
        terse=terse,
        older_turns=inputs.older_turns if len(terse) == len(inputs.terse) > 0 else 0,
        summaries=tuple(summary for summary in inputs.summaries if summary.first_seq >= cleared_at),
        past_turns=tuple(past for past in inputs.past_turns if past.entries[0].seq >= cleared_at),
    )


def _without_extracts(inputs: EpochInputs, snapshot: Snapshot) -> EpochInputs:
    """Return ``inputs`` without summaries that no model made, if all messages that they cover are loaded.

    The plan then extracts a summary of the whole, which is more complete than one composed of older extracts.
    """
    is_all_loaded = snapshot.epoch is None or (snapshot.epoch.must_rebuild and not snapshot.older_tokens)
    if not is_all_loaded:
        return inputs
    good = (each for each in inputs.summaries if each.source == "model" or each.purpose not in PREFIX_PURPOSES)
    return structs.replace(inputs, summaries=tuple(good))


def with_retrieved_turns(snapshot: Snapshot, inputs: EpochInputs, epoch: Epoch) -> Snapshot:
    """Return ``snapshot`` with the turns that ``epoch`` retrieved, as the next snapshot will load them."""
    loaded = {entry.seq for entry in (*snapshot.kept, *snapshot.entries)}
    wanted = set(epoch.kept) - loaded
    found = {entry.seq: entry for past in inputs.past_turns for entry in past.entries if entry.seq in wanted}
    if not found:
        return snapshot
    return structs.replace(snapshot, kept=tuple(sorted((*snapshot.kept, *found.values()), key=lambda entry: entry.seq)))


def build_context(snapshot: Snapshot, epoch: Epoch, *, strategy: Strategy, encode: Encode) -> Context:
    """Seal head, kept messages and tail of ``epoch``. ``encode`` recounts what the epoch shortens.

    Raises `ContextTooLarge` if the window is too small. ``full`` ignores the window: the upstream decides whether a
    request fits.
    """
    budget = None if isinstance(strategy, Full) else snapshot.window
    fold = (fold_repeats(epoch.repeats, encode=encode),) if epoch.folds_repeats else ()
    stages = (shorten_results(epoch.tiers, encode=encode), *fold, *closing_of(strategy, encode))
    draft = run(_restore(snapshot, epoch), stages)
    stated = structs.replace(draft, head=(*write_blocks(epoch), *draft.head))
    return seal(stated, snapshot=snapshot, epoch=epoch, budget=budget, injected=count_other_blocks(snapshot, epoch))


# Maps a layer that describes cut turns to the state of such a turn, and to the words of the report.
_LAYERS_OF_CUT_TURNS: tuple[tuple[str, Kept, str], ...] = (
    ("activity_log", "terse", "in the activity log"),
    ("summary", "summary", "in the summary"),
    ("session", "summary", "in session memory"),
)


def report_cut_turns(epoch: Epoch, turns: Iterable[int]) -> tuple[TurnReport, ...]:
    """Report ``turns`` that an epoch cut earlier and that a snapshot does not load."""
    layers = {message.layer for message in epoch.head} | {prefix.layer for prefix in epoch.prefixes}
    layer_reports = ((kept, reason) for layer, kept, reason in _LAYERS_OF_CUT_TURNS if layer in layers)
    kept, reason = next(layer_reports, ("left_out", "before the cut"))
    return tuple(TurnReport(turn=turn, kept=kept, tokens=0, reason=reason) for turn in turns)


def _taken_by_clear(snapshot: Snapshot, draft: Draft) -> list[int]:
    """Return the messages, not kept yet, that a clear took of the turn that goes on behind it: results need their
    calls. Every call whose context begins at the clear loads them.
    """
    if draft.cut == 1 or draft.cut != _cleared_at(snapshot) or not draft.tail:
        return []
    kept, turn = {entry.seq for entry in draft.kept}, draft.tail[0].turn
    return [e.seq for e in snapshot.kept if e.seq < draft.cut and e.turn == turn and e.seq not in kept]


def _answered_late(snapshot: Snapshot, draft: Draft, epoch_start: StartEpoch) -> list[int]:
    """Return the questions before the cut, not kept yet, whose replies have numbers after it.

    If several clients write at once, a reply may have a higher sequence number than later questions. The cut is a
    sequence number and must not separate the reply from its question.
    """
    if draft.cut == 1 or epoch_start.reason == "clear":
        return []
    loaded = _loaded(snapshot)
    late = {entry.turn for entry in late_replies(loaded, draft.cut)}
    kept = {entry.seq for entry in draft.kept}
    return [
        entry.seq
        for entry in loaded
        if entry.seq < draft.cut and entry.seq not in kept and entry.message.starts_turn and entry.turn in late
    ]


def late_replies(entries: Sequence[Entry], cut: int) -> list[Entry]:
    """Return entries that stand before the first message after the cut although their numbers are after it."""
    behind = [entry for entry in entries if entry.seq >= cut]
    first = min((entry.seq for entry in behind), default=0)
    return list(takewhile(lambda entry: entry.seq != first, behind))


def _restore(snapshot: Snapshot, epoch: Epoch) -> Draft:
    staying = frozenset(epoch.kept)
    before = [entry for entry in _loaded(snapshot) if entry.seq < epoch.cut]
    kept = [entry for entry in before if entry.seq in staying]
    questions = {entry.turn for entry in kept if entry.message.starts_turn}
    late = [entry for entry in late_replies(snapshot.entries, epoch.cut) if entry.turn in questions]
    if late:
        # Sorting is stable: each late reply follows what is kept of its turn.
        kept = sorted((*kept, *late), key=lambda entry: entry.turn)
    moved = {entry.seq for entry in late}
    return Draft(
        head=epoch.head,
        cut=epoch.cut,
        kept=tuple(kept),
        tail=tuple(entry for entry in snapshot.entries if entry.seq >= epoch.cut and entry.seq not in moved),
        gone=tuple(entry for entry in before if entry.seq not in staying),
        references=epoch.references,
        excerpts=epoch.excerpts,
        prefixes=shown_prefixes(epoch, snapshot.instructions),
        retrieved=epoch.retrieved,
        whole=epoch.whole,
    )


def _loaded(snapshot: Snapshot) -> Sequence[Entry]:
    """Kept and entries, each message once, in order."""
    known = {entry.seq: entry for entry in (*snapshot.kept, *snapshot.entries)}
    return list(known.values())


def _plan_draft(start: EpochStartInputs, strategy: Strategy) -> Draft:
    composition = compose(strategy, start)
    limit, target = _limits(start, cuts_itself=composition.cuts_itself, by_turns=needs_of(strategy).by_turns)
    shaped = run(start.draft, composition.shape)
    if composition.is_everything or limit is None or target is None:
        return run(shaped, composition.head)
    if composition.shrink is None and shaped.tokens > limit:
        return _fit(start, composition, target)  # whatever the head would be
    draft = run(shaped, composition.head)
    if draft.tokens <= limit:
        return draft
    if composition.shrink is not None:
        shrunk = _shrink(start, composition.shrink, composition, target, draft)
        if shrunk.tokens <= limit:
            return shrunk
    return _fit(start, composition, target)


def _shrink(
    start: EpochStartInputs,
    shrink: Callable[[int], tuple[Stage, ...]],
    composition: Composition,
    target: int,
    draft: Draft,
) -> Draft:
    """Let the strategy choose what to drop until head and messages fit into ``target`` tokens. The head depends on the
    choice.
    """
    for _ in range(ROUNDS):
        draft = run(start.draft, (*shrink(max(0, target - draft.head_tokens)), *composition.head))
        if draft.tokens <= target:
            break
    return draft


def _fit(start: EpochStartInputs, composition: Composition, target: int) -> Draft:
    """Cut further until head and all fit ``target`` tokens: the head depends on the cut, and the cut on the head."""

    def keep(tokens: int) -> Stage:
        hard = start.watermarks.room
        return keep_within(max(0, tokens), recent_turns=composition.recent_turns, hard=hard)

    reserve = max(start.snapshot.epoch.head_tokens if start.snapshot.epoch else 0, composition.head_reserve)
    draft = start.draft
    shaped: Draft | None = None
    for _ in range(ROUNDS):
        before, shaped = shaped, run(start.draft, (*composition.shape, keep(target - reserve)))
        if shaped == before:
            break  # a larger head leaves the cut where it is
        draft = run(shaped, composition.head)
        if draft.tokens <= target or draft.head_tokens <= reserve:
            break
        reserve = draft.head_tokens
    room = start.watermarks.room
    if room is not None and draft.tokens > room:
        # Tersely's own additions must not push the task out of the window.
        return run(start.draft, (*composition.shape, keep(room)))
    return draft


def _starting_draft(snapshot: Snapshot) -> Draft:
    """Return the current epoch's draft without its head, which a new epoch renders; for one to rebuild, all loaded
    messages.
    """
    entries = snapshot.entries
    if snapshot.epoch is None:
        return Draft(tail=entries)
    if snapshot.epoch.must_rebuild and entries and entries[0].seq < snapshot.epoch.cut:
        if not snapshot.older_tokens:
            return Draft(tail=entries)
        first = entries[0].seq
        permanent = tuple(entry for entry in must_stay(snapshot.kept, entries) if entry.seq < first)
        references = tuple(each for each in snapshot.epoch.references if each.last_seq < first)
        return Draft(cut=first, kept=permanent, tail=entries, references=references)
    restored = _restore(snapshot, snapshot.epoch)
    if restored.tail or not snapshot.entries:
        # What an earlier cut took has been counted and indexed then.
        return structs.replace(restored, head=(), gone=(), prefixes=(), retrieved=())
    # History was rewritten from before the cut: there is nothing left to keep of the old epoch.
    return Draft(tail=snapshot.entries)


def _limits(start: EpochStartInputs, *, cuts_itself: bool, by_turns: bool) -> tuple[int | None, int | None]:
    """Return above how many tokens of content this plan must cut, and down to how many; None: it need not."""
    marks = start.watermarks
    if start.is_overflow or start.epoch_start.reason == "compact":
        return marks.low, marks.low
    if isinstance(start.policy, EveryRequest):
        return marks.room, marks.room
    if isinstance(start.policy, Stride) and by_turns:
        return marks.room, None if marks.room is None else marks.room * 3 // 4
    if start.epoch_start.reason in {"first", "edit", "config"}:
        return marks.high, marks.low
    # A strategy's own cut that leaves hardly less than the limit would be due again at once.
    return (int(marks.high * PROGRESS) if cuts_itself else marks.low), marks.low
