"""A session's messages in their places, and what a strategy may look at.

``seq`` numbers are gapless, start at 1 and are given in the order of arrival. ``turn`` numbers start at 1
(shown as ``t1``) and are never reused. Instruction messages (system, developer) belong to turn 0.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Literal

import msgspec
from msgspec import structs

from tersely.domain.history.tiers import ReadBack, Tier
from tersely.domain.messages import Message

# `superseded`: the client went another way. `dropped`, `undone`, `removed`: hidden from every context, though a
# client that does not know may go on sending it; of a removed message only its digest is left.
Status = Literal["live", "superseded", "dropped", "undone", "removed"]
TerseSource = Literal["model", "derived"]
SummarySource = Literal["model", "extractive"]

# The finish reasons by which providers report that the model's window was full.
WINDOW_FULL = "model_context_window_exceeded"

# The finish reasons under which an incomplete reply is stored: the host broke off, and the client got an error;
# or the client or the service went away, so that the client lacks the end.
BROKE_OFF = "interrupted"
CLIENT_LEFT = "client_left"
INCOMPLETE = frozenset({BROKE_OFF, CLIENT_LEFT})

DEFAULT_PRIORITY = 50
IMPORTANT = 75
MAX_PRIORITY = 100


class ShownReply(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A reply as its client was shown it, in the wire form of ``dialect``; empty if that form is unknown."""

    raw: bytes
    dialect: str


class Entry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A live, model-visible message with its position in the session. Strategies work on entries.

    ``tokens`` is the stored count without the newest versions of injected blocks, which count as instructions.
    ``priority`` is 0 to 100; an important message has at least ``IMPORTANT``. ``is_shortened``: texts of ``message``
    differ from its raw form; ``is_folded``: by references for repeated text. ``prefix`` is Tersely's own text in front
    of the message's text. ``is_ours``: a call to a tool of Tersely's own, or its result; summaries do not quote it.
    ``client_view`` is set on replies that the client was shown in another form; messages of one call share it.
    ``answered``: ids of calls whose results are stored here or right before, in another dialect, and not shown.
    """

    seq: int
    turn: int
    message: Message
    tokens: int
    created_at: datetime
    pinned: bool = False
    priority: int = DEFAULT_PRIORITY
    is_shortened: bool = False
    is_folded: bool = False
    prefix: str = ""
    is_ours: bool = False
    client_view: ShownReply | None = None
    answered: tuple[str, ...] = ()


# Of more log entries than this, the older ones are counted, not loaded: planning costs the same in every session.
LOG_ENTRIES = 400


class TerseEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One log line about a turn. The source ``derived`` means that the reply had no tag and no model wrote the line."""

    turn: int
    seq: int
    role: str
    text: str
    source: TerseSource
    created_at: datetime


class Reference(msgspec.Struct, frozen=True, kw_only=True, rename={"last_seq": "position"}):
    """An identifier seen in messages that were cut, with what its rank is made of.

    ``last_seq`` is the sequence number of its last mention, ``turn`` the turn of that mention.
    """

    text: str
    turn: int
    last_seq: int
    mentions: int
    used_by_model: bool


class FileExcerpt(msgspec.Struct, frozen=True, kw_only=True):
    """A text of the file ``path`` as messages ``seqs`` read, wrote or changed it; ``turn`` is the turn of the first.

    ``only_items``: of a text too long to be carried over whole, the open items.
    """

    path: str
    turn: int
    seqs: tuple[int, ...]
    text: str
    only_items: bool = False


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A summary of the live messages ``first_seq`` to ``last_seq`` (inclusive), made for one ``purpose``.

    ``tokens`` counts ``text``. Summaries are only added, never changed.
    """

    first_seq: int
    last_seq: int
    purpose: str
    text: str
    tokens: int
    source: SummarySource
    created_at: datetime


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """A statement about message ``seq`` in a summary that was made without a model.

    ``key`` identifies what can revoke the fact: a call's id, or the arguments of a failed call.
    """

    section: str
    turn: int
    seq: int
    text: str
    key: str = ""


class CoveredFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that hold after messages ``first_seq`` to ``last_seq``. A summary without a model is written from them.

    ``base`` is an earlier summary of the messages up to ``base_last``, written by a model or without known messages.
    The facts supplement it.
    """

    facts: tuple[Fact, ...] = ()
    names: tuple[Reference, ...] = ()
    first_seq: int = 0
    last_seq: int = 0
    base: str = ""
    base_first: int = 0
    base_last: int = 0


class HeadMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message that Tersely itself wrote into a head: plain text under a role, named by its layer."""

    layer: str
    role: Literal["user", "assistant"]
    text: str
    tokens: int


class Prefix(msgspec.Struct, frozen=True, kw_only=True):
    """A text of Tersely's own in front of the words of message ``seq``."""

    layer: str
    seq: int
    text: str
    tokens: int


class InjectedBlock(msgspec.Struct, frozen=True, kw_only=True):
    """The newest version of a block that a client injected, and where the client sent it.

    ``seq`` is the message that holds the block (0: unknown, or hidden from every context). ``is_alone``: the block is a
    message of its own, directly in front of message ``seq`` (``AFTER_ALL_MESSAGES``: behind all others). ``tokens``
    counts ``text``.
    """

    key: str
    text: str
    tokens: int
    seq: int = 0
    is_alone: bool = False


AFTER_ALL_MESSAGES = 1 << 62

# The names of an epoch's fields in the database, which earlier releases read and write too.
_STORED_EPOCH = {
    "summary_covers_to": "told",
    "head_covers_to": "quoted",
    "memos_chosen_to": "settled",
    "cleared_at": "floor",
    "must_rebuild": "is_void",
}


class Repeats(msgspec.Struct, frozen=True, kw_only=True):
    """Decisions on repeated text that an epoch takes over from those before it.

    ``replaced``: checksums (32 bits each, little-endian) of the lines that references stood for and that the model did
    not ask for again since. An epoch that shows such lines whole, because it cut their first copy, keeps the checksums.
    ``asked_again``: messages that show such lines whole, because the model had asked for them again. Both hold for
    messages up to ``decided_to``, and go on from there.
    """

    replaced: bytes = b""
    asked_again: tuple[int, ...] = ()
    decided_to: int = 0


class PastTurn(msgspec.Struct, frozen=True, kw_only=True):
    """An older turn that may be brought back whole, with its relevance to the current task (0 to 1)."""

    turn: int
    entries: tuple[Entry, ...]
    relevance: float


