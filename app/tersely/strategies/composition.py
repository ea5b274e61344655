"""Compose every strategy from stages, and state its needs for the decision about epochs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import assert_never

from msgspec.structs import replace

from tersely.domain.history.history import Entry, Epoch, EpochInputs, Snapshot
from tersely.domain.history.tiers import Tier
from tersely.domain.history.turns import Turn, group_turns
from tersely.domain.text.tool_output import ToolOutputLimits
from tersely.domain.tokens import Encode
from tersely.strategies import prompts
from tersely.strategies.epochs.new_tasks import starts_new_task
from tersely.strategies.epochs.policies import (
    PROGRESS,
    Auto,
    CutConditions,
    EveryRequest,
    Policy,
    StartEpoch,
    Watermarks,
    content_tokens,
)
from tersely.strategies.head.file_excerpts import insert_file_excerpts
from tersely.strategies.head.layers import (
    EarlierSummary,
    inject_summary,
    insert_checkpoint,
    insert_memos,
    insert_references,
    insert_session_memory,
    insert_text,
)
from tersely.strategies.pipeline import Draft, Stage, count_entries
from tersely.strategies.presets import (
    DEFAULT_FILES,
    DEFAULT_REFERENCES,
    Compact,
    Full,
    Slim,
    Strategy,
    Tiered,
    Trim,
    Window,
)
from tersely.strategies.reduction.archiving import TOOL_RESULT, archive_results
from tersely.strategies.reduction.compacting import effective_limit, split_by_count, split_by_tokens, tokens_to_keep
from tersely.strategies.reduction.shortening import (
    TruncationSettings,
    apply_tiers,
    output_tiers,
    overflow_tiers,
    past_result_tiers,
    shorten_results,
    window_tiers,
)
from tersely.strategies.reduction.tiering import CompressionAges, keep_levels, score_everything
from tersely.strategies.reduction.trimming import (
    ask_for_answer,
    clear,
    clear_all,
    drop_half_over_turns,
    fit_budget,
    keep_newest_turns,
    keep_texts,
    until_steady,
)
from tersely.strategies.stages import insert_activity_log, keep_all, keep_recent_turns

# Log, index and summary each get at most this share of the low watermark, whatever their own limits allow.
HEAD_SHARE = 0.25
# Excerpts of files are what the agent works with, so they may take more.
FILES_SHARE = 0.47
# The index has this share unless it is configured: paths come first, and hardly a name after them is needed again.
INDEX_SHARE = 1 / 8
LOG_LIMIT = 2_000
SUMMARY_LIMIT = 2_000
# More tokens than any history has: only the model's window is a limit then.
NEVER = 1 << 40
# CowAgent: "Overflow Emergency Handling", step 2; "Session Persistence".
OVERFLOW_TURNS = 5
RESTORE_SHARE, RESTORE_LEAST = 6, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochStartInputs:
    """The inputs of a new epoch. ``overflows``: how often the upstream refused this call as too long."""

    draft: Draft
    snapshot: Snapshot
    inputs: EpochInputs
    policy: Policy
    epoch_start: StartEpoch
    watermarks: Watermarks
    now: datetime
    encode: Encode
    overflows: int = 0

    @property
    def is_overflow(self) -> bool:
        """Return whether the upstream has just refused the context as too long."""
        return self.epoch_start.reason == "overflow"

    @property
    def is_lazy(self) -> bool:
        """Return whether nothing requires a cut. Under ``auto`` a history that fits is sent in full."""
        lazy = self.epoch_start.reason in {"first", "edit", "config"}
        return isinstance(self.policy, Auto) and lazy and self.draft.tokens <= self.watermarks.high

    @property
    def is_pressed(self) -> bool:
        """Return whether the context must shrink: it is over the limit, or the upstream or a caller reports that it is
        too long.
        """
        if self.epoch_start.reason in {"overflow", "compact", "high_watermark", "window"}:
            return True
        return content_tokens(self.snapshot) > self.watermarks.high

    @property
    def cleared_at(self) -> int:
        """Return the first sequence number that a context may include."""
        return self.snapshot.epoch.cleared_at if self.snapshot.epoch else 1

    @property
    def originals(self) -> dict[int, Entry]:
        """Return the entries by sequence number, before any stage."""
        return {entry.seq: entry for entry in self.draft.entries}

    def share(self, limit: int) -> int:
        """``limit`` tokens, but no more than a layer's share of the low watermark."""
        return min(limit, int(self.watermarks.low * HEAD_SHARE))

    def index_limit(self, configured: int | None) -> int:
        """Return the tokens of the reference index. Default: none under ``every_request``, whose contexts
        are literal.
        """
        if configured is not None:
            return self.share(configured)
        if isinstance(self.policy, EveryRequest):
            return 0
        return min(DEFAULT_REFERENCES, int(self.watermarks.low * INDEX_SHARE))

    def files_limit(self, configured: int | None) -> int:
        """Return the tokens of excerpts of files: at most their share of the low watermark. Default: none under
        ``every_request``.
        """
        default = 0 if isinstance(self.policy, EveryRequest) else DEFAULT_FILES
        return min(default if configured is None else configured, int(self.watermarks.low * FILES_SHARE))

    @property
    def uses_files(self) -> bool:
        """Return whether there may be texts of files: no conversation without tool calls has any."""
        return bool(self.draft.excerpts) or any(entry.message.calls for entry in self.draft.entries)

    def references(self, configured: int | None) -> Stage:
        """Make the stage that indexes the identifiers of what this epoch cuts or shortens."""
        return insert_references(limit=self.index_limit(configured), encode=self.encode, originals=self.originals)

    def shorten(self, choose: Callable[[Sequence[Entry]], tuple[Tier, ...]]) -> Stage:
        """Make a stage that shortens texts by tiers. The tiers are chosen now and hold for the whole epoch."""

        def stage(draft: Draft) -> Draft:
            tiers = choose(draft.entries)
            return replace(shorten_results(tiers, encode=self.encode)(draft), tiers=(*draft.tiers, *tiers))

        return stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """A strategy's composition: ``shape`` selects and shortens messages, ``head`` writes the layers in front of them.

    ``cuts_itself``: the shape has its own limits, and the watermarks only cut what it leaves too large.
    ``is_everything``: the watermarks cut nothing either. ``head_reserve`` estimates the tokens of the head. ``shrink``
    returns a shape for a number of tokens, if the strategy itself chooses what to drop first.
    """

    shape: tuple[Stage, ...]
    head: tuple[Stage, ...]
    cuts_itself: bool = False
    is_everything: bool = False
    recent_turns: int = 1
    head_reserve: int = 0
    shrink: Callable[[int], tuple[Stage, ...]] | None = None


