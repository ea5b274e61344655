"""Apply a write to a session's counters and make its rows. No I/O: the writer stores the result."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from datetime import datetime

import msgspec
from msgspec import structs

from tersely.domain.history.links import MessageIdentity, PlacedMessage
from tersely.domain.history.reconciliation import Reconciliation
from tersely.domain.history.reply_placement import ReplyPlacement
from tersely.domain.tokens import estimate
from tersely.store.commit.records import (
    CallReport,
    Figures,
    HiddenReplyParts,
    NewEpoch,
    NewReply,
    ReferencedReply,
    ReplyWrite,
    RequestOutcome,
    RequestWrite,
    SessionCounters,
    StoredReply,
)
from tersely.store.db.statements import Record
from tersely.store.history import artifacts, model_views, packed_log, turn_rows
from tersely.store.history.artifacts import LARGE_OUTPUT
from tersely.store.history.sent_contexts import KIND, renumber
from tersely.store.history.sessions import answered_in_words, in_flight
from tersely.store.notes import pending_memory


class NewRows(msgspec.Struct):
    """The rows of a batch, by table; the session's id, then the columns of `tersely.store.db.statements`."""

    messages: list[Record] = msgspec.field(default_factory=list)
    reply_ids: list[Record] = msgspec.field(default_factory=list)
    terse: list[Record] = msgspec.field(default_factory=list)
    states: list[Record] = msgspec.field(default_factory=list)
    calls: list[Record] = msgspec.field(default_factory=list)
    epochs: list[Record] = msgspec.field(default_factory=list)
    pending_memory: list[Record] = msgspec.field(default_factory=list)
    attributes: list[Record] = msgspec.field(default_factory=list)
    artifacts: list[Record] = msgspec.field(default_factory=list)
    appends: list[Record] = msgspec.field(default_factory=list)

    def extend(self, other: NewRows) -> None:
        """Add another batch's rows."""
        self.messages += other.messages
        self.reply_ids += other.reply_ids
        self.terse += other.terse
        self.states += other.states
        self.calls += other.calls
        self.epochs += other.epochs
        self.pending_memory += other.pending_memory
        self.attributes += other.attributes
        self.artifacts += other.artifacts
        self.appends += other.appends


AT_THE_END = ReplyPlacement()
NO_HIDDEN_PARTS = HiddenReplyParts()


def enter_request(
    write: RequestWrite, state: SessionCounters, decision: Reconciliation, rows: NewRows, *, is_as_decided: bool
) -> RequestOutcome:
    """Enter a request's new messages; ``state`` moves on."""
    first = state.last_seq + 1
    entries = zip(decision.placed, write.incoming, write.raws, write.tokens, strict=True)
    before = decision.follows_seq
    exchange = write.exchange if write.mode == "append" else None
    newest = state.turns or min(state.last_seq, 1)  # earlier versions did not count a reply to instructions alone
    for index, (placed, incoming, raw, tokens) in enumerate(entries):
        if placed.is_new:
            # After a new decision, a message that was taken for known may be new: it was not counted.
            weight = tokens or estimate(len(raw))
            state.tokens += weight
            hidden = write.hidden_parts.get(index, NO_HIDDEN_PARTS)
            newest = max(newest, placed.turn)
            written_at = write.times[index] if write.times else write.now
            rows.messages.append(
                (
                    state.id, placed.seq, placed.turn, weight, placed.position, incoming.role, placed.status,
                    write.dialect, True, True, False, None, 0, incoming.digest, None, written_at, raw,
                    *model_views.columns_of(raw, hidden.model_raw), before, exchange,
                    turn_rows.noted_turn(placed.turn, newest),
                )
            )  # fmt: skip
            rows.terse += _terse(state.id, placed.turn, placed.seq, hidden.terse, written_at)
            rows.states += _states(state.id, placed.seq, hidden.state, written_at)
            if len(raw) > LARGE_OUTPUT and write.spill is not None:
                rows.artifacts += [artifacts.row(state.id, placed.seq, a, write.now) for a in write.spill(index)]
        if placed.turn > 0:
            before = placed.seq or None
    state.last_seq = decision.last_seq
    state.turns = decision.turns
    state.version += 1
    if decision.kind == "edited":
        state.edits += 1
        state.edited = True
    state.touched = write.now
    if write.title is not None:
        state.figures = msgspec.structs.replace(state.figures, title=write.title)
    if write.is_call:
        state.calls += 1
        state.last_call_at = write.now
        state.last_strategy, state.last_epoch_policy = write.strategy, write.epoch_policy
    state.open_chain = in_flight(write.open_chain) if write.open_chain else None
    rows.attributes.extend((state.id, a.digest, a.kind, write.now, a.raw) for a in write.attributes)
    answered = decision.answered
    turn = answered.turn if answered else max(1, state.turns)
    if write.key is not None:
        # An appended list has the key of all its messages, a call that of its question.
        span = (first, state.last_seq) if not write.is_call else _new_question(decision, write.incoming)
        if span is not None:
            rows.appends.append((state.id, write.key, write.key_digest, *span, turn, write.now))
    return RequestOutcome(
        session_id=state.id,
        call=state.calls,
        first_seq=first,
        last_seq=state.last_seq,
        turn=turn,
        answered_seq=answered.seq if answered else 0,
        answered_position=answered.position if answered else 0.0,
        decision=decision,
        state=copy(state),
        is_as_decided=is_as_decided,
    )


