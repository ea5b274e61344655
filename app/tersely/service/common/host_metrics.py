"""Metrics read at the moment they are asked for: the build, the processes, the disk of the data directory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from prometheus_client import ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override


class BuildInfo(Collector):
    """``tersely_build_info{version}``, always 1."""

    def __init__(self, version: str) -> None:
        self._version = version

    @override
    def collect(self) -> Iterable[Metric]:
        """Yield the metric."""
        family = GaugeMetricFamily("tersely_build_info", "The version that is running.", labels=["version"])
        family.add_metric([self._version], 1)
        yield family


class DiskSpace(Collector):
    """Free and whole bytes of the file system that holds the data directory: the spool, an embedded Postgres."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @override
    def collect(self) -> Iterable[Metric]:
        """Yield the metrics; none where the file system cannot be read."""
        existing = next((each for each in (self._directory, *self._directory.parents) if each.exists()), None)
        if existing is None:
            return
        try:
            usage = shutil.disk_usage(existing)
        except OSError:
            return
        yield GaugeMetricFamily("tersely_disk_free_bytes", "Free bytes beside the data directory.", value=usage.free)
        yield GaugeMetricFamily("tersely_disk_size_bytes", "Bytes of that file system.", value=usage.total)


class Processes(Collector):
    """The standard ``process_*`` metrics of every worker. The label ``worker`` is the process id."""

    def __init__(self, pids: Callable[[], Sequence[int]]) -> None:
        self._pids = pids

    @override
    def collect(self) -> Iterable[Metric]:
        """Yield the families, each with one sample per worker."""
        families: dict[str, Metric] = {}
        for pid in self._pids():
            for family in ProcessCollector(pid=lambda pid=pid: pid, registry=None).collect():  # type: ignore[misc]
                known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    known.add_sample(sample.name, {"worker": str(pid)}, sample.value)
        yield from families.values()


def own_process() -> Sequence[int]:
    """Return the id of this process."""
    return (os.getpid(),)
