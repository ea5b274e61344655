"""The pipeline of a proxied call. Read `Proxy.converse` and what it calls, from top to bottom:

1. history: read the request, and hash its messages (`tersely.service.proxy.preparing.session_matching`);
2. session: find whose history it is, and load it (there, and `tersely.service.proxy.preparing.server_side_history`);
3. context: decide what the model sees (`tersely.service.proxy.preparing.context_building`);
4. request: write the body for the model host (`tersely.service.proxy.preparing.request_building`);
5. send: send it, until the host accepts it (`tersely.service.proxy.sending.sender`);
6. reply: relay the reply in rounds, and record it (`tersely.service.proxy.replies.reply_rounds`).

The steps do not know each other: each takes the value of the step before (`tersely.service.proxy.preparing.stages`) and
returns a larger one. A call that continues a live session takes steps 1 to 4 at once, or steps 1 and 2 where an epoch
starts (`tersely.service.proxy.live_calls.live_calls`).

The database never makes a client wait for its model longer than necessary: the request is stored while the model works,
the reply before the client sees its end, and no connection to the database is held meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from datetime import datetime

import msgspec
from msgspec import structs

from tersely.dialects.clients import known as clients
from tersely.dialects.clients.command_traces import command_in
from tersely.dialects.dialect import Dialect, Request
from tersely.dialects.headers import CREDENTIALS, downstream_headers
from tersely.dialects.wire.lengths import check_lengths, may_be_too_long
from tersely.domain.errors import InvalidRequest, StoreUnavailable, UpstreamUnavailable
from tersely.domain.history.history import EpochInputs
from tersely.domain.messages import searchable_text
from tersely.service.common import tokens
from tersely.service.common.calibrations import Calibrations
from tersely.service.common.call_board import note_side_call
from tersely.service.common.metrics import Metrics
from tersely.service.common.offload import run_in_thread_if_large
from tersely.service.common.tracing import active_trace, step
from tersely.service.context.context_configs import ContextConfigs
from tersely.service.context.history import History
from tersely.service.context.retrieval import Retriever
from tersely.service.context.sent_contexts import KnownSessions
from tersely.service.money.prices import Prices
from tersely.service.proxy.call.call import Call, ContextKind, ProxyResponse
from tersely.service.proxy.call.call_config import CallConfig
from tersely.service.proxy.call.call_timer import CallTimer
from tersely.service.proxy.call.item_references import with_items
from tersely.service.proxy.chat_commands import ChatCommands
from tersely.service.proxy.durability.durable_writer import DurableWriter
from tersely.service.proxy.live_calls.live_call import LiveCall
from tersely.service.proxy.live_calls.live_calls import LiveCalls
from tersely.service.proxy.live_calls.preparing import whole_snapshot
from tersely.service.proxy.live_sessions.live_session import LiveSessions
from tersely.service.proxy.preparing.context_building import ContextBuilder
from tersely.service.proxy.preparing.request_building import RequestBuilder
from tersely.service.proxy.preparing.server_side_history import ServerSideHistory
from tersely.service.proxy.preparing.session_matching import SessionMatcher
from tersely.service.proxy.preparing.stages import IncomingCall, MatchedCall, PreparedCall
from tersely.service.proxy.recording.recorder import Recorder
from tersely.service.proxy.recording.reply_records import OnIds
from tersely.service.proxy.recording.round_transcript import RoundTranscript
from tersely.service.proxy.replies.reply_rounds import RoundSteps, StreamRelay, relay_oversized, relay_whole
from tersely.service.proxy.replies.tool_calls import ToolCalls
from tersely.service.proxy.sending.forwarding import ForwardedReply, Forwarder, data_lines, takes_data_only, unbuffered
from tersely.service.proxy.sending.sender import Sender, TracedReply
from tersely.service.proxy.sending.sent_call import SentCall, StartedReply
from tersely.service.proxy.shadowing import shadow_job
from tersely.service.proxy.side_calls import SideCalls
from tersely.service.shadows.shadows import Shadows
from tersely.service.summaries.jobs import credentials_of
from tersely.service.summaries.prefetcher import SummaryPrefetcher
from tersely.service.summaries.summarizer import Summarizer
from tersely.service.tools.tools import Tools
from tersely.store.commit.records import ReplyWrite, StoredReply
from tersely.store.commit.writer import Writer
from tersely.store.db.connection import Database
from tersely.store.history.lookups import Lookups
from tersely.strategies.prefetch import prefetches_summaries
from tersely.upstream.client import PendingReply, Upstream, UpstreamReply

_log = logging.getLogger(__name__)

# Characters of an error that say why a request cannot be read: it may quote the request.
MAX_REASON = 300


class ProxyConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one proxy. ``max_reply`` and ``known_contexts`` (the memory for what is stored of sessions'
    contexts) in bytes, ``heartbeat`` in seconds.

    ``key`` is the operator's, as a header: it replaces the caller's key. ``on_ids`` is called with the ids that a
    tenant was given, where tenants share the account of that key; then all of them are stored. ``is_default``: the host
    is the default one of its dialect. ``host`` is the name of any other, to which the summaries of its sessions go too:
    callers' keys for one host go to no other. Without a name no summaries are prefetched.
    """

    on_ids: OnIds | None = None
    is_default: bool = True
    host: str = ""
    key: tuple[str, str] | None = None
    fail_open: bool = True
    heartbeat: float = 15.0
    max_reply: int = 64 * 1024 * 1024
    known_contexts: int = 32 * 1024 * 1024


