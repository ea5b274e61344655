"""The bare passthrough: Tersely's own stack with nothing in it.

A raw ASGI app on uvicorn (uvloop, httptools) that hands each request to aiohttp's client and sends the answer's
chunks on as they arrive. It is what any proxy on this stack must pay.
"""

import argparse
import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

import aiohttp
import uvicorn
from multidict import CIMultiDict
from yarl import URL

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_NOT_FORWARDED: Final = frozenset(
    {
        b"host",
        b"connection",
        b"keep-alive",
        b"content-length",
        b"transfer-encoding",
        b"te",
        b"trailer",
        b"upgrade",
        b"proxy-authorization",
    }
)
_NOT_RETURNED: Final = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"trailer", b"upgrade"})


class BarePassthrough:
    """Forward every request to one upstream."""

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream.rstrip("/")
        self.session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.lifespan(receive, send)
        elif scope["type"] == "http":
            await self.forward(scope, receive, send)

    async def lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None),
            skip_auto_headers=("user-agent", "accept", "accept-encoding"),
        )
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.session.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def forward(self, scope: Message, receive: Receive, send: Send) -> None:
        assert self.session is not None
        parts = []
        while True:
            message = await receive()
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                break
        headers = CIMultiDict(
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name not in _NOT_FORWARDED
        )
        target = self.upstream + scope["raw_path"].decode("latin-1")
        if scope["query_string"]:
            target += "?" + scope["query_string"].decode("latin-1")
        async with self.session.request(
            scope["method"],
            URL(target, encoded=True),
            data=b"".join(parts) or None,
            headers=headers,
            allow_redirects=False,
        ) as response:
            await send(
                {
                    "type": "http.response.start",
                    "status": response.status,
                    "headers": [
                        (lower, value)
                        for name, value in response.raw_headers
                        if (lower := name.lower()) not in _NOT_RETURNED
                    ],
                }
            )
            async for chunk in response.content.iter_any():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--upstream", required=True, help="base URL without a path")
    args = parser.parse_args()
    config = uvicorn.Config(
        BarePassthrough(args.upstream),
        host="127.0.0.1",
        port=args.port,
        http="httptools",
        loop="uvloop",
        ws="none",
        access_log=False,
        server_header=False,
        date_header=False,
        log_level="warning",
        backlog=2048,
    )
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(uvicorn.Server(config).serve())


if __name__ == "__main__":
    main()
