"""The transparent call: read, find the session, build the context, call the model, record, answer.

Storage never stands between a client and its model for longer than it must: a request's messages are written while
the model works, the reply is committed before the client sees its end, and no connection to the database is
held meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial

from tersely.dialects.clients import known as clients
from tersely.dialects.clients.command_traces import command_in
from tersely.dialects.dialect import Dialect, Request
from tersely.dialects.dialect import Reply as SaidReply
from tersely.dialects.headers import CREDENTIALS, Headers, downstream_headers, upstream_headers
from tersely.dialects.wire.sse import DataLines
from tersely.domain.errors import NotFound, ShuttingDown, StoreUnavailable, UpstreamUnavailable
from tersely.domain.text.tags import NOTHING
from tersely.service.common.calibrations import Calibrations
from tersely.service.common.call_fields import add_fields
from tersely.service.common.metrics import Metrics
from tersely.service.common.offload import run_in_thread_if_large
from tersely.service.context.context_configs import ContextConfigs
from tersely.service.context.parse_cache import ParseCache
from tersely.service.context.retrieval import Retriever
from tersely.service.money.prices import Prices
from tersely.service.proxy.attempts import EVENT_STREAM, JSON, Attempts, StartedReply
from tersely.service.proxy.calls import Call, ContextKind, ContextLabels, ProxyResponse
from tersely.service.proxy.chat_commands import ChatCommands
from tersely.service.proxy.exchange_keeping import ExchangeKeeper
from tersely.service.proxy.item_references import with_items
from tersely.service.proxy.limited_reader import LimitedReader
from tersely.service.proxy.live_calls import LiveCalls
from tersely.service.proxy.live_sessions import LiveSessions
from tersely.service.proxy.preparing import CallPreparer, PreparedCall
from tersely.service.proxy.recording import OnIds, Recorder
from tersely.service.proxy.server_side_history import ServerSideHistory
from tersely.service.proxy.side_calls import SideCalls
from tersely.service.proxy.stored_responses import restore_client_view
from tersely.service.proxy.stream_end import iter_until_terminal_event, terminal_detector, whole_events
from tersely.service.proxy.tool_rounds import ToolRounds
from tersely.service.summaries.jobs import credentials_of
from tersely.service.summaries.prefetcher import SummaryPrefetcher
from tersely.service.summaries.summarizer import Summarizer
from tersely.service.tools.tools import Tools
from tersely.store.commit.writer import Writer
from tersely.store.db.connection import Database
from tersely.store.history.lookups import Lookups
from tersely.upstream.client import Upstream, UpstreamReply

_log = logging.getLogger(__name__)

# Bytes of new messages whose tokens are counted before the call is sent: that takes a fraction of a millisecond, and
# less than a task of its own.
COUNTED_AT_ONCE = 4_096

_OnReply = Callable[[SaidReply], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyConfig:
    """``max_reply`` and ``memo`` in bytes, ``heartbeat`` in seconds.

    ``key`` is the operator's, as a header: it goes upstream in place of the caller's. ``on_ids`` is told which ids a
    tenant was given, where tenants share the account of that key: then all of them are stored. ``is_default``: the
    host is that of its dialect; else the callers' keys for it go to no other host, and summaries are made beforehand
    only where ``has_summarizer``: the summarizer has a host of its own.
    """

    on_ids: OnIds | None = None
    is_default: bool = True
    has_summarizer: bool = False
    key: tuple[str, str] | None = None
    fail_open: bool = True
    heartbeat: float = 15.0
    max_reply: int = 64 * 1024 * 1024
    memo: int = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What the proxies of all dialects have in common. ``monotonic`` in seconds; ``chat``: where commands are on."""

    database: Database
    writer: Writer
    recipes: ContextConfigs
    calibrations: Calibrations
    metrics: Metrics
    summarizer: Summarizer
    retriever: Retriever
    tools: Tools
    exchanges: ExchangeKeeper
    live: LiveSessions
    prices: Prices
    clock: Callable[[], datetime]
    monotonic: Callable[[], float]
    new_id: Callable[[], str]
    chat: ChatCommands | None = None


