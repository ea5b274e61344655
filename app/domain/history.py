"""A session's messages in their places, and what a strategy may look at.

``seq`` numbers are gapless, start at 1 and are given in the order of arrival. ``turn`` numbers start at 1
(shown as ``t1``) and are never reused. Instruction messages (system, developer) belong to turn 0.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from app.domain.messages import Message
from app.domain.tiers import Tier, Way

# `superseded`: the client went another way. `dropped`, `undone`, `removed`: hidden from every context, though a
# client that does not know may go on sending it; of a removed message only its digest is left.
Status = Literal["live", "superseded", "dropped", "undone", "removed"]
TerseSource = Literal["model", "derived"]
SummarySource = Literal["model", "extractive"]

# How providers say that a reply broke off because the model's window was full.
WINDOW_FULL = "model_context_window_exceeded"

DEFAULT_PRIORITY = 50
IMPORTANT = 75
MAX_PRIORITY = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A live, model-visible message at its place: what strategies work on. ``tokens`` is its stored count.

    ``priority`` is 0 to 100; a message marked important has at least ``IMPORTANT``. ``is_shortened``: the texts of
    ``message``'s tool results, or a user's words, are no longer those of its raw form. ``prefix`` is a text of
    Tersely's own that goes in front of the message's words. ``is_ours``: a call to a tool of Tersely's own, or its
    result, of which the client knows nothing: what it says is no news, so that nobody quotes it.
    """

    seq: int
    turn: int
    message: Message
    tokens: int
    created_at: datetime
    pinned: bool = False
    priority: int = DEFAULT_PRIORITY
    is_shortened: bool = False
    prefix: str = ""
    is_ours: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TerseEntry:
    """One line about a turn. ``derived`` entries were made without a model because the reply had no tag."""

    turn: int
    seq: int
    role: str
    text: str
    source: TerseSource
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """An identifier seen in messages that were cut, with what its rank is made of.

    ``position`` is the sequence number of its last mention, ``turn`` the turn of that mention.
    """

    text: str
    turn: int
    position: int
    mentions: int
    used_by_model: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What stands for the live messages from ``first_seq`` to ``last_seq`` (inclusive); made for one ``purpose``.

    ``tokens`` counts ``text``. Summaries are only ever added, never changed.
    """

    first_seq: int
    last_seq: int
    purpose: str
    text: str
    tokens: int
    source: SummarySource
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadMessage:
    """A message that Tersely itself wrote into a head: plain text under a role, named by its layer."""

    layer: str
    role: Literal["user", "assistant"]
    text: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """A text of Tersely's own in front of the words of message ``seq``."""

    layer: str
    seq: int
    text: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """An older turn that may be brought back whole: what was said in it, and how relevant (0 to 1) it is now."""

    turn: int
    entries: tuple[Entry, ...]
    relevance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """A stretch of calls that share one frozen beginning.

    ``cut`` is the first sequence number of the tail (1: nothing is cut). ``kept`` are sequence numbers before
    the cut whose messages stay verbatim between head and tail (the task of a running turn, pinned messages).
    ``fingerprint`` names strategy, parameters and policy: another one means a new epoch. ``references`` are the
    ranked candidates over everything cut so far, carried from epoch to epoch so that planning never reads
    what was cut before. ``older_tokens`` counts what was live before the cut when the epoch started.
    ``tiers`` say how the texts of messages are shortened, ``prefixes`` what stands in front of which; ``retrieved`` are
    the turns among ``kept`` that were brought back for their relevance. No context speaks of what came before
    ``floor``: there the session was last cleared. What the next epoch takes over of this one's words tells of
    messages before ``told`` (0: it takes over none), and the head as a whole of messages before ``quoted`` and the cut.
    ``is_stale``: some of these have left the history, or come back to it, so that a new epoch must start; ``is_void``:
    that takes over nothing and is planned from everything that is live. Memos in front of messages up to ``settled``
    are among ``prefixes``; later messages bring their own along.
    """

    number: int
    cut: int
    head: tuple[HeadMessage, ...]
    kept: tuple[int, ...]
    reason: str
    fingerprint: str
    references: tuple[Reference, ...]
    created_at: datetime
    older_tokens: int = 0
    tiers: tuple[Tier, ...] = ()
    prefixes: tuple[Prefix, ...] = ()
    retrieved: tuple[int, ...] = ()
    floor: int = 1
    told: int = 0
    quoted: int = 0
    is_stale: bool = False
    is_void: bool = False
    settled: int = 0

    def without(
        self,
        left: Collection[int],
        back: Collection[int] = (),
        pinned: Collection[int] = (),
        *,
        last: int | None = None,
    ) -> Epoch:
        """The plan after messages left the history and others came ``back`` to it: no later one tells of those that
        left. ``pinned`` are those that came back and are pinned; ``last`` is what the history ends with now.
        """
        gone, changed = frozenset(left), frozenset((*left, *back))
        plan = replace(
            self,
            kept=tuple(sorted({*self.kept} - changed | {seq for seq in pinned if seq < self.cut})),
            references=tuple(reference for reference in self.references if reference.position not in gone),
        )
        first = min((seq for seq in changed if seq >= self.floor), default=self.last_quoted)
        is_behind = last is not None and last < self.cut  # nothing is left of the tail
        if first >= self.last_quoted and not is_behind:
            return plan
        if is_behind or first < self.told or any(self.floor <= seq < self.cut for seq in back):
            return replace(plan, head=(), prefixes=(), is_stale=True, is_void=True)
        return replace(plan, is_stale=True)

    @property
    def last_quoted(self) -> int:
        """Before which sequence number the messages are that the head may tell of."""
        return max(self.cut, self.told, self.quoted)

    @property
    def head_tokens(self) -> int:
        """Tokens of the head's own messages and of the prefixes."""
        return sum(message.tokens for message in self.head) + sum(prefix.tokens for prefix in self.prefixes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The immutable input of a strategy.

    ``entries`` are the live, model-visible messages in order, from the current epoch's cut on (all of them when
    ``epoch`` is None), without instructions; ``kept`` are the current epoch's kept messages. ``fixed_tokens``
    counts instructions and tools as sent, Tersely's own instructions included. ``window`` is the model's context
    window less its reserve, where known; ``model_window`` is the whole of it. ``way`` is the tool by which the model
    can get a shortened text back. ``edited`` says that history before this request's last message was
    rewritten since the last call (undo, drop, client rewrite); ``ran_out`` that the model's window was full in the
    middle of its last reply, in this epoch. ``last_call_at`` is when the upstream was last
    called for this session, ``calls`` how often. ``older_tokens`` counts the session's live messages before
    ``entries`` (kept ones included), so that a report can say what sending everything would have cost.
    """

    entries: tuple[Entry, ...]
    kept: tuple[Entry, ...] = ()
    epoch: Epoch | None = None
    fixed_tokens: int = 0
    window: int | None = None
    edited: bool = False
    ran_out: bool = False
    calls: int = 0
    last_call_at: datetime | None = None
    older_tokens: int = 0
    model_window: int | None = None
    way: Way = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """What only the start of an epoch needs, loaded then.

    ``terse`` are the session's entries in order, at most the newest few hundred; ``older_turns`` counts the
    turns before those that have entries which were not loaded. ``state`` and ``scratchpad`` are the session's, empty
    where it has none; ``state_seq`` is the message that the state came with; ``summaries`` the newest that count;
    ``past`` older turns that bear on the current task. ``memos`` stand in front of messages up to ``settled``.
    """

    terse: tuple[TerseEntry, ...] = ()
    older_turns: int = 0
    oldest_at: datetime | None = None
    state: str = ""
    state_seq: int = 0
    scratchpad: str = ""
    summaries: tuple[Summary, ...] = ()
    past: tuple[Past, ...] = ()
    memos: tuple[Prefix, ...] = ()
    settled: int = 0
