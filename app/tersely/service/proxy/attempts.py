"""Asking the model until the context fits: what it refuses as too long is tried again with less.

Providers tell an overflow in an error response, but also under status 200: as the whole reply, or as the first event of
a stream that says anything. As long as the client has seen nothing of a reply, another one can take its place.
"""

from __future__ import annotations

import re
from asyncio import get_running_loop
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tersely.dialects.dialect import Dialect, Overflow, ReplyChoice
from tersely.dialects.errors import classify_error
from tersely.domain.messages import Reasoning, Text
from tersely.domain.text.tags import NOTHING
from tersely.service.common.offload import run_in_thread_if_large
from tersely.service.proxy.calls import Call
from tersely.service.proxy.preparing import CallPreparer, PreparedCall
from tersely.service.proxy.server_side_history import ServerSideHistory
from tersely.upstream.client import UpstreamReply

EVENT_STREAM = "text/event-stream"
JSON = "application/json"
MAX_ERROR_BODY = 1024 * 1024
MAX_FIRST_EVENT = 64 * 1024
# How long (seconds) is waited for what comes after a stream's preamble: a refusal comes at once.
AFTER_PREAMBLE = 1.0

_EVENT = re.compile(rb"data:.*?(?:\n\n|\r\n\r\n|\r\r)", re.DOTALL)
# In every stop reason that tells of a full window.
_EXCEEDED = b"_exceeded"

Send = Callable[[Call, bytes], Awaitable[UpstreamReply]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedReply:
    """A reply, to the last try ``prepared``, whose beginning has been looked at.

    ``body`` is all of it, ``first`` is what has been read of one that is streamed. ``is_oversized``: it is over the
    limit of what is read, and ``body`` only its beginning.
    """

    prepared: PreparedCall
    reply: UpstreamReply
    first: bytes = b""
    body: bytes = b""
    is_oversized: bool = False


class Attempts:
    """Asks models of one dialect."""

    def __init__(
        self,
        dialect: Dialect,
        preparer: CallPreparer,
        named: ServerSideHistory,
        *,
        send: Send,
        heartbeat: float,
        max_reply: int,
    ) -> None:
        """``heartbeat``: how many seconds are waited for a stream's first event at most; ``max_reply`` in bytes."""
        self._dialect = dialect
        self._preparer = preparer
        self._named = named
        self._send = send
        self._heartbeat = heartbeat
        self._max_reply = max_reply

    async def ask(self, call: Call, prepared: PreparedCall) -> StartedReply:
        """Send ``prepared``, then see `settle`."""
        return await self.settle(call, prepared, await self._send(call, prepared.body))

    async def settle(self, call: Call, prepared: PreparedCall, reply: UpstreamReply) -> StartedReply:
        """The reply to ``prepared``, or to another try: with less, where it tells of an overflow and less can be sent;
        with a context, where the host is without the history that it was left to know.

        Raises `UpstreamUnavailable`; then every reply is closed.
        """
        while True:
            try:
                reply.unpack(self._max_reply)
                begun = await self._begin(prepared, reply)
                other = await self._other(call, begun)
            except BaseException:
                reply.close()
                raise
            if other is None:
                return begun
            reply.close()
            prepared, reply = other, await self._send(call, other.body)

    async def _other(self, call: Call, begun: StartedReply) -> PreparedCall | None:
        """What is to be tried instead; None where the reply stands."""
        overflowed = await run_in_thread_if_large(len(begun.body), self._overflow_of, begun)
        if begun.prepared.is_at_host:
            lacks = self._dialect.lacks_history
            is_lost = lacks is not None and lacks(begun.reply.status, begun.first or begun.body)
            return await self._named.keep_on(call, begun.prepared) if is_lost or overflowed else None
        return None if overflowed is None else await self._preparer.reduce(call, begun.prepared, overflowed)

    def is_streamed(self, prepared: PreparedCall, reply: UpstreamReply) -> bool:
        """Whether the reply comes piece by piece: as events, or, where that was asked for, as an array."""
        if reply.content_type == EVENT_STREAM:
            return True
        is_array = self._dialect.streaming.has_arrays and prepared.request.stream
        return is_array and reply.content_type == JSON and reply.status == 200

    async def _begin(self, prepared: PreparedCall, reply: UpstreamReply) -> StartedReply:
        if reply.status >= 400:
            return StartedReply(prepared=prepared, reply=reply, body=await reply.read(MAX_ERROR_BODY))
        if not self.is_streamed(prepared, reply):
            body, is_whole = await reply.read_up_to(self._max_reply)
            return StartedReply(prepared=prepared, reply=reply, body=body, is_oversized=not is_whole)
        is_looked_at = reply.status == 200 and reply.content_type == EVENT_STREAM
        return StartedReply(
            prepared=prepared, reply=reply, first=await self._first_event(reply) if is_looked_at else b""
        )

    async def _first_event(self, reply: UpstreamReply) -> bytes:
        """The beginning of a stream up to the first event that says something."""
        first = b""
        now = get_running_loop().time
        end = now() + self._heartbeat
        while len(first) < MAX_FIRST_EVENT:
            events = _EVENT.findall(first)
            if not all(event.startswith(self._dialect.streaming.preamble) for event in events):
                break
            wait = end - now()
            piece = await reply.peek(max(0.0, min(wait, AFTER_PREAMBLE) if events else wait))
            if not piece:
                break
            first += piece
        return first

    def _overflow_of(self, begun: StartedReply) -> Overflow | None:
        """The overflow that a reply tells of; None for one in which anything was said to the client."""
        if begun.is_oversized:
            return None
        status, first, body = begun.reply.status, begun.first, begun.body
        if status >= 400:
            return classify_error(status, body)
        if not (first or body):
            return None
        if first:
            if b"error" not in first and _EXCEEDED not in first:
                return None
            reader = self._dialect.open_stream(tags=NOTHING, strip_usage=False)
            reader.feed(first)
            reader.close()
            if any(map(self._says, reader.reply.choices)):
                return None
        else:
            is_reply = self._dialect.streaming.reply_key in body
            if is_reply and b'"error"' not in body[:200] and _EXCEEDED not in body:
                return None
            _, said = self._dialect.split_reply(body, NOTHING)
            if any(map(self._says, said.choices)) and not said.error:
                return None
        return classify_error(status, first or body)

    def _says(self, choice: ReplyChoice) -> bool:
        """Whether there are words, calls or media in it. Thoughts alone are no answer."""
        parts = self._dialect.read_reply(choice.model_message).parts
        return any(part.text.strip() if isinstance(part, Text) else not isinstance(part, Reasoning) for part in parts)