def _new_question(decision: Reconciliation, incoming: Sequence[MessageIdentity]) -> tuple[int, int] | None:
    """Return the sequence numbers of the question's first and last message; None unless the last one is new."""
    answered = decision.answered
    if answered is None or not answered.is_new:
        return None
    return question_of(decision, incoming)[0].seq, answered.seq


def question_of(decision: Reconciliation, incoming: Sequence[MessageIdentity]) -> list[PlacedMessage]:
    """Return the request's question: the links behind its last assistant message."""
    question: list[PlacedMessage] = []
    for placed, message in zip(decision.placed, incoming, strict=True):
        if message.is_link:
            question = [] if message.role == "assistant" else [*question, placed]
    return question


def enter_reply(
    write: ReplyWrite, outcome: RequestOutcome, state: SessionCounters, placement: ReplyPlacement, rows: NewRows
) -> StoredReply:
    """Enter a reply and the report of its call; ``state`` moves on."""
    first_seq = 0 if placement.status == "removed" else state.last_seq + 1
    enter_replies(write, write.replies, outcome, state, placement, rows, after=outcome.answered_position)
    enter_report(write, outcome, state, rows)
    record = rows.messages[-1] if write.replies else None
    return StoredReply(first_seq=first_seq, outcome=outcome, state=copy(state), record=record)


def enter_replies(
    write: ReplyWrite,
    replies: Sequence[NewReply],
    outcome: RequestOutcome,
    state: SessionCounters,
    placement: ReplyPlacement,
    rows: NewRows,
    *,
    after: float,
) -> None:
    """Enter ``replies`` at the end, or between the places ``after`` and ``placement.before``; ``state`` moves on."""
    for number, reply in enumerate(replies, start=1):
        if placement.status == "removed":
            reply = structs.replace(reply, raw=b"", model_raw=None, tokens=0, terse=(), state=None, spilled=())  # noqa: PLW2901
        state.last_seq += 1
        state.turns = max(state.turns, outcome.turn)  # a reply to instructions alone begins the first turn
        place = float(state.last_seq)
        if placement.before_position is not None:
            place = after + (placement.before_position - after) * number / (len(replies) + 1)
        rows.messages.append(
            (
                state.id, state.last_seq, outcome.turn, reply.tokens, place, reply.role,
                "superseded" if reply.is_alternative else placement.status, write.request.dialect,
                reply.chain is not None, True, False, reply.finish, outcome.call, reply.digest, reply.chain, write.now,
                reply.raw, *model_views.columns_of(reply.raw, reply.model_raw), outcome.answered_seq or None, None,
                turn_rows.noted_turn(outcome.turn, state.turns),
            )
        )  # fmt: skip
        enter_parts(reply, write.request.referenced, state.id, state.last_seq, outcome.turn, write.now, rows)
        state.tokens += reply.tokens


def enter_parts(
    reply: NewReply,
    referenced: ReferencedReply | None,
    session_id: str,
    seq: int,
    turn: int,
    now: datetime,
    rows: NewRows,
) -> None:
    """Enter what comes with the reply that is stored as ``seq``: its ids, log entries, state block and artifacts.

    ``referenced`` is the reply that the request continued by reference.
    """
    names = dict.fromkeys(name for name in (reply.id, *reply.items) if name)
    conversation = _conversation(referenced)
    rows.reply_ids += [
        (session_id, seq, name, reply.history_owner, reply.usage if name == reply.id else None, conversation)
        for name in names
    ]
    rows.terse += _terse(session_id, turn, seq, reply.terse, now)
    rows.states += _states(session_id, seq, reply.state, now)
    rows.artifacts += [artifacts.row(session_id, seq, each, now) for each in reply.spilled]


def _conversation(referenced: ReferencedReply | None) -> str:
    return referenced.conversation if referenced is not None else ""


