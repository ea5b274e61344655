"""Requests that reference their history instead of sending it: by the reply that they continue, or as a conversation.

The history is read from the store as if the request had sent it. So it continues, branches and repeats by the same
rules as any other history.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from tersely.dialects.dialect import Dialect
from tersely.domain.history.isolation import StoredInDialect, isolate, share_messages
from tersely.domain.history.links import MessageIdentity, as_incoming
from tersely.domain.history.reconciliation import reconcile
from tersely.domain.history.sessions import Session
from tersely.domain.messages import Message, with_injected_text
from tersely.service.common.offload import run_in_thread_if_large
from tersely.service.context.stored_messages import read_client_view
from tersely.service.recognition.incoming_history import IncomingHistory, extend
from tersely.service.recognition.session_lookup import SessionHints, SessionMatch, SessionSource
from tersely.store.commit import conversations, reply_ids
from tersely.store.commit.conversations import ConversationLinks
from tersely.store.commit.records import HistoryOwner, ReferencedReply
from tersely.store.db.connection import Connection
from tersely.store.history import messages, sessions
from tersely.store.history.messages import StoredMessage, TailRow
from tersely.store.history.tail_cache import ROW_SIZE

# Stands for everything before the loaded rows.
_BEFORE = MessageIdentity(digest=b"", is_link=True, starts_turn=False, role="user")


class ReferencedHistory(msgspec.Struct, frozen=True, kw_only=True):
    """The history that a request references: that of ``session`` (None: the session does not exist yet) up to the reply
    ``seq`` (0: there is no reply yet; a reply that left no message stands for its question). ``chain`` is the hash of
    that history (empty: not stored), ``rows`` are the session's rows from its cut on. ``conversation`` is the id of the
    conversation that the request continues.
    """

    session_id: str
    session: Session | None
    seq: int
    chain: bytes
    history_owner: HistoryOwner
    source: SessionSource
    rows: Sequence[TailRow] = ()
    conversation: str = ""

    @property
    def is_untouched(self) -> bool:
        """True if model and client have the same view of the whole history."""
        return all(row.row.status == "live" and not row.is_hidden for row in self.rows) and (
            self.session is None or self.session.cut == 1
        )


class ResolvedHistory(msgspec.Struct, frozen=True, kw_only=True):
    """A referenced history, and behind it the request's own messages. `fill` adds the content of the stored messages,
    whose indexes are ``unfilled``. ``reply`` is the reply that the request continues.
    """

    history: IncomingHistory
    match: SessionMatch
    reply: ReferencedReply
    history_owner: HistoryOwner
    unfilled: Sequence[int] = ()

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages that have content: all of them after `fill`."""
        return tuple(message for message in self.history.messages if message.raw)


async def find(connection: Connection, tenant: str, hints: SessionHints) -> ReferencedHistory | None:
    """Find the history that a request references; None if it is not known here, or if the request references two."""
    if (hints.reply_id and hints.conversation) or not (hints.reply_id + hints.conversation).isprintable():
        return None
    if hints.conversation:
        return await _find_conversation(connection, tenant, hints, hints.session_id or hints.conversation)
    found = await reply_ids.find(connection, tenant, hints.reply_id)
    if found is None:
        return None
    session = found.hit.session
    return ReferencedHistory(
        session_id=session.id,
        session=session,
        seq=found.hit.seq,
        chain=found.hit.chain,
        history_owner=found.history_owner,
        source="header" if hints.session_id == session.id else "body",
        rows=await messages.tail_rows(connection, tenant, session.id, session.cut, last=session.last_seq),
    )


async def _find_conversation(
    connection: Connection, tenant: str, hints: SessionHints, session_id: str
) -> ReferencedHistory:
    """Find a conversation. The host appends requests and replies to it, so a request continues its newest reply, also
    where a branch has left that since.
    """
    source: SessionSource = "header" if hints.session_id else "body"
    session = await sessions.get(connection, tenant, session_id)
    owner: HistoryOwner = "host"
    seq, chain, rows = 0, b"", list[TailRow]()
    if session is not None:
        rows = await messages.tail_rows(connection, tenant, session_id, session.cut, last=session.last_seq)
        seq = await conversations.last_reply(connection, tenant, session, hints.conversation)
        if not seq:  # its replies came before conversations were noted, or none did
            seq = _newest_reply(rows)
        if not seq and session.cut > 1:
            seq = _newest_reply(await messages.all_rows(connection, tenant, session_id, last=session.last_seq))
    if seq:
        chain = await messages.chain_of(connection, tenant, session_id, seq)
        owner = await reply_ids.history_owner(connection, tenant, session_id, seq)
    return ReferencedHistory(
        session_id=session_id,
        session=session,
        seq=seq,
        chain=chain,
        history_owner=owner,
        source=source,
        rows=rows,
        conversation=hints.conversation,
    )


