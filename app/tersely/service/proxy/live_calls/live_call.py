"""A call that continues a live session, as far as it has been worked out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Literal

import msgspec

from tersely.dialects.dialect import Request
from tersely.dialects.headers import Headers
from tersely.domain.history.context import LayerReport
from tersely.domain.history.history import Entry
from tersely.domain.history.reconciliation import Reconciliation
from tersely.domain.text.tags import TagKinds
from tersely.service.context.sent_contexts import Description
from tersely.service.proxy.call.call import Call, ContextLabels
from tersely.service.proxy.live_sessions.live_session import AddedMessages, ContextSums, LiveSession
from tersely.service.proxy.live_sessions.pieces import Pieces
from tersely.service.proxy.preparing.stages import PreparedCall
from tersely.service.recognition.incoming_history import IncomingHistory
from tersely.store.commit.records import RequestWrite

# Why a call is no live call. ``unknown``: no live session has its beginning, or the reply it names. ``changed``: of
# headers, options or settings something is another. ``messages``: it does more than append to the history. ``moved``:
# somebody else has written to the session since. ``epoch``: a new epoch starts, or might: the full path plans it, from
# the live session where that holds enough. ``busy``: exchanges wait in the spool.
Miss = Literal["unknown", "changed", "messages", "moved", "epoch", "busy"]
MISSES: tuple[Miss, ...] = ("unknown", "changed", "messages", "moved", "epoch", "busy")

# The layers of a report with messages from before the cut, and with those behind it: the latter grows.
KEPT, TAIL = "kept", "tail"


class Continuation(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A live session and the messages that a call adds to it: the last reply, as the client repeats it, and new ones.

    ``revised`` are the entries of the volatile messages, which come again in front of the echo, ``raws`` all messages
    from these on. ``headers`` are the call's: see `steady`. Where a call brings only new messages, ``history`` does not
    have the reply either.
    """

    live: LiveSession
    raws: tuple[bytes, ...]
    revised: tuple[Entry, ...]
    history: IncomingHistory
    headers: Headers

    @property
    def echoes(self) -> int:
        """The number of messages of ``history`` that were stored before: 1 if the reply is one of them, else 0."""
        return 0 if self.live.deltas is not None else 1


class LiveCall(msgspec.Struct, kw_only=True, eq=False, weakref=True):
    """A call that continues a live session; for the steps that relay and record a reply it is a `PreparedCall`.

    ``added`` are the entries of the echo and of the new messages, ``shown`` the same as the context shows them;
    ``sums`` are those of the whole context. ``pieces`` is
    the body for the upstream, ``elements`` what it adds to the last one. ``expand`` returns what the full path makes of
    the call; that is done where something out of the ordinary happens, and kept as ``prepared``. ``write`` and
    ``description`` are made while the model works, ``alarm`` has the request stored where that takes long.
    """

    call: Call
    live: LiveSession
    found: Continuation
    started: datetime
    decision: Reconciliation
    added: Sequence[Entry]
    shown: Sequence[Entry]
    sums: ContextSums
    window: int | None
    is_verbatim: bool
    pieces: Pieces
    elements: AddedMessages
    shown_tags: TagKinds
    labels: ContextLabels
    write: RequestWrite
    expand: Callable[[LiveCall], PreparedCall]
    description: Description | None = None
    prepared: PreparedCall | None = None
    alarm: asyncio.TimerHandle | None = None
    joined: bytes | None = None

    @property
    def body(self) -> bytes:
        """The body for the upstream in one piece, always the same object."""
        if self.joined is None:
            self.joined = self.pieces[0] if len(self.pieces) == 1 else b"".join(self.pieces)
        return self.joined

    @property
    def request(self) -> Request:
        """The request without its messages."""
        return self.live.request

    @property
    def tools(self) -> frozenset[str]:
        """See `PreparedCall`."""
        return self.live.tools

    @property
    def strip_usage(self) -> bool:
        """See `PreparedCall`."""
        return self.live.strip_usage

    @property
    def tags(self) -> TagKinds:
        """See `PreparedCall`."""
        return self.live.config.hidden_tags | self.shown_tags

    @property
    def own_request(self) -> bytes:
        """See `PreparedCall`."""
        return b"" if self.pieces[0] is self.call.body else self.call.body


def tokens_before(live: LiveSession, sums: ContextSums) -> int:
    """Return the tokens of the whole history, as the report of the full path has them."""
    snapshot = live.snapshot
    return snapshot.fixed_tokens + max(snapshot.older_tokens, sums.kept) + sums.tail


def tokens_after(live: LiveSession, sums: ContextSums) -> int:
    """Return the tokens of a context."""
    return live.snapshot.fixed_tokens + sums.head + sums.shown_kept + sums.shown_tail


def layers_of(live: LiveSession, sums: ContextSums) -> tuple[LayerReport, ...]:
    """Return the layers of a context, as the report of the full path has them."""
    return (*live.layers, LayerReport(name=TAIL, tokens=sums.shown_tail))
