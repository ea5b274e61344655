"""The value that grows while a call passes through the pipeline of `tersely.service.proxy.proxy`.

Each class holds what the one before it holds, and what one more step has found out. No value changes: a later step
makes a new one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime

import msgspec

from tersely.dialects.dialect import Request
from tersely.domain.messages import INSTRUCTION_ROLES
from tersely.domain.text.tags import NOTHING, TagKinds
from tersely.service.context.building import BuiltContext
from tersely.service.context.context_config import ContextConfig, TokenBudget
from tersely.service.context.history import History
from tersely.service.context.sent_contexts import Description, MessageSource
from tersely.service.proxy.call.call import Call, ContextLabels
from tersely.service.proxy.call.history_by_reference import ResolvedHistory
from tersely.service.proxy.live_sessions.live_session import AddedMessages, LiveSession
from tersely.service.recognition.incoming_history import IncomingHistory
from tersely.service.recognition.session_lookup import SessionHints, SessionMatch
from tersely.store.commit.records import HistoryOwner, RequestOutcome, RequestWrite, WholeRequest, result_of


class IncomingCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call whose request has been read: its messages with their hashes, and what it says of its session."""

    call: Call
    request: Request
    history: IncomingHistory
    hints: SessionHints
    started: datetime

    def matched(
        self,
        *,
        match: SessionMatch,
        config: ContextConfig,
        budget: TokenBudget,
        loaded: History,
        resolved: ResolvedHistory | None = None,
        is_at_host: bool = False,
    ) -> MatchedCall:
        """Return the call with its session."""
        return MatchedCall(
            call=self.call,
            request=self.request,
            history=self.history if resolved is None else resolved.history,
            hints=self.hints,
            started=self.started,
            match=match,
            config=config,
            budget=budget,
            loaded=loaded,
            resolved=resolved,
            is_at_host=is_at_host,
        )


class MatchedCall(IncomingCall, frozen=True, kw_only=True):
    """A call whose session is known. ``loaded`` is what its context is built from.

    ``resolved`` is set for a request that references its history instead of sending it. ``is_at_host``: the model host
    has that history, so the request goes out unchanged.

    ``live`` is the live session that the call continues. ``request``, ``history``, ``match`` and ``loaded`` then hold
    what the call adds to it, and perhaps instructions; ``whole_request`` returns all that is stored of the request, and
    ``expand`` the call with all of it.
    """

    match: SessionMatch
    config: ContextConfig
    budget: TokenBudget
    loaded: History
    resolved: ResolvedHistory | None = None
    is_at_host: bool = False
    live: LiveSession | None = None
    whole_request: Callable[[], WholeRequest] | None = None
    expand: Callable[[PreparedCall], PreparedCall] | None = None


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A request on its way into the store. ``write`` is what is stored, ``description`` the context that the
    model was sent (None: it could not be described), ``stored`` is done when the request is on disk.
    """

    write: RequestWrite
    description: Description | None
    stored: asyncio.Future[RequestOutcome]

    @property
    def outcome(self) -> RequestOutcome | None:
        """The outcome of the write; None as long as it is not on disk."""
        return result_of(self.stored)


class PreparedCall(MatchedCall, frozen=True, kw_only=True):
    """A call that is ready to be sent. ``built`` is None if no context fits: the client's own bytes are sent then, and
    the provider judges them.

    ``sources`` says where the messages in ``body`` come from (None: they are the request's own). ``strip_usage``: only
    Tersely asked for the usage in the reply. ``tools`` are the names of Tersely's tools that the model may call.
    ``shown_tags`` are the kinds of tags that the context shows in the model's own messages. ``history_owner`` will have
    the history up to the reply. ``client`` names the program that made the call.

    ``round_messages`` are the calls and results of earlier rounds, in wire form; ``is_last_round``: the model may call
    no tool any more. ``earlier_bodies`` are the bodies of earlier rounds.

    ``record`` is set once the request is on its way into the store.

    ``added`` says what the body adds to the last one of its live session, where that keeps its epoch.
    """

    built: BuiltContext | None
    body: bytes
    write: RequestWrite
    labels: ContextLabels
    sources: Sequence[MessageSource] | None = None
    strip_usage: bool = False
    tools: frozenset[str] = frozenset()
    shown_tags: TagKinds = NOTHING
    history_owner: HistoryOwner = "tersely"
    client: str | None = None
    round_messages: Sequence[bytes] = ()
    is_last_round: bool = False
    earlier_bodies: tuple[bytes, ...] = ()
    record: RequestRecord | None = None
    added: AddedMessages | None = None

    @property
    def whole(self) -> PreparedCall:
        """The call with its whole history. O(size of the request) for a call that continues a live session."""
        return self if self.expand is None else self.expand(self)

    @property
    def own_messages(self) -> list[bytes]:
        """The messages of the request without instructions, as they came."""
        return [message.raw for message in self.history.messages if message.role not in INSTRUCTION_ROLES]

    @property
    def tags(self) -> TagKinds:
        """The kinds of tags to strip from the reply: those the strategy asks for, and those the context shows."""
        return self.config.hidden_tags | self.shown_tags

    @property
    def own_request(self) -> bytes:
        """The client's body if another one was sent, else empty: some replies repeat their request."""
        return b"" if self.body is self.call.body else self.call.body
