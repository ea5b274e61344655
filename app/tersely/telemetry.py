"""OpenTelemetry, configured by its standard variables `OTEL_*`. Without them its SDK is not imported."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from opentelemetry.trace import Status, StatusCode

from tersely import __version__
from tersely.service.common.tracing import CallSpan, Tracing

_log = logging.getLogger(__name__)

# An exporter is asked for by where to export to.
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
CLOSE_SECONDS = 5.0
FINE, FAILED = Status(), Status(StatusCode.ERROR)


class Telemetry:
    """Exports the spans of calls. ``tracing`` is None unless the environment configures it."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._provider: Any = None
        self.tracing: Tracing | None = None
        if is_wanted(environment):
            self._provider, processor = _provider(environment)
            self.tracing = Tracing(self._provider.sampler, ExportedSpans(self._provider, processor))

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


class ExportedSpans:
    """Gives the spans of sampled calls to the exporter's queue."""

    def __init__(self, provider: Any, processor: Any) -> None:
        sdk = import_module("opentelemetry.sdk.trace")
        self.new_id: Callable[[], int] = provider.id_generator.generate_span_id
        self.new_trace_id: Callable[[], int] = provider.id_generator.generate_trace_id
        self._span = sdk.ReadableSpan
        limits = sdk.SpanLimits()
        self._count, self._length = limits.max_span_attributes, limits.max_span_attribute_length
        self._bounded = import_module("opentelemetry.attributes").BoundedAttributes
        scope = import_module("opentelemetry.sdk.util.instrumentation").InstrumentationScope
        self._scope = scope("tersely", __version__)
        self._resource = provider.resource
        self._processor = processor

    def export(self, spans: list[CallSpan]) -> None:
        """Queue spans that have ended."""
        for span in spans:
            self._processor.on_end(
                self._span(
                    name=span.name, context=span.context, parent=span.parent, resource=self._resource,
                    attributes=self._limited(span.attributes), kind=span.kind,
                    status=FAILED if span.has_failed else FINE, start_time=span.started_at, end_time=span.ended_at,
                    instrumentation_scope=self._scope,
                )
            )  # fmt: skip

    def _limited(self, attributes: dict[str, str | int]) -> Mapping[str, str | int]:
        """Return attributes within the limits of the environment."""
        if self._length is None and (self._count is None or len(attributes) <= self._count):
            return attributes
        limited: Mapping[str, str | int] = self._bounded(
            self._count, attributes, immutable=True, max_value_len=self._length
        )
        return limited


def _provider(environment: Mapping[str, str]) -> tuple[Any, Any]:
    """Return a provider that exports by OTLP over HTTP, and its processor. It is not the global one, so no other
    library uses it.
    """
    protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environment.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol not in (None, "", "http/protobuf"):
        _log.warning("spans are exported over http/protobuf: the protocol of OTEL_*_PROTOCOL is not supported")
    resources = import_module("opentelemetry.sdk.resources")
    sdk = import_module("opentelemetry.sdk.trace")
    export = import_module("opentelemetry.sdk.trace.export")
    otlp = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    given = {"service.version": __version__}
    if not environment.get("OTEL_SERVICE_NAME") and "service.name" not in environment.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    ):
        given["service.name"] = "tersely"
    resource = resources.Resource.create(given)
    provider = sdk.TracerProvider(resource=resource, shutdown_on_exit=False)
    processor = export.BatchSpanProcessor(otlp.OTLPSpanExporter())
    provider.add_span_processor(processor)
    return provider, processor
