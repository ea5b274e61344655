"""A relay between a program and Tersely that keeps what passes: requests, statuses, headers, replies."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

# What ends with each connection; everything else passes as it is.
HOP = frozenset({"host", "connection", "keep-alive", "transfer-encoding", "content-length", "expect"})
LIMIT = 256 * 1024 * 1024
PATHS = {
    "/chat/completions": "openai_chat",
    "/v1/responses": "openai_responses",
    "/v1/messages": "anthropic",
    ":generateContent": "gemini",
    ":streamGenerateContent": "gemini",
}


@dataclass(slots=True, kw_only=True)
class Seen:
    """One exchange. ``step`` is the number of the command that made it; ``headers`` are the reply's, in lower case."""

    step: int
    method: str
    target: str
    body: bytes
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    reply: bytes = b""

    @property
    def dialect(self) -> str:
        """The format of a model call; empty for everything else."""
        path = self.target.partition("?")[0]
        return next((name for end, name in PATHS.items() if path.endswith(end)), "") if self.method == "POST" else ""

    @property
    def session(self) -> str:
        """The session that the reply names; empty for calls that belong to none."""
        return self.headers.get("x-tersely-session", "")

    @property
    def context(self) -> str:
        """The value of `X-Tersely-Context`: ``built``, ``passthrough`` and so on."""
        return self.headers.get("x-tersely-context", "")

    @property
    def is_shortened(self) -> bool:
        """True if the model was sent less than the program sent."""
        before, after = (self.headers.get(f"x-tersely-tokens-{when}", "0") for when in ("before", "after"))
        return int(after) < int(before)


@dataclass(slots=True)
class Relay:
    """A relay between a program and Tersely that records what it saw. ``step`` is set by whoever runs the commands."""

    to: str
    url: str = ""
    step: int = 0
    seen: list[Seen] = field(default_factory=list)

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        """One exchange, streamed as it comes."""
        seen = Seen(step=self.step, method=request.method, target=request.path_qs, body=await request.read())
        self.seen.append(seen)
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in HOP]
        if "upgrade" in request.headers:
            headers.append(("Connection", "Upgrade"))
        async with (
            aiohttp.ClientSession(auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None)) as http,
            http.request(
                request.method, self.to + request.raw_path, data=seen.body, headers=headers, allow_redirects=False
            ) as answer,
        ):
            seen.status = answer.status
            seen.headers = {name.lower(): value for name, value in answer.headers.items()}
            kept = [(name, value) for name, value in answer.headers.items() if name.lower() not in HOP]
            response = web.StreamResponse(status=answer.status, reason=answer.reason)
            response.headers.extend(kept)
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                seen.reply += piece
                await response.write(piece)
            await response.write_eof()
        return response


@asynccontextmanager
async def relaying(to: str) -> AsyncIterator[Relay]:
    """A relay on a free loopback port for the length of the block."""
    relay = Relay(to)
    app = web.Application(client_max_size=LIMIT)
    app.router.add_route("*", "/{path:.*}", relay.pass_on)
    runner = web.AppRunner(app, access_log=None, auto_decompress=False, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        relay.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield relay
    finally:
        await runner.cleanup()