class Proxy:
    """Proxied calls of one dialect to one upstream."""

    def __init__(self, dialect: Dialect, upstream: Upstream, shared: Shared, config: ProxyConfig) -> None:
        self._dialect = dialect
        self._upstream = upstream
        self._recipes = shared.recipes
        self._metrics = shared.metrics
        self._chat = shared.chat
        self._config = config
        self._monotonic = shared.monotonic
        self._memo = ParseCache(dialect, config.memo)
        self._forethought = SummaryPrefetcher(shared.summarizer)
        self._database = shared.database
        self._exchanges = shared.exchanges
        self._clock = shared.clock
        lookups = Lookups(shared.database, shared.writer.tails)
        self._preparer = CallPreparer(
            dialect=dialect,
            database=shared.database,
            lookups=lookups,
            recipes=shared.recipes,
            calibrations=shared.calibrations,
            memo=self._memo,
            retriever=shared.retriever,
            clock=shared.clock,
            new_id=shared.new_id,
        )
        self._live = LiveCalls(
            dialect,
            shared.live,
            self._preparer,
            lookups=lookups,
            tails=shared.writer.tails,
            calibrations=shared.calibrations,
            metrics=shared.metrics,
            clock=shared.clock,
            new_id=shared.new_id,
        )
        self._named = ServerSideHistory(
            self._preparer,
            dialect=dialect,
            database=shared.database,
            memo=self._memo,
            retriever=shared.retriever,
            clock=shared.clock,
        )
        self._recorder = Recorder(
            dialect=dialect,
            writer=shared.writer,
            calibrations=shared.calibrations,
            metrics=shared.metrics,
            exchanges=shared.exchanges,
            prices=shared.prices,
            clock=shared.clock,
            new_id=shared.new_id,
            on_ids=config.on_ids,
            on_stored=self._live.remember,
        )
        self._attempts = Attempts(
            dialect,
            self._preparer,
            self._named,
            send=self._send,
            heartbeat=config.heartbeat,
            max_reply=config.max_reply,
        )
        self._rounds = ToolRounds(
            dialect,
            preparer=self._preparer,
            recorder=self._recorder,
            tools=shared.tools,
            metrics=shared.metrics,
            attempts=self._attempts,
            heartbeat=config.heartbeat,
            max_reply=config.max_reply,
        )
        self._summaries = SideCalls(dialect=dialect, database=shared.database, memo=self._memo, clock=shared.clock)

    @property
    def dialect(self) -> Dialect:
        """In which its clients speak."""
        return self._dialect

    # The ways a call can go

    async def converse(self, call: Call) -> ProxyResponse:
        """A model call: stored, and sent with a context of its own.

        Raises `InvalidRequest` for a body that cannot be read, `UpstreamUnavailable`, and `StoreUnavailable` where
        failing open is off, or the request does not carry its history.
        """
        if call.options.bypass:
            return await self.forward(call, "bypass")
        if call.header_map.get("content-encoding", "identity") != "identity":
            return await self.forward(call, "passthrough")
        self._recipes.check(strategy=call.options.strategy, epoch=call.options.epoch)
        if (prepared := await self._prepare_live(call)) is not None:
            return await self._exchange(call, prepared)
        call = await with_items(call, self._dialect, self._database)
        request = await run_in_thread_if_large(len(call.body), self._dialect.read_request, call.body, self._memo.read)
        sent = request = _as_addressed(request, call)
        if self._chat is not None:
            call, request = await run_in_thread_if_large(
                len(call.body), self._chat.without_traces, call, request, self._dialect
            )
        if request.unreadable is not None or not request.messages:
            return await self.forward(call, "passthrough")
        headers = call.header_map
        kind = clients.side_call(
            headers,
            request.messages,
            has_tools=bool(request.tools),
            stops=request.stop,
            max_tokens=request.max_tokens,
        )
        if self._chat is not None and kind is None and (command := command_in(request.messages[-1])):
            beat = self._config.heartbeat
            if not self._config.is_default:
                call = replace(call, key_headers=call.key_headers | CREDENTIALS)
            return await self._chat.answer(call, request, self._dialect, command, sent=sent, heartbeat=beat)
        if kind is not None:
            return await self._side_call(call, request, kind)
        prepare = self._named.prepare if request.references_history else self._preparer.prepare
        try:
            await self._settle(call, request, headers)
            prepared = await prepare(call, request, headers)
        except StoreUnavailable as error:
            if not self._config.fail_open:
                raise
            return await self._forward_without_store(call, request, headers, error)
        if prepared is None:
            return await self.forward(call, "passthrough")
        return await self._exchange(call, prepared)

    async def _prepare_live(self, call: Call) -> PreparedCall | None:
        """The call where it continues a live session; None where the full path has to prepare it."""
        if not self._live.is_on or self._chat is not None:
            return None
        if self._exchanges.may_concern(is_delta=False):
            self._live.count_miss("busy")
            return None
        try:
            return await self._live.prepare(call)
        except StoreUnavailable:
            return None  # the full path says what that means

    async def _settle(self, call: Call, request: Request, headers: dict[str, str]) -> None:
        """Wait until the calls that this one goes on from are in the database. Raises `StoreUnavailable`."""
        is_delta = _is_delta(call, request)
        if self._exchanges.may_concern(is_delta=is_delta):
            arrival, asked = await self._preparer.hash_history(call, request, headers)
            await self._exchanges.settle(call.tenant, asked, arrival, is_delta=is_delta)

    async def _forward_without_store(
        self, call: Call, request: Request, headers: dict[str, str], reason: StoreUnavailable
    ) -> ProxyResponse:
        """Forward a call that carries its whole history unchanged; it is stored when the database is back.

        Raises `StoreUnavailable` for one that does not carry its history.
        """
        if _is_delta(call, request):
            raise StoreUnavailable(
                "the database is away, and this request does not carry its history: send it again later"
            ) from reason
        self._metrics.fail_open.labels("read").inc()
        _log.warning("forwarding without the store: %s", reason)
        now = self._clock()
        arrival, asked = await self._preparer.hash_history(call, request, headers)

        async def spool(said: SaidReply) -> None:
            if said.error or not said.choices:
                return
            try:
                await self._recorder.spool(call, request, arrival, asked, said, 200, now=now)
            except StoreUnavailable as error:
                self._metrics.fail_open.labels("write").inc()
                _log.warning("a call without the store is not stored: %s", error)

        return await self.forward(call, "fail-open", on_reply=spool, streams=request.stream)

    async def forward(
        self,
        call: Call,
        kind: ContextKind = "passthrough",
        *,
        on_reply: _OnReply | None = None,
        streams: bool = False,
        reply_id: str = "",
    ) -> ProxyResponse:
        """Send the client's own bytes and give back the upstream's.

        ``on_reply`` gets the whole reply before the client sees its end; ``streams``: the request asks for a stream.
        ``reply_id``: of a reply that is asked for again; it comes back as it was given.
        """
        labels = ContextLabels(context=kind)
        sent = self._monotonic()
        labels.overhead_ms = (sent - call.received) * 1000
        reply = await self._send(call, call.body)
        if reply_id and not call.options.bypass and (reply.status, reply.content_type) == (200, JSON):
            return await self._recall(call, reply, reply_id, labels, sent)
        if on_reply is not None:
            reply.unpack(self._config.max_reply)
        is_stream = reply.content_type == EVENT_STREAM
        is_data_only = self._takes_data_only(reply)
        headers = downstream_headers(reply.headers) + labels.headers()
        if not is_data_only:
            headers += [(name, value) for name, value in _lower(reply.headers) if name == "content-length"]
        chunks = self._relay(call, reply, sent, on_reply if reply.status == 200 else None, streams=streams)
        return ProxyResponse(
            status=reply.status,
            headers=_unbuffered(headers) if is_stream else headers,
            chunks=_data_lines(chunks) if is_data_only else chunks,
        )

    async def _recall(
        self, call: Call, reply: UpstreamReply, reply_id: str, labels: ContextLabels, sent: float
    ) -> ProxyResponse:
        try:
            reply.unpack(self._config.max_reply)
            body = await reply.read(self._config.max_reply)
        finally:
            reply.close()
        ended = self._monotonic()
        try:
            body = await restore_client_view(
                body, reply_id, tenant=call.tenant, dialect=self._dialect, database=self._database
            )
        except StoreUnavailable as error:
            if not self._config.fail_open:
                raise
            self._metrics.fail_open.labels("read").inc()
            _log.warning("a reply is given as the host has it: %s", error)
        self._observe(call, sent, ended)
        return ProxyResponse(
            status=reply.status, headers=downstream_headers(reply.headers) + labels.headers(), body=body
        )

    async def _relay(
        self, call: Call, reply: UpstreamReply, sent: float, on_reply: _OnReply | None, *, streams: bool
    ) -> AsyncIterator[bytes]:
        """The upstream's bytes, untouched. An upstream that breaks off breaks the client's connection too."""
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
            yield self._error_event(error)
        finally:
            reply.close()
            self._observe(call, sent, self._monotonic())

    async def _relay_whole(self, reply: UpstreamReply, on_reply: _OnReply) -> AsyncIterator[bytes]:
        """A reply at once, untouched; ``on_reply`` comes before its end, unless it is over ``max_reply`` bytes."""
        whole: list[bytes] = []
        held = b""
        size = 0
        async for chunk in reply.chunks():
            size += len(chunk)
            if held:
                yield held
            held = chunk
            if size <= self._config.max_reply:
                whole.append(chunk)
        if size <= self._config.max_reply:
            body = b"".join(whole)
            await on_reply((await run_in_thread_if_large(size, self._dialect.split_reply, body, NOTHING))[1])
        if held:
            yield held

    async def _relay_stream(self, reply: UpstreamReply, on_reply: _OnReply) -> AsyncIterator[bytes]:
        """A stream, untouched. The client may go on as soon as it has the end: ``on_reply`` comes before that."""
        reader = LimitedReader(self._dialect.open_stream(tags=NOTHING, strip_usage=False), self._config.max_reply)
        end = terminal_detector(self._dialect.streaming)
        async for chunk in iter_until_terminal_event(reply, end, self._config.heartbeat):
            if not chunk:
                continue
            reader.feed(chunk)
            if out := end.hold(chunk):
                yield out
        reader.close()
        if not reader.is_cut:
            await on_reply(await reader.reply())
        if end.held:
            yield end.held

    async def _side_call(self, call: Call, request: Request, kind: clients.SideCall) -> ProxyResponse:
        """A call beside the conversation. Of a client's own summary the reply is remembered for a while: the
        client may go on from it.
        """
        self._metrics.side_calls.labels(kind).inc()

        async def remember(said: SaidReply) -> None:
            try:
                await self._summaries.remember(call, request, said)
            except StoreUnavailable as error:
                _log.warning("a summary was not remembered: %s", error)

        on_reply = remember if kind == "summary" else None
        if request.references_history and (whole := await self._named.spell_out(call, request)) is not None:
            return await self.forward(replace(call, body=whole), "built", on_reply=on_reply)
        return await self.forward(call, "passthrough", on_reply=on_reply)

    # The conversation

    async def _exchange(self, call: Call, prepared: PreparedCall) -> ProxyResponse:
        sent = self._monotonic()
        prepared.labels.overhead_ms = (sent - call.received) * 1000
        try:
            reply = await self._send_and_store(call, prepared)
            begun = await self._attempts.settle(call, prepared, reply)
        except UpstreamUnavailable:
            await self._recorder.commit_failure(prepared, None)
            raise
        except BaseException:
            self._recorder.record_failure(prepared, None)
            raise
        self._metrics.first_byte.observe(self._monotonic() - sent)
        return await self._answer(call, begun, sent)

    async def _send_and_store(self, call: Call, prepared: PreparedCall) -> UpstreamReply:
        """Send the context upstream, and store the request's messages while the upstream works."""
        if prepared.live is not None and prepared.arrival.size <= COUNTED_AT_ONCE:
            await self._recorder.store_request(prepared)
            return await self._send(call, prepared.body)
        sending = asyncio.get_running_loop().create_task(self._send(call, prepared.body))
        try:
            await asyncio.sleep(0)
            await self._recorder.store_request(prepared)
            return await sending
        except BaseException:
            await _let_go(sending)
            raise

    async def _answer(self, call: Call, begun: StartedReply, sent: float) -> ProxyResponse:
        prepared, reply, first, body = begun.prepared, begun.reply, begun.first, begun.body
        headers = downstream_headers(reply.headers) + prepared.labels.headers()
        if reply.status >= 400:
            reply.close()
            await self._recorder.commit_failure(prepared, reply.status)
            self._observe(call, sent, self._monotonic())
            return ProxyResponse(status=reply.status, headers=headers, body=body)
        if self._attempts.is_streamed(prepared, reply):
            if prepared.tools:
                chunks = self._observed(call, prepared, self._rounds.stream(call, prepared, reply, first), sent)
            else:
                chunks = self._stream(call, prepared, reply, first, sent)
            if self._takes_data_only(reply):
                chunks = _data_lines(chunks)
            return ProxyResponse(status=reply.status, headers=_unbuffered(headers), chunks=chunks)
        if begun.is_oversized:
            return ProxyResponse(status=reply.status, headers=headers, chunks=self._oversized(call, begun, sent))
        reply.close()
        ended = self._monotonic()
        if prepared.tools:
            body, status = await self._rounds.whole(call, prepared, body, reply.status)
            self._prefetch(call, prepared)
            self._observe(call, sent, self._monotonic())
            return ProxyResponse(status=status, headers=headers, body=body)
        split = partial(self._dialect.split_reply, body, prepared.extract, sent=_sent(call, prepared))
        client_body, said = await run_in_thread_if_large(len(body), split)
        await self._recorder.commit(prepared, said, reply.status, is_whole=True)
        self._prefetch(call, prepared)
        self._observe(call, sent, ended)
        return ProxyResponse(status=reply.status, headers=headers, body=client_body)

    async def _observed(
        self, call: Call, prepared: PreparedCall, chunks: AsyncIterator[bytes], sent: float
    ) -> AsyncIterator[bytes]:
        """The rounds of a reply; what our tools take counts as the upstream's time."""
        try:
            async for chunk in chunks:
                yield chunk
            self._prefetch(call, prepared)
        finally:
            await chunks.aclose()  # type: ignore[attr-defined]
            self._observe(call, sent, self._monotonic())

    async def _stream(
        self, call: Call, prepared: PreparedCall, reply: UpstreamReply, first: bytes, sent: float
    ) -> AsyncIterator[bytes]:
        """The reply as it comes, tags taken out; its end only when it is on disk.

        A reply over ``max_reply`` bytes is stored up to there, and passes through unread from there on.
        """
        reader = self._reader(call, prepared)
        ended = sent
        is_committed = False
        try:
            end = terminal_detector(self._dialect.streaming)
            heartbeat = self._dialect.streaming.heartbeat
            try:
                if first and (out := end.hold(reader.feed(first))):
                    yield out
                async for chunk in iter_until_terminal_event(reply, end, self._config.heartbeat):
                    if not chunk:
                        if heartbeat and end.is_between_events:
                            yield heartbeat
                        continue
                    out = end.hold(reader.feed(chunk))
                    if reader.is_cut and not is_committed:
                        is_committed = True
                        await self._recorder.commit_partial(prepared, await reader.reply(), reply.status)
                    if out:
                        yield out
            except (UpstreamUnavailable, ValueError) as error:
                ended = self._monotonic()
                end.held = b""
                rest = end.hold(whole_events(reader.close()))
                if not is_committed:
                    is_committed = True
                    await self._recorder.commit_partial(prepared, await reader.reply(), reply.status)
                if not end.is_between_events or reply.content_type != EVENT_STREAM:
                    raise  # half an event is out already: the client's connection breaks as the host's did
                yield rest + self._error_event(error)
                return
            ended = self._monotonic()
            rest = reader.close()
            if not is_committed:
                is_committed = True
                said = await reader.reply()
                is_whole = not said.error and (said.is_done or all(choice.finish_reason for choice in said.choices))
                try:
                    await self._recorder.commit(prepared, said, reply.status, is_whole=is_whole)
                except (StoreUnavailable, NotFound) as error:
                    if reply.content_type != EVENT_STREAM:
                        raise  # the client's connection breaks: there is no event for it
                    yield self._recorder.not_stored_event(error)
                    return
                self._prefetch(call, prepared)
            if last := end.held + rest:
                yield last
        finally:
            reply.close()
            if not is_committed:
                # The client went away: what was said until then is kept, and the model is stopped.
                reader.close()
                self._recorder.record_partial(prepared, reader, reply.status)
                ended = self._monotonic()
            self._observe(call, sent, ended)

    def _prefetch(self, call: Call, prepared: PreparedCall) -> None:
        """Ask for the summaries that the session's next epoch will want. The call must be stored."""
        if prepared.built is None or not (self._config.is_default or self._config.has_summarizer):
            return
        self._forethought.prefetch(
            call.tenant,
            prepared.found.session_id,
            prepared.found.session,
            prepared.recipe.strategy,
            prepared.history,
            prepared.built.context.epoch if prepared.built.starts_epoch else None,
            dialect=self._dialect.name,
            model=prepared.request.model,
            credentials=credentials_of(call.headers, drop=call.key_headers),
        )

    def _takes_data_only(self, reply: UpstreamReply) -> bool:
        """Return whether the client gets the ``data`` lines of the reply's stream alone."""
        if not self._dialect.streaming.is_data_only or reply.content_type != EVENT_STREAM:
            return False
        reply.unpack(self._config.max_reply)
        return all(name.lower() != "content-encoding" or value == "identity" for name, value in reply.headers)

    async def _oversized(self, call: Call, begun: StartedReply, sent: float) -> AsyncIterator[bytes]:
        """A whole reply over ``max_reply`` bytes passes through; its beginning is stored unread."""
        said = SaidReply(unread=(begun.body,))
        try:
            await self._recorder.commit_partial(begun.prepared, said, begun.reply.status)
            yield begun.body
            async for chunk in begun.reply.chunks():
                if chunk:
                    yield chunk
        finally:
            begun.reply.close()
            self._observe(call, sent, self._monotonic())

    def _reader(self, call: Call, prepared: PreparedCall) -> LimitedReader:
        stream = self._dialect.open_stream(
            tags=prepared.extract, strip_usage=prepared.strip_usage, sent=_sent(call, prepared)
        )
        return LimitedReader(stream, self._config.max_reply)

    def _error_event(self, error: Exception) -> bytes:
        add_fields(outcome="interrupted")
        told = error if isinstance(error, UpstreamUnavailable) else UpstreamUnavailable(str(error))
        return self._dialect.error_event(self._dialect.error_body(told.detail, type=told.kind, code=told.code))

    def _observe(self, call: Call, sent: float, ended: float) -> None:
        now = self._monotonic()
        add_fields(upstream_ms=round(max(0.0, ended - sent) * 1000, 2))
        self._metrics.upstream.observe(max(0.0, ended - sent))
        self._metrics.overhead.observe(max(0.0, (sent - call.received) + (now - ended)))

    # Towards the upstream

    async def _send(self, call: Call, body: bytes) -> UpstreamReply:
        headers = upstream_headers(call.headers, key=self._config.key, drop=call.key_headers)
        return await self._upstream.send(call.method, call.path, headers, body)


