"""Drafts and stages, and `seal`, which alone turns a draft into a context.

A stage is a function from draft to draft. It never mutates or logs, it does not raise when there is nothing to do, and
it records its changes by turn. `seal` repairs pairing, proves it independently, checks roles and budget, and writes the
report from these records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce

import msgspec
from msgspec.structs import replace

from tersely.domain.errors import ContextTooLarge
from tersely.domain.history.context import Context, ContextMessage, Kept, LayerReport, Repair, Report, TurnReport
from tersely.domain.history.history import (
    CoveredFacts,
    Entry,
    Epoch,
    FileExcerpt,
    HeadMessage,
    Prefix,
    Reference,
    Snapshot,
)
from tersely.domain.history.pairing import UnpairedMessages, prove_pairing, repair
from tersely.domain.history.tiers import Tier
from tersely.domain.messages import INSTRUCTION_ROLES, Message, Text


class IllegalRoles(Exception):
    """A context that was about to leave has a message out of place: a fault of Tersely, never of the caller."""


class Edit(msgspec.Struct, frozen=True, kw_only=True):
    """A stage's change to a turn."""

    stage: str
    turn: int
    kept: Kept
    reason: str


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """A context under construction.

    Every loaded message is in exactly one of ``kept`` (verbatim, between head and tail), ``tail`` and ``gone`` (left
    out), in the order of the history (that of ``seq``, unless a client rebuilt its history). ``cut`` is the first
    sequence number of the tail, 1 if nothing was ever left out. ``references`` are the candidates that an epoch carries
    over, ``excerpts`` the texts of files. `Epoch` explains ``summary_covers_to``, ``head_covers_to`` and ``covered``.
    """

    cut: int = 1
    head: tuple[HeadMessage, ...] = ()
    kept: tuple[Entry, ...] = ()
    tail: tuple[Entry, ...] = ()
    gone: tuple[Entry, ...] = ()
    references: tuple[Reference, ...] = ()
    edits: tuple[Edit, ...] = ()
    tiers: tuple[Tier, ...] = ()
    prefixes: tuple[Prefix, ...] = ()
    retrieved: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()
    closing: tuple[HeadMessage, ...] = ()
    summary_covers_to: int = 0
    head_covers_to: int = 0
    covered: CoveredFacts | None = None
    excerpts: tuple[FileExcerpt, ...] = ()

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Return the session's own messages in this draft."""
        return self.kept + self.tail

    @property
    def tokens(self) -> int:
        """Tokens of head, kept and tail."""
        return self.head_tokens + count_entries(self.entries)

    @property
    def head_tokens(self) -> int:
        """Tokens of the head's own messages and of the prefixes."""
        return sum(message.tokens for message in self.head) + sum(prefix.tokens for prefix in self.prefixes)

    def with_prefix(self, prefix: Prefix) -> Draft:
        """Return the same draft with ``prefix`` in front of its message."""
        return replace(self, prefixes=(*self.prefixes, prefix))

    def marking(self, entries: Iterable[Entry], *, kept: Kept, reason: str) -> Draft:
        """Return the draft with a note for each turn of ``entries`` of which nothing is left and nothing is
        noted yet.
        """
        known = {edit.turn for edit in self.edits} | {entry.turn for entry in self.entries}
        turns = dict.fromkeys(entry.turn for entry in entries if entry.turn not in known)
        notes = (Edit(stage=reason, turn=turn, kept=kept, reason=reason) for turn in turns)
        return replace(self, edits=(*self.edits, *notes))

    def with_head(self, *messages: HeadMessage) -> Draft:
        """Return the same draft with ``messages`` at the end of its head."""
        return replace(self, head=(*self.head, *messages))

    def with_cut(self, first: int, kept: Iterable[Entry], *, edits: Iterable[Edit] = ()) -> Draft:
        """Return the same draft with the tail from sequence number ``first`` on and ``kept`` before it."""
        whole = (*self.kept, *self.tail)
        staying = {entry.seq for entry in kept if entry.seq < first}
        return replace(
            self,
            cut=first,
            kept=tuple(entry for entry in whole if entry.seq < first and entry.seq in staying),
            tail=tuple(entry for entry in whole if entry.seq >= first),
            gone=(*self.gone, *(e for e in whole if e.seq < first and e.seq not in staying)),
            edits=(*self.edits, *edits),
        )


