"""Measures how long the model host took for a call, and how long Tersely took besides."""

from __future__ import annotations

from collections.abc import Callable

from tersely.service.common.call_fields import add_fields
from tersely.service.common.metrics import Metrics
from tersely.service.proxy.call.call import Call


class CallTimer:
    """Observes the times of calls. All times are monotonic, in seconds."""

    def __init__(self, metrics: Metrics, monotonic: Callable[[], float]) -> None:
        self._metrics = metrics
        self.now = monotonic

    def overhead_ms(self, call: Call, sent_at: float) -> float:
        """Return the milliseconds between the receipt of a call and the sending of its request."""
        return (sent_at - call.received) * 1000

    def observe_first_byte(self, sent_at: float) -> None:
        """Observe the time until the reply began."""
        self._metrics.tally.observe(self._metrics.first_byte, self.now() - sent_at)

    def observe(self, call: Call, sent_at: float, ended_at: float) -> None:
        """Observe a call that is over now, whose reply ended at ``ended_at``."""
        upstream = max(0.0, ended_at - sent_at)
        overhead = max(0.0, (sent_at - call.received) + (self.now() - ended_at))
        add_fields(upstream_ms=round(upstream * 1000, 2), overhead_ms=round(overhead * 1000, 2))
        tally = self._metrics.tally
        tally.observe(self._metrics.upstream, upstream)
        tally.observe(self._metrics.overhead, overhead)
