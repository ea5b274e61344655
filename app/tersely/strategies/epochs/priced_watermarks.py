"""Choose watermarks by what a model's cache costs.

Between two cuts the content grows from the low to the high watermark. Each call reads it from the cache and writes what
is new; each cut writes the content once more. A high watermark far above the low one makes cuts rare and reads dear.
The least expected price per call lies where both are in balance:

    price = read * (fixed + (high + low) / 2) + write * growth + (write - read) * low * growth / (high - low)

The low watermark is a bound, not a choice: the lower it is, the cheaper every call, and the more often a text or a name
that the model needs is gone (bench/watermarks.json).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

# The least low watermark at which replays keep about their ready edits and names: that of the constant watermarks.
LEAST_LOW = 9_000
# The high watermark is at least so many times the low one: else a single result of a tool would start an epoch.
LEAST_RATIO = 2
# Tokens of instructions and tools, and tokens that a call adds: of coding agents, as replayed.
FIXED = 12_000
GROWTH = 600
# Of a model's window so much at most is content; half of that is left after a cut.
MOST_OF_WINDOW = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePrices:
    """The prices of a token written to the cache and of one read from it, relative to plain input."""

    write: float
    read: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WatermarkPair:
    """A pair of watermarks in tokens, without instructions and tools."""

    high: int
    low: int


def expected_price(pair: WatermarkPair, prices: CachePrices, *, fixed: int = FIXED, growth: float = GROWTH) -> float:
    """Return the expected price of a call in a long session, in tokens of plain input.

    ``fixed``: tokens of instructions and tools; ``growth``: tokens that a call adds.
    """
    mean = fixed + (pair.high + pair.low) / 2
    rewritten = pair.low * growth / (pair.high - pair.low)
    return prices.read * mean + prices.write * growth + max(0.0, prices.write - prices.read) * rewritten


def choose_watermarks(prices: CachePrices, *, window: int | None = None, growth: float = GROWTH) -> WatermarkPair:
    """Return the watermarks of the least expected price, within the bounds on what must stay and on the model's
    ``window`` (tokens; None: unknown).
    """
    most = None if window is None else int(window * MOST_OF_WINDOW)
    low = LEAST_LOW if most is None else max(1, min(LEAST_LOW, most // LEAST_RATIO))
    span = sqrt(2 * max(0.0, prices.write - prices.read) * low * growth / prices.read) if prices.read else 0.0
    if not prices.read:
        # Reading costs nothing: only the window asks for a cut.
        span = float(most or 10 * low)
    high = max(LEAST_RATIO * low, low + round(span, -2))
    return WatermarkPair(high=int(high if most is None else max(low + 1, min(high, most))), low=low)
