"""Prepare a call that continues a live session: decide from running sums, and write only what is new in its body.

Each step takes its result from the last call's, where the full path provably gives the same again; it is a miss where
that is not certain. Where an epoch starts, the call goes on with the full path's third step, if the live session holds
what that needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial

from msgspec.structs import replace

from tersely.dialects.dialect import Dialect, Request
from tersely.domain.history.context import Context, Report
from tersely.domain.history.history import Entry, EpochInputs, Snapshot
from tersely.domain.history.pairing import UnpairedMessages, prove_pairing
from tersely.domain.history.reconciliation import Reconciliation, append_to_open_turn
from tersely.domain.models import usable_window
from tersely.domain.text.tags import NOTHING, TagKinds
from tersely.service.common import tokens
from tersely.service.common.calibrations import Calibrations
from tersely.service.context.building import BuiltContext, build
from tersely.service.context.context_config import TokenBudget, count_additions
from tersely.service.context.context_configs import compact_setting
from tersely.service.context.entries import known_entry, new_entry
from tersely.service.context.history import History
from tersely.service.context.rendering import render
from tersely.service.context.sent_contexts import FULL, SHORTENED, MessageSource
from tersely.service.context.shown_tags import kinds_shown
from tersely.service.proxy.call.call import Call, ContextLabels
from tersely.service.proxy.live_calls.deltas import append_delta, build_whole, entries_of_delta, match_of_delta
from tersely.service.proxy.live_calls.epoch_starts import may_start_epoch, reduced_history
from tersely.service.proxy.live_calls.live_call import (
    Continuation,
    LiveCall,
    Miss,
    layers_of,
    tokens_after,
    tokens_before,
)
from tersely.service.proxy.live_calls.matching import hit_of
from tersely.service.proxy.live_calls.references import as_referenced, referenced_reply, resolve_whole
from tersely.service.proxy.live_sessions.frames import count_volatile
from tersely.service.proxy.live_sessions.live_session import AddedMessages, ContextSums, LiveSession, VolatileMessage
from tersely.service.proxy.live_sessions.pieces import Pieces
from tersely.service.proxy.preparing.session_matching import SessionMatcher
from tersely.service.proxy.preparing.stages import MatchedCall, PreparedCall
from tersely.service.recognition.incoming_history import IncomingHistory
from tersely.service.recognition.session_lookup import SessionHints, SessionMatch, SessionSource, continued
from tersely.store.commit.records import RequestWrite, WholeRequest
from tersely.store.history.artifacts import spilled
from tersely.store.history.messages import TailRow
from tersely.strategies.epochs.policies import StartEpoch, TokenSums
from tersely.strategies.planning import decide, surely_keeps
from tersely.strategies.presets import Full, Trim, strategy_name
from tersely.strategies.reduction.shortening import apply_tiers


class LivePreparer:
    """Prepares the live calls of one dialect."""

    def __init__(
        self, dialect: Dialect, matcher: SessionMatcher, *, calibrations: Calibrations, new_id: Callable[[], str]
    ) -> None:
        self._dialect = dialect
        self._elements = dialect.history.elements
        self._matcher = matcher
        self._calibrations = calibrations
        self._new_id = new_id

    def prepare(self, call: Call, found: Continuation, now: datetime) -> LiveCall | MatchedCall | Miss:
        """Return the call as the full path would prepare it or, where an epoch starts, as it would match it; or why
        that is left to the full path.
        """
        live, session = found.live, found.live.session
        placed = self._place(found, now)
        if placed is None:
            return "messages"
        decision, added = placed
        try:
            prove_pairing([entry.message for entry in added])
        except UnpairedMessages:
            return "messages"
        window = self._window(live)
        shown = _as_shown(live, added)
        sums = live.sums.with_added(added, shown, turn=live.turn)
        if _must_answer(live, sums):
            return "messages"
        epoch_start = _epoch_start(found, sums, added, window, now)
        if epoch_start is not None:
            return self._match_at_epoch_start(call, found, decision, added, window, epoch_start, now) or "epoch"
        if window is not None and tokens_after(live, sums) > window and not isinstance(live.config.strategy, Full):
            return "epoch"
        is_verbatim = _is_verbatim(found, added)
        if live.sent is None and live.frame is None and not (is_verbatim and shown is added):
            return "messages"
        composed = self._compose(call, found, (*_as_shown(live, found.revised), *shown))
        if composed is None:
            return "messages"
        pieces, elements = composed
        epoch = live.snapshot.epoch
        assert epoch is not None
        return LiveCall(
            call=call,
            live=live,
            found=found,
            started=now,
            decision=decision,
            added=added,
            shown=shown,
            sums=sums,
            window=window,
            is_verbatim=is_verbatim,
            pieces=pieces,
            elements=elements,
            shown_tags=live.shown_kinds | _shown_tags(live, added),
            labels=ContextLabels(
                context="passthrough" if pieces[0] is call.body else "built",
                strategy=strategy_name(live.config.strategy),
                session_id=session.id,
                source=_source(live),
                epoch=epoch.number,
                tokens_before=tokens_before(live, sums),
                tokens_after=tokens_after(live, sums),
            ),
            write=self._write(call, found, decision, now),
            expand=self._expand,
        )

    def _place(self, found: Continuation, now: datetime) -> tuple[Reconciliation, list[Entry]] | None:
        """Return the decision on a call's messages, and the entries of the last reply and of these; None where the
        messages before it decide.
        """
        live, history, session = found.live, found.history, found.live.session
        if live.deltas is not None:
            decision = append_delta(live, history)
            entries = entries_of_delta(live, live.deltas, history, decision, self._dialect, now)
            return None if entries is None else (decision, entries)
        decision = append_to_open_turn(
            live.reply.row, history.identities, last_seq=session.last_seq, turns=session.turns
        )
        added = [known_entry(history.messages[0], live.reply, self._matcher.restore, self._dialect)]
        for message, placed in zip(history.messages[1:], decision.placed[1:], strict=True):
            added.append(new_entry(message, placed.seq, placed.turn, now))
        return decision, added

    def _window(self, live: LiveSession) -> int | None:
        request = live.request
        window = usable_window(request.model, request.max_tokens)
        return None if window is None else int(window / self._calibrations.ratio(request.model))

    def _compose(
        self, call: Call, found: Continuation, entries: Sequence[Entry]
    ) -> tuple[Pieces, AddedMessages] | None:
        """Return the body for the upstream and the elements that the last body lacks.

        None if the dialect does not write its messages one by one, or writes those in front otherwise than last time.
        """
        live = found.live
        if live.sent is not None:
            sources = [
                MessageSource(element, entry.seq, SHORTENED if entry.is_shortened else FULL)
                for entry in entries
                for raw in render(entry, self._dialect)
                for element in self._elements(raw)
            ]
            rendered = b"," + b",".join([source.raw for source in sources])
            return (*live.sent, rendered, live.sent_suffix), AddedMessages(
                [(source.raw, source) for source in sources], live.instructions
            )
        count = count_volatile(found.raws, self._dialect.name)
        if count is None or count >= len(found.raws):
            return None
        volatile: tuple[VolatileMessage, ...] = ()
        if count:
            digests = [each.digest for each in live.volatile]
            if live.deltas is not None:
                digests.append(live.reply.row.digest)
            digests += [each.digest for each in found.history.identities]
            first = len(found.raws) - count
            volatile = tuple(map(VolatileMessage, found.raws[first:], digests[first:]))
        if live.frame is None:
            pairs = [
                (element, MessageSource(element, entry.seq))
                for entry in entries
                for element in self._elements(entry.message.raw)
            ]
            return (call.body,), AddedMessages(pairs, live.instructions, volatile)
        sources = [
            MessageSource(raw, entry.seq, SHORTENED if entry.is_shortened else FULL)
            for entry in entries
            for raw in render(entry, self._dialect)
        ]
        written = live.frame.write(self._dialect, [source.raw for source in sources])
        if written is None or len(sources) != len(entries):
            return None
        if written.front != live.frame.described:
            return None  # the client's breakpoints have another form, and so do Tersely's: what is described changes
        return written.pieces, AddedMessages(
            list(zip(written.elements, sources, strict=True)), written.instructions, volatile
        )

    def _write(self, call: Call, found: Continuation, decision: Reconciliation, now: datetime) -> RequestWrite:
        messages, live = found.history.messages, found.live
        reference = live.reference

        def whole() -> WholeRequest:
            if reference is not None:
                return resolve_whole(live, reference, found.history, decision).request
            return self._whole_request(call, found)

        return RequestWrite(
            tenant=call.tenant,
            session_id=live.session.id,
            create=None,
            mode="full" if live.deltas is None else "append",
            dialect=self._dialect.name,
            incoming=found.history.identities,
            raws=[message.raw for message in messages],
            size=len(call.body),
            tokens=(),
            decision=decision,
            session=live.session,
            now=now,
            spill=partial(spilled, messages),
            strategy=compact_setting(call.options.strategy),
            epoch_policy=compact_setting(call.options.epoch),
            exchange=self._new_id(),
            referenced=None if reference is None else referenced_reply(live, reference, known=1, new=len(messages) - 1),
            whole=whole if live.deltas is None else None,
        )

    def _match_at_epoch_start(
        self,
        call: Call,
        found: Continuation,
        decision: Reconciliation,
        added: Sequence[Entry],
        window: int | None,
        epoch_start: StartEpoch,
        now: datetime,
    ) -> MatchedCall | None:
        """Return a call at which an epoch starts, without the inputs of that; None where it takes more than the live
        session holds.
        """
        live = found.live
        if not may_start_epoch(live):
            return None
        history, decision = reduced_history(found, decision)
        deltas = live.deltas
        return MatchedCall(
            call=call,
            request=replace(live.request, messages=history.messages),
            history=history,
            hints=_hints(call, live),
            started=now,
            match=_match(live, decision, history, live.rows[: live.row_count]),
            config=live.config,
            budget=_budget(live, window, now),
            loaded=History(
                snapshot=whole_snapshot(found, added, window),
                epoch_start=epoch_start,
                epoch_inputs=EpochInputs(),
                is_verbatim=_is_verbatim(found, added),
                instructions=() if deltas is None else deltas.instructions,
            ),
            live=live,
            whole_request=partial(self._whole_request, call, found) if deltas is None else None,
            expand=partial(self._expand_history, found) if deltas is None else None,
        )

    # What the full path makes of the call

    def _expand(self, call: LiveCall) -> PreparedCall:
        live, found = call.live, call.found
        hints = _hints(call.call, live)
        match = _match(live, call.decision, found.history, (live.reply,))
        request, expand = replace(live.request, messages=found.history.messages), self._expand_to_whole
        if live.reference is not None:
            request, expand = as_referenced(request, live.reference), _expand_reference
        budget = _budget(live, call.window, call.started)
        snapshot = whole_snapshot(found, call.added, budget.window)
        return PreparedCall(
            call=call.call,
            client=live.client_name,
            request=request,
            history=found.history,
            hints=hints,
            match=match,
            config=live.config,
            budget=budget,
            loaded=History(
                snapshot=snapshot,
                epoch_start=None,
                epoch_inputs=EpochInputs(),
                is_verbatim=call.is_verbatim,
                instructions=() if live.deltas is None else live.deltas.instructions,
            ),
            built=BuiltContext(context=_context(call), starts_epoch=False),
            body=call.body,
            write=call.write,
            started=call.started,
            strip_usage=live.strip_usage,
            labels=call.labels,
            tools=live.tools,
            shown_tags=call.shown_tags,
            history_owner=live.history_owner,
            added=call.elements,
            live=live,
            expand=partial(expand, found) if live.deltas is None else build_whole,
        )

    def _expand_to_whole(self, found: Continuation, prepared: PreparedCall) -> PreparedCall:
        built = build(prepared.loaded, prepared.config, prepared.budget, prepared.request.model)
        return replace(self._expand_history(found, prepared), built=built, added=None)

    def _expand_history(self, found: Continuation, prepared: PreparedCall) -> PreparedCall:
        request, history, match = self._read_whole(prepared.call, found)
        return replace(prepared, request=request, history=history, match=match, live=None, expand=None)

    def _whole_request(self, call: Call, found: Continuation) -> WholeRequest:
        _, arrival, match = self._read_whole(call, found)
        return WholeRequest(
            incoming=arrival.identities,
            raws=[message.raw for message in arrival.messages],
            decision=match.decision,
            spill=partial(spilled, arrival.messages),
        )

    def _read_whole(self, call: Call, found: Continuation) -> tuple[Request, IncomingHistory, SessionMatch]:
        request, arrival = self._matcher.read_whole(call)
        match = continued(arrival, _hints(call, found.live), hit_of(found.live), is_beginning_known=True)
        if match is None:
            raise RuntimeError("a live session differs from its stored session")
        return request, arrival, replace(match, source=_source(found.live))


def _must_answer(live: LiveSession, sums: ContextSums) -> bool:
    """Return whether the strategy may end the context with a request to answer now."""
    strategy = live.config.strategy
    return isinstance(strategy, Trim) and sums.turn_steps >= strategy.max_steps


def _as_shown(live: LiveSession, entries: Sequence[Entry]) -> Sequence[Entry]:
    """Return the entries as the epoch shows them; the same object where it shortens none."""
    epoch = live.snapshot.epoch
    if epoch is None or not epoch.tiers:
        return entries
    name = tokens.encoding_for(live.request.model)
    shown = apply_tiers(entries, epoch.tiers, encode=partial(tokens.recount, name=name))
    return shown if any(entry.is_shortened for entry in shown) else entries


def _shown_tags(live: LiveSession, added: Sequence[Entry]) -> TagKinds:
    return NOTHING if live.config.is_unchanged else kinds_shown(added, known=live.config.hidden_tags)


def _expand_reference(found: Continuation, prepared: PreparedCall) -> PreparedCall:
    """Return a call that references its history with all of that, as the full path resolves it."""
    live, reference = found.live, found.live.reference
    assert reference is not None
    whole = resolve_whole(live, reference, found.history, prepared.match.decision)
    built = build(prepared.loaded, prepared.config, prepared.budget, prepared.request.model)
    return replace(prepared, history=whole.history, match=whole.match, built=built, live=None, added=None, expand=None)


def _hints(call: Call, live: LiveSession) -> SessionHints:
    hints = SessionHints(session_id=call.options.session_id, client=live.client, headers=call.header_map)
    if live.reference is None:
        return hints
    conversation = live.reference.conversation
    return replace(hints, reply_id="" if conversation else live.reference.reply_id, conversation=conversation)


def _source(live: LiveSession) -> SessionSource:
    if live.reference is not None:
        return "body"
    return "header" if live.is_named else live.client.source or "lineage"


def _context(call: LiveCall) -> Context:
    """The context without its messages: nobody looks at those of a live call until it is read whole."""
    epoch, sums = call.live.snapshot.epoch, call.sums
    assert epoch is not None
    report = Report(
        tokens_before=tokens_before(call.live, sums),
        tokens_after=tokens_after(call.live, sums),
        epoch=epoch.number,
        reason=epoch.reason,
        cut=epoch.cut,
        layers=layers_of(call.live, sums),
        turns=(),
    )
    return Context(messages=(), epoch=epoch, report=report, repairs=call.live.repairs, is_whole=call.live.is_whole)


def whole_snapshot(found: Continuation, added: Sequence[Entry], window: int | None) -> Snapshot:
    """Return the snapshot with all messages of a call."""
    before = found.live.snapshot
    known = before.entries[: len(before.entries) - len(found.revised)]
    return replace(before, entries=(*known, *found.revised, *added), window=window)


def _match(
    live: LiveSession, decision: Reconciliation, history: IncomingHistory, rows: Sequence[TailRow]
) -> SessionMatch:
    """Return the match of a call as the full path makes it. ``rows``: those that a call with its history needs."""
    if live.deltas is not None:
        return match_of_delta(live, decision, history)
    return SessionMatch(
        session_id=live.session.id,
        session=live.session,
        source=_source(live),
        decision=decision,
        rows=rows,
        expanded_from=0 if live.reference is None else live.reference.start,
    )


def _is_verbatim(found: Continuation, added: Sequence[Entry]) -> bool:
    return found.live.is_verbatim and added[0].message is found.history.messages[0]


def _budget(live: LiveSession, window: int | None, now: datetime) -> TokenBudget:
    return TokenBudget(
        fixed_tokens=live.snapshot.fixed_tokens,
        tool_tokens=live.snapshot.tool_tokens,
        added=count_additions(live.snapshot.epoch, live.config),
        window=window,
        now=now,
        model_window=live.snapshot.model_window,
    )


def _epoch_start(
    found: Continuation, sums: ContextSums, added: Sequence[Entry], window: int | None, now: datetime
) -> StartEpoch | None:
    """Return the epoch that the full path would start; None if it would keep the current one. Read the messages only
    where their sums do not decide it.
    """
    config, snapshot = found.live.config, found.live.snapshot
    if window != snapshot.window:
        snapshot = replace(snapshot, window=window)
    if sums.distances is not None and surely_keeps(
        snapshot,
        strategy=config.strategy,
        policy=config.policy,
        sums=TokenSums(kept=sums.kept, tail=sums.tail, required=sums.questions, steps=sums.steps),
        distances=sums.distances,
        now=now,
    ):
        return None
    whole = whole_snapshot(found, added, window)
    decision = decide(whole, strategy=config.strategy, policy=config.policy, now=now)
    return decision if isinstance(decision, StartEpoch) else None
