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

from app.dialects.dialect import Dialect, ReplyReader, Request
from app.dialects.dialect import Reply as SaidReply
from app.domain import clients
from app.domain.command_traces import command_in
from app.domain.errors import StoreUnavailable, UpstreamUnavailable
from app.domain.extraction import NOTHING
from app.domain.headers import Headers, downstream_headers, upstream_headers
from app.service.aside import aside
from app.service.attempts import EVENT_STREAM, JSON, Attempts, Begun
from app.service.calibrations import Calibrations
from app.service.calls import Answer, Call, ContextKind, Labels
from app.service.chat_commands import ChatCommands
from app.service.forethought import Forethought
from app.service.memo import MessageMemo
from app.service.metrics import Metrics
from app.service.named_calls import NamedCalls
from app.service.preparing import Prepared, Preparer
from app.service.recall import as_given
from app.service.recipes import Recipes
from app.service.recording import Recorder
from app.service.references import with_items
from app.service.retrieval import Retriever
from app.service.stream_end import end_of, until_end, whole_events
from app.service.summaries import Summaries
from app.service.summarizer import Summarizer
from app.service.tool_rounds import ToolRounds
from app.service.tools import Tools
from app.store.connection import Database
from app.store.lookups import Lookups
from app.store.writer import Writer
from app.upstream.client import Reply, Upstream

_log = logging.getLogger(__name__)