class SharedServices(msgspec.Struct, frozen=True, kw_only=True):
    """Services shared by the proxies of all dialects.

    ``monotonic`` in seconds; ``chat`` is set if chat commands are on, ``shadows`` if calls may be judged for a strategy
    that is tried out.
    """

    database: Database
    writer: Writer
    configs: ContextConfigs
    calibrations: Calibrations
    metrics: Metrics
    summarizer: Summarizer
    retriever: Retriever
    tools: Tools
    exchanges: DurableWriter
    live: LiveSessions
    prices: Prices
    clock: Callable[[], datetime]
    monotonic: Callable[[], float]
    new_id: Callable[[], str]
    chat: ChatCommands | None = None
    shadows: Shadows | None = None


class Proxy:
    """Proxied calls of one dialect to one upstream."""

    def __init__(self, dialect: Dialect, upstream: Upstream, shared: SharedServices, config: ProxyConfig) -> None:
        self._dialect = dialect
        self._config = config
        self._shared = shared
        self._metrics = shared.metrics
        self._chat = shared.chat
        self._exchanges = shared.exchanges
        self._prefetcher = SummaryPrefetcher(shared.summarizer)
        self._timer = CallTimer(shared.metrics, shared.monotonic)
        lookups = Lookups(shared.database, shared.writer.tails)
        fixed_tokens = tokens.FixedTokens()
        call_config = CallConfig(
            dialect, configs=shared.configs, calibrations=shared.calibrations, fixed_tokens=fixed_tokens
        )
        self._sessions = SessionMatcher(
            dialect,
            call_config,
            database=shared.database,
            lookups=lookups,
            retriever=shared.retriever,
            clock=shared.clock,
            new_id=shared.new_id,
        )
        self._server_side = ServerSideHistory(
            dialect,
            call_config,
            database=shared.database,
            retriever=shared.retriever,
        )
        self._live = self._build_live_calls(lookups)
        self._contexts = ContextBuilder(dialect, call_config, shared.database)
        self._requests = RequestBuilder(dialect, fixed_tokens=fixed_tokens, new_id=shared.new_id)
        self._sender = Sender(
            dialect,
            upstream,
            key=config.key,
            heartbeat=config.heartbeat,
            max_reply=config.max_reply,
        )
        self._recorder = self._build_recorder()
        self._round_steps = RoundSteps(
            dialect=dialect,
            recorder=self._recorder,
            tool_calls=ToolCalls(dialect, shared.tools, shared.metrics),
            timer=self._timer,
            next_round=self._send_next_round,
            heartbeat=config.heartbeat,
            max_reply=config.max_reply,
        )
        self._forwarder = self._build_forwarder()
        self._side_calls = SideCalls(dialect=dialect, database=shared.database, clock=shared.clock)

    def _build_live_calls(self, lookups: Lookups) -> LiveCalls:
        shared = self._shared
        return LiveCalls(
            self._dialect,
            shared.live,
            self._sessions,
            database=shared.database,
            lookups=lookups,
            exchanges=shared.exchanges,
            tails=shared.writer.tails,
            calibrations=shared.calibrations,
            metrics=shared.metrics,
            clock=shared.clock,
            new_id=shared.new_id,
        )

    def _build_recorder(self) -> Recorder:
        shared = self._shared
        return Recorder(
            dialect=self._dialect,
            writer=shared.writer,
            calibrations=shared.calibrations,
            metrics=shared.metrics,
            exchanges=shared.exchanges,
            prices=shared.prices,
            clock=shared.clock,
            new_id=shared.new_id,
            on_ids=self._config.on_ids,
            known=KnownSessions(self._config.known_contexts),
            on_stored=self._on_stored,
            live=self._live,
        )

    def _build_forwarder(self) -> Forwarder:
        return Forwarder(
            self._dialect,
            self._sender,
            self._timer,
            database=self._shared.database,
            metrics=self._shared.metrics,
            prices=self._shared.prices,
            fail_open=self._config.fail_open,
            heartbeat=self._config.heartbeat,
            max_reply=self._config.max_reply,
        )

    @property
    def dialect(self) -> Dialect:
        """The dialect of its clients."""
        return self._dialect

    async def forward(self, call: Call, *, reply_id: str = "") -> ProxyResponse:
        """Forward a call that is no conversation. ``reply_id`` is set if the client asks for an earlier reply again."""
        return await self._forwarder.forward(call, reply_id=reply_id, is_conversation=False)

    async def converse(self, call: Call) -> ProxyResponse:
        """Relay a model call with a context of its own, and store it.

        Raises `InvalidRequest` for a body that cannot be read, and for messages that cannot be read where the call
        names its session, `TooLarge` for a list with too many elements, `Busy` for a body that takes too much memory,
        `UpstreamUnavailable`, and `StoreUnavailable` if failing open is off, or if the request does not carry its
        history.
        """
        if self._config.host:
            call = structs.replace(call, host=self._config.host)
        if call.options.bypass:
            return await self._forwarder.forward(call, "bypass")
        if call.is_compressed:
            return await self._forward_unread(call, "its body is compressed: send it without Content-Encoding")
        options = call.options
        self._shared.configs.check(strategy=options.strategy, epoch=options.epoch, shadow=options.shadow)
        live = await self._prepare_live(call)
        if isinstance(live, LiveCall):
            return await self._relay(await self._send_live(live))
        if live is not None and (prepared := await self._start_epoch(live)) is not None:
            return await self._relay(await self._send_and_store(prepared))
        if call.reserve is not None:
            await call.reserve()
        if call.max_messages is not None and may_be_too_long(call.body, call.max_messages):
            await run_in_thread_if_large(len(call.body), check_lengths, call.body, call.max_messages)
        incoming = await self._read(call)
        if not isinstance(incoming, IncomingCall):
            return incoming
        try:
            prepared = await self._prepare(incoming)
        except StoreUnavailable as error:
            return await self._forward_without_store(incoming, error)
        if prepared is None:
            return await self._forwarder.forward(incoming.call)
        return await self._relay(await self._send_and_store(prepared))

    # 1. History

    async def _read(self, call: Call) -> IncomingCall | ProxyResponse:
        """Read a request and hash its messages. Return the response to a call that is not part of a conversation: a
        chat command, a side call, or a request that cannot be understood.
        """
        call = await with_items(call, self._dialect, self._shared.database)
        request, history = await run_in_thread_if_large(len(call.body), self._sessions.read_whole, call)
        as_sent = request
        if self._chat is not None:
            call, request = await run_in_thread_if_large(
                len(call.body), self._chat.without_traces, call, request, self._dialect
            )
        if request.unreadable is not None or not request.messages:
            return await self._forward_unread(call, request.unreadable or "it has no messages")
        side_call = clients.side_call(
            call.header_map,
            request.messages,
            has_tools=bool(request.tools),
            stops=request.stop,
            max_tokens=request.max_tokens,
        )
        if side_call is not None:
            return await self._forward_side_call(call, request, side_call)
        if self._chat is not None and (command := command_in(request.messages[-1])):
            if not (call.host or self._config.is_default):
                call = structs.replace(call, key_headers=call.key_headers | CREDENTIALS)
            return await self._chat.answer(
                call, request, self._dialect, command, sent=as_sent, heartbeat=self._config.heartbeat
            )
        if request.messages is not as_sent.messages:
            return await self._sessions.read(call, request)
        return self._sessions.incoming(call, request, history)

    # 2. Session, 3. context, 4. request

    async def _prepare(self, incoming: IncomingCall) -> PreparedCall | None:
        """Find the session, build the context, and write the request; None for a call that is forwarded unchanged.

        Raises `StoreUnavailable`.
        """
        await self._wait_for_spooled(incoming)
        with step("recognition"):
            matched = await self._match(incoming)
        if matched is None:
            return None
        with step("context"):
            context = await self._contexts.build(matched)
            return await self._requests.build_request(matched, context)

    async def _match(self, incoming: IncomingCall) -> MatchedCall | None:
        if not incoming.request.references_history:
            return await self._sessions.match(incoming)
        matched = await self._server_side.match(incoming)
        if matched is None or isinstance(matched, MatchedCall):
            return matched
        # The request continues the history of another session: as if its messages had been sent.
        request = structs.replace(incoming.request, messages=matched.messages)
        return await self._sessions.match(await self._sessions.read(incoming.call, request))

    async def _wait_for_spooled(self, incoming: IncomingCall) -> None:
        """Wait until the calls that this one continues are in the database. Raises `StoreUnavailable`."""
        is_delta = _may_be_delta(incoming)
        if self._exchanges.may_wait(is_delta=is_delta):
            await self._exchanges.wait_for_earlier(
                incoming.call.tenant, incoming.hints, incoming.history, is_delta=is_delta
            )

    async def _prepare_live(self, call: Call) -> LiveCall | MatchedCall | None:
        """Prepare a call that continues a live session, or match one that starts an epoch there; None for every other
        call.
        """
        if not self._live.is_on or self._chat is not None:
            return None
        if self._exchanges.may_wait(is_delta=False):
            self._live.count_miss("busy")
            return None
        return await self._live.prepare(call)

    async def _start_epoch(self, matched: MatchedCall) -> PreparedCall | None:
        """Plan the epoch of a call that continues a live session, and write its request; None where that takes messages
        which the live session does not hold: where no context fits, or where all is shown as the client sent it.
        """
        try:
            with step("context"):
                context = await self._contexts.build(matched)
                if context.built is None or context.built.context.is_whole:
                    return None
                return await self._requests.build_request(matched, context)
        except StoreUnavailable:
            return None  # the full path decides what happens without the database

    # 5. Send

    async def _send_and_store(self, prepared: PreparedCall) -> StartedReply:
        """Send the request, and store it while the model works. Raises `UpstreamUnavailable`."""
        call = prepared.call
        if (trace := active_trace()) is not None:
            trace.describe(model=prepared.request.model, session=prepared.match.session_id)
        sent_at = self._timer.now()
        labels = structs.replace(prepared.labels, overhead_ms=self._timer.overhead_ms(call, sent_at))
        prepared = structs.replace(prepared, labels=labels)
        sending: asyncio.Task[UpstreamReply] | None = None
        try:
            sending = asyncio.get_running_loop().create_task(self._sender.send(call, prepared.body))
            await asyncio.sleep(0)
            prepared = await self._recorder.store_request(prepared)
            reply = await sending
            started = await self._send_until_accepted(prepared, reply, sent_at)
        except UpstreamUnavailable:
            await self._recorder.commit_failure(prepared, None)
            raise
        except BaseException:
            if sending is not None:
                await _let_go(sending)
            self._recorder.record_failure(prepared, None)
            raise
        self._timer.observe_first_byte(sent_at)
        return started

    async def _send_live(self, live: LiveCall) -> StartedReply:
        """Send the request of a live call, and work out what is stored of it while the model works.

        Raises `UpstreamUnavailable`.
        """
        sent_at = self._timer.now()
        live.labels = structs.replace(live.labels, overhead_ms=self._timer.overhead_ms(live.call, sent_at))
        pending: PendingReply | TracedReply | None = None
        if (trace := active_trace()) is not None:
            trace.describe(model=live.request.model, session=live.live.session.id)
        try:
            pending = self._sender.begin(live.call, live.pieces)
            self._recorder.describe_live(live)
            reply = await pending.reply()
            started = await self._send_until_accepted(live, reply, sent_at)
        except UpstreamUnavailable:
            await self._recorder.commit_failure(live, None)
            raise
        except BaseException:
            if pending is not None:
                pending.abandon()
            self._recorder.record_failure(live, None)
            raise
        self._timer.observe_first_byte(sent_at)
        return started

    async def _send_until_accepted(self, prepared: SentCall, reply: UpstreamReply, sent_at: float) -> StartedReply:
        """Send smaller requests while the host refuses them as too long. Raises `UpstreamUnavailable`; then every reply
        is closed.
        """
        while True:
            try:
                started = await self._sender.start(prepared, reply, sent_at)
                other = await self._other_request(started)
            except BaseException:
                reply.close()
                raise
            if other is None:
                return started
            reply.close()
            prepared, reply = other, await self._sender.send(other.call, other.body)

    async def _other_request(self, started: StartedReply) -> PreparedCall | None:
        """Return the request to send instead; None if the reply stands."""
        is_live = isinstance(started.prepared, LiveCall)
        if is_live and self._sender.is_surely_accepted(started):
            return None
        overflow = await self._sender.overflow_of(started)
        if is_live and overflow is None:
            return None
        prepared = self._recorder.full(started.prepared)
        if prepared.is_at_host:
            if overflow is None and not self._sender.lacks_history(started):
                return None
            local = await self._server_side.rebuild_locally(prepared)
            return None if local is None else await self._rebuild(local)
        if overflow is None:
            return None
        before = prepared.built.context.report.tokens_after if prepared.built else None
        reduced = await self._contexts.reduce(await _with_whole_history(prepared), overflow)
        smaller = None if reduced is None else await self._rebuild(reduced)
        if smaller is None or smaller.built is None:
            return None
        return smaller if before is None or smaller.built.context.report.tokens_after < before else None

    async def _rebuild(self, prepared: PreparedCall) -> PreparedCall | None:
        return await self._requests.rebuild(prepared, await self._contexts.build_again(prepared))

    async def _send_next_round(self, prepared: SentCall, transcript: RoundTranscript) -> StartedReply:
        whole = await _with_whole_history(self._recorder.full(prepared))
        following = self._requests.continue_with_tool_results(
            whole, transcript.messages, is_last_round=transcript.is_full
        )
        sent_at = self._timer.now()
        reply = await self._sender.send(following.call, following.body)
        return await self._send_until_accepted(following, reply, sent_at)

    # 6. Reply

    async def _relay(self, started: StartedReply) -> ProxyResponse:
        """Relay the reply, and record it. Raises `UpstreamUnavailable`, `StoreUnavailable`."""
        prepared, reply = started.prepared, started.reply
        headers = downstream_headers(reply.headers) + prepared.labels.headers()
        if reply.status >= 400:
            reply.close()
            await self._recorder.commit_failure(prepared, reply.status)
            self._timer.observe(prepared.call, started.sent_at, self._timer.now())
            return ProxyResponse(status=reply.status, headers=headers, body=started.body)
        if started.is_streamed:
            chunks: AsyncGenerator[bytes, None] = StreamRelay(self._round_steps, started).chunks()
            if takes_data_only(self._dialect, reply, self._config.max_reply):
                chunks = data_lines(chunks)
            return ProxyResponse(status=reply.status, headers=unbuffered(headers), chunks=chunks)
        if started.is_oversized:
            return ProxyResponse(
                status=reply.status, headers=headers, chunks=relay_oversized(self._round_steps, started)
            )
        reply.close()
        relayed = await relay_whole(self._round_steps, started)
        if relayed.headers is not reply.headers:
            headers = downstream_headers(relayed.headers) + prepared.labels.headers()
        return ProxyResponse(status=relayed.status, headers=headers, body=relayed.body, chunks=relayed.chunks)

    def _on_stored(self, sent: SentCall, write: ReplyWrite, stored: StoredReply | None, *, is_whole: bool) -> None:
        """Keep the session of a stored call live, prefetch the summaries that its next epoch will need, and hand the
        call to its shadow.
        """
        call = sent.call
        if self._shared.shadows is not None and (job := shadow_job(sent, write, stored, self._dialect)) is not None:
            self._shared.shadows.submit(job)
        is_summarized = self._config.is_default or bool(self._config.host)
        if isinstance(sent, LiveCall):
            if is_summarized:
                self._prefetch_live(sent)
            return
        if is_whole:
            self._live.begin(sent, write, stored)
        built = sent.built
        if built is None or not is_summarized:
            return
        self._prefetcher.prefetch(
            call.tenant,
            sent.match.session_id,
            sent.match.session,
            sent.config.strategy,
            sent.loaded,
            built.context.epoch if built.starts_epoch else None,
            dialect=self._dialect.name,
            model=sent.request.model,
            host=call.host,
            credentials=credentials_of(call.headers, drop=call.key_headers),
        )

    def _prefetch_live(self, sent: LiveCall) -> None:
        """Prefetch summaries as after a call of the full path."""
        call, live = sent.call, sent.live
        strategy = live.config.strategy
        credentials = credentials_of(call.headers, drop=call.key_headers)
        if not prefetches_summaries(strategy):
            self._shared.summarizer.caller_keys.remember(
                call.tenant, live.session.id, credentials, host=call.host, dialect=self._dialect.name
            )
            return
        self._prefetcher.prefetch(
            call.tenant,
            live.session.id,
            live.session,
            strategy,
            History(
                snapshot=whole_snapshot(sent.found, sent.added, sent.window),
                epoch_start=None,
                epoch_inputs=EpochInputs(),
                is_verbatim=sent.is_verbatim,
            ),
            None,
            dialect=self._dialect.name,
            model=sent.request.model,
            host=call.host,
            credentials=credentials,
        )

    # Calls that take none of these steps, or the first alone

    async def _forward_unread(self, call: Call, reason: str) -> ProxyResponse:
        """Forward a call whose messages cannot be read; ``reason`` says why.

        Raises `InvalidRequest` if the call names its session: it may be a delta, which nobody can complete.
        """
        if call.options.session_id is not None:
            raise InvalidRequest(
                "X-Tersely-Session names a session, whose history cannot be added to this request: "
                + reason[:MAX_REASON],
                field="X-Tersely-Session",
            )
        return await self._forwarder.forward(call)

    async def _forward_side_call(self, call: Call, request: Request, kind: clients.SideCall) -> ProxyResponse:
        """Forward a call beside the conversation. The reply to a client's own summary call is remembered for a while:
        the client may continue from that summary.
        """
        self._metrics.side_calls.labels(kind).inc()
        if (trace := active_trace()) is not None:
            trace.describe(model=request.model)
        note_side_call(kind, searchable_text(request.messages[-1]) if request.messages else "")

        async def remember(forwarded: ForwardedReply) -> None:
            if forwarded.status != 200 or forwarded.cut_off is not None:
                return
            try:
                await self._side_calls.remember(call, request, forwarded.reply)
            except StoreUnavailable as error:
                _log.warning("a client's summary was not stored: %s", error)

        on_reply = remember if kind == "summary" else None
        context: ContextKind = "passthrough"
        if request.references_history:
            incoming = await self._sessions.read(call, request)
            if (body := await self._server_side.expand_history(incoming)) is not None:
                call, context = structs.replace(call, body=body), "built"
        return await self._forwarder.forward(call, context, on_reply=on_reply)

    async def _forward_without_store(self, incoming: IncomingCall, reason: StoreUnavailable) -> ProxyResponse:
        """Forward a call that carries its whole history; it is stored when the database is back.

        Raises `StoreUnavailable` if failing open is off, or if the call does not carry its history.
        """
        if not self._config.fail_open:
            raise reason
        if _may_be_delta(incoming):
            raise StoreUnavailable(
                "the database is away, and this request does not carry its history: send it again later"
            ) from reason
        self._metrics.fail_open.labels("read").inc()
        _log.warning("forwarding without the store: %s", reason)

        async def spool(forwarded: ForwardedReply) -> None:
            if not (forwarded.reply.choices or forwarded.reply.unread):
                return
            try:
                await self._recorder.spool(incoming, forwarded)
            except StoreUnavailable as error:
                self._metrics.fail_open.labels("write").inc()
                _log.warning("a call that was forwarded without the store could not be spooled: %s", error)

        return await self._forwarder.forward(
            incoming.call, "fail-open", on_reply=spool, streams=incoming.request.stream
        )


async def _with_whole_history(prepared: PreparedCall) -> PreparedCall:
    """Return a call with its whole history. The memory for that is reserved; a call under way is not refused."""
    if prepared.expand is not None and prepared.call.reserve is not None:
        await prepared.call.reserve(may_refuse=False)
    return prepared.whole


def _may_be_delta(incoming: IncomingCall) -> bool:
    """Return whether a request may carry only what is new, so that its history has to be read from the store."""
    if incoming.request.references_history:
        return True
    messages = incoming.request.messages
    return incoming.call.options.session_id is not None and all(message.role != "assistant" for message in messages)


async def _let_go(sending: asyncio.Task[UpstreamReply]) -> None:
    """Stop a request whose reply nobody awaits any more."""
    sending.cancel()
    try:
        (await sending).close()
    except (asyncio.CancelledError, UpstreamUnavailable):
        pass
