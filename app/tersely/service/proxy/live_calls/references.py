"""Live sessions whose calls reference their history: they name the last reply, or a conversation, beside new messages.

The full path reads such a history from the store, as if the request had sent it. A live call takes the last reply from
what was stored, and everything before it from the live session. A host that has the history itself is sent such calls
unchanged; these take the full path.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from tersely.dialects.dialect import Dialect, HistoryMember, Request
from tersely.dialects.wire import raw_json
from tersely.dialects.wire.array_member import find_member, read_more
from tersely.domain.history.links import BEFORE_LOADED, MessageIdentity, PlacedMessage, as_incoming
from tersely.domain.history.reconciliation import Reconciliation
from tersely.domain.messages import Message
from tersely.service.context.stored_messages import read_client_view
from tersely.service.proxy.live_calls.deltas import MOST_ROWS, as_stored_message
from tersely.service.proxy.live_sessions.live_session import LiveSession, ReferenceSession
from tersely.service.proxy.preparing.stages import PreparedCall
from tersely.service.recognition.incoming_history import IncomingHistory
from tersely.service.recognition.session_lookup import SessionMatch
from tersely.store.commit.records import ReferencedReply, ReplyWrite, WholeRequest
from tersely.store.history.artifacts import spilled
from tersely.store.history.messages import TailRow

# A host that counts its replies gives the same short ids to the replies of several sessions. Of longer ids it is only
# remembered which of them this process has stored lately.
SHORTEST_ID = 20
# Ids that JSON writes as they are.
_PLAIN_ID = re.compile(r"[!#-\[\]-~]+")
_STRING = rb'\s*:\s*(?:\{\s*"id"\s*:\s*)?"([^"\\]*)"'


class References:
    """The references of a dialect's requests to their history."""

    def __init__(self, history: HistoryMember) -> None:
        self._reply_id = _pattern(history.reply_id)
        self._conversation = _pattern(history.conversation)

    def find(self, body: bytes) -> tuple[str, str] | None:
        """Return the id of a reply and that of a conversation, of which one is empty; None without either.

        They may stand anywhere in ``body``, which has to be compared with that of the live session.
        """
        if self._reply_id is None or self._conversation is None:
            return None
        for pattern, is_reply in ((self._reply_id, True), (self._conversation, False)):
            key, value = pattern
            at = body.find(key)
            found = value.match(body, at + len(key)) if at >= 0 else None
            if found is not None:
                name = found[1].decode(errors="replace")
                return (name, "") if is_reply else ("", name)
        return None


def _pattern(member: str) -> tuple[bytes, re.Pattern[bytes]] | None:
    return (f'"{member}"'.encode(), re.compile(_STRING)) if member else None


class BodyAround(msgspec.Struct, frozen=True, gc=False):
    """A body without the value of its history: what comes before and after it; see `ReferenceSession` for the rest."""

    before: bytes
    after: bytes
    id_start: int = 0
    id_end: int = 0

    def with_id(self, reply_id: str) -> BodyAround:
        """Return the same with the id of another reply."""
        if not self.id_end:
            return self
        name = f'"{reply_id}"'.encode()
        start, end = self.id_start, self.id_end
        before, after, size = self.before, self.after, len(self.before)
        if start < size:
            before = before[:start] + name + before[end:]
        else:
            after = after[: start - size] + name + after[end - size :]
        return BodyAround(before, after, start, start + len(name))


def read_value(value: bytes, history: HistoryMember) -> list[bytes] | None:
    """Return the elements of a history: an array, or a string in its place. None if it is neither."""
    if value.startswith(b'"') and history.text_element is not None:
        try:
            return [history.text_element(value)] if isinstance(raw_json.load(value), str) else None
        except ValueError:
            return None
    if not (value.startswith(b"[") and value.endswith(b"]")):
        return None
    return read_more(b"," + value[1:-1])


def body_around(body: bytes, newest: bytes, history: HistoryMember, *, reply_id: str) -> BodyAround | None:
    """Return a body without its history, which ends with the element ``newest``; None if it has another form.

    ``reply_id`` is the id of the reply that it names (empty: it names a conversation). O(length).
    """
    (name,) = history.path
    place = find_member(body, name)
    if place is None:
        return None
    raws = read_value(body[place[0] : place[1]], history)
    if raws is None or raws[-1] != newest:
        return None
    before, after = body[: place[0]], body[place[1] :]
    if not reply_id:
        return BodyAround(before, after)
    named = find_member(body, history.reply_id)
    if named is None or body[named[0] : named[1]] != f'"{reply_id}"'.encode():
        return None
    gone = place[1] - place[0] if named[0] > place[0] else 0
    return BodyAround(before, after, named[0] - gone, named[1] - gone)


def shows_reference(prepared: PreparedCall) -> bool:
    """Return whether a context that is not too long shows the messages of a call as it brought them, with nothing
    injected, and whether the next context shows them so again, behind the same messages.

    A message that is stored already may be written in another way there, and a result without its call is. The next
    call of a conversation shows what was put into the session behind its last reply. Instructions stand in front of the
    history alone.
    """
    resolved, history, built = prepared.resolved, prepared.history, prepared.built
    if resolved is None or built is None or len(prepared.match.rows) > MOST_ROWS:
        return False
    reply, placed = resolved.reply, prepared.match.decision.placed
    if history.links != list(range(reply.own_before_reply, len(history.messages))):
        return False
    carried = {each.seq for each in placed}
    if any(row.row.seq not in carried for row in _current_links(prepared.match.rows)):
        return False
    shown = {entry.seq: entry.message for entry in prepared.loaded.snapshot.entries}
    repaired = {each.seq for each in built.context.repairs}
    return all(
        placed[index].is_new
        and placed[index].seq not in repaired
        and shown.get(placed[index].seq) is history.messages[index]
        and not history.messages[index].injected
        for index in reply.own_indexes[reply.own_before_reply :]
    )


