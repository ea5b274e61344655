"""OpenTelemetry spans of a call: one for the request, with children for its steps.

Only a sampled call has a `CallTrace`. For every other call, and without tracing, a step costs one check of a variable.
Spans are only times and attributes until the call ends: a live span of the SDK checks every attribute, and takes a lock
for every change.

Spans carry ids, names and numbers, never content or credentials.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
from functools import wraps
from typing import Any, Literal, ParamSpec, Protocol, TypeVar

import msgspec
from opentelemetry.context import Context
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tersely.dialects.headers import Headers
from tersely.domain.messages import Dialect
from tersely.service.common.outcomes import CLIENT_GONE, settle_outcome

StepName = Literal["recognition", "context", "store"]
P = ParamSpec("P")
T = TypeVar("T")

PROVIDERS: dict[Dialect, str] = {
    "openai_chat": "openai",
    "openai_responses": "openai",
    "anthropic": "anthropic",
    "gemini": "gcp.gemini",
    "gemini_gca": "gcp.gemini",
}
# What a client writes into a request is shown up to so many characters.
MAX_NAME = 200
# Fields of the log line that are attributes of the call's span.
_SHOWN = {
    "tenant": "tersely.tenant",
    "client": "tersely.client",
    "dialect": "tersely.dialect",
    "strategy": "tersely.strategy",
    "context": "tersely.context",
    "tokens_before": "tersely.tokens_before",
    "tokens_after": "tersely.tokens_after",
    "outcome": "tersely.outcome",
    "session": "gen_ai.conversation.id",
    "route": "http.route",
}
_USAGE = {
    "input_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
}
_propagator = TraceContextTextMapPropagator()
TRACE_HEADERS = frozenset(_propagator.fields)
_LOW_64 = 2**64 - 1
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_SAMPLED_RANDOM = TraceFlags(TraceFlags.SAMPLED | TraceFlags.RANDOM_TRACE_ID)
_active: ContextVar[CallTrace | None] = ContextVar("call_trace", default=None)


class CallSpan(msgspec.Struct, eq=False):
    """A call, a step of it, or a request to a model host. ``parent`` is None for a call that continues no trace.

    A step of ``trace`` is a context manager, which ends with its block.
    """

    context: SpanContext
    parent: SpanContext | None
    name: str
    kind: SpanKind = SpanKind.INTERNAL
    attributes: dict[str, str | int] = msgspec.field(default_factory=dict)
    has_failed: bool = False
    started_at: int = msgspec.field(default_factory=time.time_ns)
    ended_at: int = 0
    trace: CallTrace | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        self.ended_at = time.time_ns()
        if isinstance(error, Exception):
            self.fail(type(error).__name__)
        trace, self.trace = self.trace, None
        if trace is not None and trace.is_finished:
            trace.export_late(self)

    def fail(self, error_type: str) -> None:
        """Mark the span as failed. The error's text may quote a message: only its type is shown."""
        self.attributes["error.type"] = error_type
        self.has_failed = True


class Spans(Protocol):
    """Makes the ids of spans, and exports them."""

    def new_id(self) -> int:
        """Return the id of a new span."""

    def new_trace_id(self) -> int:
        """Return the id of a new trace."""

    def export(self, spans: list[CallSpan]) -> None:
        """Queue spans that have ended."""


class CallTrace:
    """The spans of one sampled call."""

    def __init__(self, span: CallSpan, spans: Spans) -> None:
        self._span, self._context = span, span.context
        # It is a tuple whose properties cost a call each.
        self._trace_id, _, _, self._flags, self._state, _ = span.context
        self._spans = spans
        self._line: Mapping[str, Any] = {}
        self._token: Token[CallTrace | None] | None = None
        self._model = ""
        self._session = ""
        self._children: list[CallSpan] = []
        self._upstream: list[UpstreamTrace] = []
        self.is_finished = False

    def describe(self, *, model: str, session: str = "") -> None:
        """Name what the next request to the upstream is for."""
        self._model, self._session = model[:MAX_NAME], session

    def __enter__(self) -> None:
        self._token = _active.set(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self.fail(error)
        settle_outcome(self._line.get("status", CLIENT_GONE), error)
        if self._token is not None:
            _active.reset(self._token)
        self.finish(self._line)

    def running(self, line: Mapping[str, Any]) -> CallTrace:
        """Return a context manager that traces its block as a call. ``line`` gets the fields of its log line
        meanwhile.
        """
        self._line = line
        return self

    def step(self, name: StepName) -> CallSpan:
        """Give the block a span of its own."""
        span = self._start(name)
        span.trace = self
        return span

    def open_upstream(self, dialect: Dialect, address: tuple[str, int]) -> UpstreamTrace:
        """Start the span of a request to a model host."""
        operation = "generate_content" if PROVIDERS[dialect] == "gcp.gemini" else "chat"
        attributes: dict[str, str | int] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDERS[dialect],
            "server.address": address[0],
            "server.port": address[1],
        }
        if self._model:
            attributes["gen_ai.request.model"] = self._model
        if self._session:
            attributes["gen_ai.conversation.id"] = self._session
        name = f"{operation} {self._model}".strip()
        span = self._start(name, SpanKind.CLIENT)
        span.attributes = attributes
        upstream = UpstreamTrace(span)
        self._upstream.append(upstream)
        return upstream

    def _start(self, name: str, kind: SpanKind = SpanKind.INTERNAL) -> CallSpan:
        context = SpanContext(self._trace_id, self._spans.new_id(), False, self._flags, self._state)  # noqa: FBT003
        span = CallSpan(context, self._context, name, kind)
        self._children.append(span)
        return span

    def fail(self, error: BaseException) -> None:
        """Mark the call as failed by that error."""
        self._span.fail(type(error).__name__)

    def finish(self, line: Mapping[str, Any]) -> None:
        """End every span. ``line``: the fields of the call's log line."""
        call = self._span
        status = line.get("status", CLIENT_GONE)
        if "route" in line:
            call.name = f"{line.get('method', '')} {line['route']}".strip()
        _show(line, _SHOWN, call)
        call.attributes["http.response.status_code"] = status
        if status >= 500:
            call.has_failed = True
        if self._upstream:
            # A call with several rounds reports the usage of all rounds with the last one.
            _show(line, _USAGE, self._upstream[-1].span)
        call.ended_at = time.time_ns()
        for upstream in self._upstream:
            upstream.span.ended_at = upstream.span.ended_at or call.ended_at
        self.is_finished = True
        ended = []
        for child in self._children:
            if child.ended_at:
                ended.append(child)  # noqa: PERF401 a comprehension is a call
        ended.append(call)
        self._spans.export(ended)

    def export_late(self, span: CallSpan) -> None:
        """Export a step that outlives the call, such as a write whose client has left."""
        self._spans.export([span])


