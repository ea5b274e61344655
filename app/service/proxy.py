"""The transparent call: read, find the session, build the context, call the model, record, answer.

Storage never stands between a client and its model for longer than it must: a request's messages are written while
the model works, the reply is committed before the client sees its end, and no connection to the database is
held meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from app.dialects.dialect import Dialect, Overflow, ReplyReader, Request
from app.dialects.dialect import Reply as SaidReply
from app.domain import clients
from app.domain.chain import summary_anchors
from app.domain.clients import ClientIds
from app.domain.errors import Conflict, ContextTooLarge, NotFound, StoreUnavailable, UpstreamUnavailable
from app.domain.headers import Headers, downstream_headers, upstream_headers
from app.domain.history import Entry
from app.domain.messages import Message
from app.domain.models import usable_window
from app.service import contexts, identity, tokens
from app.service.arrival import NEWEST, Arrival, arrive, digest, extend
from app.service.calibrations import Calibrations
from app.service.calls import Answer, Call, ContextKind, Labels
from app.service.contexts import Built, Circumstances, History, Recipe
from app.service.identity import Asked, Found
from app.service.memo import MessageMemo
from app.service.metrics import Metrics
from app.service.recipes import Recipes
from app.store import sessions, side_replies
from app.store.connection import Connection, Database
from app.store.lookups import Lookups
from app.store.sessions import write_epoch
from app.store.writer import Writer
from app.store.writes import Attribute, CallReport, NewEpoch, NewReply, NewSession, ReplyWrite, RequestWrite
from app.strategies.activity_log import derive_terse
from app.strategies.pipeline import summarize_repairs
from app.strategies.presets import Slim, strategy_name
from app.upstream.client import Reply, Upstream

_log = logging.getLogger(__name__)

_FIRST_EVENT = re.compile(rb"data:.*?(?:\n\n|\r\n\r\n|\r\r)", re.DOTALL)
_MARK = re.compile(rb"(?:\A|(?<=[\r\n]))data: ?\[DONE\]")

_OnReply = Callable[[SaidReply], Awaitable[None]]

DONE = (b"data: [DONE]", b"data:[DONE]")
HEARTBEAT = b": keep-alive\n\n"
EVENT_STREAM = "text/event-stream"
MAX_ERROR_BODY = 1024 * 1024
MAX_FIRST_EVENT = 64 * 1024
# How long after its end mark a stream may go on (seconds). A host that does not hang up must not hold the client.
TRAILER_WAIT = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyConfig:
    """``max_reply`` and ``memo`` in bytes, ``heartbeat`` in seconds.

    ``api_key`` goes upstream in place of the caller's.
    """

    api_key: str | None = None
    fail_open: bool = True
    heartbeat: float = 15.0
    max_reply: int = 64 * 1024 * 1024
    memo: int = 16 * 1024 * 1024


@dataclass(slots=True, kw_only=True)
class Prepared:
    """A call that is ready to go upstream. ``built`` is None where no context could be built: then the client's own
    bytes go out, and judging them is the provider's business.
    """

    request: Request
    arrival: Arrival
    found: Found
    recipe: Recipe
    around: Circumstances
    history: History
    built: Built | None
    body: bytes
    write: RequestWrite
    started: datetime
    strip_usage: bool
    labels: Labels
    written: asyncio.Future[None] | None = field(default=None)

    @property
    def extracts(self) -> bool:
        """Whether terse tags are to be taken out of the reply."""
        return self.recipe.extracts_terse


class Proxy:
    """Proxied calls of one dialect to one upstream."""

    def __init__(
        self,
        *,
        dialect: Dialect,
        upstream: Upstream,
        database: Database,
        writer: Writer,
        recipes: Recipes,
        calibrations: Calibrations,
        metrics: Metrics,
        config: ProxyConfig,
        clock: Callable[[], datetime],
        monotonic: Callable[[], float],
        new_id: Callable[[], str],
    ) -> None:
        self._dialect = dialect
        self._upstream = upstream
        self._database = database
        self._writer = writer
        self._lookups = Lookups(database)
        self._recipes = recipes
        self._calibrations = calibrations
        self._metrics = metrics
        self._config = config
        self._clock = clock
        self._monotonic = monotonic
        self._new_id = new_id
        self._fixed_tokens = tokens.FixedTokens()
        self._memo = MessageMemo(dialect, config.memo)

    # The ways a call can go

    async def chat(self, call: Call) -> Answer:
        """A model call: stored, and sent with a context of its own.

        Raises `InvalidRequest` for a body that cannot be read, `UpstreamUnavailable`, and, where failing
        open is off, `StoreUnavailable`.
        """
        if call.options.bypass:
            return await self.forward(call, "bypass")
        if call.header_map.get("content-encoding", "identity") != "identity":
            return await self.forward(call, "passthrough")
        self._recipes.check(strategy=call.options.strategy, epoch=call.options.epoch)
        request = self._dialect.read_request(call.body, self._memo.read)
        if request.unreadable is not None or not request.messages:
            return await self.forward(call, "passthrough")
        headers = call.header_map
        kind = clients.side_call(headers, request.messages, has_tools=bool(request.tools), stops=request.stop)
        if kind is not None:
            return await self._side_call(call, request, kind)
        try:
            prepared = await self._prepare(call, request, headers)
        except StoreUnavailable as error:
            if not self._config.fail_open:
                raise
            self._metrics.fail_open.labels("read").inc()
            _log.warning("forwarding without the store: %s", error)
            return await self.forward(call, "fail-open")
        return await self._converse(call, prepared)

    async def forward(
        self, call: Call, kind: ContextKind = "passthrough", *, on_reply: _OnReply | None = None
    ) -> Answer:
        """Send the client's own bytes and give back the upstream's, stored nowhere."""
        labels = Labels(context=kind)
        sent = self._monotonic()
        labels.overhead_ms = (sent - call.received) * 1000
        reply = await self._send(call, call.body)
        headers = downstream_headers(reply.headers) + labels.headers()
        headers += [(name, value) for name, value in _lower(reply.headers) if name == "content-length"]
        if reply.content_type == EVENT_STREAM:
            headers = _unbuffered(headers)
        return Answer(
            status=reply.status,
            headers=headers,
            chunks=self._relay(call, reply, sent, on_reply),
        )

    async def _relay(self, call: Call, reply: Reply, sent: float, on_reply: _OnReply | None) -> AsyncIterator[bytes]:
        """The upstream's bytes, untouched. An upstream that breaks off breaks the client's connection too."""
        reader = None
        if on_reply is not None and reply.content_type == EVENT_STREAM:
            reader = self._dialect.open_stream(extract=False, strip_usage=False)
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
        return self._dialect.split_reply(body, False)[1]  # noqa: FBT003 the dialect's signature

    async def _side_call(self, call: Call, request: Request, kind: clients.SideCall) -> Answer:
        """A call beside the conversation. Of a client's own summary the reply is remembered for a while: the
        client may go on from it.
        """
        self._metrics.side_calls.labels(kind).inc()

        async def remember(said: SaidReply) -> None:
            try:
                await self._remember(call, request, said)
            except StoreUnavailable as error:
                _log.warning("a summary was not remembered: %s", error)

        return await self.forward(call, "passthrough", on_reply=remember if kind == "summary" else None)

    async def _remember(self, call: Call, request: Request, said: SaidReply) -> None:
        anchors = {
            anchor
            for choice in said.choices
            for anchor in summary_anchors(self._dialect.read_reply(choice.client_message))
        }
        if not anchors:
            return
        arrival = arrive(request.messages, self._memo.identify)
        client = clients.client_ids(call.header_map, request.ids)

        async def write(connection: Connection) -> None:
            session_id = await self._session_of_side_call(connection, call, arrival, client)
            if session_id is not None:
                await side_replies.remember(connection, call.tenant, session_id, sorted(anchors), self._clock())

        await self._database.run(write, tenant=call.tenant)

    async def _session_of_side_call(
        self, connection: Connection, call: Call, arrival: Arrival, client: ClientIds
    ) -> str | None:
        if call.options.session_id is not None:
            session = await sessions.get(connection, call.tenant, call.options.session_id)
            return session.id if session else None
        chains = arrival.reply_chains()[: identity.MAX_CHAINS]
        if chains:
            hit = await sessions.find_by_chain(connection, call.tenant, chains, client.id)
            if hit is not None:
                return hit.session.id
        if client.id is not None:
            first = await sessions.find_by_client_id(connection, call.tenant, client.id)
            return first.id if first else None
        return None

    # Getting ready

    async def _prepare(self, call: Call, request: Request, headers: dict[str, str]) -> Prepared:
        now = self._clock()
        arrival = arrive(request.messages, self._memo.identify)
        asked = Asked(
            session_id=call.options.session_id,
            client=clients.client_ids(headers, request.ids),
            is_retry=clients.is_retry(headers),
        )
        found, recipe, around, history = await self._look_up(call, request, arrival, asked, now)
        built = self._build(history, recipe, around, request.model)
        body, strip_usage = self._compose(call, request, arrival, found, recipe, history, built)
        return Prepared(
            request=request,
            arrival=arrival,
            found=found,
            recipe=recipe,
            around=around,
            history=history,
            built=built,
            body=body,
            write=self._request_write(call, request, arrival, found, now),
            started=now,
            strip_usage=strip_usage,
            labels=self._label(call, found, recipe, built, is_own_body=body is call.body),
        )

    async def _look_up(
        self, call: Call, request: Request, arrival: Arrival, asked: Asked, now: datetime
    ) -> tuple[Found, Recipe, Circumstances, History]:
        """The session and what its context needs. A history that goes on where it ended takes one shared lookup."""
        found = None
        chains = arrival.reply_chains()[:NEWEST] if asked.session_id is None else []
        if chains:
            hit = await self._lookups.find(call.tenant, chains, asked.client.id)
            found = identity.continued(arrival, asked, hit) if hit is not None else None
        if found is not None:
            recipe = self._recipe(call, found)
            around = self._circumstances(request, arrival, recipe, now)
            history = None
            if not found.needs_all(recipe.reach(found.session.plan if found.session else None)):
                history = contexts.of_resent(found, arrival, recipe, around, self._memo.restore)
            if history is not None:
                return found, recipe, around, history
        async with self._database.reading(call.tenant) as connection:
            if found is None:
                found = await identity.find(connection, call.tenant, arrival, asked, now=now, new_id=self._new_id)
            recipe = self._recipe(call, found)
            if found.needs_all(recipe.reach(found.session.plan if found.session else None)):
                found = await identity.with_everything(connection, call.tenant, arrival, found)
            around = self._circumstances(request, arrival, recipe, now)
            history = await contexts.load(
                connection, call.tenant, found, arrival, self._dialect, recipe, around, restore=self._memo.restore
            )
        return found, recipe, around, history

    def _recipe(self, call: Call, found: Found) -> Recipe:
        return self._recipes.choose(strategy=call.options.strategy, epoch=call.options.epoch, session=found.session)

    def _circumstances(self, request: Request, arrival: Arrival, recipe: Recipe, now: datetime) -> Circumstances:
        ratio = self._calibrations.ratio(request.model)
        window = usable_window(request.model, request.max_tokens)
        raws = [m.raw for m, i in zip(arrival.messages, arrival.incoming, strict=True) if not i.is_link]
        fixed = self._fixed_tokens.count(request.model, raws, request.tools)
        if recipe.instructions:
            fixed += tokens.count_short(recipe.instructions)
        return Circumstances(
            fixed_tokens=fixed,
            window=None if window is None else int(window / ratio),
            now=now,
        )

    def _build(self, history: History, recipe: Recipe, around: Circumstances, model: str) -> Built | None:
        try:
            return contexts.make(history, recipe, around, model)
        except ContextTooLarge:
            return None

    def _compose(
        self,
        call: Call,
        request: Request,
        arrival: Arrival,
        found: Found,
        recipe: Recipe,
        history: History,
        built: Built | None,
    ) -> tuple[bytes, bool]:
        """The upstream's body, and whether the usage in the reply is only there because we ask for it."""
        asks_usage = request.stream and not request.include_usage
        if built is None:
            return call.body, False
        is_verbatim = built.context.is_whole and history.is_verbatim and recipe.instructions is None
        if is_verbatim and not asks_usage:
            return call.body, False
        if is_verbatim:
            messages: Sequence[bytes] = [message.raw for message in arrival.messages]
        else:
            messages = contexts.lay_out(built.context, self._dialect, history, arrival, found)
        body = self._dialect.write_request(
            call.body, messages=messages, instructions=recipe.instructions, include_usage=asks_usage
        )
        return body, asks_usage

    def _request_write(
        self, call: Call, request: Request, arrival: Arrival, found: Found, now: datetime
    ) -> RequestWrite:
        attributes: list[Attribute] = []
        if request.tools and self._fixed_tokens.is_new(call.tenant, found.session_id, request.tools):
            attributes.append(Attribute(digest=tokens.content_digest(request.tools), kind="tools", raw=request.tools))
        session = found.session
        is_open = session is None or not arrival.reply_chains()
        return RequestWrite(
            tenant=call.tenant,
            session_id=found.session_id,
            create=None
            if session
            else NewSession(
                parent=found.parent,
                client_id=clients.client_ids(call.header_map, request.ids).id,
                spare_id=found.spare_id,
            ),
            mode="append" if found.is_delta else "full",
            dialect=self._dialect.name,
            incoming=arrival.incoming,
            raws=[message.raw for message in arrival.messages],
            tokens=(),
            decision=found.decision,
            session=session,
            now=now,
            attributes=attributes,
            open_chain=arrival.head_chain if is_open and not found.is_delta else None,
            replaces_instructions=found.is_delta and any(not incoming.is_link for incoming in arrival.incoming),
        )

    def _label(self, call: Call, found: Found, recipe: Recipe, built: Built | None, *, is_own_body: bool) -> Labels:
        labels = Labels(
            context="passthrough" if is_own_body else "built",
            strategy=strategy_name(recipe.strategy),
            session_id=found.session_id,
            source=found.source,
        )
        if built is not None:
            report = built.context.report
            labels.epoch = report.epoch
            labels.tokens_before, labels.tokens_after = report.tokens_before, report.tokens_after
        del call
        return labels

    # The conversation

    async def _converse(self, call: Call, prepared: Prepared) -> Answer:
        sent = self._monotonic()
        prepared.labels.overhead_ms = (sent - call.received) * 1000
        sending = asyncio.get_running_loop().create_task(self._send(call, prepared.body))
        try:
            await asyncio.sleep(0)
            await self._store_request(prepared)
            reply = await sending
            reply.unpack()
            first = b""
            if reply.status == 200 and reply.content_type == EVENT_STREAM:
                first = await self._first_chunk(reply)
            overflowed, error_body = await self._overflow_of(reply, first)
        except UpstreamUnavailable:
            await _let_go(sending)
            await self._commit_failure(prepared, None)
            raise
        except BaseException:
            await _let_go(sending)
            self._record_failure(prepared, None)
            raise
        self._metrics.first_byte.observe(self._monotonic() - sent)
        if overflowed is not None and (second := await self._reduce(call, prepared, overflowed)) is not None:
            reply.close()
            return await self._second_try(call, second, sent)
        return await self._answer(call, prepared, reply, first, error_body, sent)

    async def _second_try(self, call: Call, prepared: Prepared, sent: float) -> Answer:
        """One retry with a reduced context; what comes back then is the answer, whatever it is."""
        reply = None
        try:
            reply = await self._send(call, prepared.body)
            reply.unpack()
            error_body = b"" if reply.status < 400 else await reply.read(MAX_ERROR_BODY)
        except BaseException as error:
            if reply is not None:
                reply.close()
            if isinstance(error, UpstreamUnavailable):
                await self._commit_failure(prepared, None)
            else:
                self._record_failure(prepared, None)
            raise
        return await self._answer(call, prepared, reply, b"", error_body, sent)

    async def _answer(
        self, call: Call, prepared: Prepared, reply: Reply, first: bytes, error_body: bytes, sent: float
    ) -> Answer:
        headers = downstream_headers(reply.headers) + prepared.labels.headers()
        if reply.status >= 400:
            reply.close()
            await self._commit_failure(prepared, reply.status)
            self._observe(call, sent, self._monotonic())
            return Answer(status=reply.status, headers=headers, body=error_body)
        if reply.content_type == EVENT_STREAM:
            chunks = self._stream(call, prepared, reply, first, sent)
            return Answer(status=reply.status, headers=_unbuffered(headers), chunks=chunks)
        try:
            body = error_body or await reply.read(self._config.max_reply)
        except BaseException:
            self._record_failure(prepared, reply.status)
            raise
        finally:
            reply.close()
        ended = self._monotonic()
        client_body, said = self._dialect.split_reply(body, prepared.extracts)
        await self._commit(prepared, said, reply.status, is_whole=True)
        self._observe(call, sent, ended)
        return Answer(status=reply.status, headers=headers, body=client_body)

    async def _store_request(self, prepared: Prepared) -> None:
        """Count and queue the request's new messages, while the upstream works."""
        write = prepared.write
        placed = prepared.found.decision.placed
        new = [message for message, p in zip(prepared.arrival.messages, placed, strict=True) if p.is_new]
        counts = iter(await tokens.count_messages(new, prepared.request.model))
        write.tokens = [next(counts) if p.is_new else 0 for p in placed]
        prepared.written = self._writer.submit(write)

    async def _first_chunk(self, reply: Reply) -> bytes:
        """The first event of a stream, so that an overflow told there can still be mended."""
        first = b""
        end = self._monotonic() + self._config.heartbeat
        while len(first) < MAX_FIRST_EVENT and not _FIRST_EVENT.search(first):
            piece = await reply.peek(max(0.0, end - self._monotonic()))
            if not piece:
                break
            first += piece
        return first

    async def _overflow_of(self, reply: Reply, first: bytes) -> tuple[Overflow | None, bytes]:
        """What the reply says of an overflow, and the body if it had to be read for that."""
        if reply.status >= 400:
            body = await reply.read(MAX_ERROR_BODY)
            return self._dialect.classify_error(reply.status, body), body
        if reply.content_type == EVENT_STREAM:
            if b"error" not in first:
                return None, b""
            reader = self._dialect.open_stream(extract=False, strip_usage=False)
            reader.feed(first)
            reader.close()
            if reader.reply.choices:
                return None, b""
            return self._dialect.classify_error(reply.status, first), b""
        body = await reply.read(self._config.max_reply)
        if b'"choices"' not in body or b'"error"' in body[:200]:
            return self._dialect.classify_error(reply.status, body), body
        return None, body

    async def _reduce(self, call: Call, prepared: Prepared, overflowed: Overflow) -> Prepared | None:
        """The same call with a smaller context; None when none can be made."""
        around = prepared.around
        if overflowed.limit:
            reserve = prepared.request.max_tokens
            window = max(overflowed.limit // 4, overflowed.limit - (reserve or overflowed.limit // 8))
            ratio = self._calibrations.ratio(prepared.request.model)
            around = replace(around, window=int(window / ratio))
        try:
            history = await contexts.after_overflow(
                self._database, call.tenant, prepared.found, prepared.history, around
            )
        except StoreUnavailable:
            return None
        before = prepared.built.context.report.tokens_after if prepared.built else None
        built = self._build(history, prepared.recipe, around, prepared.request.model)
        if built is None or (before is not None and built.context.report.tokens_after >= before):
            return None
        body, strip_usage = self._compose(
            call, prepared.request, prepared.arrival, prepared.found, prepared.recipe, history, built
        )
        labels = self._label(call, prepared.found, prepared.recipe, built, is_own_body=False)
        labels.overhead_ms = prepared.labels.overhead_ms
        return replace(
            prepared,
            around=around,
            history=history,
            built=built,
            body=body,
            strip_usage=strip_usage,
            labels=labels,
        )

    async def _stream(
        self, call: Call, prepared: Prepared, reply: Reply, first: bytes, sent: float
    ) -> AsyncIterator[bytes]:
        """The reply as it comes, tags taken out; its end only when it is on disk."""
        reader = self._dialect.open_stream(extract=prepared.extracts, strip_usage=prepared.strip_usage)
        ended = sent
        is_committed = False
        try:
            end = _StreamEnd()
            try:
                if first and (out := end.hold(reader.feed(first))):
                    yield out
                async for chunk in _until_end(reply, end, self._config.heartbeat):
                    if not chunk:
                        if end.is_between_events:
                            yield HEARTBEAT
                        continue
                    if out := end.hold(reader.feed(chunk)):
                        yield out
            except (UpstreamUnavailable, ValueError) as error:
                ended = self._monotonic()
                end.held = b""
                rest = end.hold(_whole_events(reader.close()))
                is_committed = True
                await self._commit(prepared, reader.reply, reply.status, is_whole=False)
                if not end.is_between_events:
                    raise  # half an event is out already: the client's connection breaks as the host's did
                yield rest + self._error_event(str(error))
                return
            ended = self._monotonic()
            rest = reader.close()
            is_committed = True
            said = reader.reply
            is_whole = not said.error and (said.is_done or all(choice.finish_reason for choice in said.choices))
            await self._commit(prepared, said, reply.status, is_whole=is_whole)
            if last := end.held + rest:
                yield last
        finally:
            reply.close()
            if not is_committed:
                # The client went away: what was said until then is kept, and the model is stopped.
                reader.close()
                self._submit_reply(prepared, reader.reply, reply.status, is_whole=False)
                ended = self._monotonic()
            self._observe(call, sent, ended)

    def _error_event(self, message: str) -> bytes:
        body = self._dialect.error_body(message, type="upstream_error", code="upstream_unavailable")
        return b"data: " + body + b"\n\n"

    # What is recorded

    async def _commit(self, prepared: Prepared, said: SaidReply, status: int, *, is_whole: bool) -> None:
        """Return when request and reply are on disk; with failing open, when that has failed."""
        try:
            await asyncio.shield(self._submit_reply(prepared, said, status, is_whole=is_whole))
        except (StoreUnavailable, Conflict, NotFound, ValueError) as error:
            if not self._config.fail_open:
                raise StoreUnavailable("the reply could not be stored") from error
            self._metrics.fail_open.labels("write").inc()
            _log.warning("a reply was not stored: %s", error)

    async def _commit_failure(self, prepared: Prepared, status: int | None) -> None:
        """Return when the failed call is on disk: its client may try again at once, and be first at another worker."""
        if prepared.written is None:
            return
        try:
            await asyncio.shield(self._submit_reply(prepared, SaidReply(), status, is_whole=False))
        except (StoreUnavailable, Conflict, NotFound, ValueError) as error:
            _log.warning("a failed call was not stored: %s", error)

    def _record_failure(self, prepared: Prepared, status: int | None) -> None:
        if prepared.written is not None:
            self._submit_reply(prepared, SaidReply(), status, is_whole=False)

    def _submit_reply(
        self, prepared: Prepared, said: SaidReply, status: int | None, *, is_whole: bool
    ) -> asyncio.Future[None]:
        usage = self._dialect.read_usage(said.usage)
        now = self._clock()
        report = prepared.built.context.report if prepared.built else None
        call_report = CallReport(
            model=_short(prepared.request.model),
            strategy=prepared.labels.strategy,
            epoch=report.epoch if report else 0,
            cut=report.cut if report else 1,
            tools=tokens.content_digest(prepared.request.tools) if prepared.request.tools else None,
            tokens_before=report.tokens_before if report else 0,
            tokens_after=report.tokens_after if report else 0,
            input_tokens=_credible(usage.input),
            cached_tokens=_credible(usage.cached),
            output_tokens=_credible(usage.output),
            status=status,
        )
        replies = self._replies(prepared, said, is_whole=is_whole, now=now)
        self._count_call(prepared, call_report)
        return self._writer.submit(
            ReplyWrite(
                request=prepared.write,
                replies=replies,
                report=call_report,
                started=prepared.started,
                now=now,
                # A reply in which nothing was said is not stored, but the model was sent this context all the same.
                epoch=self._new_epoch(prepared) if said.choices else None,
            )
        )

    def _replies(self, prepared: Prepared, said: SaidReply, *, is_whole: bool, now: datetime) -> list[NewReply]:
        found: list[NewReply] = []
        head_chain = prepared.found.head_chain or prepared.arrival.head_chain
        for choice in said.choices:
            client = self._dialect.read_reply(choice.client_message)
            model = self._dialect.read_reply(choice.model_message)
            if not model.parts:
                continue
            identity_of_reply, _ = digest(client)
            finish = _short(choice.finish_reason) or (None if is_whole else "interrupted")
            terse = [(text, "model") for text in choice.terse]
            if not terse and is_whole and not found and not model.calls:
                terse = self._derive(prepared, model, now)
            found.append(
                NewReply(
                    raw=choice.client_message,
                    model_raw=choice.model_message if choice.model_message != choice.client_message else None,
                    digest=identity_of_reply,
                    chain=extend(head_chain, identity_of_reply),
                    tokens=tokens.count_message(model, prepared.request.model),
                    finish=finish,
                    terse=tuple(terse),
                    is_alternative=bool(found),
                )
            )
        return found

    def _derive(self, prepared: Prepared, reply: Message, now: datetime) -> list[tuple[str, str]]:
        """A log entry made without a model, for a turn whose reply carried none."""
        strategy = prepared.recipe.strategy
        if not (isinstance(strategy, Slim) and strategy.derive_terse):
            return []
        answered = prepared.found.decision.answered
        turn = answered.turn if answered else 1
        entries = [entry for entry in prepared.history.snapshot.entries if entry.turn == turn]
        last = Entry(seq=prepared.found.decision.last_seq + 1, turn=turn, message=reply, tokens=0, created_at=now)
        return [(derive_terse([*entries, last]).text, "derived")]

    def _new_epoch(self, prepared: Prepared) -> NewEpoch | None:
        built = prepared.built
        if built is None or not built.starts_epoch:
            return None
        context = built.context
        return NewEpoch(
            epoch=context.epoch,
            plan=write_epoch(context.epoch),
            tokens_before=context.report.tokens_before,
            tokens_after=context.report.tokens_after,
            derived=built.derived,
        )

    def _count_call(self, prepared: Prepared, report: CallReport) -> None:
        metrics = self._metrics
        built = prepared.built
        if built is not None:
            context = built.context
            metrics.tokens_before.observe(report.tokens_before)
            metrics.tokens_after.observe(report.tokens_after)
            metrics.tokens_saved.inc(max(0, report.tokens_before - report.tokens_after))
            if built.starts_epoch:
                metrics.epochs.labels(report.strategy, context.epoch.reason).inc()
                metrics.compression.observe(report.tokens_after / max(1, report.tokens_before))
            for kind, count in summarize_repairs(context.repairs).items():
                metrics.repairs.labels(kind).inc(count)
        for kind, reported in (
            ("input", report.input_tokens),
            ("cached", report.cached_tokens),
            ("output", report.output_tokens),
        ):
            if reported:
                metrics.reported_tokens[kind].inc(reported)
        if report.input_tokens and report.tokens_after:
            metrics.estimate_error.observe(report.input_tokens / report.tokens_after)
            self._calibrations.observe(
                prepared.request.model, estimated=report.tokens_after, reported=report.input_tokens
            )

    def _observe(self, call: Call, sent: float, ended: float) -> None:
        now = self._monotonic()
        self._metrics.upstream.observe(max(0.0, ended - sent))
        self._metrics.overhead.observe(max(0.0, (sent - call.received) + (now - ended)))

    # Towards the upstream

    async def _send(self, call: Call, body: bytes) -> Reply:
        headers = upstream_headers(call.headers, api_key=self._config.api_key, drop=call.key_headers)
        return await self._upstream.send(call.method, call.path, headers, body)


def _short(text: str) -> str:
    """What a column takes of a text that anybody may have made up."""
    return text[:200].encode(errors="replace").decode().replace("\0", "?")


def _credible(tokens_reported: int | None) -> int | None:
    """A count of tokens, unless it can be none."""
    return tokens_reported if tokens_reported is not None and 0 <= tokens_reported < 2**31 else None


async def _until_end(reply: Reply, end: _StreamEnd, heartbeat: float) -> AsyncIterator[bytes]:
    """The chunks of ``reply`` until it ends, or until ``end`` has seen its mark and what may come right after."""
    chunks = reply.chunks(heartbeat)
    while not end.is_seen:
        try:
            yield await anext(chunks)
        except StopAsyncIteration:
            return
    yield await reply.trailer(TRAILER_WAIT)


class _StreamEnd:
    """Holds the end mark of a stream back, and knows whether a comment may be put in between.

    The mark is a line of its own: JSON has no line ends inside, so words about the mark are never taken for it.
    """

    __slots__ = ("_tail", "held", "is_seen")

    def __init__(self) -> None:
        self.held = b""
        self.is_seen = False
        self._tail = b"\n\n"

    def hold(self, out: bytes) -> bytes:
        """What may be forwarded of ``out``."""
        if self.is_seen:
            self.held += out
            return b""
        if not out:
            return b""
        block = self.held + out if self.held else out
        start = self._find(block)
        self.held, block = block[start:], block[:start]
        if block:
            self._tail = (self._tail + block)[-4:] if len(block) < 4 else block[-4:]
        return block

    def _find(self, block: bytes) -> int:
        """Where the mark begins, or what may become one; the length of ``block`` where nothing does."""
        is_line_start = self._tail.endswith((b"\n", b"\r"))
        if b"[DONE]" in block:
            for match in _MARK.finditer(block):
                if match.start() or is_line_start:
                    self.is_seen = True
                    return match.start()
        last = max(block.rfind(b"\n"), block.rfind(b"\r")) + 1
        if last < len(block) and (last or is_line_start) and any(mark.startswith(block[last:]) for mark in DONE):
            return last
        return len(block)

    @property
    def is_between_events(self) -> bool:
        """Whether what was forwarded ends with a whole event."""
        return not self.held and self._tail.endswith((b"\n\n", b"\r\n\r\n"))


def _whole_events(block: bytes) -> bytes:
    """``block`` without an event at its end that nobody will complete."""
    ends = (block.rfind(mark) + len(mark) for mark in (b"\n\n", b"\r\n\r\n") if mark in block)
    return block[: max(ends, default=0)]


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