def _current_links(rows: Sequence[TailRow]) -> list[TailRow]:
    return [row for row in rows if row.row.is_link and row.row.status != "superseded"]


def first_reference(prepared: PreparedCall, write: ReplyWrite, around: BodyAround) -> ReferenceSession | None:
    """Return what the next call of a session needs after a call of the full path that referenced its history; None
    where the next one cannot name the reply.
    """
    (reply,) = write.replies
    resolved = prepared.resolved
    if resolved is None or not _is_plain_id(reply.id):
        return None
    front = resolved.reply.own_before_reply
    history, decision = prepared.history, prepared.match.decision
    return ReferenceSession(
        reply_id=reply.id,
        reply=reply.raw,
        conversation=resolved.reply.conversation,
        id_start=around.id_start,
        id_end=around.id_end,
        instructions=history.messages[:front],
        identities=history.identities[:front],
        placed=tuple(replace(each, is_new=False) for each in decision.placed[:front]),
        hidden=prepared.match.hidden,
        start=prepared.match.expanded_from,
    )


def next_reference(
    live: LiveSession, reference: ReferenceSession, write: ReplyWrite
) -> tuple[ReferenceSession, BodyAround] | None:
    """Return the same after a live call, and what is around the history in the next body."""
    (reply,) = write.replies
    if not _is_plain_id(reply.id):
        return None
    around = BodyAround(live.body, live.suffix, reference.id_start, reference.id_end).with_id(reply.id)
    return (
        replace(reference, reply_id=reply.id, reply=reply.raw, id_start=around.id_start, id_end=around.id_end),
        around,
    )


def _is_plain_id(reply_id: str) -> bool:
    return _PLAIN_ID.fullmatch(reply_id) is not None


def history_of_reference(
    live: LiveSession, reference: ReferenceSession, new: IncomingHistory, dialect: Dialect
) -> IncomingHistory:
    """Return the last reply, read from the store as the full path does, and in front of it the ``new`` messages."""
    reply = read_client_view(as_stored_message(live.reply, reference.reply), dialect).message
    return IncomingHistory(
        messages=(reply, *new.messages),
        identities=(as_incoming(live.reply.row), *new.identities),
        chains=(live.chain, *new.chains),
    )


def referenced_reply(
    live: LiveSession, reference: ReferenceSession, *, known: int, new: int, front: int = 0
) -> ReferencedReply:
    """Return the reply that a call continues. Its history has ``known`` messages, the first ``front`` of them the
    request's own instructions, and ``new`` ones behind these.
    """
    return ReferencedReply(
        seq=live.reply.row.seq,
        own_indexes=(*range(front), *range(known, known + new)),
        own_before_reply=front,
        is_conversation=bool(reference.conversation),
        conversation=reference.conversation,
    )


def as_referenced(request: Request, reference: ReferenceSession) -> Request:
    """Return the request of the session's first call as the one that continues the last reply."""
    if reference.conversation:
        return request
    ids = {name: reference.reply_id if value == request.reply_id else value for name, value in request.ids.items()}
    return replace(request, reply_id=reference.reply_id, ids=ids)


class WholeReference(msgspec.Struct, frozen=True):
    """A call as the full path resolves it: its history with the content of the call's own messages alone."""

    history: IncomingHistory
    match: SessionMatch
    reply: ReferencedReply

    @property
    def request(self) -> WholeRequest:
        """Return what is stored of the request."""
        messages = self.history.messages
        return WholeRequest(
            incoming=self.history.identities,
            raws=[message.raw for message in messages],
            decision=self.match.decision,
            spill=lambda index: spilled(messages, index),
            referenced=self.reply,
        )


def resolve_whole(
    live: LiveSession, reference: ReferenceSession, found: IncomingHistory, decision: Reconciliation
) -> WholeReference:
    """Resolve the history of a live call. ``found`` and ``decision`` begin with the last reply. O(rows)."""
    rows = live.rows[: live.row_count]
    links = sorted((each.row for each in _current_links(rows)), key=lambda row: (row.position, row.seq))
    new = found.messages[1:]
    before: list[MessageIdentity] = list(map(as_incoming, links))
    placed = [
        PlacedMessage(seq=row.seq, turn=row.turn, position=row.position, is_new=False, status=row.status)
        for row in links
    ]
    if reference.start > 1:
        before.insert(0, MessageIdentity(digest=b"", is_link=True, starts_turn=False, role="user"))
        placed.insert(0, BEFORE_LOADED)
    stubs: Sequence[Message] = [Message(role=each.role, parts=(), raw=b"") for each in before]
    front = len(reference.instructions)
    reply = referenced_reply(live, reference, known=front + len(before), new=len(new), front=front)
    decision = replace(decision, placed=(*reference.placed, *placed, *decision.placed[1:]))
    return WholeReference(
        history=IncomingHistory(
            messages=(*reference.instructions, *stubs, *new),
            identities=(*reference.identities, *before, *found.identities[1:]),
            chains=(*[b""] * front, *[live.chain] * len(before), *found.chains[1:]),
        ),
        match=SessionMatch(
            session_id=live.session.id,
            session=live.session,
            source="body",
            decision=decision,
            rows=rows,
            hidden=reference.hidden,
            expanded_from=reference.start,
        ),
        reply=reply,
    )
