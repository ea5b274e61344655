"""The figures of the service as a whole, for the operator's view. Counts come from the metrics of all workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import cast

from tersely.domain.errors import StoreUnavailable
from tersely.service.common.auth import DEFAULT_TENANT
from tersely.service.common.call_board import CallBoard, SideCallExample
from tersely.service.common.metrics import Metrics
from tersely.service.common.outcomes import OUTCOMES, Outcome
from tersely.store.db.connection import Database
from tersely.store.db.migrations import current_revision

SIZE = "SELECT pg_database_size(current_database())"
SERVER = "SHOW server_version"


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseFigures:
    """The state of the database. ``size`` in bytes, ``seconds`` of a question to it; ``busy`` of this worker's pool."""

    is_there: bool
    revision: str = ""
    expected: str = ""
    version: str = ""
    size: int | None = None
    seconds: float | None = None
    busy: int = 0
    idle: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFigures:
    """Model calls to a host in one dialect since the start, by what came of them, and the host's address. ``name`` is
    empty for the default host of the dialect.
    """

    name: str
    dialect: str
    address: str
    counts: Mapping[Outcome, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SideCallCounts:
    """Side calls of one kind: how many since the start, and the latest of this worker."""

    kind: str
    count: int
    examples: Sequence[SideCallExample]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationFigures:
    """All figures; counts since the start of the processes.

    ``estimate_error`` is the mean of reported by estimated tokens, None before the first. ``summary_queue`` and
    ``calls`` are this worker's.
    """

    at: datetime
    database: DatabaseFigures
    workers: int
    calls: int
    hosts: tuple[HostFigures, ...]
    side_calls: tuple[SideCallCounts, ...]
    summary_queue: int
    summarizer: Mapping[str, int]
    compactions: Mapping[str, int]
    spooled: int
    write_failures: Mapping[str, int]
    fail_open: int
    repairs: int
    limited: Mapping[str, int]
    estimate_error: float | None
    estimates: int
    live_sessions: int
    live_bytes: int
    disk_free: int | None


class Operations:
    """Reads the figures."""

    def __init__(
        self,
        database: Database,
        metrics: Metrics,
        board: CallBoard,
        *,
        hosts: Mapping[tuple[str, str], str],
        summary_queue: Callable[[], int],
        clock: Callable[[], datetime],
        monotonic: Callable[[], float],
    ) -> None:
        """``hosts``: name (empty: the default) and dialect -> address, without credentials."""
        self._database = database
        self._metrics = metrics
        self._board = board
        self._hosts = hosts
        self._summary_queue = summary_queue
        self._clock = clock
        self._monotonic = monotonic

    async def figures(self) -> OperationFigures:
        """Return the figures; also while the database is away."""
        samples = _Samples(self._metrics)
        error = samples.total("tersely_token_estimate_error_ratio_sum")
        estimates = round(samples.total("tersely_token_estimate_error_ratio_count"))
        free = samples.total("tersely_disk_free_bytes")
        return OperationFigures(
            at=self._clock(),
            database=await self._database_figures(),
            workers=round(samples.total("tersely_workers")) or 1,
            calls=self._board.count(),
            hosts=tuple(self._host(samples, *each) for each in self._hosts),
            side_calls=tuple(
                SideCallCounts(kind=kind, count=count, examples=self._board.examples(kind))
                for kind, count in samples.by("tersely_side_calls_total", "kind").items()
            ),
            summary_queue=self._summary_queue(),
            summarizer=samples.by("tersely_summarizer_calls_total", "result"),
            compactions=samples.by("tersely_compactions_total", "result"),
            spooled=round(samples.total("tersely_spooled_exchanges")),
            write_failures=samples.by("tersely_write_failures_total", "result"),
            fail_open=round(samples.total("tersely_fail_open_total")),
            repairs=round(samples.total("tersely_pairing_repairs_total")),
            limited=samples.by("tersely_limited_total", "limit"),
            estimate_error=error / estimates if estimates else None,
            estimates=estimates,
            live_sessions=round(samples.total("tersely_live_sessions")),
            live_bytes=round(samples.total("tersely_live_session_bytes")),
            disk_free=round(free) if free else None,
        )

    async def _database_figures(self) -> DatabaseFigures:
        busy, idle = self._database.sizes()
        began = self._monotonic()
        try:
            revision = await self._database.read_revision() or "unknown"
            seconds = self._monotonic() - began
            async with self._database.reading(DEFAULT_TENANT) as connection:
                size = await connection.fetchval(SIZE)
                version = await connection.fetchval(SERVER)
        except StoreUnavailable:
            return DatabaseFigures(is_there=False, expected=current_revision(), busy=busy, idle=idle)
        return DatabaseFigures(
            is_there=True,
            revision=revision,
            expected=current_revision(),
            version=str(version).partition(" ")[0],
            size=size,
            seconds=seconds,
            busy=busy,
            idle=idle,
        )

    def _host(self, samples: _Samples, name: str, dialect: str) -> HostFigures:
        counts = dict.fromkeys(OUTCOMES, 0)
        for labels, value in samples.of("tersely_host_calls_total"):
            if labels.get("host", "") == name and labels.get("dialect") == dialect:
                counts[cast(Outcome, labels.get("outcome"))] += round(value)
        return HostFigures(
            name=name,
            dialect=dialect,
            address=self._hosts[name, dialect],
            counts=counts,
        )


class _Samples:
    """The samples of the metrics, read once."""

    def __init__(self, metrics: Metrics) -> None:
        self._samples = metrics.samples()

    def of(self, name: str) -> list[tuple[Mapping[str, str], float]]:
        return self._samples.get(name, [])

    def total(self, name: str) -> float:
        return sum(value for _, value in self.of(name))

    def by(self, name: str, label: str) -> dict[str, int]:
        found: Counter[str] = Counter()
        for labels, value in self.of(name):
            found[labels.get(label, "")] += round(value)
        return dict(found)
