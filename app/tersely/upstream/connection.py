"""One HTTP/1.1 connection: it sends a request, receives the reply, then sends the next request.

Every wait has a time limit, and a bounded part of a reply is kept in memory. A reply that contradicts itself breaks the
connection.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable, Sequence
from typing import cast

import httptools
from typing_extensions import override

Headers = list[tuple[str, str]]
Receive = Callable[[bytes], bool]
"""Gets a part of a reply's body in the callback that received it; False if it wants no further one."""

# The host is not read from while this much of a reply waits to be taken.
READ_BUFFER = 256 * 1024
# Maximum of consecutive bytes that are no body: of a head with interim replies, of chunk extensions, of trailers.
MAX_HEAD = 64 * 1024
BAD_GATEWAY = 502
# Seconds. A timer of uvloop counts whole milliseconds and may fire so much early: if the rest of a millisecond were
# awaited again and again, each time would send a heartbeat.
TIMER_STEP = 0.002
# A larger request body is not copied behind its head. Of a much larger one, others have their turn between the parts
# that are written.
MAX_JOINED = 64 * 1024
WRITTEN_AT_ONCE = 256 * 1024


class BrokenOff(OSError):
    """The connection ended, or went wrong, before its reply was whole."""


class Interrupted(BrokenOff):
    """Nobody waits for the reply any more, because this process ends."""


