"""The HTTP client for model hosts.

An HTTP error of the host is a reply. An exception means that the host cannot be reached or that the connection broke.
Bytes pass unchanged: nothing is decompressed or redirected, and no environment variable is read.
"""

from __future__ import annotations

import asyncio
import zlib
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from yarl import URL

from tersely.domain.errors import ShuttingDown, UpstreamUnavailable
from tersely.upstream.connection import TIMER_STEP, BrokenOff, Connection, Headers, Interrupted, Receive
from tersely.upstream.pool import ConnectionPool
from tersely.upstream.request_head import begin_head, end_head, write_fields

# Maximum of bytes that are unpacked at a time, whatever the compression.
MAX_INFLATED = 1024 * 1024
# Maximum of compressed members that one body may consist of.
MAX_MEMBERS = 64 * 1024
MAX_TRAILER = 64 * 1024
# The pieces of a larger reply are joined in a thread.
LARGE_REPLY = 1024 * 1024
# How a further member of a compressed body begins.
_MEMBER = b"\x1f"
# Methods that may be sent again if it is unknown whether the host received the request.
_REPEATABLE = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """In seconds: to connect, to the first byte of the reply, between two pieces of it."""

    connect: float = 10.0
    first_byte: float = 600.0
    idle: float = 300.0


class ReplySource(Protocol):
    """The source of a reply: its head, and its body as it arrives."""

    status: int
    headers: Headers
    received_at: float

    def take(self) -> bytes | None:
        """Return the bytes that have arrived, ``b""`` at the end; None if more must be awaited."""

    async def wait(self, deadline: float, receive: Receive | None = None, pause: float = 0.0) -> bool:
        """Wait for bytes until ``deadline`` in the loop's time. Return False if none arrived.

        ``receive`` gets those that arrive meanwhile; each part moves the deadline to ``pause`` seconds after it arrived
        (``received_at``, in the loop's time). The wait ends when ``receive`` returns False.
        """


