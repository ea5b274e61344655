"""Calls that go through unchanged: the client's bytes up, the host's bytes down."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from functools import partial
from typing import Any

import msgspec

from tersely.dialects.dialect import NO_REPLY, UNCHANGED, Dialect, ErrorDescription, Reply
from tersely.dialects.headers import Headers, downstream_headers, is_compressed
from tersely.dialects.metering import MeteredRequest, ReplyMeter, measure_requests
from tersely.dialects.wire.members import model_in
from tersely.dialects.wire.sse import DataLines
from tersely.domain.errors import ShuttingDown, StoreUnavailable, UpstreamUnavailable
from tersely.domain.history.history import BROKE_OFF, CLIENT_LEFT
from tersely.service.common.call_fields import add_fields
from tersely.service.common.metrics import Metrics
from tersely.service.common.offload import run_in_thread_if_large
from tersely.service.limits.admission import charge, is_charged
from tersely.service.money.charges import (
    Charge,
    charge_of,
    charge_of_metered,
    credible_usage,
    estimate_reply,
    estimate_request,
    is_error,
    is_reported,
)
from tersely.service.money.prices import ModelPrice, Prices
from tersely.service.proxy.call.call import Call, ContextKind, ContextLabels, ProxyResponse
from tersely.service.proxy.call.call_timer import CallTimer
from tersely.service.proxy.sending.sender import EVENT_STREAM, JSON, Sender
from tersely.service.proxy.sending.stored_responses import restore_client_view
from tersely.service.proxy.streams.client_stream import ClientStream, split_into_parts
from tersely.service.proxy.streams.host_chunks import iter_until_terminal_event
from tersely.store.db.connection import Database
from tersely.upstream.client import UpstreamReply

_log = logging.getLogger(__name__)


class ForwardedReply(msgspec.Struct, frozen=True, kw_only=True):
    """A reply as the client got it, as far as it could be read. ``cut_off``: how it ended if it is not whole.

    ``unparsed`` are bytes that have come besides: the beginning of a reply that is not streamed.
    """

    reply: Reply
    status: int
    cut_off: str | None = None
    unparsed: int = 0


OnReply = Callable[[ForwardedReply], Coroutine[Any, Any, None]]


class Forwarder:
    """Forwards calls of one dialect."""

    def __init__(
        self,
        dialect: Dialect,
        sender: Sender,
        timer: CallTimer,
        *,
        database: Database,
        metrics: Metrics,
        prices: Prices,
        fail_open: bool,
        heartbeat: float,
        max_reply: int,
    ) -> None:
        """``heartbeat`` in seconds, ``max_reply`` in bytes."""
        self._dialect = dialect
        self._sender = sender
        self._timer = timer
        self._database = database
        self._metrics = metrics
        self._prices = prices
        self._fail_open = fail_open
        self._heartbeat = heartbeat
        self._max_reply = max_reply
        self._tasks: set[asyncio.Task[None]] = set()

    async def forward(
        self,
        call: Call,
        kind: ContextKind = "passthrough",
        *,
        on_reply: OnReply | None = None,
        streams: bool = False,
        reply_id: str = "",
        is_conversation: bool = True,
    ) -> ProxyResponse:
        """Send the client's own bytes and return the host's. Raises `UpstreamUnavailable`, and `Busy` for a body that
        takes too much memory to be counted.

        ``on_reply`` gets a reply that is no error before the client sees its end, or what was read of it if it breaks
        off. ``streams``: the request asks for a stream.
        ``reply_id`` is set if the client asks for an earlier reply again: the client gets that as it saw it before.
        ``is_conversation``: request and reply have the form of the dialect.
        """
        if is_charged() and call.reserve is not None:
            await call.reserve()  # the body is read when the call is counted
        sent_at = self._timer.now()
        labels = ContextLabels(context=kind, overhead_ms=self._timer.overhead_ms(call, sent_at))
        meters = is_charged() and not is_conversation
        count = partial(self._count, call) if is_charged() and is_conversation else None
        try:
            reply = await self._sender.send(call, call.body)
        except asyncio.CancelledError:
            # The client is gone, and the host was at work.
            if count is not None:
                self._start(count(ForwardedReply(reply=NO_REPLY, status=200, cut_off=CLIENT_LEFT)))
            elif meters:
                self._start(self._count_metered(call, ReplyMeter("", self._max_reply), is_whole=False))
            raise
        if reply_id and not call.options.bypass and (reply.status, reply.content_type) == (200, JSON):
            return await self._restore(call, reply, reply_id, labels, sent_at)
        on_reply = _each(count, on_reply)
        meters = meters and reply.status < 400
        if on_reply is not None or meters:
            reply.unpack(self._max_reply)
        is_data_only = takes_data_only(self._dialect, reply, self._max_reply)
        headers = downstream_headers(reply.headers) + labels.headers()
        if not is_data_only:
            headers += [(name, value) for name, value in _lower(reply.headers) if name == "content-length"]
        chunks = self._relay(call, reply, sent_at, on_reply if reply.status < 400 else None, streams=streams)
        if meters:
            chunks = self._metered(call, ReplyMeter(reply.content_type, self._max_reply), chunks)
        return ProxyResponse(
            status=reply.status,
            headers=unbuffered(headers) if reply.content_type == EVENT_STREAM else headers,
            chunks=data_lines(chunks) if is_data_only else chunks,
        )

    async def _restore(
        self, call: Call, reply: UpstreamReply, reply_id: str, labels: ContextLabels, sent_at: float
    ) -> ProxyResponse:
        """Return a stored reply as the client saw it."""
        try:
            reply.unpack(self._max_reply)
            body = await reply.read(self._max_reply)
        finally:
            reply.close()
        ended_at = self._timer.now()
        try:
            body = await restore_client_view(
                body, reply_id, tenant=call.tenant, dialect=self._dialect, database=self._database
            )
        except StoreUnavailable as error:
            if not self._fail_open:
                raise
            self._metrics.fail_open.labels("read").inc()
            _log.warning("a stored reply is returned without the client's own fields: %s", error)
        self._timer.observe(call, sent_at, ended_at)
        return ProxyResponse(
            status=reply.status, headers=downstream_headers(reply.headers) + labels.headers(), body=body
        )

    async def _count(self, call: Call, forwarded: ForwardedReply) -> None:
        """Count a reply towards the tenant's limits, also if its client leaves meanwhile."""
        reply = forwarded.reply
        size = len(call.body) + sum(map(len, reply.unread)) + sum(len(each.model_message) for each in reply.choices)
        await asyncio.shield(self._start(_find_and_count(size, partial(self._charge, call, forwarded))))

    def _charge(self, call: Call, forwarded: ForwardedReply) -> Charge:
        """Return the use of a call. O(size of request and reply)."""
        dialect, reply = self._dialect, forwarded.reply
        usage = credible_usage(dialect.read_usage(reply.usage))
        requested = call.model or model_in(call.body, must_be_json=False)
        price = self._prices.of_call(requested, reply.model, dialect.name)
        if is_reported(usage, is_whole=forwarded.cut_off is None) or is_error(reply):
            return charge_of(usage, price)
        sent = estimate_request(dialect, call.body, is_compressed=call.is_compressed) if not usage.input else 0
        return charge_of(usage, price, sent=sent, answered=estimate_reply(dialect, reply, forwarded.unparsed))

    async def _metered(
        self, call: Call, meter: ReplyMeter, chunks: AsyncGenerator[bytes, None]
    ) -> AsyncGenerator[bytes, None]:
        """Yield the reply to a call that is no conversation, and count it."""
        try:
            async for chunk in chunks:
                meter.feed(chunk)
                yield chunk
        except BaseException:
            self._start(self._count_metered(call, meter, is_whole=False))
            raise
        finally:
            await chunks.aclose()
        await asyncio.shield(self._start(self._count_metered(call, meter, is_whole=True)))

    async def _count_metered(self, call: Call, meter: ReplyMeter, *, is_whole: bool) -> None:
        """Count a call that is no conversation towards the tenant's limits."""

        def price_of(requested: str) -> ModelPrice | None:
            return self._prices.of_call(call.model or requested, measured.model, self._dialect.name)

        def find_charge() -> Charge:
            kind = call.header_map.get("content-type", "")
            unread = MeteredRequest("", len(call.body))
            requests = [unread] if call.is_compressed else measure_requests(call.body, kind)
            return charge_of_metered(measured, requests, price_of, is_whole=is_whole)

        measured = await run_in_thread_if_large(meter.size, meter.close)
        await _find_and_count(len(call.body), find_charge)

    async def _relay(
        self, call: Call, reply: UpstreamReply, sent_at: float, on_reply: OnReply | None, *, streams: bool
    ) -> AsyncGenerator[bytes, None]:
        """Yield the host's bytes. If the host breaks off, the client's connection breaks too."""
        if on_reply is None:
            chunks = reply.chunks()
        elif reply.content_type == EVENT_STREAM or (streams and self._dialect.streaming.has_arrays):
            chunks = self._relay_stream(reply, on_reply)
        else:
            chunks = self._relay_whole(reply, on_reply)
        tail = b"\n\n"
        try:
            async for chunk in chunks:
                if chunk:
                    tail = (tail + chunk)[-4:] if len(chunk) < 4 else chunk[-4:]
                    yield chunk
        except ShuttingDown as error:
            if reply.content_type != EVENT_STREAM or not tail.endswith((b"\n\n", b"\r\n\r\n")):
                raise
            add_fields(outcome="interrupted")
            yield self._dialect.error_event(
                self._dialect.error_body(ErrorDescription(message=error.detail, type=error.kind, code=error.code))
            )
        finally:
            reply.close()
            self._timer.observe(call, sent_at, self._timer.now())

    async def _relay_whole(self, reply: UpstreamReply, on_reply: OnReply) -> AsyncGenerator[bytes, None]:
        """Yield a reply that is not streamed. ``on_reply`` is called before its end, at the size limit, or without its
        bytes where it breaks off.
        """
        whole: list[bytes] = []
        held = b""
        size = 0
        try:
            async for chunk in reply.chunks():
                was_read, size = size <= self._max_reply, size + len(chunk)
                if held:
                    yield held
                held = chunk
                if was_read:
                    whole.append(chunk)
                    if size > self._max_reply:
                        await on_reply(ForwardedReply(reply=Reply(unread=(b"".join(whole),)), status=reply.status))
                        whole.clear()
        except BaseException as error:
            if size <= self._max_reply:
                cut_off = BROKE_OFF if isinstance(error, UpstreamUnavailable) else CLIENT_LEFT
                self._start(
                    on_reply(ForwardedReply(reply=NO_REPLY, status=reply.status, cut_off=cut_off, unparsed=size))
                )
            raise
        if size <= self._max_reply:
            _, found = await run_in_thread_if_large(size, self._dialect.split_reply, b"".join(whole), UNCHANGED)
            await on_reply(ForwardedReply(reply=found, status=reply.status))
        if held:
            yield held

    async def _relay_stream(self, reply: UpstreamReply, on_reply: OnReply) -> AsyncGenerator[bytes, None]:
        """Yield a stream. ``on_reply`` is called before its end, at the size limit, or where the stream breaks off: a
        client may go on as soon as it has the end.
        """
        stream = ClientStream(self._dialect, self._max_reply, UNCHANGED)
        is_reported = False

        async def report(cut_off: str | None) -> None:
            nonlocal is_reported
            if not is_reported:
                is_reported = True
                found = await stream.reply()
                cut_off = cut_off or (None if found.is_complete else BROKE_OFF)
                await on_reply(ForwardedReply(reply=found, status=reply.status, cut_off=cut_off))

        try:
            async for chunk in iter_until_terminal_event(reply, stream.end, self._heartbeat):
                start = 0
                while not start or start < len(chunk):
                    out, start = await stream.feed_part(chunk, start)
                    if out:
                        yield out
                if stream.is_cut:
                    await report(BROKE_OFF)
            rest = await stream.end_round()
            await report(None)
        except UpstreamUnavailable:
            await report(BROKE_OFF)
            raise
        except (GeneratorExit, asyncio.CancelledError):
            self._start(report(CLIENT_LEFT))
            raise
        if rest := rest + stream.close():
            yield rest

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _find_and_count(size: int, find_charge: Callable[[], Charge]) -> None:
    """Find the charge of a call, and count it towards the tenant's limits. ``size``: the bytes that ``find_charge``
    reads; if they are many, it runs in a thread.
    """
    found = await run_in_thread_if_large(size, find_charge)
    if found.tokens:
        charge(found.tokens, found.money)