Stage = Callable[[Draft], Draft]


def run(draft: Draft, stages: Sequence[Stage]) -> Draft:
    """Return the draft after all stages, in order."""
    return reduce(lambda so_far, stage: stage(so_far), stages, draft)


def seal(draft: Draft, *, snapshot: Snapshot, epoch: Epoch, budget: int | None, injected: int = 0) -> Context:
    """Return the context of a draft: valid, within ``budget`` (tokens including the fixed part; None: unlimited), with
    its report.

    ``injected``: tokens of the newest injected blocks that are in the client's own messages.

    Raises `ContextTooLarge` with both numbers if the budget is too small. Raises `UnpairedMessages` or `IllegalRoles`
    after an error of Tersely itself, so that no invalid request goes out.
    """
    entries, repairs = _mend(_with_prefixes(draft))
    messages: tuple[ContextMessage, ...] = (*draft.head, *entries, *draft.closing)
    _prove_roles(messages)
    report = _write_report(draft, entries, snapshot=snapshot, epoch=epoch, injected=injected)
    if budget is not None and report.tokens_after > budget:
        raise ContextTooLarge(needed=report.tokens_after, budget=budget)
    untouched = not (draft.head or draft.closing or draft.kept or draft.gone or repairs) and draft.cut == epoch.cut == 1
    return Context(
        messages=messages,
        epoch=epoch,
        report=report,
        repairs=repairs,
        must_answer=bool(draft.closing),
        is_whole=untouched and not draft.edits and not any(e.is_shortened or e.prefix for e in entries),
    )


def _with_prefixes(draft: Draft) -> tuple[Entry, ...]:
    if not draft.prefixes:
        return draft.entries
    prefixes: dict[int, list[Prefix]] = {}
    for prefix in draft.prefixes:
        prefixes.setdefault(prefix.seq, []).append(prefix)
    return tuple(_with_prefix(entry, prefixes.get(entry.seq, ())) for entry in draft.entries)


def _with_prefix(entry: Entry, prefixes: Sequence[Prefix]) -> Entry:
    if not prefixes:
        return entry
    # Memos that the message brought along stand next to it.
    texts = [*(prefix.text for prefix in prefixes), *([entry.prefix] if entry.prefix else [])]
    return replace(entry, prefix="\n\n".join(texts), tokens=entry.tokens + sum(prefix.tokens for prefix in prefixes))


def _mend(entries: tuple[Entry, ...]) -> tuple[tuple[Entry, ...], tuple[Repair, ...]]:
    """Return entries that pass the proof; the same ones if they pass it at once, which is cheaper and the
    usual case.
    """
    try:
        prove_pairing([entry.message for entry in entries])
    except UnpairedMessages:
        mended, repairs = repair(entries)
        prove_pairing([entry.message for entry in mended])
        return mended, repairs
    return entries, ()


def count_entries(entries: Iterable[Entry]) -> int:
    """Tokens of ``entries``."""
    return sum([entry.tokens for entry in entries])


def _as_message(message: ContextMessage) -> Message:
    if isinstance(message, Entry):
        return message.message
    return Message(role=message.role, parts=(Text(text=message.text),), raw=b"")


def _prove_roles(messages: Sequence[ContextMessage]) -> None:
    """No instructions among the messages (they go before them), and a head opens as a user speaks."""
    roles = [_as_message(message).role for message in messages]
    if INSTRUCTION_ROLES.intersection(roles):
        raise IllegalRoles("instructions among the messages of a context")
    if messages and isinstance(messages[0], HeadMessage) and messages[0].role != "user":
        raise IllegalRoles("a head that does not begin with a user message")
    if roles and roles[0] == "tool":
        raise IllegalRoles("a context that begins with a tool result")


