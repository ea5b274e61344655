"""OpenTelemetry spans of a call: one for the request, with children for its steps.

Only a sampled call has a `CallTrace`. For every other call, and without tracing, a step costs one check of a variable.
Children are only times and attributes until the call ends: a live span of the SDK asks the sampler again, and takes a
lock for every change.

Spans carry ids, names and numbers, never content or credentials.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Literal, ParamSpec, Protocol, TypeVar

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanContext, SpanKind, Status, StatusCode, Tracer, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tersely.dialects.headers import Headers
from tersely.domain.messages import Dialect

Step = Literal["recognition", "context", "store"]
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
_SHOWN = ("tenant", "client", "dialect", "strategy", "context", "session", "tokens_before", "tokens_after", "outcome")
_USAGE = {
    "input_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
}
_propagator = TraceContextTextMapPropagator()
_FIELDS = frozenset(_propagator.fields)
_active: ContextVar[CallTrace | None] = ContextVar("call_trace", default=None)


@dataclass(slots=True)
class ChildSpan:
    """A step of a call, or a request to a model host."""

    context: SpanContext
    name: str
    kind: SpanKind = SpanKind.INTERNAL
    attributes: dict[str, str | int] = field(default_factory=dict)
    has_failed: bool = False
    started_at: int = field(default_factory=time.time_ns)
    ended_at: int = 0

    def fail(self, error_type: str) -> None:
        """Mark the span as failed. The error's text may quote a message: only its type is shown."""
        self.attributes["error.type"] = error_type
        self.has_failed = True


class ChildSpans(Protocol):
    """Makes the children of sampled calls."""

    def new_id(self) -> int:
        """Return the id of a new span."""

    def export(self, parent: SpanContext, children: list[ChildSpan]) -> None:
        """Queue children that have ended."""


class CallTrace:
    """The spans of one sampled call."""

    def __init__(self, span: Span, spans: ChildSpans) -> None:
        self._span = span
        self._context = span.get_span_context()
        self._spans = spans
        self._model = ""
        self._session = ""
        self._children: list[ChildSpan] = []
        self._upstream: list[UpstreamTrace] = []
        self._is_finished = False

    def describe(self, *, model: str, session: str = "") -> None:
        """Name what the next request to the upstream is for."""
        self._model, self._session = model[:MAX_NAME], session

    def step(self, name: Step) -> SpanOfStep:
        """Give the block a span of its own."""
        return SpanOfStep(self, self._start(name))

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
        self._upstream.append(UpstreamTrace(span))
        return self._upstream[-1]

    def _start(self, name: str, kind: SpanKind = SpanKind.INTERNAL) -> ChildSpan:
        call = self._context
        context = SpanContext(
            call.trace_id, self._spans.new_id(), is_remote=False, trace_flags=call.trace_flags,
            trace_state=call.trace_state,
        )  # fmt: skip
        self._children.append(ChildSpan(context, name, kind))
        return self._children[-1]

    def fail(self, error: BaseException) -> None:
        """Mark the call as failed by that error. Its text may quote a message: only its type is shown."""
        self._span.set_attribute("error.type", type(error).__name__)
        self._span.set_status(Status(StatusCode.ERROR))

    def finish(self, line: Mapping[str, Any]) -> None:
        """End every span. ``line``: the fields of the call's log line."""
        status = line.get("status", 499)
        if "route" in line:
            self._span.update_name(f"{line.get('method', '')} {line['route']}".strip())
        attributes = {f"tersely.{name}": line[name] for name in _SHOWN if line.get(name) is not None}
        attributes["http.response.status_code"] = status
        if "session" in line:
            attributes["gen_ai.conversation.id"] = line["session"]
        if "route" in line:
            attributes["http.route"] = line["route"]
        # One call for all: each takes a lock.
        self._span.set_attributes(attributes)
        if status >= 500:
            self._span.set_status(Status(StatusCode.ERROR))
        if self._upstream:
            # A call with several rounds reports the usage of all rounds with the last one.
            usage = {to: line[name] for name, to in _USAGE.items() if line.get(name) is not None}
            self._upstream[-1].span.attributes |= usage
        for each in self._upstream:
            each.close()
        self._is_finished = True
        self._spans.export(self._context, [child for child in self._children if child.ended_at])
        self._span.end()

    def end_step(self, span: ChildSpan) -> None:
        """End a step. One that outlives the call, such as a write whose client has left, is exported by itself."""
        span.ended_at = time.time_ns()
        if self._is_finished:
            self._spans.export(self._context, [span])


