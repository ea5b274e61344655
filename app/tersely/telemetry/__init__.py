"""OpenTelemetry, configured by its standard variables `OTEL_*`. Without them its SDK is not imported."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from tersely.service.common.tracing import Tracing

_log = logging.getLogger(__name__)

# An exporter is asked for by where to export to.
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
CLOSE_SECONDS = 5.0


class Telemetry:
    """Exports the spans of calls. ``tracing`` is None unless the environment configures it."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._provider: Any = None
        self.tracing: Tracing | None = None
        if is_wanted(environment):
            self._provider, spans = import_module("tersely.telemetry.span_export").export_spans(environment)
            self.tracing = Tracing(self._provider.sampler, spans, bound=spans.bound)

    async def close(self) -> None:
        """Export what is left, within `CLOSE_SECONDS`."""
        if self._provider is None:
            return
        # A daemon: the process does not wait at its end for a collector that does not answer.
        closing = threading.Thread(target=self._provider.shutdown, name="close-telemetry", daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, CLOSE_SECONDS)
        if closing.is_alive():
            _log.warning("the last spans could not be exported in time")


def is_wanted(environment: Mapping[str, str]) -> bool:
    """Return whether the environment asks for traces."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporters = environment.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    return exporters == "otlp" or (not exporters and any(environment.get(name) for name in ENDPOINTS))
