"""The fifth step of a call: send a request, and look at the beginning of its reply.

Providers report an overflow in an error response, but also under status 200: as the whole reply, or as the first event
of a stream that has content. As long as the client has seen nothing of a reply, another one can take its place.
"""

from __future__ import annotations

import re
from asyncio import get_running_loop
from collections.abc import Sequence

from tersely.dialects.dialect import UNCHANGED, Dialect, Overflow, ReplyChoice
from tersely.dialects.errors import classify_error
from tersely.dialects.headers import upstream_headers
from tersely.domain.errors import UpstreamUnavailable
from tersely.domain.messages import Reasoning, Text
from tersely.service.common.offload import run_in_thread_if_large
from tersely.service.common.tracing import TRACE_HEADERS, UpstreamTrace, active_trace
from tersely.service.limits.admission import end_turn
from tersely.service.proxy.call.call import Call
from tersely.service.proxy.sending.sent_call import SentCall, StartedReply
from tersely.upstream.client import PendingReply, Upstream, UpstreamReply

EVENT_STREAM = "text/event-stream"
JSON = "application/json"
MAX_ERROR_BODY = 1024 * 1024
MAX_FIRST_EVENT = 64 * 1024
# How long (seconds) the reply is awaited after a stream's preamble: a refusal comes at once.
AFTER_PREAMBLE = 1.0

# How a stream of events begins, and no JSON.
_EVENTS_BEGIN = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:data|event|id|retry|):")
_LONGEST_BEGINNING = len(b"\xef\xbb\xbfevent:")
_EVENT = re.compile(rb"data:.*?(?:\n\n|\r\n\r\n|\r\r)", re.DOTALL)
# One is in every event that reports an error: in JSON a name or a value, else at the beginning of a line.
_ERRORS = (b'"error', b": error", b":error")
# In every stop reason that means a full window.
_EXCEEDED = b"_exceeded"


class TracedReply:
    """A `PendingReply` with the span of its request."""

    __slots__ = ("_pending", "_span")

    def __init__(self, pending: PendingReply, span: UpstreamTrace) -> None:
        self._pending = pending
        self._span = span

    async def reply(self) -> UpstreamReply:
        """Return when the reply's headers are there. Raises `UpstreamUnavailable`."""
        try:
            reply = await self._pending.reply()
        except BaseException as error:
            self._span.fail(error)
            raise
        self._span.answered(reply.status)
        reply.on_close = self._span.close
        return reply

    def abandon(self) -> None:
        """Give the request up: the host stops working."""
        self._pending.abandon()
        self._span.close()


