"""Make live sessions from calls of the full path, and update them after each live call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise

import msgspec
from msgspec import structs

from tersely.dialects.clients import known as clients
from tersely.dialects.clients.names import client_name
from tersely.dialects.dialect import Dialect
from tersely.dialects.wire.array_member import find_array, find_array_end
from tersely.domain.history.chain import DIGEST_BYTES
from tersely.domain.history.context import LayerReport, Repair
from tersely.domain.history.history import INCOMPLETE, WINDOW_FULL, Entry, Epoch, Snapshot
from tersely.domain.history.links import StoredLink
from tersely.domain.history.pairing import repair
from tersely.domain.history.sessions import Session
from tersely.domain.messages import Message
from tersely.service.common import tokens
from tersely.service.context.building import BuiltContext
from tersely.service.context.context_config import count_additions, instructions_in, offers_in
from tersely.service.context.loading import count_apart
from tersely.service.context.sent_contexts import ADDED, INSTRUCTIONS, Elements, MessageSource, body_parts
from tersely.service.proxy.call.call import Call
from tersely.service.proxy.live_calls.deltas import first_deltas, next_deltas, shows_delta
from tersely.service.proxy.live_calls.epoch_starts import leading_messages
from tersely.service.proxy.live_calls.live_call import KEPT, TAIL, LiveCall
from tersely.service.proxy.live_calls.references import (
    BodyAround,
    body_around,
    first_reference,
    next_reference,
    shows_reference,
)
from tersely.service.proxy.live_sessions.frames import Frame, count_volatile, placeholder_of, step_back
from tersely.service.proxy.live_sessions.live_session import (
    ContextSums,
    LeadingMessages,
    LiveSession,
    VolatileMessage,
    size_of,
    steady,
)
from tersely.service.proxy.live_sessions.pieces import with_piece
from tersely.service.proxy.live_sessions.varying_members import find_varying
from tersely.service.proxy.preparing.stages import PreparedCall
from tersely.service.recognition.incoming_history import extend, identify
from tersely.store.commit.records import ReplyWrite, SessionCounters, StoredReply, session_after
from tersely.store.history.messages import TailRow
from tersely.store.history.tail_cache import TailCache, row_of, tail_rows
from tersely.strategies.epochs.cutting import cut_distances
from tersely.strategies.epochs.policies import EveryRequest
from tersely.strategies.head.injection import LAYER as BLOCK_LAYER
from tersely.strategies.pipeline import count_entries
from tersely.strategies.reduction.shortening import apply_tiers


class _Bodies(msgspec.Struct, frozen=True, kw_only=True):
    """Offsets at which the next call continues the client's body and the one that was sent.

    ``start``: before all messages; ``end``: before the volatile messages; ``history_end``: behind all messages;
    ``sent_end``: behind those that were sent, where the next body is made from that one. ``frame``: where it is written
    around the volatile messages. ``around``: the client's body without a history that it references.
    """

    start: int
    end: int
    history_end: int
    sent_end: int = 0
    frame: Frame | None = None
    around: BodyAround | None = None


class LiveSessionBuilder:
    """Makes the live sessions of one dialect."""

    def __init__(self, dialect: Dialect, *, owner: int, tails: TailCache, new_id: Callable[[], str]) -> None:
        self._dialect = dialect
        self._history = dialect.history
        self._owner = owner
        self._tails = tails
        self._new_id = new_id

    def begin(self, prepared: PreparedCall, write: ReplyWrite, stored: StoredReply | None) -> LiveSession | None:
        """Return the session as a call of the full path left it; None where the next call has to take that again."""
        outcome, call = write.request_outcome, prepared.call
        if outcome is None or not outcome.is_as_decided or not _is_plain_reply(write):
            return None
        is_delta, is_reference = prepared.match.is_delta, prepared.resolved is not None
        # A history that the host has is not looked at, however long it is.
        if prepared.is_at_host or (is_reference and call.options.session_id is not None):
            return None
        if (is_delta and not shows_delta(prepared)) or (is_reference and not shows_reference(prepared)):
            return None
        is_read = is_delta or is_reference
        # Not every tail is at hand: calls that name their session read theirs from the store.
        read = None if is_read else self._read_tail(call, write)
        if read is None:
            read = _read_stored(prepared, write, stored)
        if read is None:
            return None
        session, rows = read
        (reply,) = write.replies
        row = rows[-1]
        if row.row.seq != session.last_seq or row.row.digest != reply.digest or session.edited:
            return None
        if session.version != outcome.state.version + 1:
            return None
        new = zip(write.request.decision.placed, write.request.tokens, strict=True)
        counts = {placed.seq: count for placed, count in new if placed.is_new}
        if not is_delta:
            counts |= {each.row.seq: each.row.tokens for each in rows}
            return self._build(call, prepared, session, rows, counts, write)
        # Stored messages have their counts; those that were written anew have estimates at every call.
        counts = {entry.seq: entry.tokens for entry in prepared.loaded.snapshot.entries} | counts
        return self._build(call, prepared, session, rows, counts, write)

    def _read_tail(self, call: Call, write: ReplyWrite) -> tuple[Session, list[TailRow]] | None:
        """Return the session and its tail after a call that brought its history; None if they are not at hand."""
        assert write.request_outcome is not None
        tail = self._tails.get(call.tenant, write.request_outcome.session_id)
        (reply,) = write.replies
        return None if tail is None or tail.chain != reply.chain else (tail.session, tail.rows)

    def grow(
        self, call: LiveCall, write: ReplyWrite, stored: StoredReply, *, checked_at: float, changes: int
    ) -> LiveSession | None:
        """Return the session as a live call left it, ``stored`` with its reply; None as for `begin`."""
        live, found, asked, state = call.live, call.found, stored.outcome, stored.state
        description = call.description
        if not asked.is_as_decided or state.version != live.session.version + 2 or state.edited:
            return None
        if description is None or stored.record is None or not _is_plain_reply(write):
            return None
        reply = row_of(stored.record)
        if reply.row.seq != state.last_seq:
            return None
        body, added, volatile = call.call.body, call.elements, call.elements.volatile
        deltas, reference, suffix = live.deltas, live.reference, live.suffix
        if deltas is not None:
            body, end = live.body, live.end
            deltas = next_deltas(deltas, found.history, write)
        elif reference is not None:
            following = next_reference(live, reference, write)
            if following is None:
                return None
            reference, around = following
            body, end, suffix = around.before, len(around.before), around.after
        elif (stepped := step_back(body, len(body) - len(live.suffix), [each.raw for each in volatile])) is not None:
            end = stepped
        else:
            return None
        frame = live.frame
        if frame is not None:
            stays = len(added.elements) - len(volatile)
            frame = frame.with_middle([element for element, _ in added.elements[:stays]])
        messages, counts = found.history.messages, write.request.tokens
        counted = zip(call.added[1:], counts[found.echoes :], strict=True)
        new = (call.added[0], *(structs.replace(entry, tokens=count) for entry, count in counted))
        shown = new
        if call.shown is not call.added:
            shown = tuple([one if one.is_shortened else other for one, other in zip(call.shown, new, strict=True)])
        question = next((each for each in reversed(messages) if each.role == "user"), live.last_question)
        rows = live.rows if len(live.rows) == live.row_count else live.rows[: live.row_count]
        rows += [*_rows_of(write), reply]
        first, is_resent = live.first_messages, deltas is None and reference is None
        if is_resent and len(first) < 3:
            first = (*first, *messages)[:3]
        return structs.replace(
            live,
            session=session_after(live.session, state),
            checked_at=checked_at,
            changes=changes,
            headers=found.headers,
            body=body,
            end=end,
            suffix=suffix,
            commas=live.commas if reference is not None else live.commas + body.count(b",", live.end, end),
            volatile=volatile,
            frame=frame,
            sent=None if live.sent is None else with_piece(live.sent, call.pieces[-2]),
            first_messages=first,
            last_question=question,
            digests=b"".join([live.digests, *[each.digest for each in found.history.identities]]) if is_resent else b"",
            snapshot=_grown_snapshot(call, new, state),
            sums=live.sums.with_added(new, shown, turn=live.turn),
            is_verbatim=call.is_verbatim,
            shown_kinds=call.shown_tags,
            reply=reply,
            chain=extend(found.history.chains[-1], reply.row.digest),
            messages_size=live.messages_size + size_of(new),
            elements=description.elements,
            rows=rows,
            row_count=len(rows),
            deltas=deltas,
            reference=reference,
        )

    def _build(
        self,
        call: Call,
        prepared: PreparedCall,
        session: Session,
        rows: list[TailRow],
        counts: dict[int, int],
        write: ReplyWrite,
    ) -> LiveSession | None:
        reply, config, request = rows[-1], prepared.config, prepared.request
        deltas = first_deltas(prepared, write) if prepared.match.is_delta else None
        shown = _read_shown(prepared, session, reply, counts, is_delta=deltas is not None)
        if shown is None:
            return None
        epoch, tail = shown.epoch, shown.snapshot.entries
        elements, volatile = _elements(prepared), _volatile(prepared, tail)
        if elements is None or volatile is None:
            return None
        if not _ends_unrepaired(shown, max(1, len(volatile))):
            return None
        # A message that is written anew at the next call is written without the instructions in front of it.
        if any(prefix.seq >= entry.seq for prefix in epoch.prefixes for entry in tail[len(tail) - len(volatile) :]):
            return None
        bodies = self._bodies(call, prepared, epoch, volatile)
        if bodies is None:
            return None
        around, reference = bodies.around, None
        body, suffix = call.body if deltas is None else call.body[: bodies.end], call.body[bodies.history_end :]
        if around is not None:
            reference = first_reference(prepared, write, around)
            if reference is None:
                return None
            around = around.with_id(reference.reply_id)
            body, suffix = around.before, around.after
            reference = structs.replace(reference, id_end=around.id_end)
        live, is_resent = prepared.live, deltas is None and reference is None
        sent_suffix = prepared.body[bodies.sent_end :] if bodies.sent_end else b""
        can_vary = around is None and bodies.frame is None and deltas is None
        return LiveSession(
            owner=self._owner,
            tenant=call.tenant,
            session=session,
            checked_at=float("-inf"),
            changes=0,
            headers=[] if clients.is_retry(call.header_map) else steady(call.headers),
            client_name=client_name(call.header_map) or None,
            method=call.method,
            path=call.path,
            options=call.options,
            client=clients.client_ids(call.header_map, request.ids),
            body=body,
            start=bodies.start,
            end=bodies.end if around is None else len(body),
            commas=_count_commas(call.body, bodies, live),
            suffix=suffix,
            sent=(prepared.body[: bodies.sent_end],) if bodies.sent_end else None,
            sent_suffix=sent_suffix,
            varying=find_varying(self._history.varying, suffix, sent_suffix) if can_vary else None,
            volatile=volatile,
            frame=bodies.frame,
            instructions=body_parts(prepared.body, self._dialect.name).instructions if bodies.frame is None else b"",
            request=structs.replace(request, messages=()),
            tools_digest=tokens.content_digest(request.tools) if request.tools else None,
            first_messages=_first_messages(prepared) if is_resent else (),
            last_question=_last_question(prepared),
            leading=_leading(prepared) if is_resent else None,
            digests=_digests(prepared) if is_resent else b"",
            config=config,
            snapshot=shown.snapshot,
            sums=shown.sums,
            repairs=shown.repairs,
            is_verbatim=prepared.loaded.is_verbatim and epoch.cut == 1 and reference is None,
            is_whole=shown.is_whole,
            shown_kinds=prepared.shown_tags,
            strip_usage=prepared.strip_usage,
            tools=prepared.tools,
            reply=reply,
            chain=_chain_of(prepared, reply),
            messages_size=size_of((*shown.snapshot.kept, *tail)),
            layers=shown.layers,
            elements=elements,
            rows=list(rows),
            row_count=len(rows),
            deltas=deltas,
            reference=reference,
            history_owner=prepared.history_owner,
        )

    def _bodies(
        self, call: Call, prepared: PreparedCall, epoch: Epoch, volatile: Sequence[VolatileMessage]
    ) -> _Bodies | None:
        """Find where the next call continues both bodies; None where they do not end with the newest message."""
        newest = self._history.elements(prepared.history.messages[-1].raw)[-1]
        newest_sent = self._history.elements(prepared.sources[-1].raw)[-1] if prepared.sources else newest
        if prepared.resolved is not None:
            return self._bodies_of_reference(call, prepared, newest, newest_sent)
        live = prepared.live
        place = (
            find_array(call.body, self._history.path)
            if live is None
            else (live.start, len(call.body) - len(live.suffix))
        )
        if place is None or not call.body.endswith(newest, 0, place[1]):
            return None
        is_delta = prepared.match.is_delta
        end = place[0] if is_delta else step_back(call.body, place[1], [each.raw for each in volatile])
        if end is None:
            return None
        if prepared.body is call.body:
            return _Bodies(start=place[0], end=end, history_end=place[1])
        if volatile:
            frame = self._frame(call, prepared, epoch, place, volatile)
            return None if frame is None else _Bodies(start=place[0], end=end, history_end=place[1], frame=frame)
        sent_end = find_array_end(prepared.body, self._history.path) or 0
        if not sent_end or not prepared.body.endswith(newest_sent, 0, sent_end):
            return None
        return _Bodies(start=place[0], end=end, history_end=place[1], sent_end=sent_end)

    def _bodies_of_reference(
        self, call: Call, prepared: PreparedCall, newest: bytes, newest_sent: bytes
    ) -> _Bodies | None:
        around = body_around(call.body, newest, self._history, reply_id=prepared.request.reply_id)
        sent_end = find_array_end(prepared.body, self._history.path) or 0
        if around is None or not sent_end or not prepared.body.endswith(newest_sent, 0, sent_end):
            return None
        end = len(around.before)
        history_end = len(call.body) - len(around.after)
        return _Bodies(start=0, end=end, history_end=history_end, sent_end=sent_end, around=around)

    def _frame(
        self,
        call: Call,
        prepared: PreparedCall,
        epoch: Epoch,
        place: tuple[int, int],
        volatile: Sequence[VolatileMessage],
    ) -> Frame | None:
        """Return the parts of the upstream body that the next body repeats; None if that body is not written message by
        message.
        """
        sources = prepared.sources or ()
        added = len(volatile)
        # Blocks of the client's alone, in front of all messages, are written like instructions but are no part of the
        # head.
        leading = _count_leading(prepared.history.messages) if epoch.cut == 1 and not epoch.head else len(sources)
        frozen = next((index for index, source in enumerate(sources) if not _is_in_head(source, epoch)), len(sources))
        frozen = min(frozen, leading)
        elements = body_parts(prepared.body, self._dialect.name).elements
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
            middle=(b",".join(elements[front : front + between]),),
            placeholder=placeholder_of(self._new_id()),
            instructions=instructions,
            has_breakpoints=prepared.match.is_delta or instructions is not None or bool(offers) or epoch.cut > 1,
        )
        written = frame.write(self._dialect, [source.raw for source in sources[len(sources) - added :]])
        if written is None or b"".join(written.pieces) != prepared.body:
            return None
        return structs.replace(frame, described=written.front)


def _grown_snapshot(call: LiveCall, new: Sequence[Entry], state: SessionCounters) -> Snapshot:
    """Return the snapshot after a live call: its revised and new messages behind the known ones."""
    before, revised = call.live.snapshot, call.found.revised
    known = before.entries[: len(before.entries) - len(revised)] if revised else before.entries
    return structs.replace(
        before,
        entries=(*known, *revised, *new),
        calls=state.calls,
        last_call_at=state.last_call_at,
        window=call.window,
    )


class _ShownContext(msgspec.Struct, frozen=True, kw_only=True):
    """The context that a call of the full path sent, for the next call to continue. ``snapshot`` has the messages
    with the tokens that are stored; ``layers`` are those of the report before the tail.
    """

    epoch: Epoch
    snapshot: Snapshot
    sums: ContextSums
    repairs: tuple[Repair, ...]
    layers: tuple[LayerReport, ...]
    is_whole: bool


def _read_shown(
    prepared: PreparedCall, session: Session, reply: TailRow, counts: Mapping[int, int], *, is_delta: bool
) -> _ShownContext | None:
    """Return what a call showed; None where the next call does not simply append to it."""
    built, config = prepared.built, prepared.config
    if built is None or not _is_plain_call(prepared):
        return None
    epoch, context, before = session.plan, built.context, prepared.loaded.snapshot
    if epoch is None or epoch.number != session.epoch or not _shows_plainly(epoch, built):
        return None
    around = _around_cut(epoch, before)
    if around is None or not _are_plain(*around, epoch, reply):
        return None
    kept, tail = around
    if any(entry.seq not in counts for entry in tail) or (built.starts_epoch and _have_twins(kept, prepared)):
        return None
    added, counted = count_additions(epoch, config), prepared.budget.added
    fixed = before.fixed_tokens + added.total - counted.total
    older = 0 if epoch.cut == 1 else epoch.older_tokens
    layers = context.report.layers
    # Blocks in the head are written with words around them; their own tokens are among the fixed ones.
    around_blocks = sum(layer.tokens for layer in layers if layer.name == BLOCK_LAYER)
    around_blocks -= sum(block.tokens for block in before.injected) if around_blocks else 0
    head = epoch.head_tokens + around_blocks
    model, repairs = prepared.request.model, context.repairs
    shown = _as_shown(epoch, model, kept, tail, repairs)
    if shown is None or not _is_as_summed(built, fixed, older, _sums(head, kept, tail, shown)):
        return None
    if not layers or layers[-1].name != TAIL:
        return None
    # What was estimated before the call has been counted since.
    tail, kept = _counted(tail, counts), _counted(kept, counts)
    if not is_delta:  # otherwise it was loaded with its counts
        # Kept messages whose rows are not at hand have the counts of the call, without those of their blocks.
        tail, apart = count_apart(tail, [entry for entry in kept if entry.seq in counts], before.injected)
        by_seq = {entry.seq: entry for entry in apart}
        kept = tuple([by_seq.get(entry.seq, entry) for entry in kept])
    shown = _as_shown(epoch, model, kept, tail, repairs)
    if shown is None:
        return None
    sums = _sums(head, kept, tail, shown)
    snapshot = structs.replace(
        before,
        entries=tail,
        kept=kept,
        epoch=epoch,
        fixed_tokens=fixed,
        tool_tokens=before.tool_tokens + added.tools - counted.tools,
        older_tokens=older,
        edited=False,
        ran_out=False,
        calls=session.calls,
        last_call_at=session.last_call_at,
    )
    recounted = {KEPT: sums.shown_kept}
    return _ShownContext(
        epoch=epoch,
        snapshot=snapshot,
        sums=sums,
        repairs=repairs,
        layers=tuple([structs.replace(each, tokens=recounted.get(each.name, each.tokens)) for each in layers[:-1]]),
        is_whole=context.is_whole,
    )


def _read_stored(
    prepared: PreparedCall, write: ReplyWrite, stored: StoredReply | None
) -> tuple[Session, list[TailRow]] | None:
    """Return the session and its tail after a call whose rows were read from the store; None: not at hand."""
    session, match = prepared.match.session, prepared.match
    if stored is None or stored.record is None or session is None or stored.outcome.session_id != session.id:
        return None
    if match.hidden:
        return None
    after = session_after(session, stored.state)
    known = [row for row in tail_rows(match.rows, after) if row.row.status != "superseded"]
    return after, [*known, *_rows_of(write), row_of(stored.record)]


def _around_cut(epoch: Epoch, snapshot: Snapshot) -> tuple[tuple[Entry, ...], tuple[Entry, ...]] | None:
    """Return the messages that ``epoch`` keeps from before its cut, and those behind it; None if one is not loaded."""
    shown = (*snapshot.kept, *snapshot.entries)
    if not {entry.seq for entry in shown}.issuperset(epoch.kept):
        return None
    kept = tuple([entry for entry in shown if entry.seq < epoch.cut and entry.seq in epoch.kept])
    return kept, tuple([entry for entry in shown if entry.seq >= epoch.cut])


def _as_shown(
    epoch: Epoch, model: str, kept: Sequence[Entry], tail: Sequence[Entry], repairs: Sequence[Repair]
) -> Sequence[Entry] | None:
    """Return the messages around a cut as the context shows them: shortened, and with its ``repairs``. What is appended
    to them changes neither. None where they would need other repairs.
    """
    encode = partial(tokens.recount, name=tokens.encoding_for(model))
    shown = apply_tiers((*kept, *tail), epoch.tiers, encode=encode)
    if not repairs:
        return shown
    if {each.seq for each in repairs}.intersection([prefix.seq for prefix in epoch.prefixes]):
        return None  # the tokens of a message that is repaired depend on what stands in front of it
    mended, found = repair(shown)
    return mended if found == repairs else None


def _ends_unrepaired(shown: _ShownContext, count: int) -> bool:
    """Return whether no repair concerns the last ``count`` messages of a context."""
    repaired = {each.seq for each in shown.repairs}
    return repaired.isdisjoint([entry.seq for entry in shown.snapshot.entries[-count:]])


def _is_as_summed(built: BuiltContext, fixed: int, older: int, sums: ContextSums) -> bool:
    """Return whether the sums equal the tokens of the report. Otherwise the report counts something that they lack."""
    report = built.context.report
    if report.tokens_after != fixed + sums.head + sums.shown_kept + sums.shown_tail:
        return False
    return built.starts_epoch or report.tokens_before == fixed + max(older, sums.kept) + sums.tail


def _is_in_head(source: MessageSource, epoch: Epoch) -> bool:
    return source.shows == ADDED or source.layer == INSTRUCTIONS or source.seq < epoch.cut


def _volatile(prepared: PreparedCall, tail: Sequence[Entry]) -> tuple[VolatileMessage, ...] | None:
    """The last messages of a request whose breakpoints the next one may move; None where that cannot be followed."""
    history = prepared.history
    count = count_volatile(prepared.own_messages, prepared.write.dialect)
    has_more = prepared.match.is_delta or prepared.live is not None  # messages in front of these
    most = len(history.links) if has_more else len(history.links) - 1
    if count is None or count > most:
        return None
    first = len(history.messages) - count
    placed = prepared.match.decision.placed[first:]
    if [each.seq for each in placed] != [entry.seq for entry in tail[len(tail) - count :]]:
        return None
    incoming = zip(history.messages[first:], history.identities[first:], strict=True)
    return tuple(VolatileMessage(message.raw, each.digest) for message, each in incoming)


def _sums(head: int, kept: Sequence[Entry], tail: Sequence[Entry], shown: Sequence[Entry]) -> ContextSums:
    everything = (*kept, *tail)
    running = everything[-1].turn
    has_pins = True in [entry.pinned for entry in everything]
    before = {entry.seq for entry in kept}
    shown_kept = count_entries([entry for entry in shown if entry.seq in before])
    return ContextSums(
        head=head,
        kept=count_entries(kept),
        tail=count_entries(tail),
        shown_kept=shown_kept,
        shown_tail=count_entries(shown) - shown_kept,
        questions=count_entries([e for e in everything if e.turn == running and e.message.starts_turn]),
        steps=[entry.message.role for entry in tail].count("assistant"),
        turn_steps=[entry.message.role for entry in everything if entry.turn == running].count("assistant"),
        distances=None if has_pins else cut_distances(tail),
    )


def _elements(prepared: PreparedCall) -> Elements | None:
    """Return the description of the body that went upstream; the next description continues it."""
    description = prepared.record.description if prepared.record else None
    return None if description is None or description.body is not prepared.body else description.elements


def _chain_of(prepared: PreparedCall, reply: TailRow) -> bytes:
    """The identity of the history up to the stored ``reply`` of a call."""
    return extend(prepared.match.head_chain or prepared.history.head_chain, reply.row.digest)


def _shows_plainly(epoch: Epoch, built: BuiltContext) -> bool:
    """Return whether a context shows the messages of the epoch unchanged, and the next one will show them so again."""
    context = built.context
    if context.epoch.number != epoch.number or context.must_answer:
        return False
    return not (epoch.folds_repeats or epoch.is_stale or epoch.must_rebuild)


def _counted(entries: Sequence[Entry], counts: Mapping[int, int]) -> tuple[Entry, ...]:
    """Entries with the tokens that are stored."""
    return tuple([structs.replace(entry, tokens=counts.get(entry.seq, entry.tokens)) for entry in entries])


def _have_twins(kept: Sequence[Entry], prepared: PreparedCall) -> bool:
    """Return whether a history has equal messages, one of them kept from before the cut. The next call looks up which
    is which, and later calls keep to that.
    """
    if not kept or prepared.match.is_delta or prepared.resolved is not None:
        return False
    placed, incoming = prepared.match.decision.placed, prepared.history.identities
    digests = {each.seq: message.digest for each, message in zip(placed, incoming, strict=True) if each.seq}
    if prepared.live is not None:  # most of the history is known, and not among what is incoming
        digests |= {each.row.seq: each.row.digest for each in prepared.match.rows}
    every = _digests(prepared)
    often = Counter(every[at : at + DIGEST_BYTES] for at in range(0, len(every), DIGEST_BYTES))
    for entry in kept:
        digest = digests.get(entry.seq)
        if digest is None and entry.message.role == "user":  # the model was shown it as the client sent it
            digest = identify(entry.message).digest
        if digest is None or often[digest] != 1:
            return True
    return False


def _count_commas(body: bytes, bodies: _Bodies, live: LiveSession | None) -> int:
    if live is not None:
        return live.commas + body.count(b",", live.end, bodies.end)
    return body.count(b",", 0, bodies.end) + body.count(b",", bodies.history_end)


def _first_messages(prepared: PreparedCall) -> tuple[Message, ...]:
    return prepared.history.messages[:3] if prepared.live is None else prepared.live.first_messages


def _last_question(prepared: PreparedCall) -> Message | None:
    question = next((each for each in reversed(prepared.history.messages) if each.role == "user"), None)
    return question if question is not None or prepared.live is None else prepared.live.last_question


def _leading(prepared: PreparedCall) -> LeadingMessages | None:
    if prepared.live is not None:
        return prepared.live.leading
    return leading_messages(prepared.history, prepared.match.decision.placed)


def _digests(prepared: PreparedCall) -> bytes:
    """Return the digests of a history's messages, one after the other."""
    live, identities = prepared.live, prepared.history.identities
    if live is not None and live.leading is not None:
        identities = identities[len(live.leading.messages) + len(live.volatile) :]
    return b"".join([live.digests if live is not None else b"", *[each.digest for each in identities]])