def _each(first: OnReply | None, second: OnReply | None) -> OnReply | None:
    """Return what calls both, in this order."""
    if first is None or second is None:
        return first or second

    async def call_both(forwarded: ForwardedReply) -> None:
        await first(forwarded)
        await second(forwarded)

    return call_both


def takes_data_only(dialect: Dialect, reply: UpstreamReply, max_reply: int) -> bool:
    """Return whether the client gets only the ``data`` lines of a stream. Unpacks such a reply, up to ``max_reply``
    bytes.
    """
    if not dialect.streaming.is_data_only or reply.content_type != EVENT_STREAM:
        return False
    reply.unpack(max_reply)
    return not is_compressed(_lower(reply.headers))


async def data_lines(chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Yield the ``data`` lines of a stream."""
    lines = DataLines()
    try:
        async for chunk in chunks:
            async for part in split_into_parts(chunk):
                if out := lines.feed(part):
                    yield out
        if out := lines.close():
            yield out
    finally:
        await chunks.aclose()


def unbuffered(headers: Headers) -> Headers:
    """Return headers that keep intermediate proxies from buffering a stream."""
    names = {name for name, _ in headers}
    added = [("x-accel-buffering", "no"), ("cache-control", "no-cache")]
    return headers + [(name, value) for name, value in added if name not in names]


def _lower(headers: Headers) -> Headers:
    return [(name.lower(), value) for name, value in headers]
