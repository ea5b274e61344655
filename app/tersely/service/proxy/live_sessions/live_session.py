"""Live sessions: what a worker keeps of the conversations that it has seen lately.

A live session is found by the bytes of a request body: nearly every body is the last one with more messages. Where
bodies reference their history instead, it is found by the id of its last reply or of its conversation. It holds
everything that the next call would otherwise work out again from a history that has not changed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Sequence

import msgspec
from msgspec import structs

from tersely.dialects.dialect import Request
from tersely.dialects.headers import Headers
from tersely.domain.client_ids import ClientIds
from tersely.domain.history.context import LayerReport, Repair
from tersely.domain.history.history import Entry, Snapshot
from tersely.domain.history.links import MessageIdentity, PlacedMessage
from tersely.domain.history.sessions import Session
from tersely.domain.messages import Message
from tersely.domain.text.tags import TagKinds
from tersely.service.context.context_config import ContextConfig
from tersely.service.context.sent_contexts import Elements, MessageSource
from tersely.service.proxy.call.call import Call, CallOptions
from tersely.service.proxy.live_sessions.frames import Frame
from tersely.service.proxy.live_sessions.pieces import Pieces
from tersely.service.proxy.live_sessions.varying_members import VaryingMember
from tersely.store.commit.records import HistoryOwner
from tersely.store.history.messages import TailRow
from tersely.strategies.epochs.cutting import CutDistances

# Measured on CPython 3.11, rounded up: bytes of a live session beside its contents, and of an entry with its message.
SESSION_BYTES = 6_000
ENTRY_BYTES = 1_800
# A digest in a set.
SET_ENTRY_BYTES = 120
# One session takes at most an eighth of the memory, so that a few huge sessions do not displace all others. The body of
# a larger one is freed when its call ends.
LARGEST_PART = 8
# Bodies are told apart by so many bytes at an offset that both a body and its continuation have.
KEY_BYTES = 64
# The replies whose ids are remembered: more than a worker stores in the time for which a live session is trusted.
KNOWN_REPLIES = 8_192


class ContextSums(msgspec.Struct, frozen=True, gc=False):
    """Tokens of a context, as its report adds them up. ``head``: of the epoch's head and prefixes; ``kept`` and
    ``tail``: of the messages before and behind the cut, among them those of the running turn's questions
    (``questions``); ``shown_kept`` and ``shown_tail``: of the same as the context shows them, repaired and shortened.
    ``steps`` counts the replies in the tail, ``turn_steps`` those of the running turn, in the tail or not.
    ``distances``: see `surely_keeps`; None: not known.
    """

    head: int
    kept: int
    tail: int
    shown_kept: int
    shown_tail: int
    questions: int
    steps: int
    turn_steps: int
    distances: CutDistances | None

    def with_added(self, added: Sequence[Entry], shown: Sequence[Entry], *, turn: int) -> ContextSums:
        """Return the sums with entries of a reply and what follows it, which the context shows as ``shown``; ``turn``
        was the running one before them.
        """
        running = added[-1].turn
        tokens = steps = 0
        questions, turn_steps = (self.questions, self.turn_steps) if running == turn else (0, 0)
        for entry in added:
            tokens += entry.tokens
            role = entry.message.role
            if role == "assistant":
                steps += 1
                turn_steps += entry.turn == running
            elif role == "user" and entry.turn == running and entry.message.starts_turn:
                questions += entry.tokens
        distances = None if self.distances is None else self.distances.with_added(added)
        shown_tokens = tokens if shown is added else sum([entry.tokens for entry in shown])
        return ContextSums(
            self.head,
            self.kept,
            self.tail + tokens,
            self.shown_kept,
            self.shown_tail + shown_tokens,
            questions,
            self.steps + steps,
            turn_steps,
            distances,
        )


class VolatileMessage(msgspec.Struct, frozen=True, gc=False):
    """A message as the client sent it last, and its identity."""

    raw: bytes
    digest: bytes


class AddedMessages(msgspec.Struct, frozen=True):
    """The elements that a live call adds to the message list of its body, with their sources. ``instructions``: those
    beside the list. ``volatile`` are the last messages of the request: their elements may be others at the next call.
    """

    elements: Sequence[tuple[bytes, MessageSource]]
    instructions: bytes = b""
    volatile: tuple[VolatileMessage, ...] = ()


class LeadingMessages(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The instructions that lead each request of a session, with their identities and places."""

    messages: tuple[Message, ...]
    identities: tuple[MessageIdentity, ...]
    placed: tuple[PlacedMessage, ...]


