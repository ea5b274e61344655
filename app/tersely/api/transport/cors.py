"""Cross-origin requests: which web pages may call the APIs from a browser."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware

from tersely.api.transport.body import App, Receive, Scope, Send

# Pages are for people, who visit them; another origin's script has no business there.
CONSOLE = "/console"
METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
# Response headers that scripts of another origin may read.
EXPOSED = (
    "Retry-After",
    "X-Request-Id",
    "X-Tersely-Context",
    "X-Tersely-Epoch",
    "X-Tersely-Overhead-Ms",
    "X-Tersely-Session",
    "X-Tersely-Session-Source",
    "X-Tersely-Strategy",
    "X-Tersely-Tokens-After",
    "X-Tersely-Tokens-Before",
)
PREFLIGHT_SECONDS = 600


class CrossOrigin:
    """ASGI around an application: answer preflights, and allow the answers, for pages of ``origins``.

    Cookies are never allowed: a key goes in a header.
    """

    def __init__(self, app: App, origins: Sequence[str]) -> None:
        self._app = app
        self._cors = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=METHODS,
            allow_headers=("*",),
            expose_headers=EXPOSED,
            max_age=PREFLIGHT_SECONDS,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "http" and not scope["path"].startswith(CONSOLE):
            await self._cors(scope, receive, send)
        else:
            await self._app(scope, receive, send)
