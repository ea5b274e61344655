"""Compute the context strip: one bar per call, divided into layers. This is geometry for an SVG, without drawing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tersely.service.sessions.call_infos import CallInfo
from tersely.store.ops.stats import EpochRow

HEIGHT = 120.0
WIDTH = 1000.0
MOST = 200
"""Bars; of more calls the last are shown."""
GROUPS = ("instructions", "tools", "head", "tail")
_GROUP_OF = {
    "instructions": "instructions",
    "injected": "instructions",
    "tools": "tools",
    "tail": "tail",
    "kept": "tail",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Part of a bar: its group and its position."""

    group: str
    y: float
    height: float
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar for one call. ``outline`` is the total height, ``cached`` the height of the part from the
    provider's cache.
    """

    number: int
    x: float
    width: float
    parts: tuple[Band, ...]
    outline: float
    cached: float
    title: str
    is_current: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochLine:
    """An epoch that started, as a line in front of its first call."""

    x: float
    reason: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """All bars and cuts; ``top`` tokens are as high as the strip. ``undivided``: number of calls whose tools are
    counted among the instructions.
    """

    bars: tuple[Bar, ...]
    cuts: tuple[EpochLine, ...]
    top: int
    undivided: int
    width: float = WIDTH
    height: float = HEIGHT


def draw(calls: Sequence[CallInfo], epochs: Sequence[EpochRow], current: int) -> Strip:
    """Lay out the strip of these calls."""
    top = max((max(call.row.tokens_before, call.row.tokens_after) for call in calls), default=0) or 1
    step = WIDTH / max(12, len(calls))
    bars: list[Bar] = []
    cuts: list[EpochLine] = []
    reasons = {epoch.number: epoch.reason for epoch in epochs}
    known: int | None = None
    for index, call in enumerate(calls):
        row = call.row
        x = index * step
        bars.append(_bar(call, x, step, top, is_current=row.number == current))
        if row.epoch and row.epoch != known and (known is not None or row.epoch > 1):
            cuts.append(EpochLine(x=x, reason=reasons.get(row.epoch, ""), number=row.epoch))
        known = row.epoch or known
    undivided = sum(is_undivided(call) for call in calls)
    return Strip(bars=tuple(bars), cuts=tuple(cuts), top=top, undivided=undivided)


def is_undivided(call: CallInfo) -> bool:
    """Return whether a call's tools are counted among its instructions: an earlier version stored it so."""
    names = {layer.name for layer in call.layers}
    return "instructions" in names and "tools" not in names


def group_tokens(call: CallInfo) -> Mapping[str, int]:
    """Group -> tokens of a call."""
    found = dict.fromkeys(GROUPS, 0)
    for layer in call.layers:
        found[_GROUP_OF.get(layer.name, "head")] += layer.tokens
    if not call.layers:
        found["tail"] = call.row.tokens_after
    return found


def _bar(call: CallInfo, x: float, step: float, top: int, *, is_current: bool) -> Bar:
    row = call.row
    scale = HEIGHT / top
    y = HEIGHT
    parts = []
    groups = group_tokens(call)
    for group in GROUPS:
        height = groups[group] * scale
        y -= height
        parts.append(Band(group=group, y=round(y, 2), height=round(height, 2), tokens=groups[group]))
    hit = row.cached_tokens / row.input_tokens if row.cached_tokens and row.input_tokens else 0.0
    shares = ", ".join(f"{group} {groups[group]:,}" for group in GROUPS if groups[group])
    title = (
        f"Call {row.number}: {row.tokens_after:,} of {row.tokens_before:,} tokens sent ({shares}), "
        f"{100 * hit:.0f} % cached"
    )
    return Bar(
        number=row.number,
        x=round(x, 2),
        width=round(max(step * 0.82, 0.8), 2),
        parts=tuple(parts),
        outline=round(HEIGHT - row.tokens_before * scale, 2),
        cached=round(row.tokens_after * scale * hit, 2),
        title=title,
        is_current=is_current,
    )
