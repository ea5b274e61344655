"""The values that a write stores: a request's new messages, the reply to it, and their effect on a session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Literal, TypeVar

import msgspec
from msgspec import structs

from tersely.domain.history.history import Epoch, TerseEntry
from tersely.domain.history.links import MessageIdentity
from tersely.domain.history.reconciliation import Reconciliation
from tersely.domain.history.sessions import Session
from tersely.domain.messages import Role
from tersely.domain.text.state import StateBlock
from tersely.store.db.statements import Record
from tersely.store.history.artifacts import Artifact
from tersely.store.history.sessions import write_epoch
from tersely.store.notes.pending_memory import PendingMemory

Mode = Literal["full", "append"]
Result = TypeVar("Result")
# Who has the history up to a reply: Tersely alone, the model host as well, or the host, who may have more of it.
HistoryOwner = Literal["tersely", "both", "host"]


class NewSession(msgspec.Struct, frozen=True, kw_only=True):
    """The row of a session that is made if it is not there.

    ``spare_id`` is taken where the id has gone to another conversation of the same client meanwhile: the session
    is that one's child then.
    """

    parent: str | None = None
    client_id: str | None = None
    strategy: str | None = None
    epoch_policy: str | None = None
    metadata: bytes = b"{}"
    spare_id: str | None = None


class NewEpoch(msgspec.Struct, frozen=True, kw_only=True):
    """An epoch that starts with this call, with what it spared. ``derived`` are entries made without a model,
    ``states`` the blocks that were found in replies which had none so far. ``memory`` is what the memory is to tell of
    the messages that leave the context.
    """

    epoch: Epoch
    plan: bytes
    tokens_before: int
    tokens_after: int
    derived: tuple[TerseEntry, ...] = ()
    states: tuple[StateBlock, ...] = ()
    memory: PendingMemory | None = None

    @property
    def past_plan(self) -> bytes:
        """The plan as it is kept with past epochs: without the candidates that only the next epoch takes over. They are
        nine tenths of the plan of a long session.
        """
        return write_epoch(structs.replace(self.epoch, references=())) if self.epoch.references else self.plan


class Attribute(msgspec.Struct, frozen=True, kw_only=True):
    """Data of a request outside its history, stored once per content."""

    digest: bytes
    kind: str
    raw: bytes


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Increments of a session's figures by a write; a text that is None stays as it was."""

    title: str | None = None
    client: str | None = None
    model: str | None = None
    tokens_saved: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    cost_sent: float = 0.0
    cost_full: float = 0.0
    priced_calls: int = 0


class SessionCounters(msgspec.Struct, kw_only=True):
    """A session's counters, as a write finds and leaves them. ``plan`` None: as it was. ``figures`` are added."""

    id: str
    last_seq: int = 0
    turns: int = 0
    tokens: int = 0
    version: int = 0
    edits: int = 0
    edited: bool = False
    calls: int = 0
    epoch: int = 0
    cut: int = 1
    plan: NewEpoch | None = None
    open_chain: bytes | None = None
    last_call_at: datetime | None = None
    touched: datetime | None = None
    last_strategy: str | None = None
    last_epoch_policy: str | None = None
    figures: Figures = Figures()


def session_counters(session: Session) -> SessionCounters:
    """Return the counters of a session."""
    return SessionCounters(
        id=session.id,
        last_seq=session.last_seq,
        turns=session.turns,
        tokens=session.tokens,
        version=session.version,
        edits=session.edits,
        edited=session.edited,
        calls=session.calls,
        epoch=session.epoch,
        cut=session.cut,
        last_call_at=session.last_call_at,
        last_strategy=session.last_strategy,
        last_epoch_policy=session.last_epoch_policy,
    )


