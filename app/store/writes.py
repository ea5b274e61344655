"""What is to be written, as values: a request's new messages, the reply to it, and what both make of a session."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

import msgspec
from msgspec import structs

from app.domain.history import Epoch, TerseEntry
from app.domain.lineage import Decision, Incoming
from app.domain.messages import Role
from app.domain.sessions import Session
from app.store.artifacts import Artifact

Mode = Literal["full", "append"]
# Who has the history up to a reply: Tersely alone, the model host as well, or the host, who may have more of it.
Keeper = Literal["tersely", "both", "host"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSession:
    """How to make the session if it is not there.

    ``spare_id`` is taken where the id has gone to another conversation of the same client meanwhile: the session
    is that one's child then.
    """

    parent: str | None = None
    client_id: str | None = None
    strategy: str | None = None
    epoch_policy: str | None = None
    metadata: bytes = b"{}"
    spare_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEpoch:
    """An epoch that starts with this call, with what it spared. ``derived`` are entries made without a model."""

    epoch: Epoch
    plan: bytes
    tokens_before: int
    tokens_after: int
    derived: tuple[TerseEntry, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribute:
    """Something a request carries beside its history, stored once per content."""

    digest: bytes
    kind: str
    raw: bytes


class State(msgspec.Struct, kw_only=True):
    """A session's counters, as a write finds and leaves them. ``plan`` None: as it was."""

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


def state_of(session: Session) -> State:
    """The counters of a session."""
    return State(
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
    )


def counters_of(state: State) -> tuple[object, ...]:
    """In the order of `app.store.statements.COUNTERS`."""
    return (
        state.last_seq, state.turns, state.tokens, state.version, state.edits, state.edited, state.calls, state.epoch,
        state.cut, None if state.plan is None else state.plan.plan, state.open_chain, state.last_call_at, state.touched,
    )  # fmt: skip


def made(new: NewSession, state: State) -> Session:
    """The session that was made so."""
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
        created_at=state.touched,
        updated_at=state.touched,
    )


def moved(session: Session, state: State) -> Session:
    """The session as a write left it."""
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
        updated_at=state.touched,
    )


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Where a request's messages came to stand. ``last_seq`` and ``state`` are the session's after this write."""

    session_id: str
    call: int
    first_seq: int
    last_seq: int
    turn: int
    answered_seq: int
    answered_place: float
    decision: Decision
    state: State
    is_as_decided: bool = True
    was_stored_before: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What a reply that comes with a request carries beside the client's view of it: see `NewReply`."""

    model_raw: bytes | None = None
    terse: tuple[tuple[str, str], ...] = ()
    state: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A request that goes on from the reply ``seq`` (0: from nothing), whatever came after that. ``own`` are the
    indexes of its own messages among all that its history was laid out with; so many of them stand in ``front`` of it.
    """

    seq: int
    own: tuple[int, ...]
    front: int


@dataclass(slots=True, kw_only=True)
class RequestWrite:
    """A request's messages. ``raws`` and ``tokens`` (0: not counted) go with ``incoming``; only what is new is written.

    ``said`` is by index of ``incoming``, for replies that do not come from a call of ours.

    ``decision`` was made on ``session`` as it was (None: it did not exist); if that has changed, it is
    made anew under the session's lock.
    ``spill`` gives the oversized tool outputs of the message at an index; it is only asked about large ones.
    ``is_call``: an upstream call is made for it. ``open_chain`` names the history while it has no reply. ``named``:
    the history was not sent, but named by its last reply.
    """

    tenant: str
    session_id: str
    create: NewSession | None
    mode: Mode
    dialect: str
    incoming: Sequence[Incoming]
    raws: Sequence[bytes]
    tokens: Sequence[int]
    decision: Decision
    session: Session | None
    now: datetime
    attributes: Sequence[Attribute] = ()
    spill: Callable[[int], Sequence[Artifact]] | None = None
    open_chain: bytes | None = None
    is_call: bool = True
    key: str | None = None
    key_digest: bytes = b""
    said: Mapping[int, Said] = field(default_factory=dict)
    replaces_instructions: bool = False
    named: Named | None = None
    outcome: Outcome | None = field(default=None)

    @property
    def version(self) -> int | None:
        """The version of the session that the decision was made on."""
        return None if self.session is None else self.session.version


@dataclass(frozen=True, slots=True, kw_only=True)
class NewReply:
    """One reply, or a message that came with it. ``raw`` as the client saw it, ``model_raw`` as the model said it where
    that differs.

    ``chain`` and ``digest`` identify the client's view. ``terse`` are its log entries with their source, ``state`` is
    its state block. ``is_alternative``: a further choice, kept but not live. A message without a ``chain`` is hidden
    from the client: a call to a tool of ours, or its result. It comes with a reply that is not. ``id`` is the
    provider's, where clients may go on from the reply by that; ``keeper`` then has the history up to it. ``items`` are
    the ids of its items, where clients may refer to them.
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
    keeper: Keeper = "tersely"
    items: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallReport:
    """What was sent upstream and what came back, in tokens; None where the provider did not say."""

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
    status: int | None = None


@dataclass(slots=True, kw_only=True)
class ReplyWrite:
    """The reply to a request, and the report of its call. Without replies only the call is recorded.

    ``epoch`` is one that started with this call. It is let go when the session moved on before the request was
    stored, or when another call started one first: the next call then plans anew.
    """

    request: RequestWrite
    replies: Sequence[NewReply]
    report: CallReport
    started: datetime
    now: datetime
    epoch: NewEpoch | None = None


Write = RequestWrite | ReplyWrite
