"""The whole service on real sockets: uvicorn as it is served, upstreams that do as they are told, a database to cut.

Servers run in threads with event loops of their own, so that one may serve all tests of a module, whose loops
come and go.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit, urlunsplit

import aiohttp
import asyncpg
import uvicorn

from app.api.protocol import DeadlineProtocol
from app.cli import serving
from app.main import build
from app.settings import Settings
from app.upstream.scripted import Received, ScriptedModel, ScriptedReply, run_scripted
from tests.conftest import Database

T = TypeVar("T")

MODEL = "gpt-4o-mini"


class Background:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], limit: float = 60) -> T:
        """Wait for ``work`` there."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(limit)

    def close(self) -> None:
        """End what still runs there, as a process does at its end."""
        self.run(_cancel_all())
        self.run(self.loop.shutdown_asyncgens())
        self.run(self.loop.shutdown_default_executor())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


@contextmanager
def background() -> Iterator[Background]:
    """A loop for the length of the block."""
    running = Background()
    try:
        yield running
    finally:
        running.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A running service. ``url`` has no path."""

    url: str
    port: int
    database: Database

    @property
    def base_url(self) -> str:
        """What an OpenAI client is pointed at."""
        return f"{self.url}/v1"


@contextmanager
def serve(database: Database, upstream: str, *, dsn: str | None = None, **settings: Any) -> Iterator[Service]:
    """The service as `serve` runs it, with these settings. ``dsn``: where it is told that the database is.

    ``upstream`` (with ``/v1``) is the host of all providers.
    """
    others = dict.fromkeys(
        ("anthropic_base_url", "gemini_base_url", "gemini_gca_base_url"), upstream.removesuffix("/v1")
    )
    config = Settings(_env_file=None, **{**others, **settings})
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    application = build(config, database_url=dsn or database.dsn, openai_base_url=upstream)
    uvicorn_config = serving._config(
        application, serving.Serving(host="127.0.0.1", port=0, workers=1, is_scripted=False)
    )
    uvicorn_config.http = type("Protocol", (DeadlineProtocol,), {"header_timeout": config.header_timeout})
    uvicorn_config.timeout_graceful_shutdown = 3
    server = uvicorn.Server(uvicorn_config)
    with background() as there:
        done = asyncio.run_coroutine_threadsafe(server.serve(sockets=[listener]), there.loop)
        wait_until(lambda: server.started or done.done())
        port = listener.getsockname()[1]
        try:
            yield Service(url=f"http://127.0.0.1:{port}", port=port, database=database)
        finally:
            server.should_exit = True
            done.result(30)
            listener.close()


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

    def _decide(self, received: Received) -> ScriptedReply | None:
        key = received.headers.get("X-Script") or (received.request or {}).get("user")
        queue = self.replies.get(key) if isinstance(key, str) else None
        return queue.pop(0) if queue else None

    def requests(self, key: str) -> list[Received]:
        """The requests whose ``user`` is ``key``."""
        return [each for each in list(self.state.received) if (each.request or {}).get("user") == key]

    @property
    def last(self) -> Received:
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


class Relay:
    """A TCP way to the database that can be cut, refused or frozen. ``dsn`` goes through it."""

    def __init__(self, database: Database) -> None:
        self._target = urlsplit(database.dsn)
        self._there: Background | None = None
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._flowing = asyncio.Event()
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        listener.close()

    @property
    def dsn(self) -> str:
        user = self._target.netloc.rpartition("@")[0]
        return urlunsplit(self._target._replace(netloc=f"{user}@127.0.0.1:{self.port}", query=""))

    def restore(self) -> None:
        """Let everything through."""
        self._run(self._open())

    def freeze(self) -> None:
        """Accept, and say nothing more."""
        self._run(self._freeze())

    def cut(self) -> None:
        """Break all connections and refuse new ones."""
        self._run(self._close())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._there is not None
        self._there.run(work)

    async def _open(self) -> None:
        self._flowing.set()
        if self._server is None:
            self._server = await asyncio.start_server(self._relay, "127.0.0.1", self.port)

    async def _freeze(self) -> None:
        await self._open()
        self._flowing.clear()

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await self._connect()
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, back}
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, back))
                group.create_task(self._pump(there, writer))
        except* (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            for each in (writer, back):
                self._writers.discard(each)
                each.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        query = parse_qs(self._target.query)
        if "host" in query:
            return await asyncio.open_unix_connection(f"{query['host'][0]}/.s.PGSQL.{query['port'][0]}")
        return await asyncio.open_connection(self._target.hostname, self._target.port)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self._flowing.wait()
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError


@contextmanager
def relay(database: Database) -> Iterator[Relay]:
    """A way to ``database`` for the length of the block; open at first."""
    made = Relay(database)
    with background() as there:
        made._there = there
        made.restore()
        try:
            yield made
        finally:
            made.cut()


async def _cancel_all() -> None:
    me = asyncio.current_task()
    others = [task for task in asyncio.all_tasks() if task is not me]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def wait_until(condition: Callable[[], object], limit: float = 15.0) -> None:
    """Wait until ``condition`` holds."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "that did not come to pass"
        time.sleep(0.005)


