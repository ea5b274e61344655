"""Judge the context of a shadow: its tokens, its price, and the text that the reply used and the context lacks."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import blake2b

from tersely.domain.history.context import ContextMessage
from tersely.domain.history.context_use import (
    Edits,
    Losses,
    edits_of,
    judge_edits,
    readable_text,
    references,
)
from tersely.domain.history.history import Entry
from tersely.service.context.building import BuiltContext
from tersely.service.money.prices import ModelPrice, scale_writes
from tersely.service.shadows.planning import AnsweredCall
from tersely.store.commit.records import CallReport
from tersely.store.ops.shadows import ShadowCall

# A message as it is listed in `ShadowState.sent`: digest and tokens. Later ones of a longer list count as new.
_LISTED = struct.Struct(">8sI")
MOST_LISTED = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedCall:
    """The figures of a call, and the list of the messages of its context."""

    call: ShadowCall
    sent: bytes


def judge(
    call: AnsweredCall,
    built: BuiltContext,
    *,
    number: int,
    strategy: str,
    report: CallReport,
    price: ModelPrice | None,
    before: bytes,
    now: datetime,
) -> JudgedCall:
    """Judge the context of call ``number`` under ``strategy``, a setting with its parameters.

    ``before`` lists the last context, ``report`` is that of the sent call.
    """
    context = built.context
    sent = _list(built)
    cached = _common_tokens(sent, before)
    full_cached = _repeated_tokens(call)
    costs = _costs(price, report, tokens=context.report.tokens_after, cached=cached, full_cached=full_cached)
    losses, edits, full_edits = _uses(call, context.messages)
    return JudgedCall(
        call=ShadowCall(
            number=number,
            strategy=strategy,
            epoch=context.epoch.number,
            tokens=context.report.tokens_after,
            cached_tokens=cached,
            full_tokens=report.tokens_after,
            full_cached=full_cached,
            cost=None if costs is None else costs[0],
            full_cost=None if costs is None else costs[1],
            referring=losses.referring,
            lost=losses.lost,
            pointing=losses.pointing,
            lost_pointing=losses.lost_pointing,
            edits=edits.calls,
            ready=edits.ready,
            full_ready=full_edits.ready,
            created_at=now,
        ),
        sent=sent,
    )


# Tokens and costs


def _list(built: BuiltContext) -> bytes:
    """Return digests and tokens of a context's parts, in order: the fixed tokens, then each message."""
    fixed = built.context.report.tokens_after - sum(message.tokens for message in built.context.messages)
    tools = blake2b(b"%d" % fixed, digest_size=8).digest()
    parts = [_LISTED.pack(tools, max(0, fixed))]
    for message in built.context.messages[: MOST_LISTED - 1]:
        digest = blake2b(_shown_bytes(message), digest_size=8).digest()
        parts.append(_LISTED.pack(digest, message.tokens))
    return b"".join(parts)


def _common_tokens(sent: bytes, before: bytes) -> int:
    total = 0
    for (digest, count), (earlier, _) in zip(_LISTED.iter_unpack(sent), _LISTED.iter_unpack(before), strict=False):
        if digest != earlier:
            break
        total += count
    return total


def _repeated_tokens(call: AnsweredCall) -> int:
    """Return the tokens of the request that stood in the request before: all in front of the last reply."""
    if call.match.session is None or not call.match.session.calls:
        return 0
    entries = call.entries
    last = max((index for index, entry in enumerate(entries) if entry.message.role == "assistant"), default=0)
    return call.snapshot.fixed_tokens + sum(entry.tokens for entry in entries[:last])


def _costs(
    price: ModelPrice | None, report: CallReport, *, tokens: int, cached: int, full_cached: int
) -> tuple[float, float] | None:
    """Return the cost of the shadow's context and of the request that was sent, in USD; None if one is unknown.

    The provider's cache is assumed to serve the same share of the repeated tokens in both, and to store the same share
    of the others.
    """
    if price is None or report.cost_sent is None or report.input_tokens is None or not report.tokens_after:
        return None
    ratio = report.input_tokens / report.tokens_after
    whole, read = int(tokens * ratio), report.cached_tokens or 0
    hits = min(1.0, read / (full_cached * ratio)) if full_cached else 1.0
    from_cache = cached * ratio * hits if full_cached else min(read, whole)
    output = report.output_tokens or 0
    written: float | None = report.written_tokens
    if written is not None:
        written = scale_writes(written, fresh=report.input_tokens - read, to=whole - from_cache)
    cost = price.cost(input_tokens=whole, cached=int(from_cache), output=output, written=written)
    return cost, report.cost_sent


# What the reply used


def _uses(call: AnsweredCall, context: Sequence[ContextMessage]) -> tuple[Losses, Edits, Edits]:
    """Return the references of the replies that the context would have lost; and their edits, as ready as they would
    have been and as they were.
    """
    calls = [each for reply in call.replies for each in reply.calls]
    if not calls:
        return Losses(), Edits(), Edits()
    shown_whole = {each.seq for each in context if isinstance(each, Entry) and not each.is_shortened}
    gone = [entry for entry in call.entries if entry.seq not in shown_whole]
    names = _SearchedTexts(shown=b"\n".join(map(_shown_bytes, context)), gone=_raws(gone), body=call.body)
    losses = Losses()
    for each in calls:
        losses += references(each.arguments, names.is_known).losses(names.is_shown)
    wanted = [edit for reply in call.replies for edit in edits_of(reply)]
    if not wanted:
        return losses, Edits(), Edits()
    texts = [readable_text(each.message) if isinstance(each, Entry) else each.text for each in context]
    edits = judge_edits(wanted, texts)
    if edits.ready == edits.calls:
        return losses, edits, edits
    return losses, edits, judge_edits(wanted, [*texts, *(readable_text(entry.message) for entry in gone)])


@dataclass(frozen=True, slots=True, kw_only=True)
class _SearchedTexts:
    """The texts in which names are searched: the context as ``shown``, the messages that it lacks, the request's
    ``body``.
    """

    shown: bytes
    gone: bytes
    body: bytes

    def is_known(self, name: str) -> bool:
        raw = name.encode("utf-8", "replace")
        return raw in self.shown or raw in self.body or raw in self.gone

    def is_shown(self, name: str) -> bool:
        raw = name.encode("utf-8", "replace")
        if raw in self.shown:
            return True
        # A name that the body has more often than the missing messages stands in instructions or tools as well.
        return self.body.count(raw) > self.gone.count(raw) or raw not in self.gone


def _raws(entries: Sequence[Entry]) -> bytes:
    return b"\n".join([entry.message.raw for entry in entries])


def _shown_bytes(message: ContextMessage) -> bytes:
    if not isinstance(message, Entry):
        return message.text.encode("utf-8", "replace")
    raw = b"" if message.is_shortened else message.message.raw
    shown = raw or readable_text(message.message).encode("utf-8", "replace")
    return message.prefix.encode("utf-8", "replace") + shown if message.prefix else shown
