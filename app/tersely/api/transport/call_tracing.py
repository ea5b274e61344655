"""Trace requests with OpenTelemetry, where the operator has asked for it."""

from __future__ import annotations

from tersely.api.transport.body import App, Receive, Scope, Send
from tersely.api.transport.call_log import QUIET
from tersely.service.common.call_fields import fields
from tersely.service.common.tracing import Tracing

_PARENT = (b"traceparent", b"tracestate")


class CallTracing:
    """ASGI middleware: makes a span for each request. It runs inside `CallLog` and shows its fields."""

    def __init__(self, app: App, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or scope["path"] in QUIET:
            await self._app(scope, receive, send)
            return
        parent = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _PARENT}
        with self._tracing.call(scope["method"], scope["path"], parent, fields.get() or {}):
            await self._app(scope, receive, send)
