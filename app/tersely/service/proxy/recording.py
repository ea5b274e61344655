"""What a proxied call leaves behind: the request's messages, the reply, the report, and what Prometheus is told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial

from msgspec import structs

from tersely.dialects.account_ids import find_named_ids
from tersely.dialects.dialect import Dialect, Request, Usage
from tersely.dialects.dialect import Reply as SaidReply
from tersely.dialects.known_fields import unknown_fields
from tersely.dialects.undescribed import payloads_as_json
from tersely.domain.errors import Conflict, NotFound, StoreUnavailable, TerselyError
from tersely.domain.history.history import BROKE_OFF, Entry
from tersely.domain.messages import Message, Text, ToolCall
from tersely.service.common import tokens
from tersely.service.common.calibrations import Calibrations
from tersely.service.common.call_fields import add_fields
from tersely.service.common.metrics import Metrics
from tersely.service.common.offload import LONG, run_in_thread_if_large
from tersely.service.context.context_configs import compact_setting
from tersely.service.context.sent_contexts import (
    Description,
    Elements,
    KnownSessions,
    describe,
    describe_added,
    message_list,
)
from tersely.service.money.prices import Prices
from tersely.service.proxy.calls import Call
from tersely.service.proxy.exchange_keeping import ExchangeKeeper
from tersely.service.proxy.limited_reader import LimitedReader
from tersely.service.proxy.preparing import PreparedCall, own_sources
from tersely.service.proxy.round_transcript import NOTHING_BESIDE, HiddenMessage, HiddenMessages
from tersely.service.recognition.incoming_history import IncomingHistory, Prefill, digest, extend
from tersely.service.recognition.session_lookup import SessionHints
from tersely.service.summaries.prefetcher import memory_of_cut
from tersely.store.commit.exchanges import Exchange
from tersely.store.commit.records import Attribute, CallReport, HistoryOwner, NewEpoch, NewReply, ReplyWrite
from tersely.store.commit.writer import Writer
from tersely.store.history.artifacts import spilled
from tersely.store.history.sessions import write_epoch
from tersely.strategies.pipeline import summarize_repairs
from tersely.strategies.presets import Slim, Tiered
from tersely.strategies.reduction.levels import measure_levels
from tersely.strategies.summaries.activity_log import derive_terse

_log = logging.getLogger(__name__)

MAX_REPLY_ID = 200
MAX_LOOKED_AT = 64 * 1024
"""Bytes of a request's new messages that are looked at for members that no table knows, the newest first."""
MIN_LOOKED_AT = 1024
"""As so many bytes even a short message counts."""
# A call that goes through unchanged sends what this strategy does.
FULL = "full"
UNREAD = "unread"
"""How what cannot be understood is said to have ended."""

# A tenant, and ids that a provider gave to its reply and the items of it.
OnIds = Callable[[str, Sequence[str]], None]
OnStored = Callable[[PreparedCall, ReplyWrite], None]


def _in_one_round(said: SaidReply) -> tuple[SaidReply, HiddenMessages]:
    return said, NOTHING_BESIDE