def _newest_reply(rows: Sequence[TailRow]) -> int:
    replies = (row for row in reversed(rows) if row.row.role == "assistant" and not row.is_hidden)
    return next((row.row.seq for row in replies if row.row.status != "superseded"), 0)


async def resolve_history(
    connection: Connection,
    tenant: str,
    referenced: ReferencedHistory,
    own: IncomingHistory,
    dialect: Dialect,
    *,
    start: int,
) -> ResolvedHistory | None:
    """Return the history, and the request's ``own`` messages behind it; None if it cannot be reconstructed any more.

    The history begins at sequence number ``start`` if that is enough.
    """
    session = referenced.session
    if session is None:
        return _resolve(referenced, own, [], [], dialect, anchor=(0, b""), start=1, last_seq=0, turns=0)
    tail: Sequence[TailRow] = referenced.rows
    if start < session.cut:
        tail = await messages.tail_rows(connection, tenant, session.id, start, last=session.last_seq)
    shown = [row for row in tail if not row.is_hidden]
    history = await messages.leading_to(connection, tenant, session.id, [row.row for row in shown], referenced.seq)
    if history is None or (start > 1 and not history):
        start = 1
        tail = await messages.all_rows(connection, tenant, session.id, last=session.last_seq)
        shown = [row for row in tail if not row.is_hidden]
        history = await messages.leading_to(connection, tenant, session.id, [row.row for row in shown], referenced.seq)
        if history is None:
            return None
    links = ConversationLinks()
    if referenced.conversation:
        every = [row.row for row in shown]
        links = await conversations.links_of(
            connection, tenant, session.id, referenced.conversation, every, calls=session.calls
        )
        history = [row for row in history if row.seq not in links.failed]
    kept = await _kept_rows(connection, tenant, session, start)
    earlier = {row.row.seq for row in kept}
    rows = sorted(
        [*kept, *(row for row in tail if row.row.seq not in earlier)], key=lambda row: (row.row.position, row.row.seq)
    )
    seqs = earlier | {row.seq for row in history}
    carried = [row for row in rows if row.row.seq in seqs and not row.is_hidden]
    uncarried = await _uncarried_instructions(connection, tenant, session.id, carried, dialect)
    carried = [row for row in carried if row.row.seq not in uncarried]
    anchor = (referenced.seq, referenced.chain)
    if referenced.seq and not referenced.chain:
        relayed = (row.row.seq for row in reversed(carried) if row.row.role == "assistant" and row.row.relayed)
        seq = next(relayed, 0)
        if not seq and start > 1:
            return await resolve_history(connection, tenant, referenced, own, dialect, start=1)
        anchor = (seq, await messages.chain_of(connection, tenant, session.id, seq) if seq else b"")
    unlinked = {row.row.seq for row in carried if not row.row.is_link}
    while start - 1 in unlinked:
        start -= 1  # they precede the first message of the resolved history
    counters = {"last_seq": session.last_seq, "turns": session.turns}
    return await run_in_thread_if_large(
        len(rows) * ROW_SIZE,
        _resolve,
        referenced,
        own,
        carried,
        rows,
        dialect,
        anchor=anchor,
        start=start,
        staying=links.staying,
        **counters,
    )


async def _kept_rows(connection: Connection, tenant: str, session: Session, start: int) -> list[TailRow]:
    """Return the rows that the epoch keeps from before ``start``."""
    seqs = [seq for seq in session.plan.kept if seq < start] if session.plan else []
    rows = await messages.rows_of(connection, tenant, session.id, seqs) if seqs else []
    return sorted((row for row in rows if row.row.status != "superseded"), key=lambda row: row.row.position)


async def _uncarried_instructions(
    connection: Connection, tenant: str, session_id: str, rows: Sequence[TailRow], dialect: Dialect
) -> set[int]:
    """Return the sequence numbers of instructions that a history does not carry: those that hold for one request, and
    those of another dialect.
    """
    instructions = [row for row in rows if not row.row.is_link]
    found = {row.row.seq for row in instructions if not share_messages(row.dialect, dialect.name)}
    seqs = [row.row.seq for row in instructions if row.row.seq not in found]
    stored = await messages.content(connection, tenant, session_id, seqs) if seqs else []
    return found | {message.seq for message in stored if dialect.is_per_request(message.raw)}