def _is_delta(call: Call, request: Request) -> bool:
    """Whether a request may carry only what is new: its history would have to be read from the store."""
    if request.references_history:
        return True
    return call.options.session_id is not None and all(message.role != "assistant" for message in request.messages)


def _as_addressed(request: Request, call: Call) -> Request:
    """The request with what its address says of it, where that is not said in the body."""
    if not call.model and not call.streams:
        return request
    return replace(request, model=call.model or request.model, stream=call.streams or request.stream)


def _sent(call: Call, prepared: PreparedCall) -> bytes:
    """The client's request where another one went upstream: some replies repeat theirs."""
    return b"" if prepared.body is call.body else call.body


async def _data_lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The ``data`` lines of a stream alone."""
    lines = DataLines()
    try:
        async for chunk in chunks:
            if out := lines.feed(chunk):
                yield out
        if out := lines.close():
            yield out
    finally:
        await chunks.aclose()  # type: ignore[attr-defined]


async def _let_go(sending: asyncio.Task[UpstreamReply]) -> None:
    """Stop a request that nobody waits for any more."""
    sending.cancel()
    try:
        (await sending).close()
    except (asyncio.CancelledError, UpstreamUnavailable):
        pass


def _lower(headers: Headers) -> Headers:
    return [(name.lower(), value) for name, value in headers]


def _unbuffered(headers: Headers) -> Headers:
    """Headers that keep proxies in between from collecting a stream."""
    names = {name for name, _ in headers}
    added = [("x-accel-buffering", "no"), ("cache-control", "no-cache")]
    return headers + [(name, value) for name, value in added if name not in names]