_OnReply = Callable[[SaidReply], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyConfig:
    """``max_reply`` and ``memo`` in bytes, ``heartbeat`` in seconds.

    ``key`` is the operator's, as a header: it goes upstream in place of the caller's.
    """

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
    recipes: Recipes
    calibrations: Calibrations
    metrics: Metrics
    summarizer: Summarizer
    retriever: Retriever
    tools: Tools
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
        self._memo = MessageMemo(dialect, config.memo)
        self._forethought = Forethought(shared.summarizer, dialect)
        self._database = shared.database
        self._preparer = Preparer(
            dialect=dialect,
            database=shared.database,
            lookups=Lookups(shared.database, shared.writer.tails),
            recipes=shared.recipes,
            calibrations=shared.calibrations,
            memo=self._memo,
            retriever=shared.retriever,
            clock=shared.clock,
            new_id=shared.new_id,
        )
        self._named = NamedCalls(
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
            clock=shared.clock,
            fail_open=config.fail_open,
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
        self._summaries = Summaries(dialect=dialect, database=shared.database, memo=self._memo, clock=shared.clock)

    @property
    def dialect(self) -> Dialect:
        """In which its clients speak."""
        return self._dialect

    # The ways a call can go

    async def converse(self, call: Call) -> Answer:
        """A model call: stored, and sent with a context of its own.

        Raises `InvalidRequest` for a body that cannot be read, `UpstreamUnavailable`, and, where failing
        open is off, `StoreUnavailable`.
        """
        if call.options.bypass:
            return await self.forward(call, "bypass")
        if call.header_map.get("content-encoding", "identity") != "identity":
            return await self.forward(call, "passthrough")
        self._recipes.check(strategy=call.options.strategy, epoch=call.options.epoch)
        call = await with_items(call, self._dialect, self._database)
        request = await aside(len(call.body), self._dialect.read_request, call.body, self._memo.read)
        sent = request = _as_addressed(request, call)
        if self._chat is not None:
            call, request = await aside(len(call.body), self._chat.without_traces, call, request, self._dialect)
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
            return await self._chat.answer(call, request, self._dialect, command, sent=sent, heartbeat=beat)
        if kind is not None:
            return await self._side_call(call, request, kind)
        prepare = self._named.prepare if request.names_history else self._preparer.prepare
        try:
            prepared = await prepare(call, request, headers)
        except StoreUnavailable as error:
            if not self._config.fail_open:
                raise
            self._metrics.fail_open.labels("read").inc()
            _log.warning("forwarding without the store: %s", error)
            return await self.forward(call, "fail-open")
        if prepared is None:
            return await self.forward(call, "passthrough")
        return await self._exchange(call, prepared)

    async def forward(
        self, call: Call, kind: ContextKind = "passthrough", *, on_reply: _OnReply | None = None, reply_id: str = ""
    ) -> Answer:
        """Send the client's own bytes and give back the upstream's, stored nowhere.

        ``reply_id``: of a reply that is asked for again; it comes back as it was given.
        """
        labels = Labels(context=kind)
        sent = self._monotonic()
        labels.overhead_ms = (sent - call.received) * 1000
        reply = await self._send(call, call.body)
        if reply_id and not call.options.bypass and (reply.status, reply.content_type) == (200, JSON):
            return await self._recall(call, reply, reply_id, labels, sent)
        headers = downstream_headers(reply.headers) + labels.headers()
        headers += [(name, value) for name, value in _lower(reply.headers) if name == "content-length"]
        if reply.content_type == EVENT_STREAM:
            headers = _unbuffered(headers)
        return Answer(
            status=reply.status,
            headers=headers,
            chunks=self._relay(call, reply, sent, on_reply),
        )

    async def _recall(self, call: Call, reply: Reply, reply_id: str, labels: Labels, sent: float) -> Answer:
        try:
            reply.unpack()
            body = await reply.read(self._config.max_reply)
        finally:
            reply.close()
        ended = self._monotonic()
        try:
            body = await as_given(body, reply_id, tenant=call.tenant, dialect=self._dialect, database=self._database)
        except StoreUnavailable as error:
            if not self._config.fail_open:
                raise
            self._metrics.fail_open.labels("read").inc()
            _log.warning("a reply is given as the host has it: %s", error)
        self._observe(call, sent, ended)
        return Answer(status=reply.status, headers=downstream_headers(reply.headers) + labels.headers(), body=body)

    async def _relay(self, call: Call, reply: Reply, sent: float, on_reply: _OnReply | None) -> AsyncIterator[bytes]:
        """The upstream's bytes, untouched. An upstream that breaks off breaks the client's connection too."""
        reader = None
        if on_reply is not None and reply.content_type == EVENT_STREAM:
            reader = self._dialect.open_stream(extract=NOTHING, strip_usage=False)
        whole: list[bytes] = []
        held = b""
        try:
            async for chunk in reply.chunks():
                if not chunk:
                    continue
                if on_reply is None:
                    yield chunk
                    continue
                if reader is not None:
                    reader.feed(chunk)
                else:
                    whole.append(chunk)
                # The client may go on as soon as it has the end: it gets that when the reply is remembered.
                if held:
                    yield held
                held = chunk
            if on_reply is not None and reply.status == 200:
                await on_reply(self._said(reader, b"".join(whole)))
            if held:
                yield held
        finally:
            reply.close()
            self._observe(call, sent, self._monotonic())

    def _said(self, reader: ReplyReader | None, body: bytes) -> SaidReply:
        if reader is not None:
            reader.close()
            return reader.reply
        return self._dialect.split_reply(body, NOTHING)[1]

    async def _side_call(self, call: Call, request: Request, kind: clients.SideCall) -> Answer:
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
        if request.names_history and (whole := await self._named.spell_out(call, request)) is not None:
            return await self.forward(replace(call, body=whole), "built", on_reply=on_reply)
        return await self.forward(call, "passthrough", on_reply=on_reply)

    # The conversation

    async def _exchange(self, call: Call, prepared: Prepared) -> Answer:
        sent = self._monotonic()
        prepared.labels.overhead_ms = (sent - call.received) * 1000
        sending = asyncio.get_running_loop().create_task(self._send(call, prepared.body))
        try:
            await asyncio.sleep(0)
            await self._recorder.store_request(prepared)
            begun = await self._attempts.settle(call, prepared, await sending)
        except UpstreamUnavailable:
            await _let_go(sending)
            await self._recorder.commit_failure(prepared, None)
            raise
        except BaseException:
            await _let_go(sending)
            self._recorder.record_failure(prepared, None)
            raise
        self._metrics.first_byte.observe(self._monotonic() - sent)
        return await self._answer(call, begun, sent)

    async def _answer(self, call: Call, begun: Begun, sent: float) -> Answer:
        prepared, reply, first, body = begun.prepared, begun.reply, begun.first, begun.body
        headers = downstream_headers(reply.headers) + prepared.labels.headers()
        if reply.status >= 400:
            reply.close()
            await self._recorder.commit_failure(prepared, reply.status)
            self._observe(call, sent, self._monotonic())
            return Answer(status=reply.status, headers=headers, body=body)
        if self._attempts.is_streamed(prepared, reply):
            if prepared.tools:
                chunks = self._observed(call, prepared, self._rounds.stream(call, prepared, reply, first), sent)
            else:
                chunks = self._stream(call, prepared, reply, first, sent)
            return Answer(status=reply.status, headers=_unbuffered(headers), chunks=chunks)
        reply.close()
        ended = self._monotonic()
        if prepared.tools:
            body, status = await self._rounds.whole(call, prepared, body, reply.status)
            self._forethought.consider(call, prepared)
            self._observe(call, sent, self._monotonic())
            return Answer(status=status, headers=headers, body=body)
        client_body, said = self._dialect.split_reply(body, prepared.extract, sent=_sent(call, prepared))
        await self._recorder.commit(prepared, said, reply.status, is_whole=True)
        self._forethought.consider(call, prepared)
        self._observe(call, sent, ended)
        return Answer(status=reply.status, headers=headers, body=client_body)

    async def _observed(
        self, call: Call, prepared: Prepared, chunks: AsyncIterator[bytes], sent: float
    ) -> AsyncIterator[bytes]:
        """The rounds of a reply; what our tools take counts as the upstream's time."""
        try:
            async for chunk in chunks:
                yield chunk
            self._forethought.consider(call, prepared)
        finally:
            await chunks.aclose()  # type: ignore[attr-defined]
            self._observe(call, sent, self._monotonic())

    async def _stream(
        self, call: Call, prepared: Prepared, reply: Reply, first: bytes, sent: float
    ) -> AsyncIterator[bytes]:
        """The reply as it comes, tags taken out; its end only when it is on disk."""
        reader = self._dialect.open_stream(
            extract=prepared.extract, strip_usage=prepared.strip_usage, sent=_sent(call, prepared)
        )
        ended = sent
        is_committed = False
        try:
            end = end_of(self._dialect.streaming)
            heartbeat = self._dialect.streaming.heartbeat
            try:
                if first and (out := end.hold(reader.feed(first))):
                    yield out
                async for chunk in until_end(reply, end, self._config.heartbeat):
                    if not chunk:
                        if heartbeat and end.is_between_events:
                            yield heartbeat
                        continue
                    if out := end.hold(reader.feed(chunk)):
                        yield out
            except (UpstreamUnavailable, ValueError) as error:
                ended = self._monotonic()
                end.held = b""
                rest = end.hold(whole_events(reader.close()))
                is_committed = True
                await self._recorder.commit(prepared, reader.reply, reply.status, is_whole=False)
                if not end.is_between_events or reply.content_type != EVENT_STREAM:
                    raise  # half an event is out already: the client's connection breaks as the host's did
                yield rest + self._error_event(str(error))
                return
            ended = self._monotonic()
            rest = reader.close()
            is_committed = True
            said = reader.reply
            is_whole = not said.error and (said.is_done or all(choice.finish_reason for choice in said.choices))
            await self._recorder.commit(prepared, said, reply.status, is_whole=is_whole)
            self._forethought.consider(call, prepared)
            if last := end.held + rest:
                yield last
        finally:
            reply.close()
            if not is_committed:
                # The client went away: what was said until then is kept, and the model is stopped.
                reader.close()
                self._recorder.submit_reply(prepared, reader.reply, reply.status, is_whole=False)
                ended = self._monotonic()
            self._observe(call, sent, ended)

    def _error_event(self, message: str) -> bytes:
        body = self._dialect.error_body(message, type="upstream_error", code="upstream_unavailable")
        return self._dialect.error_event(body)

    def _observe(self, call: Call, sent: float, ended: float) -> None:
        now = self._monotonic()
        self._metrics.upstream.observe(max(0.0, ended - sent))
        self._metrics.overhead.observe(max(0.0, (sent - call.received) + (now - ended)))

    # Towards the upstream

    async def _send(self, call: Call, body: bytes) -> Reply:
        headers = upstream_headers(call.headers, key=self._config.key, drop=call.key_headers)
        return await self._upstream.send(call.method, call.path, headers, body)


def _as_addressed(request: Request, call: Call) -> Request:
    """The request with what its address says of it, where that is not said in the body."""
    if not call.model and not call.streams:
        return request
    return replace(request, model=call.model or request.model, stream=call.streams or request.stream)


def _sent(call: Call, prepared: Prepared) -> bytes:
    """The client's request where another one went upstream: some replies repeat theirs."""
    return b"" if prepared.body is call.body else call.body


async def _let_go(sending: asyncio.Task[Reply]) -> None:
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