class Epoch(msgspec.Struct, frozen=True, kw_only=True, rename=_STORED_EPOCH):
    """A stretch of calls that share one frozen beginning.

    ``cut`` is the first sequence number of the tail (1: nothing is cut). ``kept`` are sequence numbers before the cut
    whose messages stay verbatim between head and tail (the task of a running turn, pinned messages). ``fingerprint``
    names strategy, parameters and policy; a change of it starts a new epoch. ``references`` are the ranked candidates
    over everything cut so far; epochs pass them on, so that planning never reads cut messages again. ``older_tokens``
    counts the live messages before the cut at the epoch's start.

    ``tiers`` say how texts are shortened, ``prefixes`` which texts of Tersely's own precede messages. ``retrieved`` are
    the turns among ``kept`` that were brought back for their relevance, ``whole`` the turns of which nothing was cut.
    ``covered`` are the facts behind the head's summary. ``has_injected`` is False in plans of earlier releases, which
    lack ``injected``.

    ``is_plain``: requests show everything as the client sent it, without instructions and tools of Tersely's in front
    (`tersely.strategies.epochs.additions`). Plans of earlier releases had both from their first request on.
    ``excerpts``: texts of files from messages that were cut. The head shows some of them, later epochs choose again.
    ``folds_repeats``: references replace repeated text in tool results (`tersely.strategies.reduction.repeats`);
    ``repeats``: what earlier epochs decided on it.

    ``cleared_at``: contexts leave out everything before this sequence number, where the session was last cleared.
    ``summary_covers_to``: the carried-over summary covers messages before this sequence number (0: none is carried
    over). ``head_covers_to``: the head may quote messages before this one and before the cut. ``memos_chosen_to``:
    memos for messages up to this one are among ``prefixes``; later messages carry their own.

    ``is_stale``: covered messages have left or rejoined the history, so a new epoch must start. ``must_rebuild``: the
    new epoch takes over nothing and is planned from all live messages.
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
    whole: tuple[int, ...] = ()
    cleared_at: int = 1
    summary_covers_to: int = 0
    head_covers_to: int = 0
    is_stale: bool = False
    must_rebuild: bool = False
    memos_chosen_to: int = 0
    injected: tuple[InjectedBlock, ...] = ()
    has_injected: bool = False
    covered: CoveredFacts | None = None
    is_plain: bool = False
    folds_repeats: bool = False
    repeats: Repeats | None = None
    excerpts: tuple[FileExcerpt, ...] = ()

    def without_messages(
        self,
        removed: Collection[int],
        restored: Collection[int] = (),
        pinned: Collection[int] = (),
        *,
        last: int | None = None,
    ) -> Epoch:
        """Return the plan after ``removed`` messages left the history and ``restored`` ones returned to it.

        Later plans do not mention removed messages. ``pinned`` are the restored messages that are pinned. ``last`` is
        the last stored message that is left before new ones (0: none; None: a message of the tail). If it was cut, no
        tail is left and the plan must be rebuilt.
        """
        gone, changed = frozenset(removed), frozenset((*removed, *restored))
        plan = structs.replace(
            self,
            kept=tuple(sorted({*self.kept} - changed | {seq for seq in pinned if seq < self.cut})),
            references=tuple(reference for reference in self.references if reference.last_seq not in gone),
            excerpts=tuple(excerpt for excerpt in self.excerpts if gone.isdisjoint(excerpt.seqs)),
        )
        first = min((seq for seq in changed if seq >= self.cleared_at), default=self.covered_to)
        is_behind = last is not None and last < self.cut  # nothing is left of the tail
        if first >= self.covered_to and not is_behind:
            return plan
        if is_behind or first < self.summary_covers_to or any(self.cleared_at <= seq < self.cut for seq in restored):
            return structs.replace(plan.marked_for_rebuild(), is_stale=True)
        return structs.replace(plan, is_stale=True)

    def marked_for_rebuild(self) -> Epoch:
        """Return the plan without its head, so that the next plan is made from all live messages."""
        return structs.replace(self, head=(), prefixes=(), tiers=(), covered=None, must_rebuild=True)

    @property
    def covered_to(self) -> int:
        """Return the first sequence number that the head does not cover."""
        return max(self.cut, self.summary_covers_to, self.head_covers_to)

    @property
    def head_tokens(self) -> int:
        """Tokens of the head's own messages and of the prefixes."""
        return sum(message.tokens for message in self.head) + sum(prefix.tokens for prefix in self.prefixes)


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The immutable input of a strategy.

    ``entries`` are the live, model-visible messages in order, from the current epoch's cut on (all of them when
    ``epoch`` is None), without instructions. ``kept`` are the current epoch's kept messages. ``fixed_tokens`` counts
    instructions and tools as sent, including Tersely's own and ``injected``; ``tool_tokens`` the tools among them.
    ``window`` is the model's context window
    less its reserve, where known; ``model_window`` is the whole window. ``read_back`` names the tools by which the
    model can read a shortened text in full.

    ``edited``: history before this request's last message was rewritten since the last call (undo, drop, client
    rewrite). ``ran_out``: the model's window was full in the middle of its last reply in this epoch. ``last_call_at``
    is the time of the session's last upstream call, ``calls`` their number. ``older_tokens`` counts the live messages
    before ``entries``, kept ones included, for the report. ``injected`` are the newest versions of all blocks that the
    client injected into the history, in order. ``instructions`` are Tersely's own for the model, where the
    request takes any. ``folds_repeats``: epochs that start now replace repeated text by references.
    """

    entries: tuple[Entry, ...]
    kept: tuple[Entry, ...] = ()
    epoch: Epoch | None = None
    fixed_tokens: int = 0
    tool_tokens: int = 0
    window: int | None = None
    edited: bool = False
    ran_out: bool = False
    calls: int = 0
    last_call_at: datetime | None = None
    older_tokens: int = 0
    model_window: int | None = None
    read_back: ReadBack = ""
    injected: tuple[InjectedBlock, ...] = ()
    instructions: str | None = None
    folds_repeats: bool = False

    @property
    def injected_tokens(self) -> int:
        """Tokens of the newest injected blocks: a part of ``fixed_tokens``."""
        return sum(block.tokens for block in self.injected)


class EpochInputs(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs that only the start of an epoch needs.

    ``terse`` are the newest few hundred log entries in order; ``older_turns`` counts the turns whose entries were not
    loaded. ``state`` and ``scratchpad`` are the session's, empty if absent; ``state_seq`` is the message that carried
    the state. ``summaries`` are the newest valid ones, ``past_turns`` older turns that are relevant to the current
    task. ``memos`` stand in front of messages up to ``memos_chosen_to``.
    """

    terse: tuple[TerseEntry, ...] = ()
    older_turns: int = 0
    oldest_at: datetime | None = None
    state: str = ""
    state_seq: int = 0
    scratchpad: str = ""
    summaries: tuple[Summary, ...] = ()
    past_turns: tuple[PastTurn, ...] = ()
    memos: tuple[Prefix, ...] = ()
    memos_chosen_to: int = 0