class UpstreamReply:
    """A host's reply whose headers have arrived. It must be closed in any case."""

    def __init__(self, source: ReplySource, release: Callable[[], None] | None, idle: float) -> None:
        """``release`` takes the connection back; ``idle``: how many seconds the host may be silent."""
        self._source: ReplySource | None = source
        self._release = release
        self._idle = idle
        self._now = asyncio.get_running_loop().time
        self.on_close: Callable[[], None] | None = None
        self._inflate: zlib._Decompress | None = None
        self._most_inflated = self._room = 0
        self._members = 0
        # Whether the body begins with deflated bytes, which may lack the header of zlib's format.
        self._may_be_raw = False
        self._failure: Exception | None = None
        self._silent_since = 0.0
        self.status = source.status
        self.headers: Headers = source.headers
        # The media type, without parameters, in lower case.
        self.content_type = self._header("content-type").partition(";")[0].strip()

    def _header(self, wanted: str) -> str:
        """Return the first value of a header in lower case; empty without one."""
        for name, value in self.headers:
            if len(name) == len(wanted) and name.lower() == wanted:
                return value.strip().lower()
        return ""

    def unpack(self, limit: int) -> None:
        """Decompress the body from here on, if the host compressed it without being asked.

        The reply is broken off after ``limit`` bytes: a few compressed bytes can stand for any number.
        """
        self._most_inflated = self._room = limit
        if self._header("content-encoding") and self._codings() in (["gzip"], ["x-gzip"], ["deflate"]):
            self._inflate = _new_inflate()
            self._may_be_raw = self._codings() == ["deflate"]
            self.headers = [
                (name, value)
                for name, value in self.headers
                if name.lower() not in ("content-encoding", "content-length")
            ]

    def _codings(self) -> list[str]:
        """Return how the body is compressed (RFC 9110, section 8.4), in order."""
        values = [value for name, value in self.headers if name.lower() == "content-encoding"]
        found = [each.strip().lower() for value in values for each in value.split(",")]
        return [each for each in found if each not in ("", "identity")]

    def _at_hand(self) -> bytes | None:
        """Return the bytes that have arrived, ``b""`` at the end; None if more must be awaited."""
        if self._source is None:
            raise BrokenOff("closed")
        if self._inflate is None:
            return self._source.take()
        if self._failure is not None:
            raise self._failure
        pieces: list[bytes] = []
        size = 0
        packed: bytes | None = b""
        try:
            while size < MAX_INFLATED and (packed := self._packed(self._source)):
                piece = self._inflate.decompress(packed, min(MAX_INFLATED - size, self._room) or 1)
                if piece and not self._room:
                    raise UpstreamUnavailable(f"the model host's compressed reply is over {self._most_inflated} bytes")
                pieces.append(piece)
                size += len(piece)
                self._room -= len(piece)
        except (OSError, zlib.error, UpstreamUnavailable) as error:
            if not size:
                raise
            self._failure = error  # what came before it goes out first
        return b"".join(pieces) if size else packed

    def _packed(self, source: ReplySource) -> bytes | None:
        """Return compressed bytes, ``b""`` at the end; None if more must be awaited.

        A body may consist of several members (RFC 1952, section 2.2). What follows the last one is dropped.
        """
        assert self._inflate is not None
        if not self._inflate.eof:
            packed = self._inflate.unconsumed_tail or source.take()
            if packed and self._may_be_raw:
                self._may_be_raw = False
                if packed[0] & 0x0F != zlib.DEFLATED:
                    self._inflate = zlib.decompressobj(wbits=-zlib.MAX_WBITS)
            return packed
        rest = self._inflate.unused_data or source.take()
        while rest and not rest.startswith(_MEMBER):
            rest = source.take()
        if rest:
            self._members += 1
            if self._members > MAX_MEMBERS:
                raise UpstreamUnavailable(f"the model host's compressed reply has over {MAX_MEMBERS} members")
            self._inflate = _new_inflate()
        return rest

    async def _next(self, deadline: float) -> bytes | None:
        """Return the next bytes, ``b""`` at the end; None if none arrive before ``deadline``, in the loop's time."""
        while (piece := self._at_hand()) is None:
            assert self._source is not None
            if not await self._source.wait(deadline):
                return None
        return piece

    async def peek(self, wait: float) -> bytes:
        """Return the first bytes of the body, or ``b""`` when there are none within ``wait`` seconds."""
        try:
            return await self._next(self._now() + wait) or b""
        except (OSError, zlib.error) as error:
            raise _broken_off(error) from error

    async def read_piece(self) -> bytes:
        """Return the next bytes of the body, ``b""`` at its end.

        Raises `UpstreamUnavailable` when the host breaks off or is silent for too long.
        """
        try:
            piece = await self._next(self._now() + self._idle)
        except (OSError, zlib.error) as error:
            raise _broken_off(error) from error
        if piece is None:
            raise UpstreamUnavailable(f"the model host was silent for {self._idle:.0f} s")
        return piece

    async def trailer(self, wait: float) -> bytes:
        """Return bytes after a reply's own end mark if they arrive within ``wait`` seconds. They are optional."""
        found = b""
        deadline = self._now() + wait
        try:
            while len(found) < MAX_TRAILER and (piece := await self._next(deadline)):
                found += piece
        except (OSError, zlib.error):
            pass
        return found

    async def next_piece(self, heartbeat: float | None = None, receive: Receive | None = None) -> bytes | None:
        """Return the next bytes of the body, ``b""`` at its end; None after ``heartbeat`` seconds of silence.

        ``receive`` gets the parts that arrive while this waits, unless they are compressed. When it wants no further
        one, None is returned.

        Raises `UpstreamUnavailable` when the host breaks off or is silent for too long.
        """
        pause = min(heartbeat or self._idle, self._idle)
        if self._inflate is not None:
            receive = None
        try:
            while (piece := self._at_hand()) is None:
                assert self._source is not None
                now = self._now()
                self._silent_since = self._silent_since or now
                has_news = await self._source.wait(min(now + pause, self._silent_since + self._idle), receive, pause)
                self._silent_since = max(self._silent_since, self._source.received_at)
                if not has_news:
                    silence = self._now() - self._silent_since
                    if silence >= self._idle - TIMER_STEP:
                        raise UpstreamUnavailable(f"the model host was silent for {silence:.0f} s")
                    return None
                if receive is not None:
                    piece = self._at_hand()
                    break
        except (OSError, zlib.error) as error:
            raise _broken_off(error) from error
        self._silent_since = 0.0
        return piece

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives.

        Raises `UpstreamUnavailable` when the host breaks off or is silent for too long.
        """
        while (piece := await self.next_piece()) != b"":
            if piece:
                yield piece

    async def read(self, limit: int) -> bytes:
        """Return the whole body. Raises `UpstreamUnavailable` where it is over ``limit`` bytes."""
        body, is_whole = await self.read_up_to(limit)
        if not is_whole:
            raise UpstreamUnavailable(f"the model host's reply is over {limit} bytes")
        return body

    async def read_up_to(self, limit: int) -> tuple[bytes, bool]:
        """Return the body up to its end or to ``limit`` bytes, and whether that is all of it."""
        pieces: list[bytes] = []
        size = 0
        try:
            while size <= limit and (chunk := await self._next(self._now() + self._idle)):
                size += len(chunk)
                pieces.append(chunk)
        except (OSError, zlib.error) as error:
            raise _broken_off(error) from error
        if size <= limit and chunk is None:
            raise UpstreamUnavailable(f"the model host was silent for {self._idle:.0f} s")
        body = b"".join(pieces) if size < LARGE_REPLY else await asyncio.to_thread(b"".join, pieces)
        return body, size <= limit

    def close(self) -> None:
        """Return the connection to the pool if the whole body has arrived; else close it, so that the host stops
        working.
        """
        source, self._source = self._source, None
        if source is not None:
            if self._release is not None:
                self._release()
            if self.on_close is not None:
                self.on_close()


class Upstream:
    """A pool of connections to one model host."""

    def __init__(self, base_url: str, timeouts: Timeouts) -> None:
        """``base_url`` comes from the operator's configuration alone."""
        self._base = base_url.rstrip("/")
        self._timeouts = timeouts
        self._pool: ConnectionPool | None = None
        self._host = self._path = ""
        self._address = ("", 0)
        self._login: tuple[str, str] | None = None
        self._is_interrupted = False

    @property
    def address(self) -> tuple[str, int]:
        """Return the host's name and port; an empty name before `open`."""
        return self._address

    async def open(self) -> None:
        """Make the pool; connects to nobody yet. Raises `ValueError` for a base URL without host or port."""
        base = URL(self._base, encoded=True)
        if not base.raw_host or base.port is None or base.scheme not in ("http", "https"):
            raise ValueError("the base URL of a model host must be http:// or https:// and a host")
        self._host = base.host_port_subcomponent or ""
        self._path = base.raw_path.rstrip("/")
        self._address = (base.raw_host, base.port)
        if base.raw_user is not None:
            login = f"{base.user or ''}:{base.password or ''}"
            self._login = ("authorization", "Basic " + b64encode(login.encode()).decode())
        self._pool = ConnectionPool(
            base.raw_host, base.port, secure=base.scheme == "https", connect=self._timeouts.connect
        )

    def interrupt(self) -> None:
        """End every call that is under way, and begin no more: `ShuttingDown` is raised in their place."""
        self._is_interrupted = True
        if self._pool is not None:
            self._pool.interrupt()

    async def close(self) -> None:
        """Close every connection."""
        if self._pool is not None:
            await self._pool.close()

    async def send(self, method: str, path: str, headers: Iterable[tuple[str, str]], body: bytes) -> UpstreamReply:
        """Send a request; returns when the reply's headers are there.

        ``path`` follows the base URL and carries the query, already encoded. Raises `UpstreamUnavailable`.
        """
        return await self.begin(method, path, headers, (body,)).reply()

    def begin(
        self,
        method: str,
        path: str,
        headers: Iterable[tuple[str, str]],
        pieces: Sequence[bytes],
        *,
        heads: MutableMapping[object, Any] | None = None,
        added: Iterable[tuple[str, str]] = (),
    ) -> PendingReply:
        """Send a request at once, where a connection is free; the rest is up to `PendingReply.reply`.

        ``pieces`` are its body, one behind the other.
        ``heads``: where the head is kept for another request with this method and path, and these very headers.
        ``added``: headers of this request alone.
        Raises `UpstreamUnavailable`.
        """
        assert self._pool is not None
        if self._is_interrupted:
            raise ShuttingDown
        try:
            known = None if heads is None else heads.get(self)
            if known is not None and known[0] is headers:
                beginning = known[1]
            else:
                beginning = self._begin_head(method, path, headers)
                if heads is not None:
                    heads[self] = headers, beginning
            if added:
                beginning += write_fields(added)
            head = end_head(beginning, method, sum(map(len, pieces)))
            connection = self._pool.take()
            if connection is not None:
                connection.send(method, head, pieces)
        except (OSError, ValueError) as error:
            raise _unreachable(error) from error
        return PendingReply(self, connection, method, head, pieces)

    def _begin_head(self, method: str, path: str, headers: Iterable[tuple[str, str]]) -> bytes:
        if self._login is not None:
            headers = [(name, value) for name, value in headers if name.lower() != "authorization"] + [self._login]
        return begin_head(method, self._path + path, self._host, headers)

    async def wait_for(self, pending: PendingReply) -> UpstreamReply:
        """Return the reply to a request that was begun, when its headers are there. Raises `UpstreamUnavailable`."""
        assert self._pool is not None
        deadline = asyncio.get_running_loop().time() + self._timeouts.first_byte
        try:
            connection = await self._exchange(self._pool, pending, deadline)
        except TimeoutError as error:
            raise UpstreamUnavailable("the model host did not answer in time") from error
        except Interrupted as error:
            raise ShuttingDown from error
        except (OSError, ValueError) as error:
            raise _unreachable(error) from error
        return UpstreamReply(connection, partial(self._pool.release, connection), self._timeouts.idle)

    async def _exchange(self, pool: ConnectionPool, pending: PendingReply, deadline: float) -> Connection:
        """Return the connection on which the reply's headers have arrived."""
        used = pending.connection
        if used is not None:
            try:
                return await _wait_for_head(used, deadline)
            except BrokenOff:
                # The host may have closed the connection while the request was on its way, or while it worked on it.
                if used.has_begun or pending.method not in _REPEATABLE or self._is_interrupted:
                    raise
        connection = pending.connection = await pool.make(deadline)
        connection.send(pending.method, pending.head, pending.pieces)
        return await _wait_for_head(connection, deadline)