def _write_report(draft: Draft, sent: Sequence[Entry], *, snapshot: Snapshot, epoch: Epoch, injected: int) -> Report:
    layers = _count_layers(draft, sent, snapshot, injected)
    # Messages that were cut in earlier epochs are not loaded: the snapshot has their sum.
    loaded = count_entries(snapshot.entries)
    older = max(snapshot.older_tokens, count_entries(snapshot.kept))
    return Report(
        tokens_before=snapshot.fixed_tokens + older + loaded,
        tokens_after=sum(layer.tokens for layer in layers),
        epoch=epoch.number,
        reason=epoch.reason,
        cut=epoch.cut,
        layers=layers,
        turns=_report_turns(draft, sent),
    )


def _count_layers(draft: Draft, sent: Sequence[Entry], snapshot: Snapshot, injected: int) -> tuple[LayerReport, ...]:
    tokens = {
        "instructions": snapshot.fixed_tokens - snapshot.tool_tokens - snapshot.injected_tokens,
        "tools": snapshot.tool_tokens,
    }
    if injected:
        tokens["injected"] = injected
    for message in (*draft.head, *draft.closing):
        tokens[message.layer] = tokens.get(message.layer, 0) + message.tokens
    sent_before, sent_after = _around_cut(draft, sent)
    for prefix in draft.prefixes:
        tokens[prefix.layer] = tokens.get(prefix.layer, 0) + prefix.tokens
    if draft.kept:
        tokens["kept"] = sent_before
    tokens["tail"] = sent_after
    return tuple(LayerReport(name=name, tokens=count) for name, count in tokens.items())


def _around_cut(draft: Draft, sent: Sequence[Entry]) -> tuple[int, int]:
    """Tokens of what is kept and of the tail, without the prefixes."""
    before = {entry.seq for entry in draft.kept}
    kept = count_entries(entry for entry in sent if entry.seq in before)
    prefixed = sum(prefix.tokens for prefix in draft.prefixes if prefix.seq in before)
    added = sum(prefix.tokens for prefix in draft.prefixes)
    return kept - prefixed, count_entries(sent) - kept - (added - prefixed)


def _report_turns(draft: Draft, sent: Sequence[Entry]) -> tuple[TurnReport, ...]:
    tokens: dict[int, int] = {}
    for entry in sent:
        tokens[entry.turn] = tokens.get(entry.turn, 0) + entry.tokens
    edits = {edit.turn: edit for edit in draft.edits}
    in_tail = {entry.turn for entry in draft.tail}
    partly = ({entry.turn for entry in draft.kept} - set(draft.whole)) | ({e.turn for e in draft.gone} & in_tail)
    logged = any(message.layer == "activity_log" for message in draft.head)
    turns = sorted({entry.turn for entry in (*draft.kept, *draft.tail, *draft.gone)})
    return tuple(
        TurnReport(turn=turn, kept=kept, tokens=tokens.get(turn, 0), reason=reason)
        for turn in turns
        for kept, reason in (_explain(turn, edits.get(turn), in_tail, partly, draft, logged=logged),)
    )


def _explain(
    turn: int, edit: Edit | None, in_tail: set[int], partly: set[int], draft: Draft, *, logged: bool
) -> tuple[Kept, str]:
    if edit is not None:
        return edit.kept, edit.reason
    if turn in partly:
        return "truncated", "cut inside the turn" if turn in in_tail else "only what must stay"
    if turn in in_tail:
        return "full", "recent"
    if turn in draft.whole:
        return "full", "brought back" if turn in draft.retrieved else "only what must stay"
    return ("terse", "in the activity log") if logged else ("left_out", "before the cut")


def summarize_repairs(repairs: Iterable[Repair]) -> dict[str, int]:
    """Kind -> how many, for metrics."""
    counts: dict[str, int] = {}
    for mend in repairs:
        counts[mend.kind] = counts.get(mend.kind, 0) + 1
    return counts