def needs_of(strategy: Strategy, snapshot: Snapshot | None = None) -> CutConditions:
    """Return what the decision about epochs must know of a strategy. Its own limits are tokens of content."""
    fixed = snapshot.fixed_tokens if snapshot else 0
    match strategy:
        case Full():
            return CutConditions(cuts=False)
        case Slim():
            return CutConditions(cuts=True, recent_turns=strategy.recent_turns)
        case Window():
            by_turns = strategy.context_size > 0
            return CutConditions(cuts=True, recent_turns=max(1, strategy.context_size), by_turns=by_turns)
        case Trim():
            return CutConditions(
                cuts=True,
                high=_content_limit(strategy.max_context_tokens, fixed, least=1 / 2),
                is_over_limit="turns" if snapshot and _are_turns_over(strategy, snapshot) else None,
                resume_idle=strategy.resume_idle,
                by_turns=False,
                saves=False,
            )
        case Compact():
            limit = compact_limit(strategy, snapshot) if strategy.auto_compact else NEVER
            return CutConditions(
                cuts=True,
                high=None if limit is None else _content_limit(limit, fixed, least=3 / 4),
                is_over_limit="messages" if snapshot and _are_messages_over(strategy, snapshot) else None,
                by_turns=False,
                saves=False,
            )
        case Tiered():
            high = strategy.total_budget * strategy.capacity_trigger // 100
            return CutConditions(cuts=True, high=high, by_turns=False, saves=False)
        case _:
            assert_never(strategy)


