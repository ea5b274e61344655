"""What Prometheus is told. Labels are bounded: never a session, tenant, user or model."""

from __future__ import annotations

import os
from pathlib import Path

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
    multiprocess,
)

FAST = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
SLOW = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKENS = (100, 300, 1_000, 3_000, 10_000, 20_000, 32_000, 64_000, 128_000, 256_000, 1_000_000)
MESSAGES = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000)
RATIOS = (0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0)
SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


class Metrics:
    """All metrics of one process. With ``PROMETHEUS_MULTIPROC_DIR`` set, `render` adds up all workers."""

    def __init__(self) -> None:
        _forget_the_dead()
        self.registry = CollectorRegistry()
        r = self.registry
        self.requests = Counter(
            "tersely_requests_total",
            "Requests answered.",
            ["route", "dialect", "strategy", "status"],
            registry=r,
        )
        self.overhead = Histogram(
            "tersely_overhead_seconds",
            "Time of a proxied request spent in Tersely: total minus upstream.",
            buckets=FAST,
            registry=r,
        )
        self.upstream = Histogram(
            "tersely_upstream_seconds", "From sending a request upstream to its end.", buckets=SLOW, registry=r
        )
        self.first_byte = Histogram(
            "tersely_upstream_first_byte_seconds",
            "From sending a request upstream to the first byte of its reply.",
            buckets=SLOW,
            registry=r,
        )
        self.in_flight = Gauge(
            "tersely_in_flight_requests",
            "Proxied requests under way.",
            multiprocess_mode="livesum",
            registry=r,
        )
        self.context_tokens = Histogram(
            "tersely_context_tokens",
            "Estimated tokens of a request, before and after.",
            ["stage"],
            buckets=TOKENS,
            registry=r,
        )
        # Looked up once: a child by its labels costs more than what it counts.
        self.tokens_before = self.context_tokens.labels("before")
        self.tokens_after = self.context_tokens.labels("after")
        self.tokens_saved = Counter("tersely_tokens_saved_total", "Estimated tokens that were not sent.", registry=r)
        self.upstream_tokens = Counter(
            "tersely_upstream_tokens_total", "Tokens as the upstream reported them.", ["kind"], registry=r
        )
        self.reported_tokens = {kind: self.upstream_tokens.labels(kind) for kind in ("input", "cached", "output")}
        self.tool_calls = Counter(
            "tersely_tool_calls_total", "Calls of models to tools of our own.", ["tool", "result"], registry=r
        )
        self.epochs = Counter("tersely_epochs_total", "Epochs started.", ["strategy", "reason"], registry=r)
        self.compactions = Counter("tersely_compactions_total", "Compactions.", ["strategy", "result"], registry=r)
        self.compaction_seconds = Histogram(
            "tersely_compaction_seconds", "Time a compaction took.", buckets=SLOW, registry=r
        )
        self.summarizer_tokens = Counter(
            "tersely_summarizer_tokens_total",
            "Tokens of the summarizer's own calls, as the upstream reported them.",
            ["kind"],
            registry=r,
        )
        self.compression = Histogram(
            "tersely_compression_ratio",
            "Tokens after a new epoch started, as a share of those before.",
            buckets=SHARES,
            registry=r,
        )
        self.level_tokens = Histogram(
            "tersely_level_tokens",
            "Estimated tokens of each memory level in a context of `tiered`.",
            ["level"],
            buckets=TOKENS,
            registry=r,
        )
        self.level_messages = Histogram(
            "tersely_level_messages",
            "Messages of each memory level in a context of `tiered`.",
            ["level"],
            buckets=MESSAGES,
            registry=r,
        )
        self.repairs = Counter(
            "tersely_pairing_repairs_total", "Mends that calls and results needed.", ["kind"], registry=r
        )
        self.estimate_error = Histogram(
            "tersely_token_estimate_error_ratio",
            "Reported input tokens divided by the estimate.",
            buckets=RATIOS,
            registry=r,
        )
        self.fail_open = Counter(
            "tersely_fail_open_total", "Requests that went on without the store.", ["reason"], registry=r
        )
        self.search_seconds = Histogram(
            "tersely_search_seconds", "Time of a search.", ["mode"], buckets=FAST, registry=r
        )
        self.queries = Counter("tersely_queries_total", "Queries of agents' own SQL.", ["result"], registry=r)
        self.query_seconds = Histogram(
            "tersely_query_seconds", "Time of such a query, waiting included.", buckets=FAST, registry=r
        )
        self.side_calls = Counter(
            "tersely_side_calls_total", "Calls beside a conversation, by kind.", ["kind"], registry=r
        )
        self.chat_commands = Counter(
            "tersely_chat_commands_total", "Commands answered inside of chats.", ["command"], registry=r
        )
        self.pool = Gauge(
            "tersely_db_pool_connections",
            "Connections to the database.",
            ["state"],
            multiprocess_mode="livesum",
            registry=r,
        )

    def set_pool(self, busy: int, idle: int) -> None:
        """Report the pool's connections."""
        self.pool.labels("busy").set(busy)
        self.pool.labels("idle").set(idle)

    def render(self) -> bytes:
        """Everything, in Prometheus's text format."""
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            _forget_the_dead()
            registry = CollectorRegistry()
            multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
            return generate_latest(registry)
        return generate_latest(self.registry)


def _forget_the_dead() -> None:
    """What a worker that was killed had under way is no longer under way: remove its live gauges."""
    directory = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    for file in Path(directory).glob("gauge_live*_*.db") if directory else ():
        pid = file.stem.rpartition("_")[2]
        if pid.isdigit() and not _is_alive(int(pid)):
            file.unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def with_process(metrics: Metrics) -> Metrics:
    """Add the process's own memory and CPU figures (one process only: they do not add up)."""
    ProcessCollector(registry=metrics.registry)
    return metrics