def _resolve(
    referenced: ReferencedHistory,
    own: IncomingHistory,
    carried: Sequence[TailRow],
    rows: Sequence[TailRow],
    dialect: Dialect,
    *,
    anchor: tuple[int, bytes],
    start: int,
    last_seq: int,
    turns: int,
    staying: Collection[int] = (),
) -> ResolvedHistory:
    """Join history and request. ``anchor``: the newest reply in it, and the hash of the history up to that (0: there is
    no reply). ``staying``: messages that other calls have added to the conversation meanwhile.
    """
    front = sum(dialect.is_per_request(message.raw) for message in own.messages)
    before = [as_incoming(row.row) for row in carried]
    stored = [Message(role=row.row.role, parts=(), raw=b"") for row in carried]
    if start > 1:
        shown = (index for index, row in enumerate(carried) if row.row.is_link or row.row.seq >= start)
        index = next(shown, len(before))
        before.insert(index, _BEFORE)
        stored.insert(index, Message(role="user", parts=(), raw=b""))
    incoming = [*own.identities[:front], *before, *own.identities[front:]]
    indexes = range(len(incoming))
    decision = reconcile(
        [row.row for row in rows if not row.is_hidden],
        incoming,
        last_seq=last_seq,
        turns=turns,
        first_link=int(start > 1),
        allow_restore=True,
        question_index=front + len(before),
        staying=staying,
    )
    return ResolvedHistory(
        history=IncomingHistory(
            messages=(*own.messages[:front], *stored, *own.messages[front:]),
            identities=tuple(incoming),
            chains=_chains(incoming, *anchor),
        ),
        match=SessionMatch(
            session_id=referenced.session_id,
            session=referenced.session,
            source=referenced.source,
            decision=decision,
            rows=[row for row in rows if not row.is_hidden],
            hidden=[row for row in rows if row.is_hidden],
            expanded_from=start,
        ),
        reply=ReferencedReply(
            seq=referenced.seq,
            own_indexes=(*indexes[:front], *indexes[front + len(before) :]),
            own_before_reply=front,
            is_conversation=bool(referenced.conversation),
            conversation=referenced.conversation,
        ),
        history_owner=referenced.history_owner,
        unfilled=[index for index in indexes[front : front + len(before)] if decision.placed[index].seq],
    )


def _chains(incoming: Sequence[MessageIdentity], reply_seq: int, reply_chain: bytes) -> tuple[bytes, ...]:
    """Return the hash chain after each message; it is known after the reply ``reply_seq``."""
    chains: list[bytes] = []
    chain = b""
    for message in incoming:
        if message.is_link:
            chain = extend(chain, message.digest)
        if reply_seq and message.seq == reply_seq:
            chain = reply_chain
        chains.append(chain)
    return tuple(chains)


async def fill(connection: Connection, tenant: str, resolved: ResolvedHistory, dialect: Dialect) -> ResolvedHistory:
    """Return the history with the content of its stored messages, as the client knows them."""
    if not resolved.unfilled:
        return resolved
    placed = resolved.match.decision.placed
    stored = await messages.content(
        connection, tenant, resolved.match.session_id, [placed[index].seq for index in resolved.unfilled]
    )
    size = sum(len(message.raw) for message in stored)
    return await run_in_thread_if_large(size, _filled, resolved, {message.seq: message for message in stored}, dialect)


def _filled(resolved: ResolvedHistory, by_seq: Mapping[int, StoredMessage], dialect: Dialect) -> ResolvedHistory:
    placed = resolved.match.decision.placed
    filled = list(resolved.history.messages)
    found = ((index, by_seq.get(placed[index].seq)) for index in resolved.unfilled)
    stored = {index: read_client_view(each, dialect) for index, each in found if each is not None and each.raw}
    isolated = isolate([stored.get(index, StoredInDialect(message=message)) for index, message in enumerate(filled)])
    for index in stored:
        shown = isolated[index]
        if len(shown) == 1:
            filled[index] = shown[0] if shown[0].raw else _read_again(shown[0], dialect)
        elif shown:  # this dialect writes them as one message
            parts = tuple(part for message in shown for part in message.parts)
            injected = tuple(block for message in shown for block in message.injected)
            whole = Message(role=shown[-1].role, parts=parts, raw=b"", injected=injected)
            filled[index] = replace(whole, raw=dialect.write_message(with_injected_text(whole)))
    return replace(resolved, history=replace(resolved.history, messages=tuple(filled)), unfilled=())


def _read_again(message: Message, dialect: Dialect) -> Message:
    """Return the message in ``dialect``. Text from another dialect that looks like an injected block is none."""
    written = dialect.read_message(dialect.write_message(with_injected_text(message)))
    if written.injected == message.injected:
        return written
    return replace(written, parts=message.parts, injected=message.injected)
