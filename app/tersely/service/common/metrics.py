"""The metrics for Prometheus. Labels are bounded: never a session, tenant, user or model.

Every labelled counter exists with 0 from the start: a rate sees the first event too, and an alert has data to look at.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
    multiprocess,
)
from prometheus_client.registry import Collector

from tersely.data.known_fields import FIELDS
from tersely.dialects.clients.known import SideCall
from tersely.domain.chat_commands import Verb
from tersely.domain.limits import LIMIT_NAMES
from tersely.domain.messages import Dialect
from tersely.domain.tools.catalog import TOOLS
from tersely.service.common.host_metrics import BuildInfo, DiskSpace, Processes, own_process
from tersely.service.common.outcomes import OUTCOMES
from tersely.service.common.tally import Tally
from tersely.strategies.epochs.policies import REASONS
from tersely.strategies.presets import STRATEGIES
from tersely.strategies.reduction.levels import LevelName

# The time of a series' first sample adds nothing to its first appearance.
disable_created_metrics()  # type: ignore[no-untyped-call]

FAST = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
SLOW = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKENS = (100, 300, 1_000, 3_000, 10_000, 20_000, 32_000, 64_000, 128_000, 256_000, 1_000_000)
MESSAGES = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000)
RATIOS = (0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0)
# A model call as the metrics call it.
CALL_ROUTES: Mapping[Dialect, str] = {
    "openai_chat": "chat",
    "openai_responses": "responses",
    "anthropic": "messages",
    "gemini": "generate",
    "gemini_gca": "generate",
}
# The statuses that every route can have; others are added when they occur.
STATUSES = ("200", "400", "401", "429", "499", "500", "502", "503")
COMPACTION_RESULTS = ("model", "extractive", "unchanged", "empty", "stale", "failed")
QUERY_RESULTS = ("ok", "error", "too_long", "too_large", "busy")
REPAIRS = (
    "orphan_result",
    "duplicate_result",
    "duplicate_call",
    "missing_result",
    "moved_result",
    "empty_content",
    "empty_message",
)
DIALECTS: tuple[str, ...] = get_args(Dialect)
SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


_Metric = type[Counter] | type[Gauge] | type[Histogram]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """A metric of the table: ``start`` are the label values whose series exist with 0 from the start."""

    kind: _Metric
    name: str
    text: str
    labels: tuple[str, ...] = ()
    options: Mapping[str, Any]
    start: tuple[tuple[str, ...], ...] = ()

    def create(self, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
        """Create the metric in ``registry``, with its series."""
        metric = self.kind(self.name, self.text, self.labels, registry=registry, **self.options)
        for values in self.start:
            metric.labels(*values)
        return metric


def _counter(
    name: str, text: str, *, labels: tuple[str, ...] = (), start: Iterable[tuple[str, ...]] = ()
) -> MetricSpec:
    return MetricSpec(kind=Counter, name=name, text=text, labels=labels, options={}, start=tuple(start))


def _gauge(name: str, text: str, *, labels: tuple[str, ...] = (), start: Iterable[tuple[str, ...]] = ()) -> MetricSpec:
    options = {"multiprocess_mode": "livesum"}
    return MetricSpec(kind=Gauge, name=name, text=text, labels=labels, options=options, start=tuple(start))


def _histogram(
    name: str,
    text: str,
    *,
    buckets: Sequence[float],
    labels: tuple[str, ...] = (),
    start: Iterable[tuple[str, ...]] = (),
) -> MetricSpec:
    options = {"buckets": buckets}
    return MetricSpec(kind=Histogram, name=name, text=text, labels=labels, options=options, start=tuple(start))


def _single(*values: str) -> list[tuple[str, ...]]:
    """Return the label values of a metric with one label."""
    return [(value,) for value in values]


def _known_requests() -> Iterator[tuple[str, ...]]:
    """Yield the label values of `Metrics.requests` that are known beforehand."""
    for dialect, route in CALL_ROUTES.items():
        yield from product((route,), (dialect,), ("", *STRATEGIES), STATUSES)
    yield from product(("passthrough",), DIALECTS, ("",), STATUSES)
    yield from product(("api", "mcp"), ("",), ("",), STATUSES)


# Every metric, by its attribute of `Metrics`.
TABLE: dict[str, MetricSpec] = {
    "requests": _counter(
        "tersely_requests_total",
        "Answered requests.",
        labels=(
            "route",
            "dialect",
            "strategy",
            "status",
        ),
        start=_known_requests(),
    ),
    "host_calls": _counter(
        "tersely_host_calls_total",
        (
            "Model calls by their model host and by what came of them. The default host of a dialect has no name; "
            "calls that Tersely refuses before it knows their host count there."
        ),
        labels=("host", "dialect", "outcome"),
        start=product(("",), DIALECTS, OUTCOMES),
    ),
    "overhead": _histogram(
        "tersely_overhead_seconds",
        "Time of a proxied request spent in Tersely: total minus upstream.",
        buckets=FAST,
    ),
    "upstream": _histogram(
        "tersely_upstream_seconds",
        "From sending a request upstream to its end.",
        buckets=SLOW,
    ),
    "first_byte": _histogram(
        "tersely_upstream_first_byte_seconds",
        "From sending a request upstream to the first byte of its reply.",
        buckets=SLOW,
    ),
    "in_flight": _gauge(
        "tersely_in_flight_requests",
        "Proxied requests under way.",
    ),
    "body_bytes": _gauge(
        "tersely_body_memory_bytes",
        "Memory that is set aside for request bodies in flight.",
    ),
    "context_tokens": _histogram(
        "tersely_context_tokens",
        "Estimated tokens of a request, before and after the context was built.",
        labels=("stage",),
        buckets=TOKENS,
    ),
    "tokens_saved": _counter(
        "tersely_tokens_saved_total",
        "Estimated tokens that were not sent.",
    ),
    "cost": _counter(
        "tersely_cost_usd_total",
        "Cost of calls by known prices: as sent, and as the full history with a perfect cache.",
        labels=("kind",),
        start=(("sent",), ("full",)),
    ),
    "upstream_tokens": _counter(
        "tersely_upstream_tokens_total",
        "Tokens as the upstream reported them.",
        labels=("kind",),
    ),
    "tool_calls": _counter(
        "tersely_tool_calls_total",
        "Calls of models to Tersely's own tools.",
        labels=(
            "tool",
            "result",
        ),
        start=product(TOOLS, ("ok", "error", "refused")),
    ),
    "epochs": _counter(
        "tersely_epochs_total",
        "Epochs started.",
        labels=(
            "strategy",
            "reason",
        ),
        start=product(STRATEGIES, REASONS),
    ),
    "compactions": _counter(
        "tersely_compactions_total",
        "Compactions.",
        labels=(
            "strategy",
            "result",
        ),
        start=product(STRATEGIES, COMPACTION_RESULTS),
    ),
    "compaction_seconds": _histogram(
        "tersely_compaction_seconds",
        "Time a compaction took.",
        buckets=SLOW,
    ),
    "summarizer_tokens": _counter(
        "tersely_summarizer_tokens_total",
        "Tokens of the summarizer's own calls, as the upstream reported them.",
        labels=("kind",),
        start=_single("input", "cached", "output"),
    ),
    "summarizer_calls": _counter(
        "tersely_summarizer_calls_total",
        "Calls of the summarizer to its model. `refused`: not made because of a session's daily limit.",
        labels=("result",),
        start=_single("answered", "failed", "refused"),
    ),
    "summarizer_cost": _counter(
        "tersely_summarizer_cost_usd_total",
        "USD that the summarizer's calls cost, where prices are configured.",
    ),
    "compression": _histogram(
        "tersely_compression_ratio",
        "Tokens after a new epoch started, as a share of those before.",
        buckets=SHARES,
    ),
    "level_tokens": _histogram(
        "tersely_level_tokens",
        "Estimated tokens of each memory level in a context of `tiered`.",
        labels=("level",),
        buckets=TOKENS,
        start=_single(*get_args(LevelName)),
    ),
    "level_messages": _histogram(
        "tersely_level_messages",
        "Messages of each memory level in a context of `tiered`.",
        labels=("level",),
        buckets=MESSAGES,
        start=_single(*get_args(LevelName)),
    ),
    "repairs": _counter(
        "tersely_pairing_repairs_total",
        "Repairs of the pairing of tool calls and results.",
        labels=("kind",),
        start=_single(*REPAIRS),
    ),
    "estimate_error": _histogram(
        "tersely_token_estimate_error_ratio",
        "Reported input tokens divided by the estimate.",
        buckets=RATIOS,
    ),
    "limited": _counter(
        "tersely_limited_total",
        "Requests refused with 429 because a limit of their tenant or key is used up.",
        labels=("limit",),
        start=_single(*LIMIT_NAMES),
    ),
    "fail_open": _counter(
        "tersely_fail_open_total",
        "Requests that were served without the store.",
        labels=("reason",),
        start=_single("read", "write"),
    ),
    "spooled": _gauge(
        "tersely_spooled_exchanges",
        "Answered calls that wait in the spool for the database.",
    ),
    "write_failures": _counter(
        "tersely_write_failures_total",
        (
            "Calls that the database did not store in time. `spooled`: they wait on disk. `refused`: the "
            "database refused them, and they are kept in a file. `lost`: neither stored them."
        ),
        labels=("result",),
        start=_single("spooled", "refused", "lost"),
    ),
    "breaker_opened": _counter(
        "tersely_breaker_opened_total",
        "How often calls to the summarizer's model were paused after repeated failures.",
    ),
    "search_seconds": _histogram(
        "tersely_search_seconds",
        "Time of a search.",
        labels=("mode",),
        buckets=FAST,
        start=_single("search", "relevant", "tail", "head", "turn"),
    ),
    "unread_replies": _counter(
        "tersely_unread_replies_total",
        "Replies that could not be parsed completely. They are forwarded and stored unchanged.",
        labels=("dialect",),
        start=_single(*DIALECTS),
    ),
    "unknown_fields": _counter(
        "tersely_unknown_fields_total",
        ("Unknown fields in clients' messages, which are forwarded unchanged. A client sends something new."),
        labels=(
            "dialect",
            "block",
        ),
        start=FIELDS,
    ),
    "queries": _counter(
        "tersely_queries_total",
        "SQL queries of agents.",
        labels=("result",),
        start=_single(*QUERY_RESULTS),
    ),
    "query_seconds": _histogram(
        "tersely_query_seconds",
        "Time of an SQL query, including the time it waited.",
        buckets=FAST,
    ),
    "side_calls": _counter(
        "tersely_side_calls_total",
        "Calls beside a conversation, by kind.",
        labels=("kind",),
        start=_single(*get_args(SideCall)),
    ),
    "chat_commands": _counter(
        "tersely_chat_commands_total",
        "Commands answered inside of chats.",
        labels=("command",),
        start=_single(*get_args(Verb)),
    ),
    "live_calls": _counter(
        "tersely_live_calls_total",
        "Calls by whether they continued a live session: `hit`, or why they did not.",
        labels=("result",),
        start=_single("hit", "unknown", "changed", "messages", "moved", "epoch", "busy"),
    ),
    "shadow_calls": _counter(
        "tersely_shadow_calls_total",
        (
            "Calls of sessions that try out a strategy. `judged`: the figures are stored. `dropped`: the queue was "
            "full. `late`: a later call was judged before. `failed`: no context fits, or the database was away."
        ),
        labels=("result",),
        start=_single("judged", "dropped", "late", "failed"),
    ),
    "live_sessions": _gauge(
        "tersely_live_sessions",
        "Live sessions in memory.",
        labels=("state",),
        start=_single("held"),
    ),
    "live_session_bytes": _gauge(
        "tersely_live_session_bytes",
        "Memory that live sessions take, about.",
    ),
    "pool": _gauge(
        "tersely_db_pool_connections",
        "Connections to the database.",
        labels=("state",),
        start=_single("busy", "idle"),
    ),
}


class _IgnoredMetric:
    """A metric that ignores everything."""

    def labels(self, *_values: str) -> _IgnoredMetric:
        return self

    def inc(self, _amount: float = 1) -> None: ...

    def dec(self, _amount: float = 1) -> None: ...

    def set(self, _value: float) -> None: ...

    def observe(self, _value: float) -> None: ...


class Metrics:
    """All metrics of one process. With ``PROMETHEUS_MULTIPROC_DIR`` set, `render` adds up all workers."""

    requests: Counter
    host_calls: Counter
    overhead: Histogram
    upstream: Histogram
    first_byte: Histogram
    in_flight: Gauge
    body_bytes: Gauge
    context_tokens: Histogram
    tokens_saved: Counter
    cost: Counter
    upstream_tokens: Counter
    tool_calls: Counter
    epochs: Counter
    compactions: Counter
    compaction_seconds: Histogram
    summarizer_tokens: Counter
    summarizer_calls: Counter
    summarizer_cost: Counter
    compression: Histogram
    level_tokens: Histogram
    level_messages: Histogram
    repairs: Counter
    estimate_error: Histogram
    limited: Counter
    fail_open: Counter
    spooled: Gauge
    write_failures: Counter
    breaker_opened: Counter
    search_seconds: Histogram
    unread_replies: Counter
    unknown_fields: Counter
    queries: Counter
    query_seconds: Histogram
    side_calls: Counter
    chat_commands: Counter
    live_calls: Counter
    shadow_calls: Counter
    live_sessions: Gauge
    live_session_bytes: Gauge
    pool: Gauge

    def __init__(self, *, version: str = "unknown", data_dir: Path | None = None) -> None:
        """Create the metrics of `TABLE`. ``data_dir`` names the file system whose space is reported."""
        _remove_dead_workers()
        self.tally = Tally()
        self._at_render: list[Collector] = [BuildInfo(version), Processes(_workers)]
        if data_dir is not None:
            self._at_render.append(DiskSpace(data_dir))
        self.registry = CollectorRegistry()
        for attribute, spec in TABLE.items():
            setattr(self, attribute, spec.create(self.registry))
        # Looked up once: finding a child by its labels costs more than counting.
        self.tokens_before = self.context_tokens.labels("before")
        self.tokens_after = self.context_tokens.labels("after")
        self.reported_tokens = {kind: self.upstream_tokens.labels(kind) for kind in ("input", "cached", "output")}
        self._cost_sent, self._cost_full = self.cost.labels("sent"), self.cost.labels("full")
        self._live_held = self.live_sessions.labels("held")
        for collector in self._at_render:
            self.registry.register(collector)

    def add_cost(self, *, sent: float | None, full: float | None) -> None:
        """Add the cost of a call and of its full history, in USD; None: unknown."""
        if sent is not None and full is not None:
            self.tally.add(self._cost_sent, sent)
            self.tally.add(self._cost_full, full)

    def show_live_sessions(self, count: int, size: int) -> None:
        """Report the live sessions of this worker and the bytes that they take."""
        self.tally.show(self._live_held, count)
        self.tally.show(self.live_session_bytes, size)

    def set_pool(self, busy: int, idle: int) -> None:
        """Report the pool's connections."""
        self.pool.labels("busy").set(busy)
        self.pool.labels("idle").set(idle)

    def render(self) -> bytes:
        """Render all metrics in Prometheus's text format."""
        self.tally.flush()
        return generate_latest(self._registry())

    def samples(self) -> dict[str, list[tuple[Mapping[str, str], float]]]:
        """Return the samples of all workers: name -> labels and values."""
        self.tally.flush()
        found: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        for family in self._registry().collect():
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
        return found

    def _registry(self) -> CollectorRegistry:
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            return self.registry
        _remove_dead_workers()
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        for collector in self._at_render:
            registry.register(collector)
        return registry


class IgnoredMetrics(Metrics):
    """Metrics that ignore everything, for calls of no user, such as those of a replay."""

    def __init__(self) -> None:
        ignored: Any = _IgnoredMetric()
        self.tally = Tally()
        for attribute in TABLE:
            setattr(self, attribute, ignored)
        self.registry = CollectorRegistry()
        self.tokens_before = self.tokens_after = ignored
        self.reported_tokens = dict.fromkeys(("input", "cached", "output"), ignored)
        self._cost_sent = self._cost_full = self._live_held = ignored


def _remove_dead_workers() -> None:
    """Remove the live gauges of workers that were killed."""
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


def _workers() -> Sequence[int]:
    """Return the process ids of all workers, or of this process if it is the only one."""
    directory = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if not directory:
        return own_process()
    found = {file.stem.rpartition("_")[2] for file in Path(directory).glob("counter_*.db")}
    return sorted(pid for pid in map(int, filter(str.isdigit, found)) if _is_alive(pid))
