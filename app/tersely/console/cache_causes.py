"""Name the cause of each cache miss of a session, and its cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tersely.console.epoch_reasons import explain_epoch
from tersely.service.money.prices import ModelPrice
from tersely.service.sessions.call_infos import CallInfo
from tersely.store.ops.stats import EpochRow

LOST = 0.5
"""The cache was lost if a call reads less from it than this share of the previous call's input."""
SMALLEST = 1024
"""Tokens; providers cache no shorter prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheBreak:
    """A call whose prompt did not begin like the previous one, or that was not read from the cache.

    ``again`` are the tokens that were read again; ``cost`` is their additional cost, None if the price is unknown.
    """

    call: CallInfo
    cause: str
    detail: str
    again: int | None
    cost: float | None


def find_breaks(
    calls: Sequence[CallInfo], epochs: Sequence[EpochRow], *, lifetime: float, price: Callable[[str], ModelPrice | None]
) -> list[CacheBreak]:
    """The breaks among ``calls`` in order. ``lifetime``: seconds that a cache stays warm."""
    reasons = {epoch.number: epoch.reason for epoch in epochs}
    found = []
    for before, call in pairwise(calls):
        cause, detail = _cause(before, call, reasons, lifetime)
        expected = before.row.input_tokens
        cached = call.row.cached_tokens
        is_lost = expected is not None and expected >= SMALLEST and cached is not None and cached < LOST * expected
        if not cause and not is_lost:
            continue
        again = max(0, min(expected, call.row.input_tokens or 0) - (cached or 0)) if expected is not None else None
        cost = None
        if again is not None and cached is not None and (known := price(call.row.model)) is not None:
            cost = again * (known.write - known.cached)
        found.append(
            CacheBreak(
                call=call,
                cause=cause or "not read from the cache",
                detail=detail or "the beginning was the same: the provider did not keep or find it",
                again=again if cached is not None else None,
                cost=cost,
            )
        )
    return found


def _cause(before: CallInfo, call: CallInfo, reasons: dict[int, str], lifetime: float) -> tuple[str, str]:
    row, earlier = call.row, before.row
    if row.model != earlier.model:
        return "another model", f"{earlier.model or 'unnamed'} → {row.model or 'unnamed'}"
    if row.tools != earlier.tools:
        return "changed tools", "the client's tool definitions differ from those of the call before"
    pause = (row.created_at - (earlier.finished_at or earlier.created_at)).total_seconds()
    expired = f"{pause / 60:.0f} min since the call before; caches stay warm {lifetime / 60:.0f} min"
    if row.epoch != earlier.epoch:
        # Before the instructions: Tersely changes its own among them only with an epoch.
        reason = reasons.get(row.epoch, "")
        cause = "edited history" if reason == "edit" else "new epoch"
        detail = explain_epoch(reason) if reason else "the head was written anew"
        return cause, f"{detail} ({expired})" if pause > lifetime else detail
    if call.instructions != before.instructions:
        return "changed instructions", "the client's instructions differ from those of the call before"
    if pause > lifetime:
        return "lifetime passed", expired
    return "", ""