def _content_limit(limit: int, fixed: int, *, least: float) -> int:
    """Return what a limit on the whole context leaves besides instructions and tools.

    At least the share ``least`` of it is left: otherwise large instructions alone would start an epoch at every call.
    """
    return max(1, limit - fixed, int(limit * least))


def _are_turns_over(strategy: Trim, snapshot: Snapshot) -> bool:
    draft = Draft(kept=snapshot.kept, tail=snapshot.entries)
    if len({entry.turn for entry in draft.entries}) <= strategy.max_context_turns:
        return False
    return drop_half_over_turns(strategy.max_context_turns)(draft) is not draft


def _are_messages_over(strategy: Compact, snapshot: Snapshot) -> bool:
    """Return whether there are too many messages and a split leaves clearly fewer.

    Otherwise the split would be due again at once.
    """
    draft = Draft(kept=snapshot.kept, tail=snapshot.entries)
    has_limit = compact_limit(strategy, snapshot) is not None
    if not strategy.auto_compact or has_limit or len(draft.entries) <= strategy.max_messages:
        return False
    return len(split_of(strategy, None)(draft).entries) <= PROGRESS * strategy.max_messages


def compact_limit(strategy: Compact, snapshot: Snapshot | None) -> int | None:
    """tiancaiamao/ai's effective token limit for a snapshot's model."""
    window = snapshot.model_window if snapshot else None
    return effective_limit(window, reserve_tokens=strategy.reserve_tokens, max_tokens=strategy.max_tokens)


def compose(strategy: Strategy, start: EpochStartInputs) -> Composition:
    """Return the stages with which ``strategy`` begins an epoch."""
    if start.epoch_start.reason == "clear":
        return Composition(shape=(clear_all(),), head=(), cuts_itself=True)
    match strategy:
        case Full():
            return (
                _slim(Slim(), start)
                if start.is_overflow
                else Composition(shape=(keep_all(start.cleared_at),), head=(), is_everything=True)
            )
        case Slim():
            return _slim(strategy, start)
        case Window():
            return _window(strategy, start)
        case Trim():
            return _trim(strategy, start)
        case Compact():
            return _compact(strategy, start)
        case Tiered():
            return _tiered(strategy, start)
        case _:
            assert_never(strategy)


def overflow_tries(strategy: Strategy) -> int:
    """Return how often a call that the upstream refuses as too long is tried again, each time with less."""
    return 2 if isinstance(strategy, Trim) else 1


def closing_of(strategy: Strategy, encode: Encode) -> tuple[Stage, ...]:
    """Return the stages that look at the end of a context, at each call."""
    return (ask_for_answer(strategy.max_steps, encode=encode),) if isinstance(strategy, Trim) else ()


def _slim(strategy: Slim, start: EpochStartInputs) -> Composition:
    log_limit = start.share(LOG_LIMIT)
    files = start.files_limit(strategy.files) if start.uses_files else 0
    log = insert_activity_log(
        start.inputs,
        limit=log_limit,
        encode=start.encode,
        derive=strategy.derive_terse,
        earlier=layer_text(start.snapshot.epoch, "activity_log"),
    )
    turns = () if isinstance(start.policy, Auto) else (keep_recent_turns(strategy.recent_turns),)
    return Composition(
        shape=turns,
        # The index comes last: it leaves out names that the other layers show.
        head=(log, insert_file_excerpts(limit=files, encode=start.encode), start.references(strategy.references)),
        recent_turns=strategy.recent_turns,
        head_reserve=start.index_limit(strategy.references) + log_limit // 4 + files // 2,
    )


