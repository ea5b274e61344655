"""Requests to a service, through a client library and byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
import httpx
from aiohttp.connector import Connection
from typing_extensions import override

from tests.support.upstreams import MODEL

if TYPE_CHECKING:
    from tests.support.services import Service


# What `X-Tersely-Context` says of calls that are stored. Short sessions pass through as the client sent them.
STORED = frozenset({"built", "passthrough"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The response to the client; header names in lower case."""

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
        """Return the session that the response names; empty for calls that belong to none."""
        return self.headers.get("x-tersely-session", "")

    @property
    def source(self) -> str:
        """Return how the session was found."""
        return self.headers.get("x-tersely-session-source", "")


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
    connector = _Connector()
    try:
        async with (
            aiohttp.ClientSession(auto_decompress=False, timeout=timeout, connector=connector) as http,
            http.request(method, service.url + path, data=io.BytesIO(body) if body else None, headers=sent) as response,
        ):
            read = await response.read()
            names = {name.lower(): value for name, value in response.headers.items()}
            return Answered(status=response.status, headers=names, body=read, seconds=time.monotonic() - began)
    finally:
        await connector.abort()


class _Connector(aiohttp.TCPConnector):
    """Connections that can be ended while a body is still being written.

    A body may be refused before it was sent. Then aiohttp leaves its connection to the event loop, and a loop that ends
    with the test leaves it to the garbage collector, whose warning fails some later test.
    """

    def __init__(self) -> None:
        super().__init__()
        self._transports: list[asyncio.Transport] = []

    @override
    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Any], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        connection = await super().connect(req, traces, timeout)
        if connection.transport is not None:
            self._transports.append(connection.transport)
        return connection

    async def abort(self) -> None:
        for each in self._transports:
            each.abort()
        await asyncio.sleep(0)


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


def view_of(service: Service, session: str, view: str) -> list[dict[str, Any]]:
    """A session's messages over REST: as the client or the model sees them, or all."""
    found = httpx.get(f"{service.url}/api/sessions/{session}/messages", params={"view": view, "limit": 200}).json()
    return list(found["items"])


def request_bytes(body: bytes, *, path: str = "/v1/chat/completions", **headers: str) -> bytes:
    """A request as it goes over the wire."""
    sent = {"host": "t", "content-type": "application/json", "content-length": str(len(body)), **headers}
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in sent.items())
    return f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + body
