"""The last step of a call: store the request's messages, the reply and the report, and count them in the metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Protocol

from msgspec import structs

from tersely.dialects.dialect import NO_REPLY, Dialect, ErrorDescription, Reply
from tersely.domain.errors import Conflict, NotFound, StoreUnavailable, TerselyError
from tersely.domain.history.history import BROKE_OFF, CLIENT_LEFT
from tersely.service.common import tokens
from tersely.service.common.calibrations import Calibrations
from tersely.service.common.call_board import identify_call
from tersely.service.common.call_fields import add_fields
from tersely.service.common.metrics import Metrics
from tersely.service.common.offload import LONG, run_in_thread_if_large
from tersely.service.common.tracing import traced
from tersely.service.context.context_configs import compact_setting
from tersely.service.context.sent_contexts import (
    Description,
    KnownSessions,
    body_parts,
    describe,
    describe_added,
)
from tersely.service.money.charges import Charge
from tersely.service.money.prices import Prices
from tersely.service.proxy.durability.durable_writer import DurableWriter
from tersely.service.proxy.live_calls.live_call import LiveCall, layers_of
from tersely.service.proxy.live_calls.live_calls import LiveCalls
from tersely.service.proxy.live_sessions.frames import count_volatile
from tersely.service.proxy.preparing.request_building import own_sources
from tersely.service.proxy.preparing.stages import IncomingCall, PreparedCall, RequestRecord
from tersely.service.proxy.recording.call_counter import CallCounter
from tersely.service.proxy.recording.call_reports import CallReports, storable_name
from tersely.service.proxy.recording.reply_records import OnIds, ReplyRecords, leaves_no_message
from tersely.service.proxy.recording.round_transcript import NO_HIDDEN_MESSAGES, CombinedReply, HiddenMessages
from tersely.service.proxy.sending.forwarding import ForwardedReply
from tersely.service.proxy.sending.sent_call import SentCall
from tersely.service.proxy.streams.limited_reader import LimitedReader
from tersely.service.summaries.prefetcher import memory_of_cut
from tersely.store.commit.exchanges import Exchange
from tersely.store.commit.records import (
    Attribute,
    CallReport,
    HistoryOwner,
    NewEpoch,
    NewReply,
    ReplyWrite,
    StoredReply,
)
from tersely.store.commit.writer import HOLD, Writer
from tersely.store.history.sent_contexts import digest_of
from tersely.store.history.sessions import write_epoch

_log = logging.getLogger(__name__)


class OnStored(Protocol):
    """Is called with a call that has been stored, or waits to be (``stored`` None). ``is_whole``: its reply is."""

    def __call__(self, sent: SentCall, write: ReplyWrite, stored: StoredReply | None, *, is_whole: bool) -> None: ...


class Recorder:
    """Stores and counts the calls of one dialect."""

    def __init__(
        self,
        *,
        dialect: Dialect,
        writer: Writer,
        calibrations: Calibrations,
        metrics: Metrics,
        exchanges: DurableWriter,
        prices: Prices,
        clock: Callable[[], datetime],
        new_id: Callable[[], str],
        on_ids: OnIds | None = None,
        known: KnownSessions,
        on_stored: OnStored,
        live: LiveCalls,
    ) -> None:
        """``on_ids`` is set if tenants share a provider account: it is called with every id that a tenant was given,
        and all of them are stored.
        """
        self._on_stored = on_stored
        self._live = live
        self._dialect = dialect
        self._writer = writer
        self._exchanges = exchanges
        self._clock = clock
        self._new_id = new_id
        self._known = known
        self._records = ReplyRecords(dialect, metrics, on_ids)
        self._reports = CallReports(dialect, prices)
        self._counter = CallCounter(dialect.name, metrics, calibrations)

    @traced("store")
    async def store_request(self, prepared: PreparedCall) -> PreparedCall:
        """Count and queue the request's new messages; return the call with the record of that."""
        identify_call(prepared.write.session_id)
        # The session moves on. If the call fails, no live session takes the place of the one before it.
        self._live.forget_session(prepared.call.tenant, prepared.write.session_id)
        placed = prepared.match.decision.placed
        new = [message for message, p in zip(prepared.history.messages, placed, strict=True) if p.is_new]
        self._counter.count_unknown_fields(new)
        counts = iter(await tokens.count_messages(new, prepared.request.model))
        size = max(len(prepared.body), prepared.write.size)
        description = await run_in_thread_if_large(size, self._describe, prepared)
        literals = description.literals if description is not None else ()
        write = structs.replace(
            prepared.write,
            tokens=[next(counts) if p.is_new else 0 for p in placed],
            attributes=[*prepared.write.attributes, *literals],
        )
        record = RequestRecord(write=write, description=description, stored=self._writer.submit(write))
        return structs.replace(prepared, record=record)

    # Live calls

    def describe_live(self, call: LiveCall) -> None:
        """Count and describe what a live call adds. It is stored with the reply, or before, where that takes long."""
        identify_call(call.live.session.id)
        live, write, history = call.live, call.write, call.found.history
        known = call.found.echoes
        new, model = history.messages[known:], live.request.model
        self._counter.count_unknown_fields(new)
        call.description = description = describe_added(
            self._dialect.name,
            live.elements,
            call.elements.elements,
            new={placed.seq: each.raw for each, placed in zip(new, call.decision.placed[known:], strict=True)},
            known=self._known.get(call.call.tenant, live.session.id, live.session.edits),
            layers=layers_of(live, call.sums),
            instructions=call.elements.instructions,
            volatile=len(call.elements.volatile),
        )
        call.write = structs.replace(
            write,
            tokens=(*[0] * known, *[tokens.count_message(message, model) for message in new]),
            attributes=description.literals,
        )
        if live.is_joined:
            self._store_early(call)  # another call of the session, on any replica, must find this question
        else:
            call.alarm = asyncio.get_running_loop().call_later(HOLD, self._store_early, call)
            self._writer.deferred[call] = self._store_early  # an edit of the session must find this question

    def _store_early(self, call: LiveCall) -> None:
        self.full(call)
        self._writer.hurry(call.write)

    def _disarm(self, call: LiveCall) -> None:
        """Have the request stored with what is submitted next."""
        self._writer.deferred.pop(call, None)
        if call.alarm is not None:
            call.alarm.cancel()
            call.alarm = None

    def full(self, call: SentCall) -> PreparedCall:
        """Return a call as the full path prepares and records it."""
        if not isinstance(call, LiveCall):
            return call
        self._disarm(call)
        if call.prepared is None:
            self._live.forget(call)
            if call.description is None:
                self.describe_live(call)
                self._disarm(call)
            assert call.description is not None
            description = structs.replace(call.description, body=call.body)
            record = RequestRecord(write=call.write, description=description, stored=self._writer.submit(call.write))
            call.prepared = structs.replace(call.expand(call), write=call.write, record=record)
        return call.prepared

    async def _commit_live(self, call: LiveCall, reply: Reply, status: int) -> None:
        """Store a live call in one write. Raises as `commit`."""
        self._disarm(call)
        write = self._live_write(call, reply, status)
        report, estimate = write.report, None
        if not report.input_tokens or report.output_tokens is None:
            estimate = self._reports.estimate_charge(call, reply, report, is_whole=True, is_answered=True)
        self._counter.count_tokens(report)
        self._counter.count_repairs(call.live.repairs)
        self._counter.count_reported(report, estimate, call.call.tenant, call.live.request.model, is_one_round=True)
        tenant, session_id = call.call.tenant, call.live.session.id
        checked = self._live.now(tenant)
        try:
            stored = await self._exchanges.commit(write, own_id=session_id if call.live.is_named else None)
        except BaseException:
            self._live.forget(call)
            raise
        self._live.note_replies(tenant, write, stored)
        self._live.grow(call, write, stored, checked)
        self._on_stored(call, write, stored, is_whole=True)
        if stored is None or call.description is None:
            return
        if stored.outcome.is_as_decided and stored.outcome.session_id == session_id:
            replies = _numbered(write.replies, stored.first_seq)
            digests = {seq: digest_of(reply.raw) for seq, reply in replies.items()}
            self._known.learn(tenant, session_id, call.description, replies, digests)
        else:
            self._known.forget(tenant, session_id)

    def _is_plain(self, call: LiveCall, reply: Reply, hidden: HiddenMessages, *, is_whole: bool) -> bool:
        """Return whether a reply is stored in one write with its request, which nothing else has asked for."""
        return is_whole and call.prepared is None and hidden is NO_HIDDEN_MESSAGES and _size_of(reply) < LONG

    def _live_write(self, call: LiveCall, reply: Reply, status: int) -> ReplyWrite:
        live, request, now = call.live, call.live.request, self._clock()
        epoch = live.snapshot.epoch
        assert epoch is not None
        assert call.description is not None
        report = self._reports.report(
            call,
            reply,
            status,
            sent=call.description.sent,
            client=live.client_name,
            epoch=epoch.number,
            cut=epoch.cut,
            tools=live.tools_digest,
            tokens_before=call.labels.tokens_before or 0,
            tokens_after=call.labels.tokens_after or 0,
            tokens_new=sum(call.write.tokens),
        )
        replies = self._records.choices(
            call.call.tenant,
            request,
            reply,
            head_chain=call.found.history.chains[-1],
            prefill=None,
            is_whole=True,
            history_owner=live.history_owner,
        )
        empty = None
        if leaves_no_message(replies):
            empty = self._records.empty(call.call.tenant, reply, is_whole=True, history_owner=live.history_owner)
        return ReplyWrite(
            request=call.write, replies=replies, empty=empty, report=report, started=call.started, now=now
        )

    # The request

    async def wait_for_session(self, sent: SentCall) -> str:
        """Return the id of the call's session, when the request is stored or cannot be stored. In the latter case, the
        commit of the reply fails.
        """
        prepared = self.full(sent)
        record = prepared.record
        if record is None:
            return prepared.match.session_id
        self._writer.hurry(record.write)
        with suppress(Exception):
            await asyncio.shield(record.stored)
        outcome = record.outcome
        return outcome.session_id if outcome is not None else prepared.match.session_id

    def _describe(self, prepared: PreparedCall) -> Description | None:
        """Describe what the model is sent; None if the body cannot be described. O(size of the request)."""
        # A call that starts an epoch has the sources of all that is sent, though not the whole history.
        described = prepared.whole if prepared.sources is None else prepared
        session = described.match.session
        known = self._known.get(
            prepared.call.tenant, described.match.session_id, session.edits if session is not None else 0
        )
        given = zip(described.history.messages, described.match.decision.placed, strict=True)
        new = {placed.seq: message.raw for message, placed in given if placed.is_new and placed.seq}
        sources = described.sources
        if sources is None:
            sources = own_sources(described.history, described.match)
        if prepared.is_at_host:
            sources = [source for source in sources if source.seq in new]
        report = described.built.context.report if described.built else None
        try:
            return describe(
                prepared.body,
                self._dialect.name,
                sources=sources,
                new=new,
                known=known,
                layers=report.layers if report else (),
                rounds=[len(body_parts(body, self._dialect.name).elements) for body in prepared.earlier_bodies],
                volatile=count_volatile(described.own_messages, self._dialect.name) or 0,
                client_tools=prepared.request.tools,
            )
        except ValueError:
            return None

    @traced("store")
    async def commit(
        self,
        sent: SentCall,
        reply: Reply,
        status: int,
        *,
        is_whole: bool,
        is_answered: bool = True,
        hidden: HiddenMessages = NO_HIDDEN_MESSAGES,
    ) -> None:
        """Return when request and reply are on disk: in the database, or in the spool. ``is_answered``: the host has
        begun to answer the last round.

        Raises `StoreUnavailable` if neither takes them, `NotFound` if their session has been deleted.
        """
        if isinstance(sent, LiveCall) and self._is_plain(sent, reply, hidden, is_whole=is_whole):
            await self._commit_live(sent, reply, status)
            return
        prepared = self.full(sent)
        is_answered = is_answered and status < 400
        work = partial(
            self._reply_write,
            prepared,
            reply,
            status,
            is_whole=is_whole,
            is_answered=is_answered,
            hidden=hidden,
            now=self._clock(),
        )
        try:
            prepared, write, estimate = await run_in_thread_if_large(self._work_size(prepared, reply), work)
        except asyncio.CancelledError:  # the client has left meanwhile
            self._submit_reply(prepared, reply, status, is_answered=is_answered, hidden=hidden)
            raise
        self._counter.count_call(
            prepared, write.report, estimate, is_one_round=reply.rounds == 1, is_answered=is_answered
        )
        if not is_whole:
            add_fields(outcome="interrupted")
        own_id = prepared.match.session_id if prepared.match.source == "header" else None
        checked = self._live.now(prepared.call.tenant)
        stored = await self._exchanges.commit(write, own_id=own_id)
        self._live.note_replies(prepared.call.tenant, write, stored)
        if isinstance(sent, LiveCall):
            self._live.grow(sent, write, stored if is_whole else None, checked)
        self._on_stored(sent, write, stored, is_whole=is_whole)
        await self._learn(prepared, write, stored)

    async def _learn(self, prepared: PreparedCall, write: ReplyWrite, stored: StoredReply | None) -> None:
        """Remember which bytes of the session are stored now. ``stored`` None: the exchange is not stored yet."""
        outcome, tenant, match = write.request_outcome, prepared.call.tenant, prepared.match
        description = prepared.record.description if prepared.record else None
        if outcome is None or description is None:
            return
        if outcome.is_as_decided and outcome.session_id == match.session_id:
            replies = _numbered(write.replies, stored.first_seq if stored is not None else 0)
            # Many megabytes take their time to be hashed.
            digests = await run_in_thread_if_large(
                sum(len(reply.raw) for reply in replies.values()),
                lambda: {seq: digest_of(reply.raw) for seq, reply in replies.items()},
            )
            self._known.learn(tenant, outcome.session_id, description, replies, digests)
        else:
            self._known.forget(tenant, match.session_id)

    async def commit_partial(
        self,
        prepared: SentCall,
        reply: Reply,
        status: int,
        *,
        is_answered: bool = True,
        hidden: HiddenMessages = NO_HIDDEN_MESSAGES,
    ) -> None:
        """Store an incomplete reply. A failure is logged: the client has got an error in any case."""
        try:
            await self.commit(prepared, reply, status, is_whole=False, is_answered=is_answered, hidden=hidden)
        except (StoreUnavailable, NotFound) as error:
            _log.warning("an incomplete reply was not stored: %s", error)

    async def spool(self, incoming: IncomingCall, forwarded: ForwardedReply) -> None:
        """Return when a call that was made without the store is in the spool. Raises `StoreUnavailable`.

        The request must carry its whole history.
        """
        counts = await tokens.count_messages(incoming.history.messages, incoming.request.model)
        size = _size_of(forwarded.reply) + sum(len(each.raw) for each in incoming.history.messages)
        await self._exchanges.spool(
            await run_in_thread_if_large(size, self._exchange_of, incoming, forwarded, counts, self._clock())
        )

    def _exchange_of(
        self, incoming: IncomingCall, forwarded: ForwardedReply, counts: list[int], now: datetime
    ) -> Exchange:
        """Return the exchange of a call that was made without the store. O(size of request and reply)."""
        reply, cut_off = forwarded.reply, forwarded.cut_off
        call, request, history, hints = incoming.call, incoming.request, incoming.history, incoming.hints
        tools = tokens.content_digest(request.tools) if request.tools else None
        exchange_id = self._new_id()
        owner: HistoryOwner = "both" if request.is_stored else "tersely"
        replies = self._records.choices(
            call.tenant,
            request,
            reply,
            head_chain=history.head_chain,
            prefill=history.prefill,
            is_whole=cut_off is None,
            cut_off=cut_off or BROKE_OFF,
            history_owner=owner,
        )
        empty = None
        if leaves_no_message(replies):
            empty = self._records.empty(call.tenant, reply, is_whole=cut_off is None, history_owner=owner)
        return Exchange(
            id=exchange_id,
            tenant=call.tenant,
            dialect=self._dialect.name,
            session_id=exchange_id,
            own_id=hints.session_id,
            client=hints.client,
            create=None,
            mode="full",
            incoming=list(history.identities),
            raws=[message.raw for message in history.messages],
            tokens=counts,
            decision=None,
            version=None,
            attributes=[Attribute(digest=tools, kind="tools", raw=request.tools)] if tools else [],
            open_chain=history.head_chain if not history.reply_chains() else None,
            hidden_parts={},
            referenced=None,
            replaces_instructions=False,
            strategy=compact_setting(call.options.strategy),
            epoch_policy=compact_setting(call.options.epoch),
            key=hints.key,
            key_digest=history.question_digest if hints.key is not None else b"",
            outcome=None,
            replies=replies,
            empty=empty,
            report=self._reports.report_unchanged(
                call, request.model, reply, forwarded.status, tools=tools, tokens_sent=sum(counts)
            ),
            epoch=None,
            requested_at=incoming.started,
            started_at=incoming.started,
            answered_at=now,
        )

    def not_stored_event(self, error: TerselyError) -> bytes:
        """Return the event that ends a stream whose reply could not be stored."""
        _log.error("a stream ends with an error: %s", error)
        add_fields(outcome="not_stored")
        code = "not_found" if isinstance(error, NotFound) else "database_unavailable"
        return self._dialect.error_event(
            self._dialect.error_body(ErrorDescription(message=error.detail, type="server_error", code=code))
        )

    @traced("store")
    async def commit_failure(self, sent: SentCall, status: int | None, earlier: Reply = NO_REPLY) -> None:
        """Return when a failed call is on disk: its client may retry at once, and reach another worker first.

        ``earlier``: what is reported of the rounds before the one that failed.
        """
        prepared = self.full(sent)
        if prepared.record is None:
            return
        try:
            await asyncio.shield(self._submit_reply(prepared, earlier, status, is_answered=False))
        except (StoreUnavailable, Conflict, NotFound, ValueError) as error:
            _log.warning("a failed call was not stored: %s", error)

    def record_failure(self, sent: SentCall, status: int | None, earlier: Reply = NO_REPLY) -> None:
        """Record a call that its client left, as `commit_failure`, without waiting for the store."""
        prepared = self.full(sent)
        if prepared.record is not None:
            self._submit_reply(prepared, earlier, status, is_answered=True)

    def record_partial(
        self,
        sent: SentCall,
        reader: LimitedReader,
        combine: Callable[[Reply], CombinedReply],
        status: int | None,
    ) -> None:
        """Record what ``reader`` has read until the client was gone, without waiting for the store.

        ``combine`` joins it with the earlier rounds of the call.
        """
        prepared = self.full(sent)

        def submit(reply: Reply) -> asyncio.Future[StoredReply]:
            combined = combine(reply)
            return self._submit_reply(prepared, combined.reply, status, is_answered=True, hidden=combined.hidden)

        async def submit_later() -> None:
            with suppress(StoreUnavailable, Conflict, NotFound, ValueError):
                await submit(await reader.reply())

        if reader.size < LONG:
            submit(reader.reply_so_far())
        else:
            self._writer.track(asyncio.get_running_loop().create_task(submit_later()))

    def _submit_reply(
        self,
        prepared: PreparedCall,
        reply: Reply,
        status: int | None,
        *,
        is_answered: bool,
        hidden: HiddenMessages = NO_HIDDEN_MESSAGES,
    ) -> asyncio.Future[StoredReply]:
        """Queue a reply that its client left, with the report of the call, and count both. A long reply is read in a
        thread. ``is_answered``: see `CallReports.estimate_charge`.

        ``hidden`` messages are only stored with a reply: without one, the request may be sent again.
        """
        work = partial(
            self._reply_write,
            prepared,
            reply,
            status,
            is_whole=False,
            is_answered=is_answered,
            cut_off=CLIENT_LEFT,
            hidden=hidden,
            now=self._clock(),
        )

        def submit(described: PreparedCall, write: ReplyWrite, estimate: Charge | None) -> asyncio.Future[StoredReply]:
            self._counter.count_call(
                described, write.report, estimate, is_one_round=reply.rounds == 1, is_answered=is_answered
            )
            return self._writer.submit(write)

        async def submit_later() -> StoredReply:
            return await submit(*(await asyncio.to_thread(work)))

        if self._work_size(prepared, reply) < LONG:
            return submit(*work())
        return self._writer.track(asyncio.get_running_loop().create_task(submit_later()))

    def _work_size(self, prepared: PreparedCall, reply: Reply) -> int:
        """Return about how many bytes have to be read to make a record of the reply."""
        return _size_of(reply) + (0 if _is_described(prepared) else len(prepared.body))

    def _reply_write(
        self,
        prepared: PreparedCall,
        reply: Reply,
        status: int | None,
        *,
        is_whole: bool,
        is_answered: bool,
        hidden: HiddenMessages,
        now: datetime,
        cut_off: str = BROKE_OFF,
    ) -> tuple[PreparedCall, ReplyWrite, Charge | None]:
        """Return the call with the description of the body that was sent last, its reply for the store, and its charge
        where that is estimated.
        """
        request = prepared.record
        assert request is not None
        late: tuple[Attribute, ...] = ()
        if not _is_described(prepared):
            # Another body was sent than the one described first: a smaller one, or a further round.
            request = structs.replace(request, description=self._describe(prepared))
            prepared = structs.replace(prepared, record=request)
            literals = request.description.literals if request.description else ()
            late = tuple(set(literals) - set(request.write.attributes))
        replies = self._records.choices(
            prepared.call.tenant,
            prepared.request,
            reply,
            head_chain=prepared.match.head_chain or prepared.history.head_chain,
            prefill=prepared.history.prefill,
            is_whole=is_whole,
            cut_off=cut_off,
            history_owner=prepared.history_owner,
        )
        empty = None
        if leaves_no_message(replies):
            empty = self._records.empty(
                prepared.call.tenant, reply, is_whole=is_whole, history_owner=prepared.history_owner
            )
        if reply.rounds > 1:
            replies = [structs.replace(each, usage=reply.usage or None) for each in replies]
        if replies and hidden != NO_HIDDEN_MESSAGES:
            before, after = (
                self._records.hidden(each, prepared.request.model) for each in (hidden.before, hidden.after)
            )
            replies = [*before, *map(self._records.as_input, replies), *after]
        report = self._report(prepared, request, reply, status)
        write = ReplyWrite(
            request=request.write,
            replies=replies,
            empty=empty,
            report=report,
            started=prepared.started,
            now=now,
            # A reply without content is not stored, but the model was sent this context all the same.
            epoch=self._new_epoch(prepared) if reply.choices else None,
            attributes=late,
            request_stored=request.stored,
        )
        estimate = self._reports.estimate_charge(prepared, reply, report, is_whole=is_whole, is_answered=is_answered)
        return prepared, write, estimate

    def _report(self, prepared: PreparedCall, request: RequestRecord, reply: Reply, status: int | None) -> CallReport:
        """Report a call of the full path by its context. Without one nothing was counted."""
        report = prepared.built.context.report if prepared.built else None
        before = report.tokens_before if report else 0
        return self._reports.report(
            prepared,
            reply,
            status,
            sent=request.description.sent if request.description else None,
            client=prepared.client,
            epoch=report.epoch if report else 0,
            cut=report.cut if report else 1,
            tools=_digest_of_tools(prepared),
            tokens_before=before,
            tokens_after=report.tokens_after if report else 0,
            tokens_new=sum(request.write.tokens) if prepared.match.session else before,
        )

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
                prepared.config.strategy,
                prepared.loaded,
                context.epoch,
                dialect=self._dialect.name,
                model=storable_name(prepared.request.model),
                host=prepared.call.host,
            ),
        )


def _numbered(replies: Sequence[NewReply], first_seq: int) -> dict[int, NewReply]:
    """Return the replies by sequence number; none without the first one's (0)."""
    return dict(enumerate(replies, first_seq)) if first_seq else {}


def _digest_of_tools(prepared: PreparedCall) -> bytes | None:
    if prepared.live is not None:
        return prepared.live.tools_digest
    return tokens.content_digest(prepared.request.tools) if prepared.request.tools else None


def _is_described(prepared: PreparedCall) -> bool:
    """Return whether the description is that of the body that went upstream."""
    return (
        prepared.record is not None
        and (described := prepared.record.description) is not None
        and described.body is prepared.body
    )


def _size_of(reply: Reply) -> int:
    """Bytes of a reply."""
    size = sum(map(len, reply.unread))
    return size + sum([len(choice.client_message) + len(choice.model_message) for choice in reply.choices])
