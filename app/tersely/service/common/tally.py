"""Count now, update Prometheus later: its counters take a lock and several calls for each number.

Numbers reach the metrics when these are read, and a fraction of a second after they came, for the processes that read
them from files.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Protocol

# Seconds until other processes see a number.
DELAY = 0.5


class Sum(Protocol):
    """A counter or a gauge."""

    def inc(self, amount: float = 1) -> None:
        """Add ``amount``."""


class Level(Protocol):
    """A gauge."""

    def set(self, value: float) -> None:
        """Show ``value``."""


@dataclass(frozen=True, slots=True)
class _TalliedGauge:
    tally: Tally
    gauge: Level

    def set(self, value: float) -> None:
        self.tally.show(self.gauge, value)


class Tally:
    """Numbers on their way to metrics."""

    def __init__(self) -> None:
        self._sums: defaultdict[Sum, float] = defaultdict(float)
        self._levels: dict[Level, float] = {}
        self._values: defaultdict[Any, list[float]] = defaultdict(list)
        self._alarm: asyncio.TimerHandle | None = None

    def add(self, counter: Sum, amount: float = 1) -> None:
        """Add to a counter or a gauge."""
        self._sums[counter] += amount
        if self._alarm is None:
            self._set_alarm()

    def show(self, gauge: Level, value: float) -> None:
        """Show a value at a gauge."""
        self._levels[gauge] = value
        if self._alarm is None:
            self._set_alarm()

    def observe(self, histogram: Any, value: float) -> None:
        """Add a value to a histogram."""
        self._values[histogram].append(value)
        if self._alarm is None:
            self._set_alarm()

    def gauge(self, gauge: Level) -> Level:
        """Return a gauge whose values go through the tally."""
        return _TalliedGauge(self, gauge)

    def flush(self) -> None:
        """Tell everything."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        sums, levels, values = self._sums, self._levels, self._values
        self._sums, self._levels, self._values = defaultdict(float), {}, defaultdict(list)
        for counter, amount in sums.items():
            counter.inc(amount)
        for gauge, value in levels.items():
            gauge.set(value)
        for histogram, found in values.items():
            _observe_all(histogram, found)

    def _set_alarm(self) -> None:
        try:
            self._alarm = asyncio.get_running_loop().call_later(DELAY, self.flush)
        except RuntimeError:  # nothing runs that could wait
            self.flush()


def _observe_all(histogram: Any, values: list[float]) -> None:
    """Add values to a histogram, each bucket once."""
    bounds = getattr(histogram, "_upper_bounds", None)
    if bounds is None:
        return  # it ignores them
    counts: defaultdict[int, int] = defaultdict(int)
    for value in values:
        counts[bisect_left(bounds, value)] += 1
    for bucket, count in counts.items():
        histogram._buckets[bucket].inc(count)  # noqa: SLF001 it has no method for many values
    histogram._sum.inc(sum(values))  # noqa: SLF001
