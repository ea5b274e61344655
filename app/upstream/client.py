"""The HTTP client towards model hosts.

An HTTP error of the host is a reply, not an exception; only a host that cannot be reached or that breaks off is.
Bytes pass as they come: nothing is decompressed, redirected, or taken from the environment.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from app.domain.errors import UpstreamUnavailable

Headers = list[tuple[str, str]]

READ_BUFFER = 256 * 1024
# How much comes out of a compressed piece at a time, however much is in it.
MAX_INFLATED = 1024 * 1024
MAX_TRAILER = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """In seconds: to connect, to the first byte of the reply, between two pieces of it."""

    connect: float = 10.0
    first_byte: float = 600.0
    idle: float = 300.0


class Reply:
    """A host's reply whose headers have arrived. Close it, whatever happens."""

    def __init__(self, response: aiohttp.ClientResponse, idle: float) -> None:
        """``idle``: how many seconds the host may be silent."""
        self._response = response
        self._idle = idle
        self._inflate: zlib._Decompress | None = None
        self.status = response.status
        self.headers: Headers = list(response.headers.items())

    @property
    def content_type(self) -> str:
        """The media type, without parameters, in lower case."""
        return self._response.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    def unpack(self) -> None:
        """Give the body uncompressed from here on, where the host compressed it although it was not asked to."""
        encoding = self._response.headers.get("Content-Encoding", "").strip().lower()
        if encoding in ("gzip", "x-gzip", "deflate"):
            self._inflate = zlib.decompressobj(wbits=32 + zlib.MAX_WBITS)
            self.headers = [
                (name, value)
                for name, value in self.headers
                if name.lower() not in ("content-encoding", "content-length")
            ]

    async def _read_some(self) -> bytes:
        """The next bytes; ``b""`` at the end."""
        inflate = self._inflate
        if inflate is None:
            return await self._response.content.readany()
        while True:
            packed = inflate.unconsumed_tail or await self._response.content.readany()
            if not packed:
                return b""
            if piece := inflate.decompress(packed, MAX_INFLATED):
                return piece

    def _at_hand(self) -> bytes | None:
        """What has arrived already, ``b""`` at the end; None where one has to wait, or to unpack."""
        content = self._response.content
        if self._inflate is not None or content.exception() is not None:
            return None
        if content.at_eof():
            return b""
        return content.read_nowait() or None

    async def peek(self, wait: float) -> bytes:
        """The first bytes of the body, or ``b""`` when there are none within ``wait`` seconds."""
        if (found := self._at_hand()) is not None:
            return found
        try:
            async with asyncio.timeout(wait):
                return await self._read_some()
        except TimeoutError:
            return b""
        except (aiohttp.ClientError, OSError, zlib.error) as error:
            raise UpstreamUnavailable(f"the model host broke off: {type(error).__name__}") from error

    async def trailer(self, wait: float) -> bytes:
        """What comes after a reply's own end mark, if it comes within ``wait`` seconds; nothing depends on it."""
        found = b""
        try:
            async with asyncio.timeout(wait):
                while len(found) < MAX_TRAILER and (piece := await self._read_some()):
                    found += piece
        except (aiohttp.ClientError, OSError, zlib.error):  # time is up, too
            pass
        return found

    async def chunks(self, heartbeat: float | None = None) -> AsyncIterator[bytes]:
        """The body as it arrives; ``b""`` stands for ``heartbeat`` seconds of silence.

        Raises `UpstreamUnavailable` when the host breaks off or is silent for too long.
        """
        silence = 0.0
        pause = min(heartbeat or self._idle, self._idle)
        try:
            while True:
                try:
                    # A timer costs more than what is at hand already.
                    if (chunk := self._at_hand()) is None:
                        async with asyncio.timeout(pause):
                            chunk = await self._read_some()
                except TimeoutError:
                    silence += pause
                    if silence >= self._idle:
                        raise UpstreamUnavailable(f"the model host was silent for {silence:.0f} s") from None
                    yield b""
                    continue
                silence = 0.0
                if not chunk:
                    return
                yield chunk
        except (aiohttp.ClientError, OSError, zlib.error) as error:
            raise UpstreamUnavailable(f"the model host broke off: {type(error).__name__}") from error

    async def read(self, limit: int) -> bytes:
        """The whole body, at most ``limit`` bytes."""
        pieces: list[bytes] = []
        size = 0
        async for chunk in self.chunks():
            size += len(chunk)
            if size > limit:
                raise UpstreamUnavailable(f"the model host's reply is over {limit} bytes")
            pieces.append(chunk)
        return b"".join(pieces)

    def close(self) -> None:
        """Return the connection to the pool if the body was read, else cut it: the host stops working."""
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()


class Upstream:
    """A pool of connections to one model host."""

    def __init__(self, base_url: str, timeouts: Timeouts) -> None:
        """``base_url`` comes from the operator's configuration alone."""
        self._base = base_url.rstrip("/")
        self._timeouts = timeouts
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Make the pool; connects to nobody yet."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=60, keepalive_timeout=30),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            read_bufsize=READ_BUFFER,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._timeouts.connect),
            skip_auto_headers=("User-Agent", "Content-Type", "Accept", "Accept-Encoding"),
        )

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()

    async def send(self, method: str, path: str, headers: Iterable[tuple[str, str]], body: bytes) -> Reply:
        """Send a request; returns when the reply's headers are there.

        ``path`` follows the base URL and carries the query, already encoded. Raises `UpstreamUnavailable`.
        """
        assert self._session is not None
        url = URL(self._base + path, encoded=True)
        try:
            async with asyncio.timeout(self._timeouts.first_byte):
                response = await self._session.request(
                    method,
                    url,
                    headers=CIMultiDict(headers),
                    data=body or None,
                    allow_redirects=False,
                )
        except TimeoutError as error:
            raise UpstreamUnavailable("the model host did not answer in time") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise UpstreamUnavailable(f"the model host cannot be reached: {type(error).__name__}") from error
        return Reply(response, self._timeouts.idle)
