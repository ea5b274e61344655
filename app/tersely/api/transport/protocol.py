"""uvicorn's HTTP protocol, with limits on requests before they are authenticated.

Plain uvicorn keeps a connection open that sends nothing, or one header a minute, and collects headers without limit.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from tersely.api.transport.body import RECEIVED
from tersely.api.transport.body_writer import WRITER, BodyWriter
from tersely.api.transport.disconnects import KEY, Disconnect
from tersely.api.transport.request_ids import caller_request_id, new_request_id

HEADER_TIMEOUT = 15.0
HEADER_BYTES = 32 * 1024
HEADER_COUNT = 200
HEADER_CONNECTIONS = 1024
# Bytes of a body's framing (sizes and extensions of chunks, trailers) beyond as many as the body itself has.
MAX_FRAMING = 1024 * 1024
# Seconds in which the rest of a refused request is discarded. A client that is cut off at once does not see the answer.
LINGER = 2.0
MAX_DISCARDED = 1024 * 1024

_TOO_LARGE = (431, "The headers are too large: at most {size} bytes and {count} headers.")
_MALFORMED = (400, "That is not a valid HTTP request.")
_BAD_FRAMING = (400, "The chunks of the body are too small for their number.")


class _Refused(Exception):
    """Ends the parsing of a connection's bytes; ``_refusal`` is the answer."""


# uvicorn has no status line for what HTTP does not define, and drops the connection. Three digits are a status line all
# the same (RFC 9112, section 4), and hosts send such statuses.
STATUS_LINE.update({status: b"HTTP/1.1 %d \r\n" % status for status in range(600, 1000)})