class Sender:
    """Sends requests of one dialect to one model host."""

    def __init__(
        self,
        dialect: Dialect,
        upstream: Upstream,
        *,
        key: tuple[str, str] | None,
        heartbeat: float,
        max_reply: int,
    ) -> None:
        """``key`` is a header that replaces the caller's key. ``heartbeat``: how many seconds a stream's first event is
        awaited at most. ``max_reply`` in bytes.
        """
        self._dialect = dialect
        self._upstream = upstream
        self._key = key
        self._heartbeat = heartbeat
        self._max_reply = max_reply

    async def send(self, call: Call, body: bytes) -> UpstreamReply:
        """Send a body with the call's headers. Raises `UpstreamUnavailable`."""
        return await self.begin(call, (body,)).reply()

    def begin(self, call: Call, pieces: Sequence[bytes]) -> PendingReply | TracedReply:
        """Send a body in pieces with the call's headers, without waiting. Raises `UpstreamUnavailable`."""
        end_turn()
        known = self, call.key_headers
        headers = call.by_headers.get(known)
        if headers is None:
            headers = call.by_headers[known] = upstream_headers(call.headers, key=self._key, drop=call.key_headers)
        if (trace := active_trace()) is None:
            return self._upstream.begin(call.method, call.path, headers, pieces, heads=call.by_headers)
        span = trace.open_upstream(self._dialect.name, self._upstream.address)
        heads = call.by_headers
        for name, _ in headers:
            if name in TRACE_HEADERS:
                headers, heads = [field for field in headers if field[0] not in TRACE_HEADERS], {}
                break
        try:
            pending = self._upstream.begin(call.method, call.path, headers, pieces, heads=heads, added=span.headers())
            return TracedReply(pending, span)
        except UpstreamUnavailable as error:
            span.fail(error)
            raise

    async def start(self, prepared: SentCall, reply: UpstreamReply, sent_at: float) -> StartedReply:
        """Read the beginning of a reply, or all of one that is not streamed. Raises `UpstreamUnavailable`."""
        reply.unpack(self._max_reply)
        if reply.status >= 400:
            body = await reply.read(MAX_ERROR_BODY)
            return StartedReply(prepared=prepared, reply=reply, sent_at=sent_at, body=body)
        first = b""
        if not self._is_streamed(prepared, reply):
            first = await self._read_beginning(reply) if prepared.request.stream and reply.status == 200 else b""
            if _EVENTS_BEGIN.match(first) is None:
                body, is_whole = await reply.read_up_to(self._max_reply)
                body = first + body
                return StartedReply(
                    prepared=prepared, reply=reply, sent_at=sent_at, body=body, is_oversized=not is_whole
                )
            reply.content_type = EVENT_STREAM  # whatever the host calls it
        if reply.status == 200 and reply.content_type == EVENT_STREAM:
            first = await self._read_first_event(reply, first)
        return StartedReply(prepared=prepared, reply=reply, sent_at=sent_at, first=first, is_streamed=True)

    async def overflow_of(self, started: StartedReply) -> Overflow | None:
        """Return the overflow that a reply reports; None for a reply with content."""
        return await run_in_thread_if_large(len(started.body), self._overflow_of, started)

    def is_surely_accepted(self, started: StartedReply) -> bool:
        """Return whether the whole body is that of a reply, so that it reports no overflow. The body is not parsed."""
        body = started.body
        if not body or started.reply.status >= 400 or started.is_oversized:
            return False
        return self._dialect.streaming.reply_key in body and b'"error"' not in body[:200] and _EXCEEDED not in body

    def lacks_history(self, started: StartedReply) -> bool:
        """Return whether the host reports that it does not have the history that the request references."""
        lacks = self._dialect.lacks_history
        return lacks is not None and lacks(started.reply.status, started.first or started.body)

    def _is_streamed(self, prepared: SentCall, reply: UpstreamReply) -> bool:
        """Return whether the reply comes in pieces: as events or, if the request asks for that, as a JSON array."""
        if reply.content_type == EVENT_STREAM:
            return True
        is_array = self._dialect.streaming.has_arrays and prepared.request.stream
        return is_array and reply.content_type == JSON and reply.status == 200

    async def _read_beginning(self, reply: UpstreamReply) -> bytes:
        """Read so many bytes of a body that they show whether it consists of events."""
        first = b""
        while len(first.lstrip()) < _LONGEST_BEGINNING and len(first) < MAX_FIRST_EVENT:
            if not (piece := await reply.read_piece()):
                break
            first += piece
        return first

    async def _read_first_event(self, reply: UpstreamReply, first: bytes) -> bytes:
        """Read a stream, of which ``first`` has been read, up to the first event behind its preamble."""
        now = get_running_loop().time
        end = now() + self._heartbeat
        while len(first) < MAX_FIRST_EVENT:
            has_events = False
            for event in _EVENT.finditer(first):
                if not first.startswith(self._dialect.streaming.preamble, event.start()):
                    return first
                has_events = True
            wait = end - now()
            piece = await reply.peek(max(0.0, min(wait, AFTER_PREAMBLE) if has_events else wait))
            if not piece:
                break
            first += piece
        return first

    def _overflow_of(self, started: StartedReply) -> Overflow | None:
        if started.is_oversized:
            return None
        status, first, body = started.reply.status, started.first, started.body
        if status >= 400:
            return classify_error(status, body)
        if not (first or body):
            return None
        if first:
            if _EXCEEDED not in first and not any(mark in first for mark in _ERRORS):
                return None
            reader = self._dialect.open_stream(UNCHANGED)
            reader.feed(first)
            reader.close()
            if any(map(self._has_content, reader.reply.choices)):
                return None
        else:
            if self.is_surely_accepted(started):
                return None
            _, reply = self._dialect.split_reply(body, UNCHANGED)
            if any(map(self._has_content, reply.choices)) and not reply.error:
                return None
        return classify_error(status, first or body)

    def _has_content(self, choice: ReplyChoice) -> bool:
        """Return whether a choice has text, calls or media. Reasoning alone is no answer."""
        parts = self._dialect.read_reply(choice.model_message).parts
        return any(part.text.strip() if isinstance(part, Text) else not isinstance(part, Reasoning) for part in parts)