def enter_report(write: ReplyWrite, outcome: RequestOutcome, state: SessionCounters, rows: NewRows) -> None:
    """Enter the report of a call, and the epoch that started with it; ``state`` moves on."""
    # The request of a failed call may be sent again. Once there is a reply, lookups use the reply's chain.
    # An unreadable reply is no answer: the client asks again, or continues.
    is_answered = any(not reply.is_alternative for reply in write.replies)
    is_last = state.last_seq == outcome.last_seq + len(write.replies)
    open_chain = write.request.open_chain if is_last else None
    if open_chain is not None and is_answered:
        is_in_words = any(reply.is_text_only for reply in write.replies if not reply.is_alternative)
        open_chain = answered_in_words(open_chain) if is_in_words else None
    state.open_chain = open_chain
    if (empty := write.empty) is not None and outcome.answered_seq:
        conversation = _conversation(write.request.referenced)
        rows.reply_ids.append(
            (state.id, outcome.answered_seq, empty.id, empty.history_owner, empty.usage, conversation)
        )
    report = write.report
    sent = report.sent
    if sent is not None and not outcome.is_as_decided:
        # A write that continued a live session is decided again with its whole history, whose end its own messages are.
        before, after = write.request.decision.placed, outcome.decision.placed
        pairs = zip(reversed(before), reversed(after), strict=False)
        is_whole = len(before) == len(after)
        sent = renumber(sent, {old.seq: new.seq for old, new in pairs if is_whole or old.is_new})
    attributes = write.attributes
    if _was_edited(write, outcome, state):
        # The description may quote what was removed for good while the model spoke.
        sent, attributes = None, tuple(each for each in attributes if each.kind != KIND)
    rows.attributes.extend((state.id, a.digest, a.kind, write.now, a.raw) for a in attributes)
    state.figures = _add_figures(state.figures, report)
    rows.calls.append(
        (
            state.id, outcome.call, outcome.turn, report.model, report.strategy, report.epoch, report.cut,
            outcome.last_seq, report.tools, report.tokens_before, report.tokens_after, report.input_tokens,
            report.cached_tokens, report.output_tokens, report.status, write.started, write.now,
            write.request.exchange, report.weight, sent, report.client, report.request_id, report.overhead_ms,
            report.cost_sent, report.cost_full, report.host,
        )
    )  # fmt: skip
    # An epoch that was planned before history was edited shows what is hidden now.
    is_planned_so = outcome.is_as_decided and outcome.state.edits == state.edits
    if write.epoch is not None and is_planned_so and write.epoch.epoch.number == state.epoch + 1:
        _enter_epoch(write.epoch, state, write.now, rows)
    state.version += 1
    state.touched = write.now


def _was_edited(write: ReplyWrite, outcome: RequestOutcome, state: SessionCounters) -> bool:
    """Return whether messages may have been hidden or removed since the call's context was built."""
    if outcome.state.edits != state.edits:
        return True
    session = write.request.session
    # The call itself may be the edit: its question takes the place of another one. That removes nothing.
    edits = outcome.state.edits - (outcome.decision.kind == "edited")
    return not outcome.is_as_decided and session is not None and session.edits != edits


def _add_figures(figures: Figures, report: CallReport) -> Figures:
    """The figures with those of a call."""
    has_price = report.cost_sent is not None and report.cost_full is not None
    return msgspec.structs.replace(
        figures,
        client=report.client or figures.client,
        model=report.model or figures.model,
        tokens_saved=figures.tokens_saved + report.tokens_saved,
        input_tokens=figures.input_tokens + (report.input_tokens or 0),
        cached_tokens=figures.cached_tokens + (report.cached_tokens or 0),
        output_tokens=figures.output_tokens + (report.output_tokens or 0),
        cost_sent=figures.cost_sent + (report.cost_sent or 0.0),
        cost_full=figures.cost_full + (report.cost_full or 0.0),
        priced_calls=figures.priced_calls + has_price,
    )


def _enter_epoch(new: NewEpoch, state: SessionCounters, now: datetime, rows: NewRows) -> None:
    epoch = new.epoch
    state.epoch, state.cut, state.plan, state.edited = epoch.number, epoch.cut, new, False
    packed, single = packed_log.number_entries(new.derived)
    rows.epochs.append(
        (
            state.id, epoch.number, epoch.cut, epoch.reason, epoch.head_tokens, new.tokens_before, new.tokens_after,
            now, new.past_plan, *packed_log.pack(packed),
        )
    )  # fmt: skip
    if new.memory is not None:
        rows.pending_memory.append(pending_memory.record(state.id, new.memory, now))
    rows.states.extend((state.id, s.seq, 0, s.source, s.created_at, _stored(s.text)) for s in new.states)
    rows.terse.extend((state.id, *cursor, e.role, e.source, e.created_at, _stored(e.text)) for cursor, e in single)


def _terse(session_id: str, turn: int, seq: int, entries: Iterable[tuple[str, str]], now: datetime) -> list[Record]:
    """Rows for a reply's log entries, given as (text, source)."""
    return [
        (session_id, turn, seq, number, "assistant", source, now, _stored(text))
        for number, (text, source) in enumerate(entries)
    ]


def _states(session_id: str, seq: int, text: str | None, now: datetime) -> list[Record]:
    """Rows for a reply's state block."""
    return [] if text is None else [(session_id, seq, 0, "model", now, _stored(text))]


def _stored(text: str) -> bytes:
    """Entries are kept as bytes: Postgres's text refuses U+0000."""
    return text.encode("utf-8", "replace")
