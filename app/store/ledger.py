"""What a write makes of a session's counters, and which rows it comes to. No I/O: the writer stores the outcome."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field, replace
from datetime import datetime

from app.domain.history import Status
from app.domain.lineage import Decision
from app.domain.tokens import estimate
from app.store import artifacts
from app.store.artifacts import LARGE_OUTPUT
from app.store.sessions import in_flight
from app.store.statements import Record
from app.store.writes import NewEpoch, Outcome, ReplyWrite, RequestWrite, Said, State

# Where derived entries are numbered from, beside the model's own entries of the same message.
DERIVED_FROM = 1000


@dataclass(slots=True)
class Rows:
    """The rows of a batch, by table; the session's id, then the columns of `app.store.statements`."""

    messages: list[Record] = field(default_factory=list)
    reply_ids: list[Record] = field(default_factory=list)
    terse: list[Record] = field(default_factory=list)
    states: list[Record] = field(default_factory=list)
    calls: list[Record] = field(default_factory=list)
    epochs: list[Record] = field(default_factory=list)
    attributes: list[Record] = field(default_factory=list)
    artifacts: list[Record] = field(default_factory=list)
    appends: list[Record] = field(default_factory=list)

    def extend(self, other: Rows) -> None:
        """Add another batch's rows."""
        self.messages += other.messages
        self.reply_ids += other.reply_ids
        self.terse += other.terse
        self.states += other.states
        self.calls += other.calls
        self.epochs += other.epochs
        self.attributes += other.attributes
        self.artifacts += other.artifacts
        self.appends += other.appends


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a reply belongs: at the end, or before ``before`` when the session has moved on."""

    status: Status = "live"
    before: float | None = None


AT_THE_END = Placement()
NOTHING_SAID = Said()


def enter_request(write: RequestWrite, state: State, decision: Decision, rows: Rows, *, is_as_decided: bool) -> Outcome:
    """Enter a request's new messages; ``state`` moves on."""
    first = state.last_seq + 1
    entries = zip(decision.placed, write.incoming, write.raws, write.tokens, strict=True)
    before = decision.after
    for index, (placed, incoming, raw, tokens) in enumerate(entries):
        if placed.is_new:
            # Where the history is laid anew, what was thought to be known may be new after all: it was not counted.
            weight = tokens or estimate(len(raw))
            state.tokens += weight
            said = write.said.get(index, NOTHING_SAID)
            rows.messages.append(
                (
                    state.id, placed.seq, placed.turn, weight, placed.place, incoming.role, "live", write.dialect,
                    True, True, False, None, 0, incoming.digest, None, write.now, raw,
                    said.model_raw, before,
                )
            )  # fmt: skip
            rows.terse += _terse(state.id, placed.turn, placed.seq, said.terse, write.now)
            rows.states += _states(state.id, placed.seq, said.state, write.now)
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
    if write.is_call:
        state.calls += 1
        state.last_call_at = write.now
    state.open_chain = in_flight(write.open_chain) if write.open_chain else None
    rows.attributes.extend((state.id, a.digest, a.kind, write.now, a.raw) for a in write.attributes)
    answered = decision.answered
    turn = answered.turn if answered else max(1, state.turns)
    if write.key is not None:
        rows.appends.append((state.id, write.key, write.key_digest, first, state.last_seq, turn, write.now))
    return Outcome(
        session_id=state.id,
        call=state.calls,
        first_seq=first,
        last_seq=state.last_seq,
        turn=turn,
        answered_seq=answered.seq if answered else 0,
        answered_place=answered.place if answered else 0.0,
        decision=decision,
        state=copy(state),
        is_as_decided=is_as_decided,
    )


def enter_reply(write: ReplyWrite, asked: Outcome, state: State, placement: Placement, rows: Rows) -> None:
    """Enter a reply and the report of its call; ``state`` moves on."""
    for number, reply in enumerate(write.replies, start=1):
        if placement.status == "removed":
            reply = replace(reply, raw=b"", model_raw=None, tokens=0, terse=(), state=None, spilled=())  # noqa: PLW2901
        state.last_seq += 1
        place = float(state.last_seq)
        if placement.before is not None:
            room = placement.before - asked.answered_place
            place = asked.answered_place + room * number / (len(write.replies) + 1)
        rows.messages.append(
            (
                state.id, state.last_seq, asked.turn, reply.tokens, place, reply.role,
                "superseded" if reply.is_alternative else placement.status, write.request.dialect,
                reply.chain is not None, True, False, reply.finish, asked.call, reply.digest, reply.chain, write.now,
                reply.raw, reply.model_raw, asked.answered_seq or None,
            )
        )  # fmt: skip
        names = dict.fromkeys(name for name in (reply.id, *reply.items) if name)
        rows.reply_ids += [(state.id, state.last_seq, name, reply.keeper) for name in names]
        rows.terse += _terse(state.id, asked.turn, state.last_seq, reply.terse, write.now)
        rows.states += _states(state.id, state.last_seq, reply.state, write.now)
        rows.artifacts += [artifacts.row(state.id, state.last_seq, each, write.now) for each in reply.spilled]
        state.tokens += reply.tokens
    # Of a call that failed, the request may be sent again; once there is a reply, its chain is what is looked for.
    is_unanswered = not write.replies and state.last_seq == asked.last_seq
    state.open_chain = write.request.open_chain if is_unanswered else None
    report = write.report
    rows.calls.append(
        (
            state.id, asked.call, asked.turn, report.model, report.strategy, report.epoch, report.cut,
            asked.last_seq, report.tools, report.tokens_before, report.tokens_after, report.input_tokens,
            report.cached_tokens, report.output_tokens, report.status, write.started, write.now,
        )
    )  # fmt: skip
    # An epoch that was planned before history was edited shows what is hidden now.
    is_planned_so = asked.is_as_decided and asked.state.edits == state.edits
    if write.epoch is not None and is_planned_so and write.epoch.epoch.number == state.epoch + 1:
        _enter_epoch(write.epoch, state, write.now, rows)
    state.version += 1
    state.touched = write.now


def _enter_epoch(new: NewEpoch, state: State, now: datetime, rows: Rows) -> None:
    epoch = new.epoch
    state.epoch, state.cut, state.plan, state.edited = epoch.number, epoch.cut, new, False
    rows.epochs.append(
        (
            state.id, epoch.number, epoch.cut, epoch.reason, epoch.head_tokens, new.tokens_before, new.tokens_after,
            now, new.plan,
        )
    )  # fmt: skip
    rows.terse.extend(
        (state.id, e.turn, e.seq, number, e.role, e.source, e.created_at, _stored(e.text))
        for number, e in enumerate(new.derived, start=DERIVED_FROM)
    )


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