async def until(condition: Callable[[], object], limit: float = 15.0) -> None:
    """Wait until ``condition`` holds, while the loop goes on."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "that did not come to pass"
        await asyncio.sleep(0.01)


async def eventually(condition: Callable[[], Awaitable[T]], limit: float = 15.0) -> T:
    """What ``condition`` gives once it is true."""
    end = time.monotonic() + limit
    while not (found := await condition()):
        assert time.monotonic() < end, "that did not come to pass"
        await asyncio.sleep(0.01)
    return found


# Clients


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What the client got; header names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    seconds: float

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def context(self) -> str:
        return self.headers["x-tersely-context"]

    @property
    def session(self) -> str:
        return self.headers["x-tersely-session"]


def body_of(*messages: object, **more: Any) -> bytes:
    """A request body; texts are the user's."""
    listed = [{"role": "user", "content": each} if isinstance(each, str) else each for each in messages]
    return json.dumps({"model": MODEL, "messages": listed, **more}).encode()


async def post(
    service: Service,
    body: bytes,
    *,
    path: str = "/v1/chat/completions",
    method: str = "POST",
    **headers: Any,
) -> Answered:
    """One call; underscores in header names stand for hyphens."""
    sent = {"content-type": "application/json", **{n.replace("_", "-"): v for n, v in headers.items()}}
    began = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=30)
    async with (
        aiohttp.ClientSession(auto_decompress=False, timeout=timeout) as http,
        http.request(method, service.url + path, data=io.BytesIO(body) if body else None, headers=sent) as response,
    ):
        read = await response.read()
        names = {name.lower(): value for name, value in response.headers.items()}
        return Answered(status=response.status, headers=names, body=read, seconds=time.monotonic() - began)


@dataclass(slots=True)
class Wire:
    """A bare connection, for what no client library would send."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    got: bytes = field(default=b"")

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def until(self, mark: bytes, limit: float = 10) -> bytes:
        """Everything up to ``mark``."""
        async with asyncio.timeout(limit):
            while mark not in self.got:
                piece = await self.reader.read(65536)
                assert piece, f"the connection ended before {mark!r}: {self.got[-300:]!r}"
                self.got += piece
        return self.got

    async def to_end(self, limit: float = 10) -> bytes:
        """Everything, until the other side closes."""
        async with asyncio.timeout(limit):
            with contextlib.suppress(ConnectionError):
                while piece := await self.reader.read(65536):
                    self.got += piece
        return self.got


@asynccontextmanager
async def wire(service: Service, **options: Any) -> AsyncIterator[Wire]:
    """A bare connection to the service; it is cut when the block is left."""
    reader, writer = await asyncio.open_connection("127.0.0.1", service.port, **options)
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()


def request_bytes(body: bytes, *, path: str = "/v1/chat/completions", **headers: str) -> bytes:
    """A request as it goes over the wire."""
    sent = {"host": "t", "content-type": "application/json", "content-length": str(len(body)), **headers}
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in sent.items())
    return f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + body


# A look into the store


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A stored message."""

    seq: int
    turn: int
    role: str
    status: str
    finish: str | None
    raw: bytes

    @property
    def text(self) -> str:
        content = json.loads(self.raw).get("content")
        return content if isinstance(content, str) else ""


async def kept(service: Service, session: str) -> list[Kept]:
    """The messages of a session by number, behind row security."""
    rows = await look(
        service,
        "SELECT seq, turn, role, status, finish, raw FROM messages WHERE session_id = $1 ORDER BY seq",
        session,
    )
    found = [Kept(**dict(row)) for row in rows]
    assert [each.seq for each in found] == list(range(1, len(found) + 1)), "numbers have gaps"
    return found


async def look(service: Service, sql: str, *args: object) -> list[asyncpg.Record]:
    """A superuser's query."""
    connection = await asyncpg.connect(service.database.admin_dsn)
    try:
        return list(await connection.fetch(sql, *args))
    finally:
        await connection.close()


@contextmanager
def many(*contexts: Any) -> Iterator[list[Any]]:
    """Several context managers as one."""
    with ExitStack() as stack:
        yield [stack.enter_context(each) for each in contexts]