class DeltaSession(msgspec.Struct, frozen=True, gc=False):
    """The state of a session whose calls bring only their new messages.

    ``instructions`` are the stored ones that its calls do not bring, ``reply`` is the last reply as its client saw it.
    ``digests`` has those of all its links, and perhaps of others.
    """

    instructions: tuple[bytes, ...]
    reply: bytes
    digests: set[bytes]


class ReferenceSession(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The state of a session whose calls reference their history: by the last reply, or as a conversation.

    ``reply_id`` is the id of the last reply, ``reply`` that reply as its client saw it. ``conversation`` is the id of
    the conversation (empty: each call names the last reply). ``id_start`` and ``id_end`` are the offsets of the reply's
    id in the body without its new messages (0: it does not stand there).

    ``instructions`` are those that each call brings, with their ``identities`` and places. ``hidden`` are the rows that
    the client does not know. The history was read from the sequence number ``start`` on.
    """

    reply_id: str
    reply: bytes
    conversation: str
    id_start: int
    id_end: int
    instructions: tuple[Message, ...]
    identities: tuple[MessageIdentity, ...]
    placed: tuple[PlacedMessage, ...]
    hidden: Sequence[TailRow]
    start: int


class LiveSession(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """A session after its last call, as the next call continues it.

    ``body`` is the client's last one: its messages begin at ``start`` (0: it does not bring them), up to ``end`` it
    goes to the end of the last one but those in ``volatile``, whose breakpoints the next body may move; ``suffix`` is
    what comes after the messages. ``sent`` is the body that went upstream up to there, and ``sent_suffix`` what comes
    after (None: the client's own, or one of ``frame``).
    ``varying`` is the member in both suffixes that may have another value at the next call; ``instructions`` are those
    beside the client's messages.
    ``commas`` counts those of ``body`` up to ``end`` and of ``suffix``, in texts too: no list there has more elements.
    ``owner`` identifies the `LiveCalls` that prepared it, ``session`` is the session's row as it is known. The database
    was asked, or written to, at ``checked_at`` (loop time), when it counted so many ``changes`` of the tenant.
    ``headers`` are those of the last request (see `steady`), ``client_name`` names the program that sent it.
    ``request`` is the request without its messages, ``first_messages`` are the first three of them and
    ``last_question`` is the last that the user sent. ``leading`` are the instructions of a body that brings its history
    (None: some stand among the messages), ``digests`` are those of the messages of such a body, one after the other.
    ``snapshot`` holds the session's messages without the last reply: ``reply`` is its row, ``chain`` the identity of
    the history up to it. ``messages_size``: see `size_of`. ``layers`` are those of the context before its tail,
    ``elements`` describe the body that went upstream. ``rows`` are the stored messages from the cut on, of which the
    first ``row_count`` are this session's: the list goes on with those of later calls. ``deltas`` is set where calls
    bring only their new messages, ``reference`` where they reference their history beside these: then ``body`` is what
    comes before the new messages in the next call.
    ``history_owner`` will have the history up to the next reply.
    """

    owner: int
    tenant: str
    session: Session
    checked_at: float
    changes: int
    headers: Headers
    client_name: str | None
    method: str
    path: str
    options: CallOptions
    client: ClientIds
    body: bytes
    start: int
    end: int
    commas: int
    suffix: bytes
    sent: Pieces | None
    sent_suffix: bytes
    varying: VaryingMember | None
    volatile: tuple[VolatileMessage, ...]
    frame: Frame | None
    instructions: bytes
    request: Request
    tools_digest: bytes | None
    first_messages: tuple[Message, ...]
    last_question: Message | None
    leading: LeadingMessages | None
    digests: bytes
    config: ContextConfig
    snapshot: Snapshot
    sums: ContextSums
    repairs: tuple[Repair, ...]
    is_verbatim: bool
    is_whole: bool
    shown_kinds: TagKinds
    strip_usage: bool
    tools: frozenset[str]
    reply: TailRow
    chain: bytes
    messages_size: int
    layers: tuple[LayerReport, ...]
    elements: Elements
    rows: list[TailRow]
    row_count: int
    deltas: DeltaSession | None
    reference: ReferenceSession | None
    history_owner: HistoryOwner

    @property
    def is_named(self) -> bool:
        """True if its calls name the session in Tersely's own header."""
        return self.options.session_id is not None

    @property
    def is_joined(self) -> bool:
        """True if a call goes to the end of the session, whatever other calls have added: it does not say what it
        continues.
        """
        return self.deltas is not None or (self.reference is not None and bool(self.reference.conversation))

    @property
    def turn(self) -> int:
        """The turn of the newest message, not counting the last reply."""
        entries = self.snapshot.entries or self.snapshot.kept
        return entries[-1].turn

    @property
    def size(self) -> int:
        """Bytes of memory, about."""
        size = SESSION_BYTES + self.messages_size + len(self.body) + len(self.suffix) + len(self.sent_suffix)
        size += len(self.request.tools) + sum(map(len, self.sent or ())) + len(self.reply.model_raw or b"")
        size += len(self.digests)
        if self.leading is not None:
            size += size_of_messages(self.leading.messages)
        if self.deltas is not None:
            size += len(self.deltas.reply) + SET_ENTRY_BYTES * len(self.deltas.digests)
        if self.reference is not None:
            size += len(self.reference.reply) + size_of_messages(self.reference.instructions)
        return size if self.frame is None else size + self.frame.size


def steady(headers: Headers) -> Headers:
    """Return the headers that may be the same in each request of a conversation."""
    return [header for header in headers if header[0] != "content-length"]


def size_of(entries: Iterable[Entry]) -> int:
    """Bytes of memory that entries take, about."""
    return size_of_messages([entry.message for entry in entries])


def size_of_messages(messages: Iterable[Message]) -> int:
    """Bytes of memory that messages take, about. Their text is held twice: as it came, and read."""
    return sum([ENTRY_BYTES + 2 * len(message.raw) for message in messages])


class _CachedSession(msgspec.Struct):
    session: LiveSession
    size: int


class LiveSessions:
    """The live sessions that were used last, of at most ``budget`` bytes."""

    def __init__(self, budget: int) -> None:
        """``budget`` in bytes; 0: nothing is kept."""
        self._budget = budget
        self._bytes = 0
        self._sessions: OrderedDict[tuple[str, str], _CachedSession] = OrderedDict()
        self._by_chain: defaultdict[tuple[str, bytes], int] = defaultdict(int)
        self._by_prefix: defaultdict[tuple[str, int, bytes], list[LiveSession]] = defaultdict(list)
        # How many of its keys have each offset.
        self._offsets: Counter[int] = Counter()
        # Live sessions whose next call names their last reply, by tenant and the id of that.
        self._by_reply: dict[tuple[str, str], LiveSession] = {}
        # The session of each reply that was stored here lately, by tenant and id; empty: replies of several.
        self._replies: OrderedDict[tuple[str, str], str] = OrderedDict()

    @property
    def is_on(self) -> bool:
        """True if live sessions are kept."""
        return self._budget > 0

    @property
    def bytes(self) -> int:
        """Bytes in use, about."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._sessions)

    def find(self, call: Call) -> list[LiveSession]:
        """Return the live sessions whose bodies ``call`` continues, the longest first."""
        body = call.body
        if call.options.session_id is not None:
            held = self._sessions.get((call.tenant, call.options.session_id))
            live = None if held is None else _continued(body, held.session)
            return [] if live is None else [live]
        found: list[LiveSession] = []
        for offset in self._offsets:
            if offset <= len(body):
                alike = self._by_prefix.get((call.tenant, offset, body[max(0, offset - KEY_BYTES) : offset]))
                if alike is not None:
                    found += [live for each in alike if (live := _continued(body, each)) is not None]
        if len(found) > 1:
            found.sort(key=lambda live: live.end, reverse=True)
        return found

    def find_referenced(self, call: Call, *, reply_id: str, conversation: str) -> list[LiveSession]:
        """Return the live session whose last reply has that id or, without an id, that of the conversation, if ``call``
        continues it.
        """
        if reply_id:
            live = self._by_reply.get((call.tenant, reply_id))
        else:
            held = self._sessions.get((call.tenant, conversation))
            live = None if held is None or held.session.is_named else held.session
        if live is None or live.reference is None or live.reference.conversation != conversation:
            return []
        continued = _continued(call.body, live)
        return [] if continued is None else [continued]

    def note_reply(self, tenant: str, reply_id: str, session_id: str) -> None:
        """Remember that a reply of a session has that id. A host that gives an id twice does not name one reply."""
        key = tenant, reply_id
        known = self._replies.pop(key, session_id)
        self._replies[key] = session_id if known == session_id else ""
        if len(self._replies) > KNOWN_REPLIES:
            self._replies.popitem(last=False)

    def is_reply_of(self, live: LiveSession, reply_id: str) -> bool:
        """Return whether a reply with that id was stored here lately for ``live``, and for no other session."""
        return self._replies.get((live.tenant, reply_id)) == live.session.id

    def has_twin(self, live: LiveSession) -> bool:
        """Return whether the history of another live session is the same, so that a call may continue either."""
        return self._by_chain[live.tenant, live.chain] > 1

    def put(self, live: LiveSession) -> None:
        """Keep ``live`` in place of what was kept of its session."""
        self.forget(live.tenant, live.session.id)
        size = live.size
        if size > self._budget // LARGEST_PART:
            return
        self._sessions[live.tenant, live.session.id] = _CachedSession(live, size)
        if live.reference is not None:
            if not live.reference.conversation:
                self._by_reply[live.tenant, live.reference.reply_id] = live
        elif not live.is_named:
            key = _key_of(live)
            alike = self._by_prefix[key]
            if not alike:
                self._offsets[key[1]] += 1
            alike.append(live)
        self._by_chain[live.tenant, live.chain] += 1
        self._bytes += size
        while self._bytes > self._budget:
            self.forget(*next(iter(self._sessions)))

    def forget(self, tenant: str, session_id: str) -> None:
        """Keep nothing of a session."""
        held = self._sessions.pop((tenant, session_id), None)
        if held is None:
            return
        self._bytes -= held.size
        reference = held.session.reference
        if reference is not None:
            if self._by_reply.get((tenant, reference.reply_id)) is held.session:
                del self._by_reply[tenant, reference.reply_id]
        elif not held.session.is_named:
            key = _key_of(held.session)
            alike = self._by_prefix[key]
            alike.remove(held.session)
            if not alike:
                del self._by_prefix[key]
                self._offsets[key[1]] -= 1
                if not self._offsets[key[1]]:
                    del self._offsets[key[1]]
        chain = held.session.tenant, held.session.chain
        self._by_chain[chain] -= 1
        if not self._by_chain[chain]:
            del self._by_chain[chain]

    def clear(self) -> None:
        """Keep nothing."""
        self._sessions.clear()
        self._by_prefix.clear()
        self._by_reply.clear()
        self._offsets.clear()
        self._by_chain.clear()
        self._bytes = 0


def _continued(body: bytes, live: LiveSession) -> LiveSession | None:
    """Return the live session that ``body`` continues, with the suffix of ``body``; None where it does not."""
    end = live.end
    # The end first: conversations of one client begin alike.
    start = max(0, end - KEY_BYTES)
    if body[start:end] != live.body[start:end] or not body.startswith(memoryview(live.body)[:end]):
        return None
    if not body.endswith(live.suffix):
        value = None if live.varying is None else live.varying.value_in(body, end)
        if live.varying is None or value is None:
            return None
        live = _with_value(live, live.varying, value)
    return live if end + len(live.suffix) < len(body) else None


def _with_value(live: LiveSession, member: VaryingMember, value: bytes) -> LiveSession:
    suffix = member.suffix(value)
    commas = live.commas - live.suffix.count(b",") + suffix.count(b",")
    return structs.replace(live, suffix=suffix, sent_suffix=member.sent_suffix(value), commas=commas)


def _offset_of(size: int) -> int:
    """Return the greatest power of two up to ``size``."""
    return 1 << (size.bit_length() - 1) if size else 0


def _key_of(live: LiveSession) -> tuple[str, int, bytes]:
    offset = _offset_of(live.end)
    return live.tenant, offset, live.body[max(0, offset - KEY_BYTES) : offset]
