"""Model hosts for tests: a scripted model, and hosts that send bytes as they are told."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tersely.fakellm.scripted import ReceivedRequest, ScriptedModel, ScriptedReply, run_scripted
from tests.support.loops import background

MODEL = "gpt-4o-mini"


class Model:
    """A scripted upstream in its own thread. Unknown keys are answered from the request."""

    def __init__(self, *, is_forgetful: bool = False) -> None:
        self.state = ScriptedModel(script=self._decide, is_strict=True, keep=2000, is_forgetful=is_forgetful)
        self.url = ""
        self.replies: dict[str, list[ScriptedReply]] = {}

    def script(self, key: str, *replies: ScriptedReply) -> str:
        """Answer requests whose ``user``, or whose header ``X-Script``, is ``key`` like this, in order."""
        self.replies.setdefault(key, []).extend(replies)
        return key

    def _decide(self, received: ReceivedRequest) -> ScriptedReply | None:
        key = received.headers.get("X-Script") or (received.request or {}).get("user")
        queue = self.replies.get(key) if isinstance(key, str) else None
        return queue.pop(0) if queue else None

    def requests(self, key: str) -> list[ReceivedRequest]:
        """The requests whose ``user`` is ``key``."""
        return [each for each in list(self.state.received) if (each.request or {}).get("user") == key]

    def bodies(self, key: str) -> list[dict[str, Any]]:
        """The bodies of these requests."""
        return [each.request or {} for each in self.requests(key)]

    @property
    def last(self) -> ReceivedRequest:
        """The newest request."""
        return self.state.received[-1]


@contextmanager
def scripted(*, is_forgetful: bool = False) -> Iterator[Model]:
    """A scripted upstream for the length of the block. ``is_forgetful``: one that keeps no replies."""
    model = Model(is_forgetful=is_forgetful)
    ready = threading.Event()
    with background() as there:
        stop = asyncio.Event()

        async def run() -> None:
            async with run_scripted(model=model.state) as server:
                model.url = server.base_url
                ready.set()
                await stop.wait()

        done = asyncio.run_coroutine_threadsafe(run(), there.loop)
        assert ready.wait(10)
        try:
            yield model
        finally:
            there.loop.call_soon_threadsafe(stop.set)
            done.result(10)


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRequest:
    """A request as a byte upstream got it. ``lines`` are the header lines as they came."""

    target: str
    method: str
    lines: tuple[bytes, ...]
    body: bytes

    @property
    def headers(self) -> dict[str, str]:
        pairs = (line.decode("latin-1").partition(":") for line in self.lines)
        return {name.strip().lower(): value.strip() for name, _, value in pairs}


RawHandler = Callable[[RawRequest, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class RawUpstream:
    """An upstream made of bytes: ``handler`` writes what it likes; then the connection is closed.

    ``ended`` counts the connections whose other side went away first.
    """

    def __init__(self) -> None:
        self.url = ""
        self.handler: RawHandler | None = None
        self.requests: list[RawRequest] = []
        self.gone = threading.Event()

    def answer(self, *pieces: bytes | float) -> None:
        """Write these pieces to each request from now on; a number is a pause in seconds."""
        self.gone.clear()

        async def handler(_: RawRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for piece in pieces:
                if isinstance(piece, bytes):
                    writer.write(piece)
                    await writer.drain()
                elif await _is_gone_within(reader, piece):
                    self.gone.set()
                    return

        self.handler = handler

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while request := await _read_raw(reader):
                self.requests.append(request)
                assert self.handler is not None
                await self.handler(request, reader, writer)
                return
        except (ConnectionError, asyncio.IncompleteReadError):
            self.gone.set()
        finally:
            writer.close()


async def _is_gone_within(reader: asyncio.StreamReader, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return not await reader.read(1)
    except TimeoutError:
        return False
    except ConnectionError:
        return True


async def _read_raw(reader: asyncio.StreamReader) -> RawRequest | None:
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head[:-4].split(b"\r\n")
    method, target, _ = first.decode("latin-1").split(" ", 2)
    request = RawRequest(target=target, method=method, lines=tuple(lines), body=b"")
    length = int(request.headers.get("content-length", "0"))
    body = await reader.readexactly(length)
    return RawRequest(target=target, method=method, lines=tuple(lines), body=body)


@contextmanager
def raw_upstream() -> Iterator[RawUpstream]:
    """An upstream of bytes for the length of the block."""
    upstream = RawUpstream()
    with background() as there:
        server = there.run(asyncio_server(upstream._serve))
        upstream.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        try:
            yield upstream
        finally:
            server.close()


async def asyncio_server(serve_one: Any) -> asyncio.Server:
    return await asyncio.start_server(serve_one, "127.0.0.1", 0)


def http_head(content_type: str = "text/event-stream", *, status: str = "200 OK", **headers: str) -> bytes:
    """The head of a response that ends when the connection does; underscores stand for hyphens."""
    more = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\nconnection: close\r\n{more}\r\n".encode()


def chunk(data: bytes) -> bytes:
    """A piece of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def sse(text: str | None = None, *, finish: str | None = None, role: bool = False, **more: Any) -> bytes:
    """One event of a streamed reply."""
    delta: dict[str, Any] = {"role": "assistant"} if role else {}
    if text is not None:
        delta["content"] = text
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    body = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [choice], **more}
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