class DeadlineProtocol(HttpToolsProtocol):
    """Limits the bytes, the number and the time of a request's headers, and how many connections may still send theirs.

    The time is counted from a connection's opening or a request's first byte. Of too many connections that have not
    sent their headers yet the oldest is closed: honest ones are there for milliseconds.
    """

    header_timeout = HEADER_TIMEOUT
    header_bytes = HEADER_BYTES
    header_count = HEADER_COUNT
    header_connections = HEADER_CONNECTIONS

    _waiting_by_server: ClassVar[WeakKeyDictionary[ServerState, dict[DeadlineProtocol, None]]] = WeakKeyDictionary()
    _deadline: asyncio.TimerHandle | None = None
    _disconnect: Disconnect | None = None
    _is_refused = False
    _refusal: tuple[int, str] | None = None
    _is_in_head = True
    # Bytes that arrived while the headers were incomplete; bytes and number of the parsed fields.
    _head_size = 0
    _fields_size = 0
    _fields = 0
    # Bytes that arrived since the headers, and the part of them that belongs to the body.
    _received = 0
    _body_size = 0
    _discarded = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pieces: list[bytes] = []

    # Input

    @override
    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_headers()

    @override
    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            self._discarded += len(data)
            if self._discarded > MAX_DISCARDED:
                self._close()
            return
        unread: bytes | memoryview = data
        while unread and not self._is_refused and not self.transport.is_closing():
            piece, unread = unread, b""
            if self._is_in_head:
                room = self.header_bytes + 1 - self._head_size
                if len(piece) > room:
                    whole = memoryview(piece)
                    piece, unread = whole[:room], whole[room:]
                self._head_size += len(piece)
            else:
                self._received += len(piece)
            super().data_received(piece)  # type: ignore[arg-type]  # the parser takes any bytes
            self._pass_body_on()
            if self._is_in_head and self._head_size > self.header_bytes:
                self._refuse(_TOO_LARGE)
            elif self._received - self._body_size > MAX_FRAMING + self._body_size:
                self._refuse(_BAD_FRAMING)

    @override
    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._is_in_head:
            self._is_in_head = True
            self._head_size = 0  # header bytes that arrived with the previous message are counted by their fields
        self._fields_size = self._fields = self._received = self._body_size = 0
        if self._deadline is None:
            self._await_headers()

    @override
    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._fields_size += len(url)
        if self._fields_size > self.header_bytes:
            self._refusal = _TOO_LARGE
            raise _Refused

    @override
    def on_header(self, name: bytes, value: bytes) -> None:
        # What uvicorn's method does is repeated here: this is called for each header.
        self._fields_size += len(name) + len(value) + 4
        self._fields += 1
        if self._fields_size > self.header_bytes or self._fields > self.header_count:
            self._refusal = _TOO_LARGE
            raise _Refused
        if self._is_in_head:  # otherwise it is a trailer, which must not be taken for a header
            name = name.lower()
            if name == b"expect" and value.lower() == b"100-continue":
                self.expect_100_continue = True
            self.headers.append((name, value))

    @override
    def on_headers_complete(self) -> None:
        self._stop_waiting()
        self._is_in_head = False
        self._fields_size = self._fields = 0  # from here on they count trailers
        self.scope[KEY] = self._disconnect = Disconnect(self.flow.resume_reading)  # type: ignore[literal-required]
        super().on_headers_complete()
        self.scope[WRITER] = BodyWriter(self.cycle)  # type: ignore[literal-required]

    @override
    def on_body(self, body: bytes) -> None:
        """Collect the pieces that arrived at once. Appending each to the body would take quadratic time."""
        self._body_size += len(body)
        self._pieces.append(body)

    @override
    def on_message_complete(self) -> None:
        self._pass_body_on()
        self.scope[RECEIVED] = True  # type: ignore[literal-required]
        super().on_message_complete()

    def _pass_body_on(self) -> None:
        if self._pieces:
            pieces, self._pieces = self._pieces, []
            if self.parser is not None:
                body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
                if not (self.cycle.body or self.cycle.response_complete):
                    # Of immutable bytes, `receive` makes no copy.
                    self.cycle.body, body = body, b""  # type: ignore[assignment]
                super().on_body(body)

    @override
    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: a route refuses upgrades, and no library is missing."""

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        cycle = self.cycle
        is_open = cycle is not None and not cycle.response_complete
        super().connection_lost(exc)
        if is_open and self._disconnect is not None:
            self._disconnect.report()

    # Refusals

    @override
    def send_400_response(self, msg: str) -> None:
        """Answer a request that uvicorn cannot parse, or whose parsing was stopped here."""
        self._refuse(self._refusal or _MALFORMED)

    def _refuse(self, refusal: tuple[int, str]) -> None:
        """Answer, and read no more of this connection."""
        if self._is_refused:
            return
        self._is_refused = True
        self._stop_waiting()
        if self.transport.is_closing():
            return
        cycle = self.cycle
        is_answered = cycle is None or cycle.response_complete
        if not is_answered:
            if cycle.response_started:
                self.transport.close()  # in the middle of another answer
                return
            cycle.disconnected = True
            cycle.message_event.set()
            if self._disconnect is not None:
                self._disconnect.report()
        self.transport.write(self._refusal_bytes(*refusal))
        self.loop.call_later(LINGER, self._close)

    def _refusal_bytes(self, status: int, text: str) -> bytes:
        message = text.format(size=self.header_bytes, count=self.header_count)
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        body = json.dumps({"error": error}).encode()
        request_id = caller_request_id(self.headers or []) or new_request_id()
        head = (
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\nx-request-id: {request_id}\r\n"
            "connection: close\r\n\r\n"
        )
        return STATUS_LINE[status] + head.encode() + body

    # Time

    def _await_headers(self) -> None:
        self._deadline = self.loop.call_later(self.header_timeout, self._expire)
        waiting = self._waiting_by_server.setdefault(self.server_state, {})
        waiting[self] = None
        if len(waiting) > self.header_connections:
            next(iter(waiting))._expire()  # noqa: SLF001 one of this class

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
            self._waiting_by_server.get(self.server_state, {}).pop(self, None)

    def _expire(self) -> None:
        self._stop_waiting()
        self._close()

    def _close(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