class Recorder:
    """Stores and counts the calls of one dialect."""

    def __init__(
        self,
        *,
        dialect: Dialect,
        writer: Writer,
        calibrations: Calibrations,
        metrics: Metrics,
        exchanges: ExchangeKeeper,
        prices: Prices,
        clock: Callable[[], datetime],
        new_id: Callable[[], str],
        on_ids: OnIds | None = None,
        on_stored: OnStored,
    ) -> None:
        """``on_ids``: tenants share a provider account, so every id is stored, and told to this at once. ``on_stored``
        is called with a call whose whole reply has been stored.
        """
        self._on_stored = on_stored
        self._dialect = dialect
        self._writer = writer
        self._calibrations = calibrations
        self._metrics = metrics
        self._exchanges = exchanges
        self._clock = clock
        self._new_id = new_id
        self._on_ids = on_ids
        self._prices = prices
        self._known = KnownSessions()

    async def store_request(self, prepared: PreparedCall) -> None:
        """Count and queue the request's new messages, while the upstream works."""
        write = prepared.write
        placed = prepared.found.decision.placed
        new = [message for message, p in zip(prepared.arrival.messages, placed, strict=True) if p.is_new]
        self._count_unknown_fields(new)
        counts = iter(await tokens.count_messages(new, prepared.request.model))
        write.tokens = [next(counts) if p.is_new else 0 for p in placed]
        is_extended = prepared.expand is not None and prepared.live is not None and prepared.live.elements is not None
        size = 0 if is_extended else len(prepared.body)
        prepared.description = await run_in_thread_if_large(size, self._describe, prepared)
        if prepared.description is not None:
            write.attributes = [*write.attributes, *prepared.description.literals]
        prepared.written = self._writer.submit(write)

    async def wait_for_request(self, prepared: PreparedCall) -> None:
        """Return when the request is stored, or cannot be: whoever commits the reply is told."""
        if prepared.written is not None:
            self._writer.hurry(prepared.write)
            with suppress(Exception):
                await asyncio.shield(prepared.written)

    def _describe(self, prepared: PreparedCall) -> Description | None:
        """Describe what the model is sent; None where that cannot be told. O(size of the request), or of what is new
        in a call that continues a live session.
        """
        if prepared.live is not None and prepared.expand is not None and prepared.live.elements is not None:
            return self._describe_added(prepared, prepared.live.session_id, prepared.live.elements)
        whole = prepared.whole
        session = whole.found.session
        known = self._known.get(
            prepared.write.tenant, whole.found.session_id, session.edits if session is not None else 0
        )
        given = zip(whole.arrival.messages, whole.found.decision.placed, strict=True)
        new = {placed.seq: message.raw for message, placed in given if placed.is_new and placed.seq}
        sources = prepared.sources if prepared.sources is not None else whole.sources
        if sources is None:
            sources = own_sources(whole.arrival, whole.found)
        if prepared.is_at_host:
            sources = [source for source in sources if source.seq in new]
        report = whole.built.context.report if whole.built else None
        try:
            return describe(
                prepared.body,
                self._dialect.name,
                sources=sources,
                new=new,
                known=known,
                layers=report.layers if report else (),
                rounds=[len(message_list(body, self._dialect.name)[0]) for body in prepared.rounds],
            )
        except ValueError:
            return None

    def _describe_added(self, prepared: PreparedCall, session_id: str, before: Elements) -> Description:
        session, context = prepared.found.session, prepared.built
        assert session is not None
        assert context is not None
        given = zip(prepared.arrival.messages, prepared.found.decision.placed, strict=True)
        return describe_added(
            prepared.body,
            self._dialect.name,
            before,
            prepared.sources or (),
            new={placed.seq: message.raw for message, placed in given if placed.is_new and placed.seq},
            known=self._known.get(prepared.write.tenant, session_id, session.edits),
            layers=context.context.report.layers,
        )

    def _count_unknown_fields(self, messages: Sequence[Message]) -> None:
        """Count the members that no table knows in the newest messages; a history of any length costs the same."""
        room = MAX_LOOKED_AT
        for message in reversed(messages):
            room -= max(MIN_LOOKED_AT, len(message.raw))
            if room < 0:
                return
            for dialect, block in unknown_fields(self._dialect.name, message):
                self._metrics.unknown_fields.labels(dialect, block).inc()

    async def commit(
        self,
        prepared: PreparedCall,
        said: SaidReply,
        status: int,
        *,
        is_whole: bool,
        beside: HiddenMessages = NOTHING_BESIDE,
    ) -> None:
        """Return when request and reply are on disk: in the database, or in the spool.

        Raises `StoreUnavailable` where neither takes them, `NotFound` where their session was deleted meanwhile.
        """
        write = await run_in_thread_if_large(
            _size_of(said) + (0 if _is_described(prepared) else len(prepared.body)),
            partial(self._reply_write, prepared, said, status, is_whole=is_whole, beside=beside, now=self._clock()),
        )
        self._count_call(prepared, write.report, is_one=not beside.before)
        if not is_whole:
            add_fields(outcome="interrupted")
        own_id = prepared.found.session_id if prepared.found.source == "header" else None
        await self._exchanges.commit(write, prepared.written, own_id=own_id)
        if is_whole:
            self._on_stored(prepared, write)
        self._learn(prepared, write)

    def _learn(self, prepared: PreparedCall, write: ReplyWrite) -> None:
        """Remember which bytes of the session are stored now."""
        outcome, description = prepared.write.outcome, prepared.description
        if outcome is None or description is None:
            return
        if outcome.is_as_decided and outcome.session_id == prepared.found.session_id:
            replies = {seq: reply.raw for seq, reply in enumerate(write.replies, write.first_seq) if write.first_seq}
            self._known.learn(prepared.write.tenant, outcome.session_id, description, replies)
        else:
            self._known.forget(prepared.write.tenant, prepared.found.session_id)

    async def commit_partial(
        self, prepared: PreparedCall, said: SaidReply, status: int, *, beside: HiddenMessages = NOTHING_BESIDE
    ) -> None:
        """Store a reply that broke off. The client is told so in any case."""
        try:
            await self.commit(prepared, said, status, is_whole=False, beside=beside)
        except (StoreUnavailable, NotFound) as error:
            _log.warning("a reply that broke off was not stored: %s", error)

    async def spool(
        self,
        call: Call,
        request: Request,
        arrival: IncomingHistory,
        asked: SessionHints,
        said: SaidReply,
        status: int,
        *,
        now: datetime,
    ) -> None:
        """Return when a call that was made without the store waits in the spool. Raises `StoreUnavailable`.

        ``now`` is when it began. The request carries its whole history.
        """
        usage = self._dialect.read_usage(said.usage)
        counts = await tokens.count_messages(arrival.messages, request.model)
        total = sum(counts)
        tools = tokens.content_digest(request.tools) if request.tools else None
        report = CallReport(
            model=_short(request.model),
            strategy=FULL,
            epoch=0,
            cut=1,
            tools=tools,
            tokens_before=total,
            tokens_after=total,
            input_tokens=_credible(usage.input),
            cached_tokens=_credible(usage.cached),
            output_tokens=_credible(usage.output),
            status=status,
        )
        name = self._new_id()
        await self._exchanges.spool(
            Exchange(
                id=name,
                tenant=call.tenant,
                dialect=self._dialect.name,
                session_id=name,
                own_id=asked.session_id,
                client=asked.client,
                create=None,
                mode="full",
                incoming=list(arrival.identities),
                raws=[message.raw for message in arrival.messages],
                tokens=counts,
                decision=None,
                version=None,
                attributes=[Attribute(digest=tools, kind="tools", raw=request.tools)] if tools else [],
                open_chain=arrival.head_chain if not arrival.reply_chains() else None,
                hidden_parts={},
                referenced=None,
                replaces_instructions=False,
                strategy=compact_setting(call.options.strategy),
                epoch_policy=compact_setting(call.options.epoch),
                key=asked.key,
                key_digest=arrival.question_digest if asked.key is not None else b"",
                outcome=None,
                replies=self._replies(
                    call.tenant,
                    request,
                    said,
                    head_chain=arrival.head_chain,
                    prefill=arrival.prefill,
                    is_whole=True,
                    keeper="both" if request.is_stored else "tersely",
                ),
                report=report,
                epoch=None,
                requested_at=now,
                started_at=now,
                answered_at=self._clock(),
            )
        )

    def not_stored_event(self, error: TerselyError) -> bytes:
        """The event that ends a stream whose reply could not be stored."""
        _log.error("a stream ends with an error: %s", error)
        add_fields(outcome="not_stored")
        code = "not_found" if isinstance(error, NotFound) else "database_unavailable"
        return self._dialect.error_event(self._dialect.error_body(error.detail, type="server_error", code=code))

    async def commit_failure(self, prepared: PreparedCall, status: int | None) -> None:
        """Return when the failed call is on disk: its client may try again at once, and be first at another worker."""
        if prepared.written is None:
            return
        try:
            await asyncio.shield(self.submit_reply(prepared, SaidReply(), status, is_whole=False))
        except (StoreUnavailable, Conflict, NotFound, ValueError) as error:
            _log.warning("a failed call was not stored: %s", error)

    def record_failure(self, prepared: PreparedCall, status: int | None) -> None:
        """Record a call that came to nothing, without waiting for it."""
        if prepared.written is not None:
            self.submit_reply(prepared, SaidReply(), status, is_whole=False)

    def record_partial(
        self,
        prepared: PreparedCall,
        reader: LimitedReader,
        status: int | None,
        *,
        with_rounds: Callable[[SaidReply], tuple[SaidReply, HiddenMessages]] = _in_one_round,
    ) -> None:
        """Record what ``reader`` has read until the client went away, without waiting for it.

        ``with_rounds`` joins it with the earlier rounds of the call.
        """

        def submit(said: SaidReply) -> asyncio.Future[None]:
            reply, beside = with_rounds(said)
            return self.submit_reply(prepared, reply, status, is_whole=False, beside=beside)

        async def submit_later() -> None:
            with suppress(StoreUnavailable, Conflict, NotFound, ValueError):
                await submit(await reader.reply())

        if reader.size < LONG:
            submit(reader.reply_so_far())
        else:
            self._writer.track(asyncio.get_running_loop().create_task(submit_later()))

    def submit_reply(
        self,
        prepared: PreparedCall,
        said: SaidReply,
        status: int | None,
        *,
        is_whole: bool,
        beside: HiddenMessages = NOTHING_BESIDE,
    ) -> asyncio.Future[None]:
        """Queue what was said (``is_whole``: to its end) with the report of the call, and count both. Long replies are
        read in a thread.

        ``beside`` is stored with a reply, or not at all: without one, the request may be sent again.
        """
        now = self._clock()
        size = _size_of(said) + (0 if _is_described(prepared) else len(prepared.body))
        write = partial(self._reply_write, prepared, said, status, is_whole=is_whole, beside=beside, now=now)
        if size < LONG:
            return self._submit(prepared, write(), is_one=not beside.before)

        async def submit() -> None:
            await self._submit(prepared, await asyncio.to_thread(write), is_one=not beside.before)

        return self._writer.track(asyncio.get_running_loop().create_task(submit()))

    def _submit(self, prepared: PreparedCall, write: ReplyWrite, *, is_one: bool) -> asyncio.Future[None]:
        self._count_call(prepared, write.report, is_one=is_one)
        return self._writer.submit(write)

    def _reply_write(
        self,
        prepared: PreparedCall,
        said: SaidReply,
        status: int | None,
        *,
        is_whole: bool,
        beside: HiddenMessages,
        now: datetime,
    ) -> ReplyWrite:
        usage = self._dialect.read_usage(said.usage)
        report = prepared.built.context.report if prepared.built else None
        late: tuple[Attribute, ...] = ()
        if not _is_described(prepared):
            # Another body went upstream than was described: a smaller one, or a further round.
            stored = prepared.description.literals if prepared.description else ()
            prepared.description = self._describe(prepared)
            late = tuple(set(prepared.description.literals) - set(stored)) if prepared.description else ()
        cost_sent, cost_full = self._costs(prepared, usage)
        call_report = CallReport(
            sent=prepared.description.sent if prepared.description else None,
            client=prepared.client,
            request_id=prepared.request_id,
            overhead_ms=prepared.labels.overhead_ms,
            cost_sent=cost_sent,
            cost_full=cost_full,
            model=_short(prepared.request.model),
            strategy=prepared.labels.strategy,
            epoch=report.epoch if report else 0,
            cut=report.cut if report else 1,
            tools=_digest_of_tools(prepared),
            tokens_before=report.tokens_before if report else 0,
            tokens_after=report.tokens_after if report else 0,
            input_tokens=_credible(usage.input),
            cached_tokens=_credible(usage.cached),
            output_tokens=_credible(usage.output),
            weight=self._weigh(said, report.tokens_after if report else 0),
            status=status,
        )
        replies = self._replies(
            prepared.write.tenant,
            prepared.request,
            said,
            head_chain=prepared.found.head_chain or prepared.arrival.head_chain,
            prefill=prepared.arrival.prefill,
            is_whole=is_whole,
            keeper=prepared.keeper,
            derive=partial(self._derive, prepared, now=now),
        )
        if beside.before:
            replies = [structs.replace(reply, usage=said.usage or None) for reply in replies]
        if replies and beside != NOTHING_BESIDE:
            before, after = (self._hidden(prepared, hidden) for hidden in (beside.before, beside.after))
            replies = [*before, *map(self._as_input, replies), *after]
        return ReplyWrite(
            request=prepared.write,
            replies=replies,
            report=call_report,
            started=prepared.started,
            now=now,
            # A reply in which nothing was said is not stored, but the model was sent this context all the same.
            epoch=self._new_epoch(prepared) if said.choices else None,
            attributes=late,
        )

    def _costs(self, prepared: PreparedCall, usage: Usage) -> tuple[float | None, float | None]:
        """The cost of the call in USD, and that of the full history with a perfect cache; None: not known.

        A perfect cache holds all that earlier calls of the session sent, and what the provider found in its own: only
        the rest of this request is written to it.
        """
        price = self._prices.of(prepared.request.model, self._dialect.name)
        if price is None or usage.input is None or not _credible(usage.input):
            return None, None
        output = _credible(usage.output) or 0
        sent = price.cost(input_tokens=usage.input, cached=_credible(usage.cached) or 0, output=output)
        report = prepared.built.context.report if prepared.built else None
        if report is None or not report.tokens_after:
            return sent, sent
        new = sum(prepared.write.tokens) if prepared.found.session else report.tokens_before
        ratio = usage.input / report.tokens_after
        known = max(0, report.tokens_before - new)
        whole = max(usage.input, int(report.tokens_before * ratio))
        cached = max(_credible(usage.cached) or 0, int(known * ratio))
        full = price.cost(input_tokens=whole, cached=cached, output=output)
        return sent, full

    def _weigh(self, said: SaidReply, sent: int) -> int | None:
        """Prompt and completion of the last round in tokens; of one round, what the provider said of the call.

        ``sent`` is our own count of the context, for providers that do not say.
        """
        last = self._dialect.read_usage(said.last_usage or said.usage)
        prompt = _credible(last.input)
        return _credible((sent if prompt is None else prompt) + (_credible(last.output) or 0))

    def _replies(
        self,
        tenant: str,
        request: Request,
        said: SaidReply,
        *,
        head_chain: bytes,
        prefill: Prefill | None,
        is_whole: bool,
        keeper: HistoryOwner,
        derive: Callable[[Message], list[tuple[str, str]]] = lambda _: [],
    ) -> list[NewReply]:
        """The choices of a reply. ``derive`` gives the log entries of one without a tag.

        Behind them stand the choices that continue a ``prefill``, each as one message with it.
        """
        found: list[NewReply] = []
        joined: list[NewReply] = []
        reply_id = self._id_of(said)
        for choice in said.choices:
            client = self._dialect.read_reply(choice.client_message)
            is_same = choice.model_message == choice.client_message
            model = client if is_same else self._dialect.read_reply(choice.model_message)
            if not model.parts:
                continue
            model_raw: bytes | None = choice.model_message
            if client.is_malformed or model.is_malformed or model.role != "assistant":
                model_raw = self._as_described(model)
            identity_of_reply, _ = digest(client)
            finish = _short(choice.finish_reason) or (None if is_whole else BROKE_OFF)
            is_named = (request.is_stored or self._on_ids is not None) and not client.is_malformed
            items = self._items_of(choice.client_message) if is_named else ()
            if self._on_ids is not None and not client.is_malformed:
                items = (*items, *self._named(choice.client_message), *filter(_is_usable, (said.container,)))
                self._on_ids(tenant, [name for name in (reply_id, *items) if name])
            terse = [(text, "model") for text in choice.terse]
            if not terse and is_whole and not found and not model.calls and model_raw is not None:
                terse = derive(model)
            found.append(
                NewReply(
                    raw=choice.client_message if model_raw is not None else payloads_as_json((choice.client_message,)),
                    model_raw=model_raw if model_raw != choice.client_message else None,
                    digest=identity_of_reply,
                    chain=extend(head_chain, identity_of_reply),
                    tokens=tokens.count_message(model, request.model),
                    finish=finish,
                    terse=tuple(terse),
                    # A block that broke off would take away what the one before it still says.
                    state=choice.state if is_whole else None,
                    is_alternative=model_raw is None or any(not reply.is_alternative for reply in found),
                    id=reply_id,
                    history_owner=keeper if is_whole else "tersely",
                    items=items,
                    is_text_only=bool(request.tools) and not client.calls,
                )
            )
            if (
                prefill is not None
                and self._dialect.continues_prefill
                and not (client.is_malformed or model.is_malformed)
            ):
                joined.append(self._with_prefill(found[-1], prefill, request.model))
        found += joined
        if said.unread:
            found.append(self._unread(said.unread, head_chain))
        return found

    def _with_prefill(self, reply: NewReply, prefill: Prefill, model: str) -> NewReply:
        """A reply as one message with its prefill. Some hosts repeat the prefill in the reply."""

        def join(raw: bytes) -> bytes:
            text = self._dialect.read_reply(raw).text
            return raw if text.startswith(prefill.text) else self._dialect.with_text(raw, prefill.text + text)

        raw = join(reply.raw)
        model_raw = join(reply.model_raw or reply.raw)
        message = self._dialect.read_reply(raw)
        identity, _ = digest(message)
        return structs.replace(
            reply,
            raw=raw,
            model_raw=model_raw if model_raw != raw else None,
            digest=identity,
            chain=extend(prefill.chain_before, identity),
            tokens=tokens.count_message(message, model),
            is_alternative=True,
            id="",
            items=(),
        )

    def _as_described(self, reply: Message) -> bytes | None:
        """A reply of an undescribed shape as the provider takes it back: its words and calls; None without any."""
        parts = tuple(part for part in reply.parts if isinstance(part, Text | ToolCall))
        return self._dialect.write_message(Message(role="assistant", parts=parts, raw=b"")) if parts else None

    def _unread(self, payloads: Sequence[bytes], head_chain: bytes) -> NewReply:
        """What of a reply cannot be understood, word for word; no context holds it."""
        self._metrics.unread_replies.labels(self._dialect.name).inc()
        raw = payloads_as_json(payloads)
        identity, _ = digest(self._dialect.read_reply(raw))
        return NewReply(
            raw=raw,
            model_raw=None,
            digest=identity,
            chain=extend(head_chain, identity),
            tokens=0,
            finish=UNREAD,
            is_alternative=True,
        )

    def _id_of(self, said: SaidReply) -> str:
        """The id by which the client may go on from a reply."""
        return said.id if self._dialect.lacks_history is not None and _is_usable(said.id) else ""

    def _items_of(self, message: bytes) -> tuple[str, ...]:
        """The ids by which the client may refer to items of a reply."""
        references = self._dialect.references
        return tuple(filter(_is_usable, references.items_by_id(message))) if references is not None else ()

    def _named(self, message: bytes) -> tuple[str, ...]:
        """The ids of what a reply made beside itself, which the client may name."""
        return tuple(filter(_is_usable, find_named_ids(self._dialect.name, message)))

    def _as_input(self, reply: NewReply) -> NewReply:
        """A reply said in rounds: it goes back to the model as that said it last, whatever the client makes of it."""
        return structs.replace(reply, model_raw=self._dialect.as_input(reply.model_raw)) if reply.model_raw else reply

    def _hidden(self, prepared: PreparedCall, messages: Sequence[HiddenMessage]) -> list[NewReply]:
        """What the client never sees. All of it is the model's view: nothing else tells it from what a client sent."""
        read = [self._dialect.read_message(hidden.raw) for hidden in messages]
        return [
            NewReply(
                raw=hidden.raw,
                model_raw=hidden.raw,
                digest=digest(message)[0],
                chain=None,
                tokens=tokens.count_message(message, prepared.request.model),
                finish=_short(hidden.choice.finish_reason) if hidden.choice else None,
                terse=tuple((text, "model") for text in hidden.choice.terse) if hidden.choice else (),
                state=hidden.choice.state if hidden.choice else None,
                role=message.role,
                spilled=tuple(spilled(read, index)),
            )
            for index, (hidden, message) in enumerate(zip(messages, read, strict=True))
        ]

    def _derive(self, prepared: PreparedCall, reply: Message, now: datetime) -> list[tuple[str, str]]:
        """A log entry made without a model, for a turn whose reply carried none."""
        strategy = prepared.recipe.strategy
        if not (isinstance(strategy, Slim) and strategy.derive_terse):
            return []
        answered = prepared.found.decision.answered
        turn = answered.turn if answered else 1
        entries = [entry for entry in prepared.history.snapshot.entries if entry.turn == turn]
        last = Entry(seq=prepared.found.decision.last_seq + 1, turn=turn, message=reply, tokens=0, created_at=now)
        return [(derive_terse([*entries, last]).text, "derived")]

    def _new_epoch(self, prepared: PreparedCall) -> NewEpoch | None:
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
            states=built.states,
            memory=memory_of_cut(
                prepared.recipe.strategy,
                prepared.history,
                context.epoch,
                dialect=self._dialect.name,
                model=_short(prepared.request.model),
            ),
        )

    def _count_call(self, prepared: PreparedCall, report: CallReport, *, is_one: bool) -> None:
        """``is_one``: the upstream was asked once, so that what it reports can be held against what was estimated."""
        metrics = self._metrics
        add_fields(
            input_tokens=report.input_tokens,
            cached_tokens=report.cached_tokens,
            output_tokens=report.output_tokens,
        )
        built = prepared.built
        if built is not None:
            context = built.context
            metrics.tokens_before.observe(report.tokens_before)
            metrics.tokens_after.observe(report.tokens_after)
            metrics.tokens_saved.inc(max(0, report.tokens_before - report.tokens_after))
            if built.starts_epoch:
                metrics.epochs.labels(report.strategy, context.epoch.reason).inc()
                metrics.compression.observe(report.tokens_after / max(1, report.tokens_before))
            for level in measure_levels(context) if isinstance(prepared.recipe.strategy, Tiered) else ():
                metrics.level_tokens.labels(level.name).observe(level.tokens)
                metrics.level_messages.labels(level.name).observe(level.messages)
            for kind, count in summarize_repairs(context.repairs).items():
                metrics.repairs.labels(kind).inc(count)
        metrics.add_cost(sent=report.cost_sent, full=report.cost_full)
        for kind, reported in (
            ("input", report.input_tokens),
            ("cached", report.cached_tokens),
            ("output", report.output_tokens),
        ):
            if reported:
                metrics.reported_tokens[kind].inc(reported)
        if is_one and report.input_tokens and report.tokens_after:
            metrics.estimate_error.observe(report.input_tokens / report.tokens_after)
            self._calibrations.observe(
                prepared.request.model, estimated=report.tokens_after, reported=report.input_tokens
            )


def _digest_of_tools(prepared: PreparedCall) -> bytes | None:
    if prepared.live is not None:
        return prepared.live.tools_digest
    return tokens.content_digest(prepared.request.tools) if prepared.request.tools else None


def _is_described(prepared: PreparedCall) -> bool:
    """Return whether the description is that of the body that went upstream."""
    return prepared.description is not None and prepared.description.body is prepared.body


def _size_of(said: SaidReply) -> int:
    """Bytes of a reply."""
    size = sum(map(len, said.unread))
    return size + sum(len(choice.client_message) + len(choice.model_message) for choice in said.choices)


def _short(text: str) -> str:
    """What a column takes of a text that anybody may have made up."""
    return text[:200].encode(errors="replace").decode().replace("\0", "?")


def _credible(tokens_reported: int | None) -> int | None:
    """A count of tokens, unless it can be none."""
    return tokens_reported if tokens_reported is not None and 0 <= tokens_reported < 2**31 else None


def _is_usable(name: str) -> bool:
    return 0 < len(name) <= MAX_REPLY_ID and name.isprintable()