def _are_plain(kept: Sequence[Entry], entries: Sequence[Entry], epoch: Epoch, reply: TailRow) -> bool:
    """Return whether messages stand in the order of their numbers, unaltered, around the cut, and the user opened the
    turn.
    """
    everything = (*kept, *entries)
    if [entry for entry in everything if entry.prefix or entry.is_shortened]:
        return False
    if [one for one, other in pairwise(everything) if one.seq >= other.seq]:
        return False
    if (entries and entries[0].seq < epoch.cut) or (kept and kept[-1].seq >= epoch.cut):
        return False
    turn = reply.row.turn
    return "user" in [entry.message.role for entry in everything if entry.turn == turn]


def _rows_of(write: ReplyWrite) -> list[TailRow]:
    """Return the rows of a request's new messages, as a lookup reads them."""
    request = write.request
    rows: list[TailRow] = []
    follows = request.decision.follows_seq
    for placed, incoming, count in zip(request.decision.placed, request.incoming, request.tokens, strict=True):
        if placed.is_new:
            row = StoredLink(
                seq=placed.seq,
                position=placed.position,
                turn=placed.turn,
                tokens=count,
                role=incoming.role,
                status=placed.status,
                digest=incoming.digest,
                relayed=False,
                call=0,
                follows=follows,
            )
            rows.append(TailRow(row=row, dialect=request.dialect, pinned=False, created_at=request.now, model_raw=None))
        follows = placed.seq
    return rows


