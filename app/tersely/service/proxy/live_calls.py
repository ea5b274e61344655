"""Calls that continue a live session: only what is new in them is read, hashed, decided upon and written.

The full path (steps 1 to 4 of `tersely.service.proxy.proxy`) defines what is right. A live call takes its result from
the last call's, where each step of the full path provably gives the same again; every other call is a miss, which the
full path prepares, and which leaves a live session behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import pairwise
from typing import Literal

from msgspec import structs

from tersely.dialects.clients import known as clients
from tersely.dialects.clients.names import client_name
from tersely.dialects.dialect import Dialect, Request
from tersely.dialects.wire.array_member import find_array, find_array_end, read_more
from tersely.domain.errors import InvalidRequest
from tersely.domain.history.context import Context, LayerReport, Report
from tersely.domain.history.history import INCOMPLETE, WINDOW_FULL, Entry, Epoch, EpochInputs, Snapshot
from tersely.domain.history.pairing import UnpairedMessages, prove_pairing
from tersely.domain.history.reconciliation import append_to_open_turn
from tersely.domain.history.sessions import Session
from tersely.domain.messages import Message
from tersely.domain.models import usable_window
from tersely.service.common import tokens
from tersely.service.common.calibrations import Calibrations
from tersely.service.common.metrics import Metrics
from tersely.service.common.tracing import step
from tersely.service.context.building import BuiltContext, build
from tersely.service.context.context_config import (
    ContextConfig,
    TokenBudget,
    count_additions,
    instructions_in,
    offers_in,
)
from tersely.service.context.context_configs import compact_setting
from tersely.service.context.entries import known_entry, new_entry
from tersely.service.context.history import History
from tersely.service.context.loading import count_apart
from tersely.service.context.rendering import render
from tersely.service.context.sent_contexts import ADDED, INSTRUCTIONS, Elements, Source, message_list
from tersely.service.context.shown_tags import kinds_shown
from tersely.service.proxy.calls import Call, ContextLabels
from tersely.service.proxy.live_frames import Frame, count_volatile, placeholder_of, step_back
from tersely.service.proxy.live_sessions import Added, LiveSession, LiveSessions, Sums, Volatile, size_of
from tersely.service.proxy.session_matching import SessionMatcher
from tersely.service.proxy.stages import PreparedCall
from tersely.service.recognition.incoming_history import IncomingHistory, extend, identify
from tersely.service.recognition.session_lookup import SessionHints, SessionMatch, continued
from tersely.store.commit.records import ReplyWrite, RequestWrite, WholeRequest
from tersely.store.history.artifacts import spilled
from tersely.store.history.lookups import Lookups
from tersely.store.history.messages import TailRow
from tersely.store.history.sessions import ReplyMatch
from tersely.store.history.tail_cache import TailCache
from tersely.strategies.epochs.additions import LAYER as NOTE_LAYER
from tersely.strategies.epochs.cutting import widest_step
from tersely.strategies.epochs.policies import EveryRequest, Keep, TokenSums
from tersely.strategies.pipeline import count_entries
from tersely.strategies.planning import decide, surely_keeps
from tersely.strategies.presets import Full, Slim, strategy_name

# Why a call is no live call. ``unknown``: no live session has its beginning. ``changed``: of headers, options or
# settings something is another. ``messages``: it does more than append to the history. ``moved``: somebody else has
# written to the session since. ``epoch``: a new epoch starts, or might. ``busy``: exchanges wait in the spool.
Miss = Literal["unknown", "changed", "messages", "moved", "epoch", "busy"]
MISSES: tuple[Miss, ...] = ("unknown", "changed", "messages", "moved", "epoch", "busy")
# The layer of a report that grows with the history.
TAIL = "tail"
# The member of a request in which the history stands, of the dialects whose calls may be live.
HISTORY_MEMBERS = {"openai_chat": "messages", "anthropic": "messages"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Continuation:
    """A live session with the messages that a call adds to it: the echo of the last reply, and what is new.

    ``revised`` are the entries of the volatile messages, which come again in front of the echo, ``raws`` all messages
    from these on.
    """

    live: LiveSession
    raws: tuple[bytes, ...]
    revised: tuple[Entry, ...]
    history: IncomingHistory
    hints: SessionHints


class LiveCalls:
    """Prepares the live calls of one dialect, and keeps its live sessions."""

    def __init__(
        self,
        dialect: Dialect,
        sessions: LiveSessions,
        matcher: SessionMatcher,
        *,
        lookups: Lookups,
        tails: TailCache,
        calibrations: Calibrations,
        metrics: Metrics,
        clock: Callable[[], datetime],
        new_id: Callable[[], str],
    ) -> None:
        self._dialect = dialect
        self._member = HISTORY_MEMBERS.get(dialect.name, "")
        self._sessions = sessions
        self._matcher = matcher
        self._lookups = lookups
        self._tails = tails
        self._calibrations = calibrations
        self._held = metrics.live_sessions.labels("held")
        self._bytes = metrics.live_session_bytes
        self._clock = clock
        self._new_id = new_id
        self._count = {each: metrics.live_calls.labels(each) for each in ("hit", *MISSES)}

    @property
    def is_on(self) -> bool:
        """Whether calls of this dialect may be live."""
        return bool(self._member) and self._sessions.is_on

    def count_miss(self, reason: Miss) -> None:
        """Count a call that was not looked at."""
        self._count[reason].inc()

    async def prepare(self, call: Call) -> PreparedCall | None:
        """Return the call as the full path would prepare it; None for the full path. Raises `StoreUnavailable`."""
        found = self._continue(call)
        if isinstance(found, str):
            self._count[found].inc()
            return None
        live = found.live
        now = self._clock()
        with step("recognition"):
            hit = await self._lookups.find(call.tenant, [live.chain], live.client.id)
        result: PreparedCall | Miss = "moved"
        if hit is not None and hit.is_current and hit.tail is not None:
            if (hit.session.id, hit.session.version) == (live.session_id, live.version):
                with step("context"):
                    result = self._prepare(call, found, hit, now)
            elif hit.session.id == live.session_id:
                self._sessions.forget(live.tenant, live.session_id)
        if isinstance(result, str):
            self._count[result].inc()
            return None
        self._count["hit"].inc()
        return result

    # Finding

    def _continue(self, call: Call) -> _Continuation | Miss:
        reason: Miss = "unknown"
        for live in self._sessions.find(call):
            found = self._continuation(call, live)
            if not isinstance(found, str):
                return found
            reason = found
        return reason

    def _continuation(self, call: Call, live: LiveSession) -> _Continuation | Miss:
        # Several hosts may have one dialect.
        if live.owner != id(self) or (call.method, call.path, call.options) != (live.method, live.path, live.options):
            return "changed"
        headers = call.header_map
        client = clients.client_ids(headers, live.request.ids)
        if client != live.client or clients.is_retry(headers) or clients.idempotency_key(headers) is not None:
            return "changed"
        raws = read_more(call.body[live.end : len(call.body) - len(live.suffix)])
        if raws is None or len(raws) < 2 + len(live.volatile):
            return "messages"
        brought = tuple(raws)
        revised = self._revise(live, brought)
        if revised is None:
            return "messages"
        raws = raws[len(revised) :]
        try:
            messages = tuple(self._dialect.read_message(raw) for raw in raws)
        except InvalidRequest:
            return "messages"
        incoming = tuple(identify(message) for message in messages)
        if not _appends(messages) or not all(each.is_link for each in incoming):
            return "messages"
        if incoming[0].digest != live.reply.row.digest:
            return "messages"
        chains = [live.chain]
        for each in incoming[1:]:
            chains.append(extend(chains[-1], each.digest))
        question = live.last_question
        opening = (*live.first_messages, *([question] if question is not None else ()), *messages)
        if len(live.first_messages) < 3:
            opening = (*live.first_messages, *messages)
        request = live.request
        kind = clients.side_call(
            headers, opening, has_tools=bool(request.tools), stops=request.stop, max_tokens=request.max_tokens
        )
        if kind is not None:
            return "messages"
        hints = SessionHints(client=client, headers=headers)
        history = IncomingHistory(messages=messages, identities=incoming, chains=tuple(chains))
        return _Continuation(live=live, raws=brought, revised=revised, history=history, hints=hints)

    def _revise(self, live: LiveSession, raws: Sequence[bytes]) -> tuple[Entry, ...] | None:
        """Return the entries of the volatile messages as the client sends them now; None where they are others."""
        entries = live.snapshot.entries[len(live.snapshot.entries) - len(live.volatile) :]
        revised: list[Entry] = []
        for raw, before, entry in zip(raws, live.volatile, entries, strict=False):
            if raw == before.raw:
                revised.append(entry)
                continue
            if entry.message.raw != before.raw or entry.message.role == "assistant" or entry.client_view is not None:
                return None
            try:
                message = self._dialect.read_message(raw)
            except InvalidRequest:
                return None
            found = identify(message)
            is_same = (message.role, message.injected) == (entry.message.role, entry.message.injected)
            if found.digest != before.digest or not is_same:
                return None
            revised.append(replace(entry, message=message))
        return tuple(revised)

    # Preparing

    def _prepare(self, call: Call, found: _Continuation, hit: ReplyMatch, now: datetime) -> PreparedCall | Miss:
        live, history, session = found.live, found.history, hit.session
        match = self._match(live, history, session)
        reply, new = history.messages[0], history.messages[1:]
        shown = known_entry(reply, live.reply, self._matcher.restore, self._dialect)
        added = [shown] + [
            new_entry(message, placed.seq, placed.turn, now)
            for message, placed in zip(new, match.decision.placed[1:], strict=True)
        ]
        try:
            prove_pairing([entry.message for entry in added])
        except UnpairedMessages:
            return "messages"
        budget = self._budget(live, now)
        snapshot = replace(
            live.snapshot,
            entries=(*live.snapshot.entries[: len(live.snapshot.entries) - len(found.revised)], *found.revised, *added),
            window=budget.window,
            calls=session.calls,
            last_call_at=session.last_call_at,
        )
        config = live.config
        assert snapshot.epoch is not None
        sums = live.sums.with_added(added, turn=live.turn)
        if not _keeps_epoch(snapshot, sums, config, now):
            return "epoch"
        is_verbatim = live.is_verbatim and shown.message is reply
        context = self._context(live, snapshot, sums)
        limit = None if isinstance(config.strategy, Full) else budget.window
        if limit is not None and context.report.tokens_after > limit:
            return "epoch"
        if live.sent is None and live.frame is None and not is_verbatim:
            return "messages"
        composed = self._compose(call, found, (*found.revised, *added))
        if composed is None:
            return "messages"
        body, elements = composed
        request = replace(live.request, messages=history.messages)
        read_whole = partial(self._read_whole, call, found.hints, hit)
        return PreparedCall(
            call=call,
            client=client_name(call.header_map) or None,
            request=request,
            history=history,
            hints=found.hints,
            match=match,
            config=config,
            budget=budget,
            loaded=History(snapshot=snapshot, advance=None, epoch_inputs=EpochInputs(), is_verbatim=is_verbatim),
            built=BuiltContext(context=context, starts_epoch=False),
            body=body,
            write=self._write(call, live, history, match, now, read_whole),
            started=now,
            strip_usage=live.strip_usage,
            labels=_labels(live, match, context, is_own_body=body is call.body),
            tools=live.tools,
            shown_tags=live.shown_kinds | kinds_shown(added, known=config.hidden_tags),
            history_owner="both" if body is call.body and request.is_stored else "tersely",
            added=elements,
            live=live,
            expand=partial(_expand, read_whole),
        )

    def _compose(self, call: Call, found: _Continuation, entries: Sequence[Entry]) -> tuple[bytes, Added] | None:
        """The body for the upstream, and what it adds to the last one; None where its messages are not written one by
        one.
        """
        live = found.live
        count = count_volatile(found.raws, self._dialect.name)
        if count is None or count >= len(found.raws):
            return None
        digests = [*(each.digest for each in live.volatile), *(each.digest for each in found.history.identities)]
        first = len(found.raws) - count
        volatile = tuple(map(Volatile, found.raws[first:], digests[first:]))
        if live.sent is None and live.frame is None:
            pairs = [(raw, Source(raw, entry.seq)) for raw, entry in zip(found.raws, entries, strict=True)]
            return call.body, Added(pairs, live.instructions, volatile)
        sources = [Source(raw, entry.seq) for entry in entries for raw in render(entry, self._dialect)]
        if live.frame is None:
            assert live.sent is not None
            rendered = b",".join([source.raw for source in sources])
            body = b"".join((memoryview(live.sent)[: live.sent_end], b",", rendered, live.sent_suffix))
            return body, Added([(source.raw, source) for source in sources])
        written = live.frame.write(self._dialect, [source.raw for source in sources])
        if written is None or len(sources) != len(entries):
            return None
        return written.body, Added(list(zip(written.elements, sources, strict=True)), written.instructions, volatile)

    def _match(self, live: LiveSession, history: IncomingHistory, session: Session) -> SessionMatch:
        decision = append_to_open_turn(
            live.reply.row, history.identities, last_seq=session.last_seq, turns=session.turns
        )
        return SessionMatch(
            session_id=session.id,
            session=session,
            source=live.client.source or "lineage",
            decision=decision,
            rows=(live.reply,),
        )

    def _budget(self, live: LiveSession, now: datetime) -> TokenBudget:
        ratio = self._calibrations.ratio(live.request.model)
        window = usable_window(live.request.model, live.request.max_tokens)
        return TokenBudget(
            fixed_tokens=live.snapshot.fixed_tokens,
            window=None if window is None else int(window / ratio),
            now=now,
            model_window=live.snapshot.model_window,
        )

    def _context(self, live: LiveSession, snapshot: Snapshot, sums: Sums) -> Context:
        """The context without its messages: nobody looks at those of a live call but `_expand`."""
        epoch = snapshot.epoch
        assert epoch is not None
        report = Report(
            tokens_before=snapshot.fixed_tokens + max(snapshot.older_tokens, sums.kept) + sums.tail,
            tokens_after=snapshot.fixed_tokens + sums.head + sums.kept + sums.tail,
            epoch=epoch.number,
            reason=epoch.reason,
            cut=epoch.cut,
            layers=(*live.layers, LayerReport(name=TAIL, tokens=sums.tail)),
            turns=(),
        )
        return Context(messages=(), epoch=epoch, report=report, repairs=(), is_whole=live.is_whole)

    def _write(
        self,
        call: Call,
        live: LiveSession,
        history: IncomingHistory,
        match: SessionMatch,
        now: datetime,
        read_whole: Callable[[], tuple[Request, IncomingHistory, SessionMatch]],
    ) -> RequestWrite:
        def whole() -> WholeRequest:
            _, arrival, found = read_whole()
            return WholeRequest(
                incoming=arrival.identities,
                raws=[message.raw for message in arrival.messages],
                decision=found.decision,
                spill=partial(spilled, arrival.messages),
            )

        return RequestWrite(
            tenant=call.tenant,
            session_id=live.session_id,
            create=None,
            mode="full",
            dialect=self._dialect.name,
            incoming=history.identities,
            raws=[message.raw for message in history.messages],
            size=len(call.body),
            tokens=(),
            decision=match.decision,
            session=match.session,
            now=now,
            spill=partial(spilled, history.messages),
            strategy=compact_setting(call.options.strategy),
            epoch_policy=compact_setting(call.options.epoch),
            exchange=self._new_id(),
            whole=whole,
        )

    # Reading all of it after all

    def _read_whole(
        self, call: Call, hints: SessionHints, hit: ReplyMatch
    ) -> tuple[Request, IncomingHistory, SessionMatch]:
        request, arrival = self._matcher.read_whole(call)
        found = continued(arrival, hints, hit, is_beginning_known=True)
        if found is None:
            raise RuntimeError("a live session differs from its stored session")
        return request, arrival, found

    # Keeping

    def remember(self, prepared: PreparedCall, write: ReplyWrite) -> None:
        """Keep the session as a call left it, whose reply has been stored; or nothing, where nothing may be kept."""
        if not self.is_on:
            return
        call = prepared.call
        live = self._next(call, prepared, write)
        if live is not None:
            self._sessions.put(live)
        elif (outcome := write.request_outcome) is not None:
            self._sessions.forget(call.tenant, outcome.session_id)
        self._held.set(len(self._sessions))
        self._bytes.set(self._sessions.bytes)

    def _next(self, call: Call, prepared: PreparedCall, write: ReplyWrite) -> LiveSession | None:
        outcome = write.request_outcome
        if outcome is None or not outcome.is_as_decided or not _is_plain_reply(write):
            return None
        tail = self._tails.get(call.tenant, outcome.session_id)
        (reply,) = write.replies
        if tail is None or tail.chain != reply.chain or tail.session.version != outcome.state.version + 1:
            return None
        row = tail.rows[-1]
        if row.row.seq != tail.session.last_seq or row.row.digest != reply.digest or tail.session.edited:
            return None
        counts = {each.row.seq: each.row.tokens for each in reversed(tail.rows[-1 - len(prepared.write.raws) :])}
        if prepared.live is not None and prepared.expand is not None:
            return self._grown(call, prepared, prepared.live, tail.session, row, counts)
        new = zip(write.request.decision.placed, write.request.tokens, strict=True)
        counts = {placed.seq: count for placed, count in new if placed.is_new}
        counts |= {each.row.seq: each.row.tokens for each in tail.rows}
        return self._first(call, prepared, tail.session, row, counts)

    def _grown(
        self,
        call: Call,
        prepared: PreparedCall,
        live: LiveSession,
        session: Session,
        reply: TailRow,
        counts: dict[int, int],
    ) -> LiveSession | None:
        snapshot = prepared.loaded.snapshot
        known, added = len(live.snapshot.entries), prepared.added
        if added is None:
            return None
        elements = _elements(prepared)
        end = step_back(call.body, len(call.body) - len(live.suffix), [each.raw for each in added.volatile])
        if elements is None or end is None:
            return None
        stays = len(added.elements) - len(added.volatile)
        frame = live.frame
        if frame is not None:
            frame = frame.with_middle([element for element, _ in added.elements[:stays]])
        new = [replace(entry, tokens=counts[entry.seq]) for entry in snapshot.entries[known:]]
        messages = prepared.history.messages
        question = next((each for each in reversed(messages) if each.role == "user"), live.last_question)
        return structs.replace(
            live,
            version=session.version,
            body=call.body,
            end=end,
            volatile=added.volatile,
            frame=frame,
            sent=None if live.sent is None else prepared.body,
            sent_end=len(prepared.body) - len(live.sent_suffix),
            first_messages=(*live.first_messages, *messages)[:3],
            last_question=question,
            snapshot=replace(snapshot, entries=(*snapshot.entries[:known], *new)),
            sums=live.sums.with_added(new, turn=live.turn),
            is_verbatim=prepared.loaded.is_verbatim,
            shown_kinds=prepared.shown_tags,
            reply=reply,
            chain=_chain_of(prepared, reply),
            messages_size=live.messages_size + size_of(new),
            elements=elements,
        )

    def _first(
        self, call: Call, prepared: PreparedCall, session: Session, reply: TailRow, counts: dict[int, int]
    ) -> LiveSession | None:
        built, config, request = prepared.built, prepared.config, prepared.request
        if built is None or not _is_plain_call(call, prepared):
            return None
        epoch, context = session.plan, built.context
        before = prepared.loaded.snapshot
        if epoch is None or epoch.number != session.epoch or not _shows_plainly(epoch, built):
            return None
        shown = (*before.kept, *before.entries)
        loaded = {entry.seq for entry in shown}
        kept = tuple(entry for entry in shown if entry.seq < epoch.cut and entry.seq in epoch.kept)
        tail = tuple(entry for entry in shown if entry.seq >= epoch.cut)
        if not loaded.issuperset(epoch.kept) or not _are_plain(kept, tail, epoch, reply):
            return None
        if any(entry.seq not in counts for entry in tail) or _have_twins(kept, prepared):
            return None
        # The sums have to give what the report says: else something counts that they do not know of.
        layers = context.report.layers
        sums = _sums(epoch, kept, tail)
        fixed = before.fixed_tokens + count_additions(epoch, config) - count_additions(before.epoch, config)
        older = 0 if epoch.cut == 1 else epoch.older_tokens
        is_as_summed = context.report.tokens_after == fixed + sums.head + sums.kept + sums.tail
        if not built.starts_epoch:
            total = fixed + max(older, sums.kept) + sums.tail
            is_as_summed = is_as_summed and context.report.tokens_before == total
        # What was estimated before the call has been counted since.
        tail, kept = count_apart(_counted(tail, counts), _counted(kept, counts), before.injected)
        messages = prepared.history.messages
        is_own_body = prepared.body is call.body
        place = find_array(call.body, self._member)
        elements, volatile = _elements(prepared), _volatile(prepared, tail)
        if elements is None or volatile is None or place is None:
            return None
        # A message that is written anew at the next call is written without the instructions in front of it.
        if any(prefix.seq >= entry.seq for prefix in epoch.prefixes for entry in tail[len(tail) - len(volatile) :]):
            return None
        end = step_back(call.body, place[1], [each.raw for each in volatile])
        if end is None or not call.body.endswith(messages[-1].raw, 0, place[1]):
            return None
        frame, sent_end = None, 0
        if not is_own_body and volatile:
            frame = self._frame(call, prepared, epoch, place, volatile)
            if frame is None:
                return None
        elif not is_own_body:
            sent_end = find_array_end(prepared.body, self._member) or 0
            if not sent_end or not prepared.body.endswith(messages[-1].raw, 0, sent_end):
                return None
        if not is_as_summed or not layers or layers[-1].name != TAIL:
            return None
        return LiveSession(
            owner=id(self),
            tenant=call.tenant,
            session_id=session.id,
            version=session.version,
            method=call.method,
            path=call.path,
            options=call.options,
            client=clients.client_ids(call.header_map, request.ids),
            body=call.body,
            end=end,
            suffix=call.body[place[1] :],
            sent=prepared.body if sent_end else None,
            sent_end=sent_end,
            sent_suffix=prepared.body[sent_end:] if sent_end else b"",
            volatile=volatile,
            frame=frame,
            instructions=message_list(call.body, self._dialect.name)[1] if is_own_body else b"",
            request=replace(request, messages=()),
            tools_digest=tokens.content_digest(request.tools) if request.tools else None,
            first_messages=messages[:3],
            last_question=next((each for each in reversed(messages) if each.role == "user"), None),
            config=config,
            snapshot=replace(
                before,
                entries=tail,
                kept=kept,
                epoch=epoch,
                fixed_tokens=fixed,
                older_tokens=older,
                edited=False,
                ran_out=False,
            ),
            sums=_sums(epoch, kept, tail),
            is_verbatim=prepared.loaded.is_verbatim and epoch.cut == 1,
            is_whole=context.is_whole,
            shown_kinds=prepared.shown_tags,
            strip_usage=prepared.strip_usage,
            tools=prepared.tools,
            reply=reply,
            chain=_chain_of(prepared, reply),
            messages_size=size_of((*kept, *tail)),
            layers=layers[:-1],
            elements=elements,
        )

    def _frame(
        self, call: Call, prepared: PreparedCall, epoch: Epoch, place: tuple[int, int], volatile: Sequence[Volatile]
    ) -> Frame | None:
        """What stays of the body that went upstream; None where that is not written message by message."""
        sources = prepared.sources or ()
        added = len(volatile)
        frozen = 1 + max((index for index, source in enumerate(sources) if _is_in_head(source, epoch)), default=-1)
        elements, _ = message_list(prepared.body, self._dialect.name)
        between = len(sources) - frozen - 1 - added
        front = len(elements) - between - added
        if between < 1 or front < 1:
            return None
        offers, instructions = offers_in(epoch, prepared.config), instructions_in(epoch, prepared.config)
        body = call.body[: place[0]] + call.body[place[1] :]
        frame = Frame(
            body=self._dialect.add_tools(body, offers) if offers else body,
            front=tuple(source.raw for source in sources[: frozen + 1]),
            frozen=frozen,
            front_elements=front,
            middle=b",".join(elements[front : front + between]),
            placeholder=placeholder_of(self._new_id()),
            instructions=instructions,
            has_breakpoints=instructions is not None or bool(offers) or epoch.cut > 1,
        )
        written = frame.write(self._dialect, [source.raw for source in sources[len(sources) - added :]])
        return frame if written is not None and written.body == prepared.body else None


def _is_in_head(source: Source, epoch: Epoch) -> bool:
    return source.shows == ADDED or source.layer == INSTRUCTIONS or source.seq < epoch.cut


def _volatile(prepared: PreparedCall, tail: Sequence[Entry]) -> tuple[Volatile, ...] | None:
    """The last messages of a request whose breakpoints the next one may move; None where that cannot be followed."""
    history = prepared.history
    count = count_volatile(prepared.own_messages, prepared.write.dialect)
    if count is None or count >= len(history.links):
        return None
    first = len(history.messages) - count
    placed = prepared.match.decision.placed[first:]
    if [each.seq for each in placed] != [entry.seq for entry in tail[len(tail) - count :]]:
        return None
    incoming = zip(history.messages[first:], history.identities[first:], strict=True)
    return tuple(Volatile(message.raw, each.digest) for message, each in incoming)


def _sums(epoch: Epoch, kept: Sequence[Entry], tail: Sequence[Entry]) -> Sums:
    everything = (*kept, *tail)
    running = everything[-1].turn
    has_pins = any(entry.pinned for entry in everything)
    return Sums(
        head=epoch.head_tokens,
        kept=count_entries(kept),
        tail=count_entries(tail),
        questions=count_entries(e for e in everything if e.turn == running and e.message.starts_turn),
        steps=sum(entry.message.role == "assistant" for entry in tail),
        widest=None if has_pins else widest_step(tail),
    )


def _keeps_epoch(snapshot: Snapshot, sums: Sums, config: ContextConfig, now: datetime) -> bool:
    """Whether the full path would keep the epoch. The messages are looked at only where their sums do not tell."""
    if sums.widest is not None and surely_keeps(
        snapshot,
        strategy=config.strategy,
        policy=config.policy,
        sums=TokenSums(kept=sums.kept, tail=sums.tail, floor=sums.questions, steps=sums.steps),
        widest=sums.widest,
        now=now,
    ):
        return True
    return isinstance(decide(snapshot, strategy=config.strategy, policy=config.policy, now=now), Keep)


def _elements(prepared: PreparedCall) -> Elements | None:
    """What the next description goes on from: the description of the body that went upstream."""
    description = prepared.record.description if prepared.record else None
    return None if description is None or description.body is not prepared.body else description.elements


def _expand(
    read_whole: Callable[[], tuple[Request, IncomingHistory, SessionMatch]], prepared: PreparedCall
) -> PreparedCall:
    request, history, match = read_whole()
    built = build(prepared.loaded, prepared.config, prepared.budget, request.model)
    return replace(prepared, request=request, history=history, match=match, built=built, added=None, expand=None)


def _chain_of(prepared: PreparedCall, reply: TailRow) -> bytes:
    """The identity of the history up to the stored ``reply`` of a call."""
    return extend(prepared.match.head_chain or prepared.history.head_chain, reply.row.digest)


def _appends(messages: Sequence[Message]) -> bool:
    """Whether messages are a reply and what comes after it, with nothing that a client injected."""
    if messages[0].role != "assistant" or any(message.injected or message.is_malformed for message in messages):
        return False
    return all(message.role in {"user", "tool"} and message.raw and message.parts for message in messages[1:])


def _shows_plainly(epoch: Epoch, built: BuiltContext) -> bool:
    """Whether a context shows the messages of the epoch as they are, and the next one will show them so again."""
    context = built.context
    if context.epoch.number != epoch.number or context.repairs or context.must_answer:
        return False
    # Instructions in front of a question are part of the body that went upstream.
    if any(prefix.layer != NOTE_LAYER for prefix in epoch.prefixes):
        return False
    if epoch.folds_repeats:
        return False
    return not (epoch.is_stale or epoch.must_rebuild or epoch.tiers or epoch.injected or epoch.retrieved)


def _counted(entries: Sequence[Entry], counts: Mapping[int, int]) -> tuple[Entry, ...]:
    """Entries with the tokens that are stored."""
    return tuple(replace(entry, tokens=counts.get(entry.seq, entry.tokens)) for entry in entries)


def _have_twins(kept: Sequence[Entry], prepared: PreparedCall) -> bool:
    """Whether a history shows a message twice that is kept from before the cut: which is which is looked up then."""
    if not kept:
        return False
    placed, incoming = prepared.match.decision.placed, prepared.history.identities
    digests = {each.seq: message.digest for each, message in zip(placed, incoming, strict=True) if each.seq}
    often = Counter(message.digest for message in incoming)
    for entry in kept:
        digest = digests.get(entry.seq)
        if digest is None and entry.message.role == "user":  # the model was shown it as the client sent it
            digest = identify(entry.message).digest
        if digest is None or often[digest] != 1:
            return True
    return False


def _are_plain(kept: Sequence[Entry], entries: Sequence[Entry], epoch: Epoch, reply: TailRow) -> bool:
    """Whether messages are in the order of their numbers, unaltered, around the cut, and the user opened the turn."""
    everything = (*kept, *entries)
    if any(entry.prefix or entry.is_shortened for entry in everything):
        return False
    if any(one.seq >= other.seq for one, other in pairwise(everything)):
        return False
    if any(entry.seq < epoch.cut for entry in entries) or any(entry.seq >= epoch.cut for entry in kept):
        return False
    return any(entry.turn == reply.row.turn and entry.message.role == "user" for entry in everything)


def _is_plain_reply(write: ReplyWrite) -> bool:
    """Whether a call got one whole reply, and nothing beside it."""
    if len(write.replies) != 1:
        return False
    (reply,) = write.replies
    is_plain = reply.chain is not None and not reply.is_alternative and reply.role == "assistant"
    return is_plain and reply.finish not in {None, WINDOW_FULL, *INCOMPLETE}


def _is_plain_call(call: Call, prepared: PreparedCall) -> bool:
    """Whether the full path prepared a call without anything that a live call does not do again."""
    found, arrival, history, config = prepared.match, prepared.history, prepared.loaded, prepared.config
    decision = found.decision
    if found.is_delta or found.expanded_from or found.source == "header" or prepared.resolved is not None:
        return False
    if call.options.session_id is not None or prepared.is_at_host or prepared.round_messages:
        return False
    if decision.kind not in {"new", "continue"} or decision.superseded or decision.restored:
        return False
    if not decision.replies_at_end or any(placed.status != "live" for placed in decision.placed):
        return False
    if prepared.write.key is not None or history.blocks or history.instructions or history.overflows:
        return False
    # Blocks that clients inject stay where they are as long as nothing is cut.
    is_cut = prepared.built is not None and prepared.built.context.epoch.cut > 1
    if is_cut and (history.snapshot.injected or any(message.injected for message in arrival.messages)):
        return False
    links = arrival.links
    # Instructions lead the history, or there are none.
    if not links or links != list(range(links[0], len(arrival.messages))):
        return False
    if not all(message.is_instruction for message in arrival.messages[: links[0]]):
        return False
    if isinstance(config.policy, EveryRequest) or not isinstance(config.strategy, Slim | Full):
        return False
    return arrival.messages[-1].role in {"user", "tool"}


def _labels(live: LiveSession, match: SessionMatch, context: Context, *, is_own_body: bool) -> ContextLabels:
    report = context.report
    return ContextLabels(
        context="passthrough" if is_own_body else "built",
        strategy=strategy_name(live.config.strategy),
        session_id=live.session_id,
        source=match.source,
        epoch=report.epoch,
        tokens_before=report.tokens_before,
        tokens_after=report.tokens_after,
    )
