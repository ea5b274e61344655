"""Export spans by OTLP over HTTP: the SDK queues, batches, sends and repeats; the spans are encoded here.

The SDK's encoder makes a message for each value and copies it three times.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from struct import Struct
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.trace.v1.trace_pb2 import (
    SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK,
    SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK,
    Span,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import INVALID_SPAN_CONTEXT, SpanKind
from typing_extensions import override

from tersely import __version__

if TYPE_CHECKING:
    from tersely.service.common.tracing import CallSpan

_log = logging.getLogger(__name__)

_KINDS = {
    SpanKind.INTERNAL: Span.SPAN_KIND_INTERNAL,
    SpanKind.SERVER: Span.SPAN_KIND_SERVER,
    SpanKind.CLIENT: Span.SPAN_KIND_CLIENT,
}


def export_spans(environment: Mapping[str, str]) -> tuple[TracerProvider, ExportedSpans]:
    """Return a provider that exports spans, and its queue. It is not the global one, so no other library uses it."""
    protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environment.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol not in (None, "", "http/protobuf"):
        _log.warning("spans are exported over http/protobuf: the protocol of OTEL_*_PROTOCOL is not supported")
    given = {"service.version": __version__}
    if not environment.get("OTEL_SERVICE_NAME") and "service.name" not in environment.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    ):
        given["service.name"] = "tersely"
    provider = TracerProvider(resource=Resource.create(given), shutdown_on_exit=False)
    processor = BatchSpanProcessor(SpanExporter(SpanEncoder(provider.resource, SpanLimits())))
    provider.add_span_processor(processor)
    return provider, ExportedSpans(provider, processor)


class _Queued(msgspec.Struct, eq=False):
    """The spans of a call in the exporter's queue, which asks an item only whether it is sampled."""

    spans: list[CallSpan]
    context: ClassVar[Any] = SimpleNamespace(trace_flags=SimpleNamespace(sampled=True))


class ExportedSpans:
    """Gives the spans of sampled calls to the exporter's queue, those of one call as one item.

    ``bound``: new traces are sampled if the lower 64 bits of their id are below it; None if only the sampler knows.
    """

    def __init__(self, provider: TracerProvider, processor: BatchSpanProcessor) -> None:
        self.new_id = provider.id_generator.generate_span_id
        self.new_trace_id = provider.id_generator.generate_trace_id
        self.bound = _bound_of(provider.sampler)
        self._on_end: Callable[[Any], None] = processor.on_end

    def export(self, spans: list[CallSpan]) -> None:
        """Queue spans that have ended."""
        self._on_end(_Queued(spans))


def _bound_of(sampler: Sampler) -> int | None:
    """Return the bound of a sampler that decides on new traces by their ids alone."""
    root = getattr(sampler, "_root", None) if isinstance(sampler, ParentBased) else sampler
    return root.bound if type(root) is TraceIdRatioBased else None


class SpanEncoder:
    """Encodes spans of one resource within the limits of the environment."""

    def __init__(self, resource: Resource, limits: SpanLimits) -> None:
        self._most = limits.max_span_attributes
        self._longest = limits.max_span_attribute_length
        scope = InstrumentationScope("tersely", __version__)
        example = ReadableSpan(
            name="", context=INVALID_SPAN_CONTEXT, resource=resource, instrumentation_scope=scope,
            start_time=0, end_time=0,
        )  # fmt: skip
        (of_resource,) = encode_spans([example]).resource_spans
        (of_scope,) = of_resource.scope_spans
        del of_resource.scope_spans[:]
        del of_scope.spans[:]
        # The fields of a message may come in any order.
        self._resource, self._scope = of_resource.SerializeToString(), of_scope.SerializeToString()

    def encode(self, spans: Sequence[CallSpan]) -> bytes:
        """Return the request that brings the spans to a collector, an ``ExportTraceServiceRequest``."""
        fields = [self._scope]
        for span in spans:
            encoded = self._encode(span)
            fields += (_SCOPE_SPANS_SPANS, _varint(len(encoded)), encoded)
        of_scope = b"".join(fields)
        return _message(_REQUEST_SPANS, self._resource + _message(_RESOURCE_SPANS_SCOPE, of_scope))

    def _encode(self, span: CallSpan) -> bytes:
        # These are tuples whose properties cost a call each.
        trace_id, span_id, _, _, state, _ = span.context
        flags: int = SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
        fields = [
            _TRACE_ID, trace_id.to_bytes(16, "big"), _SPAN_ID, span_id.to_bytes(8, "big"),
            _name_and_kind(span.name, _KINDS[span.kind]), _TIMES.pack(0x39, span.started_at, 0x41, span.ended_at),
        ]  # fmt: skip
        if state:
            fields.append(_message(_STATE, state.to_header().encode()))
        if span.parent is not None:
            _, parent_id, is_remote, _, _, _ = span.parent
            fields += (_PARENT_ID, parent_id.to_bytes(8, "big"))
            if is_remote:
                flags |= SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK
        attributes = list(span.attributes.items())
        if len(attributes) > (self._most or len(attributes)):
            fields += (_DROPPED, _varint(len(attributes) - (self._most or 0)))
            attributes = attributes[: self._most]
        for name, value in attributes:
            if type(value) is int:  # as below, without calls
                number = _varint(value)
                content = b"%b%b%b%b%b" % (_key(name), _VALUE, _varint(len(number) + 1), _INT, number)
                fields += (_ATTRIBUTE, _varint(len(content)), content)
            elif isinstance(value, int | float):
                fields.append(_message(_ATTRIBUTE, _key(name) + _message(_VALUE, _number(value))))
            else:
                fields.append(_text_attribute(name, str(value)[: self._longest]))
        fields.append(_ERROR if span.has_failed else _UNSET)
        fields.append(_FLAGS.pack(0x185, flags))
        return b"".join(fields)


