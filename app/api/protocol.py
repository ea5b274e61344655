"""uvicorn's HTTP protocol with an absolute deadline for a request's headers.

Bare uvicorn keeps a connection that sends nothing, or a header a minute, for ever.
"""

from __future__ import annotations

import asyncio
from typing import Any

from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADER_TIMEOUT = 15.0


class DeadlineProtocol(HttpToolsProtocol):
    """Closes a connection whose headers are not complete in time, counted from its first byte or its opening."""

    header_timeout = HEADER_TIMEOUT
    _deadline: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_headers()

    @override
    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._deadline is None:
            self._await_headers()

    @override
    def on_headers_complete(self) -> None:
        self._stop_waiting()
        super().on_headers_complete()

    @override
    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: an upgrade is refused by its route, and is no matter of a library that is missing."""

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _await_headers(self) -> None:
        self._deadline = self.loop.call_later(self.header_timeout, self._expire)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        self._deadline = None
        if not self.transport.is_closing():
            self.transport.close()
