"""Trace requests with OpenTelemetry, where the operator has asked for it."""

from __future__ import annotations

from collections.abc import Awaitable

from tersely.api.transport.body import App, Receive, Scope, Send
from tersely.api.transport.call_log import QUIET
from tersely.service.common.call_fields import fields
from tersely.service.common.tracing import CallTrace, Tracing

_PARENT = (b"traceparent", b"tracestate")


class CallTracing:
    """ASGI middleware: makes a span for each request. It runs inside `CallLog` and shows its fields."""

    def __init__(self, app: App, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """ASGI. A call that is not sampled goes on without a coroutine of its own."""
        if scope["type"] != "http" or scope["path"] in QUIET:
            return self._app(scope, receive, send)
        parent = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _PARENT}
        trace = self._tracing.begin(scope["method"], scope["path"], parent)
        return self._app(scope, receive, send) if trace is None else self._trace(trace, scope, receive, send)

    async def _trace(self, trace: CallTrace, scope: Scope, receive: Receive, send: Send) -> None:
        with trace.running(fields.get() or {}):
            await self._app(scope, receive, send)
