"""Write one log line per request, and put the request's id on every other line of the request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from tersely.api.transport.body import App, Message, Receive, Scope, Send
from tersely.api.transport.request_ids import caller_request_id, current, new_request_id, with_request_id
from tersely.service.common.call_fields import fields
from tersely.service.common.outcomes import CLIENT_GONE, settle_outcome

_log = logging.getLogger("tersely.calls")

# What is asked every few seconds.
QUIET = frozenset({"/healthz", "/readyz", "/metrics"})
# Response headers whose values are fields of the line.
_SHOWN: dict[bytes, tuple[str, Callable[[bytes], Any]]] = {
    b"x-tersely-context": ("context", bytes.decode),
    b"x-tersely-strategy": ("strategy", bytes.decode),
    b"x-tersely-session": ("session", bytes.decode),
    b"x-tersely-tokens-before": ("tokens_before", int),
    b"x-tersely-tokens-after": ("tokens_after", int),
}


class CallLog:
    """ASGI around an application: request ids, and a line for each request that is answered."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = caller_request_id(scope["headers"])
        request_id = given or new_request_id()
        current.set(request_id)
        line: dict[str, Any] = {"method": scope["method"], "status": CLIENT_GONE}
        fields.set(line)
        began = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                line["status"] = message["status"]
                for header, value in message["headers"]:
                    if header in _SHOWN:
                        name, read = _SHOWN[header]
                        line[name] = read(value)
                message["headers"] = with_request_id(message["headers"], request_id, is_callers=bool(given))
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except BaseException as error:
            settle_outcome(line["status"], error)
            raise
        finally:
            settle_outcome(line["status"])
            line["duration_ms"] = round((time.perf_counter() - began) * 1000, 2)
            level = logging.DEBUG if scope["path"] in QUIET else logging.INFO
            if _log.isEnabledFor(level):
                _log.log(level, "call", extra={"call": line})