# Fields of OTLP's messages in protobuf's wire format: the number of the field times 8, plus its type (0: a variable
# number, 1: 8 bytes, 2: a length and as many bytes, 5: 4 bytes).
_REQUEST_SPANS, _RESOURCE_SPANS_SCOPE, _SCOPE_SPANS_SPANS = b"\x0a", b"\x12", b"\x12"
_TRACE_ID, _SPAN_ID, _STATE, _PARENT_ID, _NAME, _KIND = b"\x0a\x10", b"\x12\x08", b"\x1a", b"\x22\x08", b"\x2a", b"\x30"
_ATTRIBUTE, _DROPPED = b"\x4a", b"\x50"
_KEY, _VALUE, _TEXT, _BOOL, _INT = b"\x0a", b"\x12", b"\x0a", b"\x10", b"\x18"
_UNSET, _ERROR = b"\x7a\x00", b"\x7a\x02\x18\x02"
_TIMES = Struct("<BQBQ")
_FLAGS = Struct("<HI")
_DOUBLE = Struct("<Bd")


@lru_cache(maxsize=4096)
def _varint(number: int) -> bytes:
    """Encode a number; a negative one as 64 bits. Most are lengths, which repeat."""
    number &= 0xFFFFFFFFFFFFFFFF
    if number < 0x80:
        return number.to_bytes(1, "big")
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _message(field: bytes, content: bytes) -> bytes:
    """Encode a field that has a length: a text, or a message."""
    return b"%b%b%b" % (field, _varint(len(content)), content)


def _number(value: float) -> bytes:
    if isinstance(value, bool):
        return _BOOL + _varint(value)
    return _INT + _varint(int(value)) if isinstance(value, int) else _DOUBLE.pack(0x21, value)


@lru_cache(maxsize=256)
def _key(name: str) -> bytes:
    return _message(_KEY, name.encode())


@lru_cache(maxsize=256)
def _name_and_kind(name: str, kind: int) -> bytes:
    return _message(_NAME, name.encode(errors="replace")) + _KIND + _varint(kind)


@lru_cache(maxsize=1024)
def _text_attribute(name: str, value: str) -> bytes:
    """Encode an attribute whose value is a text. Most texts are the same in every call, and sessions last for many."""
    return _message(_ATTRIBUTE, _key(name) + _message(_VALUE, _message(_TEXT, value.encode(errors="replace"))))


class SpanExporter(OTLPSpanExporter):
    """Sends spans as the SDK's exporter does, configured by the same variables, but encodes them by `SpanEncoder`."""

    def __init__(self, encoder: SpanEncoder) -> None:
        super().__init__()
        self._encoder = encoder

    @override
    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        """Send the ended spans of calls. The SDK tells of failures."""
        sent = self._client.export(self._encoder.encode([span for queued in spans for span in queued.spans]))
        return SpanExportResult.SUCCESS if sent.success else SpanExportResult.FAILURE