def _window(strategy: Window, start: EpochStartInputs) -> Composition:
    settings = TruncationSettings(
        recent=strategy.recent_results,
        recent_chars=strategy.recent_chars,
        older_chars=strategy.older_chars,
        inactive_chars=strategy.inactive_chars,
    )
    way = start.snapshot.read_back
    turns: tuple[Stage, ...] = ()
    if strategy.context_size and not isinstance(start.policy, Auto):
        turns = (keep_recent_turns(strategy.context_size),)
    truncation = start.shorten(lambda entries: window_tiers(entries, read_back=way, settings=settings))
    state = insert_text(
        "state",
        prompts.STATE_TITLE,
        start.inputs.state,
        prompts.STATE_ACK,
        encode=start.encode,
        seq=start.inputs.state_seq,
    )
    scratchpad = insert_text(
        "scratchpad",
        prompts.SCRATCHPAD_TITLE,
        start.inputs.scratchpad,
        prompts.SCRATCHPAD_ACK,
        encode=start.encode,
    )
    return Composition(
        shape=() if start.is_lazy else (*turns, truncation),
        head=(state, scratchpad, start.references(strategy.references), insert_memos(start.inputs.memos)),
        recent_turns=max(1, strategy.context_size),
    )


def _trim(strategy: Trim, start: EpochStartInputs) -> Composition:
    least = 0 if isinstance(start.policy, EveryRequest) else 1 / 2
    budget = _content_limit(strategy.max_context_tokens, start.snapshot.fixed_tokens, least=least)
    way = start.snapshot.read_back
    shape: tuple[Stage, ...]
    if start.is_overflow and start.overflows > 1:
        return Composition(shape=(clear(),), head=(), cuts_itself=True)
    if start.is_overflow:
        shape = (keep_newest_turns(OVERFLOW_TURNS), start.shorten(lambda _: overflow_tiers(read_back=way)))
    elif start.epoch_start.reason == "resume":
        shape = (keep_texts(max(RESTORE_LEAST, strategy.max_context_turns // RESTORE_SHARE)),)
    else:
        most = 1 if start.epoch_start.reason == "compact" else strategy.max_context_turns
        halve: tuple[Stage, ...] = (drop_half_over_turns(most), fit_budget(budget))
        if isinstance(start.policy, Auto) and most > 1:
            # One after the other at three calls, they would cost three re-writes of the prefix.
            halve = (until_steady(*halve),)
        shape = (
            start.shorten(lambda entries: past_result_tiers(entries, chars=strategy.max_result_chars, read_back=way)),
            *halve,
        )
    summary = inject_summary(
        start.inputs,
        earlier=earlier_summary(start.snapshot.epoch),
        limit=start.share(SUMMARY_LIMIT),
        encode=start.encode,
        is_requested=start.epoch_start.reason == "compact",
    )
    return Composition(shape=shape, head=(start.references(strategy.references), summary), cuts_itself=True)


def _compact(strategy: Compact, start: EpochStartInputs) -> Composition:
    limits = ToolOutputLimits(
        max_lines=strategy.max_lines,
        max_bytes=strategy.max_bytes,
        max_chars=strategy.max_chars,
        large_output_threshold=strategy.large_output_threshold,
        truncate_mode="head" if strategy.truncate_mode == "head" else "head_tail",
    )
    output = start.shorten(lambda _: output_tiers(limits, read_back=start.snapshot.read_back))
    checkpoint = insert_checkpoint(
        start.inputs,
        earlier=earlier_summary(start.snapshot.epoch),
        limit=start.share(SUMMARY_LIMIT),
        encode=start.encode,
        is_requested=start.epoch_start.reason == "compact",
    )
    archive = () if strategy.tool_summary_strategy == "off" else (_archive(strategy, start),)
    return Composition(
        shape=(output, _split_if_due(strategy, start)),
        head=(checkpoint, *archive, start.references(strategy.references)),
        cuts_itself=True,
    )


def _archive(strategy: Compact, start: EpochStartInputs) -> Stage:
    return archive_results(
        [summary for summary in start.inputs.summaries if summary.purpose == TOOL_RESULT],
        cutoff=strategy.tool_call_cutoff,
        heuristic=strategy.tool_summary_strategy == "heuristic",
        limit=start.share(SUMMARY_LIMIT),
        read_back=start.snapshot.read_back,
        encode=start.encode,
        originals=start.originals,
        now=start.now,
    )


def _split_if_due(strategy: Compact, start: EpochStartInputs) -> Stage:
    """Split as in tiancaiamao/ai, "Triggering Rules". An overflow or a caller's request needs no threshold.

    Shortened and archived messages count with their remaining tokens, and the current head counts too.
    """
    split = split_of(strategy, compact_limit(strategy, start.snapshot))

    def stage(draft: Draft) -> Draft:
        return split(draft) if _is_due(strategy, start, draft) else draft

    return stage


def _is_due(strategy: Compact, start: EpochStartInputs, draft: Draft) -> bool:
    if start.is_overflow or start.epoch_start.reason in {"compact", "high_watermark", "messages", "window"}:
        return True
    if not strategy.auto_compact:
        return False
    limit = compact_limit(strategy, start.snapshot)
    if limit is None:
        return len(draft.entries) > strategy.max_messages
    epoch = start.snapshot.epoch
    shown = apply_tiers(draft.entries, epoch.tiers if epoch else (), encode=start.encode)
    content = (epoch.head_tokens if epoch else 0) + count_entries(shown)
    if isinstance(start.policy, EveryRequest):
        return start.snapshot.fixed_tokens + content >= limit
    return content > start.watermarks.high


def split_of(strategy: Compact, limit: int | None) -> Stage:
    """Make the stage that splits old from recent messages for an effective token limit ("Split logic")."""
    if strategy.keep_recent_tokens > 0:
        return split_by_tokens(tokens_to_keep(strategy.keep_recent_tokens, limit))
    return split_by_count(strategy.keep_recent)


def _tiered(strategy: Tiered, start: EpochStartInputs) -> Composition:
    scores = score_everything(start.draft.entries, start.inputs.past_turns, start.now)
    ages = CompressionAges(working=strategy.working_age, session=strategy.session_age, now=start.now)
    is_new_task = start.is_pressed and _is_new_task(strategy, start)

    def levels(space: int) -> tuple[Stage, ...]:
        return (
            keep_levels(
                past=start.inputs.past_turns,
                scores=scores,
                ages=ages,
                working_budget=min(strategy.working_budget, space),
                room=min(max(0, strategy.total_budget - strategy.session_budget), space),
                is_new_task=is_new_task,
            ),
        )

    memory = insert_session_memory(
        start.inputs,
        {turn: score.total for turn, score in scores.items()},
        budget=min(strategy.session_budget, start.watermarks.high // 2),
        old_after=strategy.session_age,
        now=start.now,
        encode=start.encode,
    )
    return Composition(
        shape=() if start.is_lazy else levels(NEVER),
        head=(memory, start.references(strategy.references)),
        cuts_itself=True,
        shrink=None if start.is_lazy else levels,
    )


def _is_new_task(strategy: Tiered, start: EpochStartInputs) -> bool:
    turns = group_turns(start.draft.entries)
    if not turns:
        return False
    past = [Turn(number=each.turn, entries=each.entries) for each in start.inputs.past_turns]
    return starts_new_task(turns[-1], [*past, *turns[:-1]], pause=strategy.working_age)


def layer_text(epoch: Epoch | None, layer: str) -> str:
    """Return the text of ``layer`` in an epoch's head or in front of a message; empty if there is none."""
    if epoch is None:
        return ""
    texts = [message.text for message in epoch.head if message.layer == layer and message.role == "user"]
    texts += [prefix.text for prefix in epoch.prefixes if prefix.layer == layer]
    return texts[0] if texts else ""


def earlier_summary(epoch: Epoch | None) -> EarlierSummary:
    """Return the summary that ``epoch`` carries, without messages that it kept at the end of the cut part."""
    if epoch is None:
        return EarlierSummary()
    kept = set(epoch.kept)
    last = next((seq for seq in range(epoch.cut - 1, 0, -1) if seq not in kept), 0)
    if epoch.summary_covers_to > epoch.cut:
        last = epoch.summary_covers_to - 1
    return EarlierSummary(text=summary_text(epoch), first_seq=epoch.cleared_at, last_seq=last, covered=epoch.covered)


def summary_text(epoch: Epoch | None) -> str:
    """Return the summary that ``epoch`` carries, without its framing text."""
    text = layer_text(epoch, "summary")
    for title in (prompts.CHECKPOINT_TITLE, prompts.SUMMARY_TITLE):
        text = text.removeprefix(title)
    return text.strip().removesuffix(prompts.SUMMARY_END).strip()