def _is_plain_reply(write: ReplyWrite) -> bool:
    """Return whether a call got one whole reply, and nothing beside it."""
    if len(write.replies) != 1:
        return False
    (reply,) = write.replies
    is_plain = reply.chain is not None and not reply.is_alternative and reply.role == "assistant"
    return is_plain and reply.finish not in {None, WINDOW_FULL, *INCOMPLETE}


def _is_plain_call(prepared: PreparedCall) -> bool:
    """Return whether the full path prepared a call without anything that a live call does not do again."""
    found, arrival, history, config = prepared.match, prepared.history, prepared.loaded, prepared.config
    decision = found.decision
    if prepared.is_at_host or prepared.round_messages:
        return False
    if decision.kind not in {"new", "continue", "delta"} or decision.superseded or decision.restored:
        return False
    if not decision.replies_at_end or any(placed.status != "live" for placed in decision.placed):
        return False
    if prepared.write.key is not None or history.blocks or history.overflows:
        return False
    if history.instructions and not found.is_delta:
        return False
    links = arrival.links
    if found.is_delta and len(links) < len(arrival.messages):
        return False  # it brings instructions, which replace others
    if not links or not _is_orderly(arrival.messages, links) or isinstance(config.policy, EveryRequest):
        return False
    return arrival.messages[-1].role in {"user", "tool"}


def _is_orderly(messages: Sequence[Message], links: Sequence[int]) -> bool:
    """Return whether each message beside the links of a history has its place: it is one of the instructions that lead
    the history, or it stands before a later message. Clients put instructions and blocks of their own there.
    """
    leading = _count_leading(messages)
    if len(links) == len(messages) - leading:
        return True
    known = set(links)
    others = [index for index in range(leading, len(messages)) if index not in known]
    anchor = next((index for index in reversed(links) if messages[index].role != "tool"), 0)
    return others[-1] < anchor


def _count_leading(messages: Sequence[Message]) -> int:
    """Return how many instructions lead a history."""
    return next((index for index, message in enumerate(messages) if not message.is_instruction), len(messages))
