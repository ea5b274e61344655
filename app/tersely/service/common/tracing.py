"""OpenTelemetry spans of a call: one for the request, with children for its steps.

Only a sampled call has a `CallTrace`. For every other call, and without tracing, a step costs one check of a variable.
Spans carry ids, names and numbers, never content or credentials.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import wraps
from typing import Any, Literal, ParamSpec, Protocol, TypeVar

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tersely.dialects.headers import Headers
from tersely.domain.messages import Dialect

Step = Literal["recognition", "context", "store"]
# A step of a call: when it began and ended, in nanoseconds, and the type of the error that ended it; empty: none.
StepTime = tuple[Step, int, int, str]
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


class CallTrace:
    """The spans of one sampled call."""

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self._context = set_span_in_context(span)
        self._model = ""
        self._session = ""
        self._steps: list[StepTime] = []
        self._upstream: list[UpstreamTrace] = []

    def describe(self, *, model: str, session: str = "") -> None:
        """Name what the next request to the upstream is for."""
        self._model, self._session = model[:MAX_NAME], session

    def step(self, name: Step) -> TimedStep:
        """Give the block a span of its own, which is made when the call ends."""
        return TimedStep(name, self._steps)

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
        span = self._tracer.start_span(name, self._context, kind=SpanKind.CLIENT, attributes=attributes)
        self._upstream.append(UpstreamTrace(span))
        return self._upstream[-1]

    def fail(self, error: BaseException) -> None:
        """Mark the call as failed by that error."""
        _fail(self._span, error)

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
        self._span.set_attributes(attributes)
        if status >= 500:
            self._span.set_status(Status(StatusCode.ERROR))
        # A call with several rounds reports the usage of all rounds with the last one.
        usage = {to: line[name] for name, to in _USAGE.items() if line.get(name) is not None}
        for name, began_at, ended_at, failure in self._steps:
            step = self._tracer.start_span(name, self._context, start_time=began_at)
            if failure:
                _set_failed(step, failure)
            step.end(ended_at)
        for each in self._upstream:
            each.end(usage if each is self._upstream[-1] else {})
        self._span.end()


class TimedStep:
    """Notes when a block began and ended. It is a class because a generator takes several times as long."""

    __slots__ = ("_began_at", "_name", "_steps")

    def __init__(self, name: Step, steps: list[StepTime]) -> None:
        self._name = name
        self._steps = steps
        self._began_at = 0

    def __enter__(self) -> None:
        self._began_at = time.time_ns()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        failure = type(error).__name__ if isinstance(error, Exception) else ""
        self._steps.append((self._name, self._began_at, time.time_ns(), failure))


class UpstreamTrace:
    """The span of one request to a model host. It ends with the reply, and is completed when the call ends."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._status = 0
        self._ended_at: int | None = None

    def headers(self, headers: Headers) -> Headers:
        """Return the headers with this span as the parent of what the host does."""
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, set_span_in_context(self._span))
        return [(name, value) for name, value in headers if name not in _FIELDS] + list(carrier.items())

    def answered(self, status: int) -> None:
        """The reply's headers are there."""
        self._status = status

    def fail(self, error: BaseException) -> None:
        """There is no reply."""
        _fail(self._span, error)
        self.close()

    def close(self) -> None:
        """The reply is over."""
        self._ended_at = self._ended_at or time.time_ns()

    def end(self, usage: Mapping[str, int]) -> None:
        """End the span, at the time when the reply was over. ``usage``: attributes for what the reply cost."""
        attributes: dict[str, str | int] = {**usage}
        if self._status:
            attributes["http.response.status_code"] = self._status
        if self._status >= 400:
            attributes["error.type"] = str(self._status)
            self._span.set_status(Status(StatusCode.ERROR))
        # One call for all: each takes a lock.
        self._span.set_attributes(attributes)
        self._span.end(self._ended_at)


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

    def __init__(self, tracer: Tracer, sampler: Sampler, ids: TraceIds) -> None:
        """``sampler`` and ``ids`` are those of the tracer."""
        self._tracer = tracer
        self._sampler = sampler
        self._ids = ids

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
        return CallTrace(self._tracer, span) if span.is_recording() else None

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


def _fail(span: Span, error: BaseException) -> None:
    """Mark a span as failed. The error's text may quote a message: only its type is told."""
    _set_failed(span, type(error).__name__)


def _set_failed(span: Span, error: str) -> None:
    span.set_attribute("error.type", error)
    span.set_status(Status(StatusCode.ERROR))