class Connection(asyncio.Protocol):
    """A connection to a host, for one request at a time."""

    def __init__(self, on_lost: Callable[[Connection], None]) -> None:
        """``on_lost`` is called when the connection is gone."""
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._poll: select.poll | None = None
        self._waiter: asyncio.Future[bool] | None = None
        self._receive: Receive | None = None
        self._pause = self._deadline = self._timer_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_paused = False
        self._may_write = True
        self._is_fit = True
        self.is_idle = True
        self.expires = 0.0
        self._begin("")

    def _begin(self, method: str) -> None:
        self._method = method
        self._unsent: list[bytes | memoryview] = []  # the last one comes first
        self._pieces: list[bytes] = []
        self._size = 0
        self._overhead = 0
        self._has_news = False
        self._error: BrokenOff | None = None
        self._is_complete = False
        self._has_framing = False
        self.has_begun = False
        self.received_at = 0.0
        self.status = 0
        self.headers: Headers = []

    # For whoever sends a request

    @property
    def is_usable(self) -> bool:
        """True if a request can be sent: an idle host has sent nothing and has not closed the connection."""
        if not self._is_fit or self._transport is None or self._transport.is_closing():
            return False
        # What the event loop has not seen yet counts too: a request into a closed connection may be lost.
        return self._poll is None or not self._poll.poll(0)

    def send(self, method: str, head: bytes, pieces: Sequence[bytes]) -> None:
        """Begin an exchange. ``pieces`` are the body, one behind the other."""
        assert self._transport is not None
        self._begin(method)
        self.is_idle = False
        size = sum(map(len, pieces))
        if size <= MAX_JOINED:
            self._transport.write(b"".join((head, *pieces)))
        else:
            self._unsent = [*reversed(pieces), head]
            self._write_more()

    def _write_more(self) -> None:
        """Write the next part of the body, and go on with it when the loop and the transport let us."""
        if not self._unsent or not self._may_write:
            return
        if self._transport is None or self._transport.is_closing():
            self._unsent = []
            return
        part: list[bytes | memoryview] = []
        room = WRITTEN_AT_ONCE
        while self._unsent and room:
            piece = self._unsent.pop()
            if len(piece) > room:
                rest = memoryview(piece)
                self._unsent.append(rest[room:])
                piece = rest[:room]
            part.append(piece)
            room -= len(piece)
        self._transport.writelines(part)
        if self._unsent:
            self._loop.call_soon(self._write_more)

    async def wait_for_head(self, deadline: float) -> bool:
        """Return whether status and headers arrived before ``deadline``, in the loop's time. Raises `BrokenOff`."""
        while not self.status:
            if self._error is not None:
                raise self._error
            if not await self.wait(deadline):
                return False
        return True

    def take(self) -> bytes | None:
        """Return the body's bytes so far, ``b""`` at its end, None if more must be awaited. Raises `BrokenOff`."""
        if self._pieces:
            data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            self._pieces.clear()
            self._size = 0
            self._resume_reading()
            return data
        if self._is_complete:
            return b""
        if self._error is not None:
            raise self._error
        return None

    async def wait(self, deadline: float, receive: Receive | None = None, pause: float = 0.0) -> bool:
        """Wait until more of the reply arrives than has been taken; return False at ``deadline``, in the loop's time.

        ``receive`` gets the parts of the body that arrive meanwhile. Each moves the deadline to ``pause`` seconds after
        it arrived (`received_at`). The wait ends when ``receive`` returns False.
        """
        self._has_news = False
        waiter = self._waiter = self._loop.create_future()
        self._receive, self._pause, self._deadline = receive, pause, deadline
        if self._timer is None or self._timer_at > deadline:
            self._set_timer(deadline)
        try:
            return bool(await waiter)
        finally:
            self._waiter = self._receive = None

    def _set_timer(self, at: float) -> None:
        """Have the wait end at ``at``, unless its deadline has been moved until then: a timer for each wait would cost
        more than the wait itself.
        """
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = self._loop.call_at(at, self._time_out), at

    def _time_out(self) -> None:
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return
        if self._loop.time() < self._deadline - TIMER_STEP:
            self._set_timer(self._deadline)
        else:
            self._waiter.set_result(False)

    def finish(self) -> bool:
        """End the exchange. Whether another one may follow; the connection is cut where not."""
        transport = self._transport
        is_fit = self._is_fit and self._is_complete and transport is not None
        if is_fit and transport is not None and not self._unsent and not transport.get_write_buffer_size():
            self._pieces.clear()
            self._size = 0
            self.is_idle = True
            self._resume_reading()
            return True
        self.abort()
        return False

    def keep_alive(self, most: float) -> float:
        """Return how many seconds the host lets the connection idle, at most ``most``."""
        for name, value in self.headers:
            if len(name) == 10 and name.lower() == "keep-alive":
                seconds = value.lower().partition("timeout=")[2].partition(",")[0].strip()
                if seconds.isascii() and seconds.isdigit():
                    # It counts from when the host wrote its reply, not from now.
                    return min(most, int(seconds[:6]) - 1.0)
        return most

    def interrupt(self) -> None:
        """End the exchange: whoever waits for the reply gets `Interrupted`."""
        if not self.is_idle:
            self._fail(Interrupted("this process ends"))
            self._notify()

    def abort(self) -> None:
        """Cut the connection: the host stops working."""
        self._is_fit = False
        if self._transport is not None:
            self._transport.abort()

    # For asyncio

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """`asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)
        socket = transport.get_extra_info("socket")
        if socket is not None and hasattr(select, "poll"):
            self._poll = select.poll()
            self._poll.register(socket.fileno(), select.POLLIN)

    @override
    def pause_writing(self) -> None:
        """`asyncio.Protocol`."""
        self._may_write = False

    @override
    def resume_writing(self) -> None:
        """`asyncio.Protocol`."""
        self._may_write = True
        self._write_more()

    @override
    def data_received(self, data: bytes) -> None:
        """`asyncio.Protocol`."""
        if self.is_idle or self._is_complete or self._error is not None:
            # Unrequested bytes answer no later request.
            self.abort()
            return
        self._overhead += len(data)
        self.has_begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(BrokenOff(f"unreadable: {error}"))
        else:
            if self._overhead > MAX_HEAD:
                self._fail(BrokenOff("too much that is no body"))
        if self._receive is not None and self._pieces and self._error is None:
            self._hand_over(self._receive)
        if self._size > READ_BUFFER:
            self._pause_reading()
        if self._has_news:
            self._notify()

    @override
    def eof_received(self) -> None:
        """`asyncio.Protocol`. Without a length, the end of the connection ends the body."""
        self._is_fit = False
        if self.status and not self._has_framing:
            self._is_complete = True
        self._end(None)

    @override
    def connection_lost(self, error: Exception | None) -> None:
        """`asyncio.Protocol`."""
        self._is_fit = False
        self._transport = None
        self._unsent = []
        self._poll = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._end(error)
        self._on_lost(self)

    def _hand_over(self, receive: Receive) -> None:
        """Give the body's bytes to whoever wants them at once."""
        self.received_at = self._loop.time()
        self._deadline = self.received_at + self._pause
        self._has_news = self._is_complete
        if not receive(self.take() or b""):
            self._receive = None
            self._has_news = True

    def _pause_reading(self) -> None:
        if not self._is_paused and self._transport is not None and not self._transport.is_closing():
            self._is_paused = True
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._is_paused and self._transport is not None and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()

    def _end(self, error: Exception | None) -> None:
        self._fail(BrokenOff("ended early" if error is None else type(error).__name__))
        self._notify()

    def _fail(self, error: BrokenOff) -> None:
        """Stop receiving. Bytes that have arrived stay."""
        self._has_news = True
        self._is_fit = False
        if not self._is_complete and self._error is None:
            self._error = error
            if self._transport is not None:
                self._transport.abort()

    def _notify(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._has_news = False
            self._waiter.set_result(True)

    # For the parser

    def on_message_begin(self) -> None:
        """Refuse a second reply to one request."""
        if self._is_complete:
            self._is_fit = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header. Trailers are dropped, like everything that concerns one hop."""
        if self.status or self._is_complete:
            return
        # Most names are of another length, and this is called for each.
        if len(name) == 17 and name.lower() == b"transfer-encoding":
            if self._has_framing or value.strip(b" \t").lower() != b"chunked":
                raise ValueError("the host used a transfer coding that was not requested")
            self._has_framing = True
        elif len(name) == 14 and name.lower() == b"content-length":
            self._has_framing = True
        self.headers.append((name.decode("latin-1"), value.strip(b" \t").decode("utf-8", "surrogateescape")))

    def on_headers_complete(self) -> None:
        """The reply proper begins, unless this is only an interim one."""
        if self._is_complete:
            return
        status = self._parser.get_status_code()
        if status == 101:
            raise ValueError("the host changed the protocol without a request")
        if self._overhead > MAX_HEAD + READ_BUFFER or sum([len(n) + len(v) for n, v in self.headers]) > MAX_HEAD:
            raise ValueError("the head of the reply is too long")
        if 100 <= status < 200:
            self.headers = []
            self._has_framing = False
            return
        # Statuses below 100 do not exist. Every invalid status counts as a server error (RFC 9110, section 15).
        self.status = status if status >= 200 else BAD_GATEWAY
        self._overhead = 0
        self._has_news = True
        if self._method == "HEAD":
            # The parser waits for the body that the headers speak of.
            self._is_complete = True
            self._is_fit = False

    def on_body(self, body: bytes) -> None:
        """Some of the body."""
        if self._is_complete:
            return
        self._pieces.append(body)
        self._size += len(body)
        self._overhead = 0
        self._has_news = True

    def on_message_complete(self) -> None:
        """Complete the reply, unless it is an interim one."""
        if self.status and not self._is_complete:
            self._is_complete = True
            self._has_news = True
            self._is_fit = self._is_fit and bool(self._parser.should_keep_alive())