def _show(line: Mapping[str, Any], names: Mapping[str, str], span: CallSpan) -> None:
    """Make fields of a log line attributes of a span."""
    attributes = span.attributes
    for name, attribute in names.items():
        value = line.get(name)
        if value is not None:
            attributes[attribute] = value


class UpstreamTrace:
    """The span of one request to a model host. It ends with the reply, and is completed when the call ends."""

    def __init__(self, span: CallSpan) -> None:
        self.span = span

    def headers(self) -> Headers:
        """Return the trace headers of the upstream request: they name this span as the parent of the host's spans."""
        trace_id, span_id, _, flags, state, _ = self.span.context
        own = [("traceparent", f"00-{trace_id:032x}-{span_id:016x}-{flags:02x}")]
        if state:
            own.append(("tracestate", state.to_header()))
        return own

    def answered(self, status: int) -> None:
        """Record the status of the reply, whose headers are there."""
        self.span.attributes["http.response.status_code"] = status
        if status >= 400:
            self.span.fail(str(status))

    def fail(self, error: BaseException) -> None:
        """Record that there is no reply."""
        self.span.fail(type(error).__name__)
        self.close()

    def close(self) -> None:
        """End the span with the reply."""
        self.span.ended_at = self.span.ended_at or time.time_ns()


class Sampler(Protocol):
    """A sampler of the SDK."""

    def should_sample(self, parent_context: Context | None, trace_id: int, name: str, kind: SpanKind) -> Any:
        """Decide whether a trace is sampled, with which attributes and trace state."""


class Tracing:
    """Starts the traces of sampled calls."""

    def __init__(self, sampler: Sampler, spans: Spans, *, bound: int | None = None) -> None:
        """``bound``: new traces are sampled if the lower 64 bits of their id are below it, as ``sampler`` would decide.
        None: the sampler must be asked.
        """
        self._sampler = sampler
        self._spans = spans
        self._bound = bound

    def begin(self, method: str, path: str, parent: Mapping[str, str]) -> CallTrace | None:
        """Begin the trace of a call; None if it is not sampled. ``parent``: the caller's headers that name a trace."""
        if self._bound is not None and "traceparent" not in parent:
            trace_id = self._spans.new_trace_id()
            if trace_id & _LOW_64 >= self._bound:
                return None
            own = SpanContext(trace_id, self._spans.new_id(), is_remote=False, trace_flags=_SAMPLED_RANDOM)
            return self._start(own, None, method, path, {})
        context = _propagator.extract(parent) if "traceparent" in parent else Context()
        callers = get_current_span(context).get_span_context()
        is_new = not callers.is_valid
        trace_id = self._spans.new_trace_id() if is_new else callers.trace_id
        sampled = self._sampler.should_sample(context, trace_id, f"{method} call", SpanKind.SERVER)
        if not sampled.decision.is_sampled():
            return None
        flags = _SAMPLED_RANDOM if is_new or callers.trace_flags.random_trace_id else _SAMPLED
        own = SpanContext(
            trace_id, self._spans.new_id(), is_remote=False, trace_flags=flags, trace_state=sampled.trace_state
        )
        return self._start(own, None if is_new else callers, method, path, sampled.attributes)

    def _start(
        self, own: SpanContext, parent: SpanContext | None, method: str, path: str, given: Mapping[str, Any]
    ) -> CallTrace:
        attributes = {**given, "http.request.method": method, "url.path": path[:MAX_NAME]}
        return CallTrace(CallSpan(own, parent, f"{method} call", SpanKind.SERVER, attributes), self._spans)


def active_trace() -> CallTrace | None:
    """Return the trace of the current call; None if it is not sampled."""
    return _active.get()


def traced(name: StepName) -> Callable[[Callable[P, Awaitable[T]]], Callable[P, Awaitable[T]]]:
    """Give each run of a coroutine function a span of its own, in calls that are sampled."""

    def decorate(function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
        async def run(trace: CallTrace, *given: P.args, **named: P.kwargs) -> T:
            with trace.step(name):
                return await function(*given, **named)

        @wraps(function)
        def choose(*given: P.args, **named: P.kwargs) -> Awaitable[T]:
            trace = _active.get()
            return function(*given, **named) if trace is None else run(trace, *given, **named)

        return choose

    return decorate


_NO_SPAN = nullcontext()


def step(name: StepName) -> AbstractContextManager[None]:
    """Give the block a span of its own, in a call that is sampled."""
    trace = _active.get()
    return _NO_SPAN if trace is None else trace.step(name)