class SpanOfStep:
    """Ends a span with a block. It is a class because a generator takes several times as long."""

    __slots__ = ("_span", "_trace")

    def __init__(self, trace: CallTrace, span: ChildSpan) -> None:
        self._trace = trace
        self._span = span

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            self._span.fail(type(error).__name__)
        self._trace.end_step(self._span)


class UpstreamTrace:
    """The span of one request to a model host. It ends with the reply, and is completed when the call ends."""

    def __init__(self, span: ChildSpan) -> None:
        self.span = span

    def headers(self, headers: Headers) -> Headers:
        """Return the headers with this span as the parent of what the host does."""
        context = self.span.context
        own = [("traceparent", f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}")]
        if context.trace_state:
            own.append(("tracestate", context.trace_state.to_header()))
        return [(name, value) for name, value in headers if name not in _FIELDS] + own

    def answered(self, status: int) -> None:
        """The reply's headers are there."""
        self.span.attributes["http.response.status_code"] = status
        if status >= 400:
            self.span.fail(str(status))

    def fail(self, error: BaseException) -> None:
        """There is no reply."""
        self.span.fail(type(error).__name__)
        self.close()

    def close(self) -> None:
        """The reply is over."""
        self.span.ended_at = self.span.ended_at or time.time_ns()


class Sampler(Protocol):
    """What a sampler of the SDK answers to."""

    def should_sample(self, parent_context: Context | None, trace_id: int, name: str, kind: SpanKind) -> Any:
        """Return a result whose ``decision`` says whether a trace is sampled."""


class TraceIds(Protocol):
    """Makes the ids of traces. ``next_id`` is the id of the next one; 0: a new one."""

    next_id: int

    def generate_trace_id(self) -> int:
        """Return ``next_id``, or a new id."""


class Tracing:
    """Starts the traces of sampled calls.

    The sampler is asked before there is a span: to make one that records nothing costs three times as much.
    """

    def __init__(self, tracer: Tracer, sampler: Sampler, ids: TraceIds, spans: ChildSpans) -> None:
        """``sampler``, ``ids`` and ``spans`` are those of the tracer."""
        self._tracer = tracer
        self._sampler = sampler
        self._ids = ids
        self._spans = spans

    def begin(self, method: str, path: str, parent: Mapping[str, str]) -> CallTrace | None:
        """Begin the trace of a call; None if it is not sampled. ``parent``: the caller's headers that name a trace."""
        context = _propagator.extract(parent) if "traceparent" in parent else Context()
        name = f"{method} call"
        trace_id = get_current_span(context).get_span_context().trace_id or self._ids.generate_trace_id()
        if not self._sampler.should_sample(context, trace_id, name, SpanKind.SERVER).decision.is_sampled():
            return None
        self._ids.next_id = trace_id
        try:
            attributes = {"http.request.method": method, "url.path": path[:MAX_NAME]}
            span = self._tracer.start_span(name, context, kind=SpanKind.SERVER, attributes=attributes)
        finally:
            self._ids.next_id = 0
        return CallTrace(span, self._spans) if span.is_recording() else None

    @contextmanager
    def running(self, trace: CallTrace, line: Mapping[str, Any]) -> Iterator[None]:
        """Trace the block as a call. ``line`` gets the fields of its log line meanwhile."""
        token = _active.set(trace)
        try:
            yield
        except BaseException as error:
            trace.fail(error)
            raise
        finally:
            _active.reset(token)
            trace.finish(line)


def active_trace() -> CallTrace | None:
    """Return the trace of the current call; None if it is not sampled."""
    return _active.get()


def traced(name: Step) -> Callable[[Callable[P, Awaitable[T]]], Callable[P, Awaitable[T]]]:
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


def step(name: Step) -> AbstractContextManager[None]:
    """Give the block a span of its own, in a call that is sampled."""
    trace = _active.get()
    return _NO_SPAN if trace is None else trace.step(name)