def counters_of(state: SessionCounters) -> tuple[object, ...]:
    """In the order of `tersely.store.db.statements.COUNTERS`."""
    return (
        state.last_seq, state.turns, state.tokens, state.version, state.edits, state.edited, state.calls, state.epoch,
        state.cut, None if state.plan is None else state.plan.plan, state.open_chain, state.last_call_at, state.touched,
        state.last_strategy, state.last_epoch_policy,
    )  # fmt: skip


def figures_of(state: SessionCounters) -> tuple[object, ...]:
    """In the order of `tersely.store.db.statements.FIGURES`."""
    figures = state.figures
    last = state.last_call_at
    return (
        figures.title, figures.client, figures.model, figures.tokens_saved, figures.input_tokens, figures.cached_tokens,
        figures.output_tokens, figures.cost_sent, figures.cost_full, figures.priced_calls,
        None if last is None else last.replace(minute=0, second=0, microsecond=0),
    )  # fmt: skip


def new_session_from(new: NewSession, state: SessionCounters) -> Session:
    """Return the session that was made so."""
    assert state.touched is not None
    return Session(
        id=state.id,
        parent=new.parent,
        client_id=new.client_id,
        strategy=new.strategy,
        epoch_policy=new.epoch_policy,
        metadata=new.metadata,
        last_seq=state.last_seq,
        turns=state.turns,
        tokens=state.tokens,
        version=state.version,
        edits=state.edits,
        edited=state.edited,
        calls=state.calls,
        epoch=state.epoch,
        cut=state.cut,
        plan=None if state.plan is None else state.plan.epoch,
        last_call_at=state.last_call_at,
        last_strategy=state.last_strategy,
        last_epoch_policy=state.last_epoch_policy,
        created_at=state.touched,
        updated_at=state.touched,
    )


def session_after(session: Session, state: SessionCounters) -> Session:
    """Return the session as a write left it."""
    assert state.touched is not None
    return structs.replace(
        session,
        last_seq=state.last_seq,
        turns=state.turns,
        tokens=state.tokens,
        version=state.version,
        edits=state.edits,
        edited=state.edited,
        calls=state.calls,
        epoch=state.epoch,
        cut=state.cut,
        plan=session.plan if state.plan is None else state.plan.epoch,
        last_call_at=state.last_call_at,
        last_strategy=state.last_strategy,
        last_epoch_policy=state.last_epoch_policy,
        updated_at=state.touched,
    )


class RequestOutcome(msgspec.Struct, kw_only=True, rename={"answered_position": "answered_place"}):
    """The stored positions of a request's messages. ``last_seq`` and ``state`` are the session's after this write."""

    session_id: str
    call: int
    first_seq: int
    last_seq: int
    turn: int
    answered_seq: int
    answered_position: float
    decision: Reconciliation
    state: SessionCounters
    is_as_decided: bool = True
    was_stored_before: bool = False