class PendingReply:
    """A request whose reply has not begun yet. One of `reply` and `abandon` must be called."""

    __slots__ = ("_upstream", "connection", "head", "method", "pieces")

    def __init__(
        self, upstream: Upstream, connection: Connection | None, method: str, head: bytes, pieces: Sequence[bytes]
    ) -> None:
        """``connection``: the one on which the request has been sent; None: it has yet to be made."""
        self._upstream = upstream
        self.connection = connection
        self.method = method
        self.head = head
        self.pieces = pieces

    async def reply(self) -> UpstreamReply:
        """Return when the reply's headers are there. Raises `UpstreamUnavailable`."""
        return await self._upstream.wait_for(self)

    def abandon(self) -> None:
        """Give the request up: the host stops working."""
        if self.connection is not None:
            self.connection.abort()


def _new_inflate() -> zlib._Decompress:
    return zlib.decompressobj(wbits=32 + zlib.MAX_WBITS)


async def _wait_for_head(connection: Connection, deadline: float) -> Connection:
    try:
        if await connection.wait_for_head(deadline):
            return connection
    except BaseException:
        connection.abort()
        raise
    connection.abort()
    raise TimeoutError


def _unreachable(error: Exception) -> UpstreamUnavailable:
    return UpstreamUnavailable(f"the model host cannot be reached: {type(error).__name__}")


def _broken_off(error: Exception) -> UpstreamUnavailable:
    if isinstance(error, Interrupted):
        return ShuttingDown()
    return UpstreamUnavailable(f"the model host broke off: {type(error).__name__}")
