"""The scheme that a client used, as a reverse proxy with TLS reports it."""

from __future__ import annotations

from collections.abc import Awaitable

from tersely.api.transport.body import App, Receive, Scope, Send


class ForwardedScheme:
    """ASGI middleware: sets the scheme to ``https`` where ``X-Forwarded-Proto`` says so.

    Redirects, the addresses that the console shows, and the ``Secure`` of its cookies follow the scheme. Anyone can
    send the header: it changes only the sender's own answer.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """ASGI."""
        if scope["type"] == "http" and (b"x-forwarded-proto", b"https") in scope["headers"]:
            scope = {**scope, "scheme": "https"}
        return self._app(scope, receive, send)