class HiddenReplyParts(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a reply in a request that the client's view lacks: see `NewReply`."""

    model_raw: bytes | None = None
    terse: tuple[tuple[str, str], ...] = ()
    state: str | None = None


class ReferencedReply(
    msgspec.Struct, frozen=True, kw_only=True, rename={"own_indexes": "own", "own_before_reply": "front"}
):
    """The reply that a request continues, for a request that references its history instead of sending it.

    ``seq`` is that reply's message (0: the request starts a history). ``own_indexes`` are the indexes of the request's
    new messages in the resolved history; ``own_before_reply`` says how many of them come before the reply.
    ``is_conversation``: the request continues a conversation at its end, whatever other calls added meanwhile.
    ``conversation`` is its id (empty: there is none, or the write was spooled before ids were kept).
    """

    seq: int
    own_indexes: tuple[int, ...]
    own_before_reply: int
    is_conversation: bool = False
    conversation: str = ""


class WholeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """All messages of a request, with the decision on them. ``referenced``: see `RequestWrite`."""

    incoming: Sequence[MessageIdentity]
    raws: Sequence[bytes]
    decision: Reconciliation
    spill: Callable[[int], Sequence[Artifact]]
    referenced: ReferencedReply | None = None


class RequestWrite(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A request's messages. ``raws`` and ``tokens`` (0: not counted) go with ``incoming``; only what is new is written.

    ``hidden_parts`` is by index of ``incoming``, for replies that do not come from a call of ours. ``times`` says when
    each message was written, where the caller knows it; without it all are from ``now``.

    ``decision`` was made on ``session`` as it was (None: it did not exist); if that has changed, it is made anew under
    the session's lock. ``spill`` gives the oversized tool outputs of the message at an index; it is only asked about
    large ones. ``is_call``: an upstream call is made for it, whose headers ask for ``strategy`` and ``epoch_policy``.
    ``open_chain`` names the history while it has no reply. ``referenced``: the history was not sent, but named by its
    last reply. ``title`` is the session's, for one without turns. ``size``: bytes of the request's body; with 0, few.
    ``exchange`` is the id of the call's request and reply: whoever does not know whether they were stored looks for it.
    ``whole`` is set where the request was read from the last message on that its session is known to have: it returns
    all of the request.
    """

    tenant: str
    session_id: str
    create: NewSession | None
    mode: Mode
    dialect: str
    incoming: Sequence[MessageIdentity]
    raws: Sequence[bytes]
    tokens: Sequence[int]
    decision: Reconciliation
    session: Session | None
    now: datetime
    times: Sequence[datetime] = ()
    attributes: Sequence[Attribute] = ()
    spill: Callable[[int], Sequence[Artifact]] | None = None
    open_chain: bytes | None = None
    is_call: bool = True
    strategy: str | None = None
    epoch_policy: str | None = None
    key: str | None = None
    key_digest: bytes = b""
    hidden_parts: Mapping[int, HiddenReplyParts] = {}
    replaces_instructions: bool = False
    referenced: ReferencedReply | None = None
    size: int = 0
    exchange: str | None = None
    title: str | None = None
    whole: Callable[[], WholeRequest] | None = None

    def expanded(self) -> RequestWrite:
        """Return the write with its whole history, if it was read from its last known message on. O(size of the
        request).
        """
        if self.whole is None:
            return self
        whole = self.whole()
        known = len(whole.incoming) - len(self.incoming)
        return structs.replace(
            self,
            incoming=whole.incoming,
            raws=whole.raws,
            decision=whole.decision,
            spill=whole.spill,
            tokens=[0] * known + list(self.tokens),
            referenced=whole.referenced,
            whole=None,
        )

    def in_spare_session(self) -> RequestWrite:
        """Return the write for a session of its own, a child of the one that has taken its id."""
        assert self.create is not None
        assert self.create.spare_id is not None
        create = structs.replace(self.create, parent=self.session_id, spare_id=None)
        return structs.replace(self, session_id=self.create.spare_id, create=create)

    @property
    def parts(self) -> tuple[Write, ...]:
        """See `ReplyWrite.parts`."""
        return (self,)

    @property
    def version(self) -> int | None:
        """Return the version of the session that the decision was made on."""
        return None if self.session is None else self.session.version


class NewReply(
    msgspec.Struct, frozen=True, kw_only=True, rename={"history_owner": "keeper", "is_text_only": "is_in_words"}
):
    """One reply, or a message that came with it. ``raw`` as the client saw it, ``model_raw`` as the model wrote it if
    that differs.

    ``chain`` and ``digest`` identify the client's view. ``terse`` are its log entries with their source, ``state`` is
    its state block. ``is_alternative``: a further choice, kept but not live. A message without a ``chain`` is hidden
    from the client: a call to a tool of ours, or its result. It comes with a reply that is not. ``id`` is the
    provider's, where clients may go on from the reply by that; ``history_owner`` then has the history up to it.
    ``items`` are the ids of its items, where clients may refer to them. ``usage`` is what the provider reported of all
    rounds of a reply in several. ``is_text_only``: it calls none of the tools that it was offered.
    """

    raw: bytes
    model_raw: bytes | None
    digest: bytes
    chain: bytes | None
    tokens: int
    finish: str | None
    role: Role = "assistant"
    spilled: tuple[Artifact, ...] = ()
    terse: tuple[tuple[str, str], ...] = ()
    state: str | None = None
    is_alternative: bool = False
    id: str = ""
    history_owner: HistoryOwner = "tersely"
    items: tuple[str, ...] = ()
    usage: bytes | None = None
    is_text_only: bool = False


class EmptyReply(msgspec.Struct, frozen=True, kw_only=True):
    """A reply that left no message, by the provider's ``id``: a client may continue from it all the same.

    The history up to it ends with the question; ``history_owner`` has that. ``usage``: see `NewReply`.
    """

    id: str
    history_owner: HistoryOwner
    usage: bytes | None = None


class CallReport(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of an upstream call, sent and received; None where the provider did not report them.

    ``weight``: prompt and completion of the last round, as reported or estimated. ``written_tokens`` were written to
    the provider's cache (see `Usage`); the database does not keep them. ``host`` is the name of the model
    host (empty: the default one of the dialect; None: a call of older code).
    """

    model: str
    strategy: str
    epoch: int
    cut: int
    tools: bytes | None
    tokens_before: int
    tokens_after: int
    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    written_tokens: int | None = None
    weight: int | None = None
    status: int | None = None
    sent: bytes | None = None
    client: str | None = None
    request_id: str | None = None
    overhead_ms: float | None = None
    cost_sent: float | None = None
    cost_full: float | None = None
    host: str | None = None

    @property
    def tokens_saved(self) -> int:
        """The tokens that were not sent. A failed call saved none: its client sends the request again."""
        is_failed = self.status is None or self.status >= 400
        return 0 if is_failed else max(0, self.tokens_before - self.tokens_after)


class ReplyWrite(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The reply to a request, and the report of its call. Without replies only the call is recorded, and the id of an
    ``empty`` reply.

    ``attributes`` are stored with it. ``epoch`` is one that started with this call. It is let go when the session
    moved on before the request was stored, or when another call started one first: the next call then plans anew.
    ``request_stored`` is done when the request is stored (None: the request is stored together with the reply).
    """

    request: RequestWrite
    replies: Sequence[NewReply]
    empty: EmptyReply | None = None
    report: CallReport
    started: datetime
    now: datetime
    epoch: NewEpoch | None = None
    attributes: Sequence[Attribute] = ()
    request_stored: asyncio.Future[RequestOutcome] | None = None

    @property
    def request_outcome(self) -> RequestOutcome | None:
        """The outcome of the request; None as long as it is not stored."""
        return None if self.request_stored is None else result_of(self.request_stored)

    @property
    def parts(self) -> tuple[Write, ...]:
        """The writes that this one consists of: the request, where it is stored together with the reply."""
        return (self.request, self) if self.request_stored is None else (self,)


class StoredReply(msgspec.Struct, frozen=True, kw_only=True):
    """The position of a stored reply. ``first_seq``: the sequence number of the first of its messages; 0: none was
    stored as it is. ``outcome`` is the outcome of its request, ``state`` the session's after both, ``record`` the row
    of the last message.
    """

    first_seq: int
    outcome: RequestOutcome
    state: SessionCounters
    record: Record | None = None


def result_of(done: asyncio.Future[Result]) -> Result | None:
    """Return the result of a write; None if it is under way or has failed."""
    return done.result() if done.done() and not done.cancelled() and done.exception() is None else None


Write = RequestWrite | ReplyWrite


def session_id_of(write: Write) -> str:
    if isinstance(write, RequestWrite):
        return write.session_id
    outcome = write.request_outcome
    return write.request.session_id if outcome is None else outcome.session_id


def request_of(write: Write) -> RequestWrite:
    return write if isinstance(write, RequestWrite) else write.request
