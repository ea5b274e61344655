"""Find the session of a request, and what the request changes in it. Matches are exact and within the tenant."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import reduce
from hashlib import blake2b
from typing import Literal

import msgspec

from tersely.dialects.clients import known as clients
from tersely.domain.client_ids import ClientIds
from tersely.domain.history.links import StoredLink
from tersely.domain.history.reconciliation import Reconciliation, append_messages, reconcile
from tersely.domain.history.repetition import (
    find_before_last_reply,
    find_earlier_question,
    find_unanswered,
    is_repetition,
    reconcile_repetition,
)
from tersely.domain.history.sessions import Session
from tersely.domain.messages import is_outside_messages
from tersely.service.common.offload import run_in_thread_if_large
from tersely.service.recognition.incoming_history import NEWEST, IncomingHistory, extend
from tersely.store.commit import idempotency_keys as appends
from tersely.store.db.connection import Connection
from tersely.store.history import messages, sessions
from tersely.store.history.messages import EndOfCall, TailRow
from tersely.store.history.sessions import ReplyMatch
from tersely.store.history.tail_cache import ROW_SIZE

SessionSource = Literal["header", "body", "lineage", "new"]

# A repeated request without replies within this time is a retry. Later, the same text starts another session.
RETRY_WITHIN = timedelta(minutes=10)
# After a call without a result (a blocked prompt, an empty reply) its history may continue within this time.
GO_ON_WITHIN = timedelta(hours=6)
# How long the reply to a client's own summary call is remembered.
SUMMARY_WITHIN = timedelta(hours=6)
MAX_CHAINS = 1024


class SessionHints(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a request that identify its session.

    ``session_id``: the id in Tersely's own header. ``client``: the client's own ids. ``key``: the hash of the client's
    idempotency key (None: it sent none). ``headers``: the request's headers. ``reply_id`` and ``conversation``: the
    previous reply or the conversation that the request refers to instead of sending its history.
    """

    session_id: str | None = None
    client: ClientIds = msgspec.field(default_factory=ClientIds)
    is_retry: bool = False
    key: str | None = None
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    reply_id: str = ""
    conversation: str = ""


class SessionMatch(msgspec.Struct, frozen=True, kw_only=True):
    """The session of a request (None: it will be created as ``session_id``) and what the request changes in it.

    ``rows``: the stored rows that ``decision`` is based on: the current ones from the session's cut on, or all.
    ``hidden``: those rows that the client does not know. ``first_link``: how many links of the history come before the
    rows. With ``is_delta`` the request carries only new messages, ``rows`` is the stored tail before them, and
    ``head_chain`` the chain value of both together. ``fallback_id``: the id to use if another conversation of the same
    client took ``session_id``. ``expanded_from``: the sequence number from which a history by reference was expanded
    (0: the request carries its history).
    """

    session_id: str
    session: Session | None
    source: SessionSource
    decision: Reconciliation
    rows: Sequence[TailRow]
    hidden: Sequence[TailRow] = ()
    first_link: int = 0
    is_delta: bool = False
    parent: str | None = None
    head_chain: bytes | None = None
    fallback_id: str | None = None
    expanded_from: int = 0

    def needs_all(self, reach: int) -> bool:
        """Return whether a context from sequence number ``reach`` on needs rows that were not loaded."""
        return self.session is not None and not self.is_delta and self.first_link > 0 and reach < self.session.cut


class NewestMatch(msgspec.Struct, frozen=True):
    """The answer to a lookup by the newest `NEWEST` replies of a history; ``reply_match`` is None if none is known."""

    reply_match: ReplyMatch | None


def idempotency_key(headers: Mapping[str, str]) -> str | None:
    """Return the stored form of a call's idempotency key; None if the client sent none."""
    key = clients.idempotency_key(headers)
    return None if key is None else f"call {blake2b(key.encode(errors='replace'), digest_size=16).hexdigest()}"


async def find(
    connection: Connection,
    tenant: str,
    incoming: IncomingHistory,
    hints: SessionHints,
    *,
    now: datetime,
    new_id: Callable[[], str],
    newest: NewestMatch | None = None,
) -> SessionMatch:
    """Find the session by Tersely's own id, or else by lineage, within the client's own id if it sent one.

    ``newest`` is what was found by the newest replies of the history; None: they have not been looked up.
    """
    if hints.session_id is not None:
        return await _by_own_id(connection, tenant, incoming, hints, hints.session_id, now)
    found = await _by_lineage(connection, tenant, incoming, hints, now, newest)
    return found or await _new(connection, tenant, incoming, hints, new_id)


async def _fresh(
    session_id: str,
    incoming: IncomingHistory,
    *,
    source: SessionSource = "new",
    parent: str | None = None,
    spare_id: str | None = None,
) -> SessionMatch:
    return SessionMatch(
        session_id=session_id,
        session=None,
        source=source,
        decision=await run_in_thread_if_large(incoming.size, reconcile, (), incoming.identities, last_seq=0, turns=0),
        rows=(),
        parent=parent,
        fallback_id=spare_id,
    )


async def _by_own_id(
    connection: Connection, tenant: str, incoming: IncomingHistory, hints: SessionHints, session_id: str, now: datetime
) -> SessionMatch:
    session = await sessions.get(connection, tenant, session_id)
    if session is None:
        return await _fresh(session_id, incoming, source="header")
    tail = await messages.tail_rows(connection, tenant, session_id, session.cut, last=session.last_seq)
    size = len(tail) * ROW_SIZE
    shown = await run_in_thread_if_large(size, _shown, tail)
    if await run_in_thread_if_large(size, _is_delta, incoming, shown, session):
        return await _delta(connection, tenant, incoming, shown, session, hints, now)
    reply_match = None
    if session.cut > 1 and (chains := incoming.reply_chains()[:NEWEST]):
        reply_match = await sessions.find_by_chain(connection, tenant, chains, session.client_id, session_id=session_id)
    if reply_match is None or not reply_match.is_current:
        found = await _compare_with_stored(connection, tenant, incoming, session, "header", tail)
        if found.decision.kind != "edited":
            return found
        # The client may have gone back to superseded messages, which the tail does not contain.
        return await _compare_with_stored(connection, tenant, incoming, session, "header", None)
    index = incoming.index_of_chain(reply_match.chain)
    return await _compare_with_stored(
        connection, tenant, incoming, session, "header", tail, hit_seq=reply_match.seq, hit_index=index
    )


def _is_delta(incoming: IncomingHistory, tail: Sequence[TailRow], session: Session) -> bool:
    """Return whether a request under Tersely's own id carries only new messages.

    A whole history contains replies, or equals everything that is stored so far.
    """
    links = [incoming.identities[index] for index in incoming.links]
    if incoming.has_replies:
        return False
    stored = [row.row for row in tail if row.row.is_link and row.row.status == "live"]
    if session.cut > 1:
        return session.last_seq > 0
    return bool(stored) and [row.digest for row in stored] != [link.digest for link in links]


async def _delta(
    connection: Connection,
    tenant: str,
    incoming: IncomingHistory,
    tail: Sequence[TailRow],
    session: Session,
    hints: SessionHints,
    now: datetime,
) -> SessionMatch:
    """Append new messages, and place a repeated delta where it was stored before."""
    counters = {"last_seq": session.last_seq, "turns": session.turns}
    instructions = [row.row for row in tail if not row.row.is_link]
    has_instructions = any(not identity.is_link for identity in incoming.identities)
    again = await _asked_before(connection, tenant, incoming, tail, session, hints, now)
    if again:
        decision = reconcile_repetition(
            again, instructions if has_instructions else (), incoming.identities, **counters
        )
        before = [each for each in tail if not each.row.is_link or each.row.position < again[0].position]
    else:
        unanswered, replies = await _sent_again(connection, tenant, incoming, tail, session)
        left = {row.seq for row in (*unanswered, *replies)}
        before = [each for each in tail if each.row.seq not in left]
        live = (each.row.seq for each in reversed(before) if each.row.is_link and each.row.status == "live")
        replaced = await _replaced_instructions(connection, tenant, incoming, tail, session)
        decision = append_messages(
            incoming.identities,
            **counters,
            turn=max((row.row.turn for row in tail), default=session.turns),
            follows_seq=next(live, None if session.last_seq else 0),
            superseded=[*replaced, *(row.seq for row in replies)],
            repeated=unanswered,
        )
    return SessionMatch(
        session_id=session.id,
        session=session,
        source="header",
        decision=decision,
        rows=tail,
        is_delta=True,
        head_chain=await _whole_chain(connection, tenant, incoming, before, session),
    )


async def _sent_again(
    connection: Connection, tenant: str, incoming: IncomingHistory, tail: Sequence[TailRow], session: Session
) -> tuple[Sequence[StoredLink], Sequence[StoredLink]]:
    """Return the session's last messages with which a delta begins, and the replies to them that its client left before
    their end: it does not have them.
    """
    rows = [row.row for row in tail]
    if unanswered := find_unanswered(rows, incoming.identities):
        return unanswered, ()
    before = find_before_last_reply(rows, incoming.identities)
    if before is None:
        return (), ()
    end = await messages.end_of_call(
        connection, tenant, session.id, before.answered.seq, before.replies[-1].seq, calls=session.calls
    )
    return (before.rows, before.replies) if end.client_left else ((), ())


async def _replaced_instructions(
    connection: Connection, tenant: str, incoming: IncomingHistory, tail: Sequence[TailRow], session: Session
) -> list[int]:
    """Return the stored instructions that those of the request replace: outside the messages and among them
    separately.
    """
    brought = [message.raw for message in incoming.messages if message.is_instruction]
    stored = [row for row in tail if row.row.is_instruction] if brought else []
    kinds = {is_outside_messages(raw) for raw in brought}
    same = {identity.digest for identity in incoming.identities if identity.is_instruction}
    # Chat completions have no instructions outside the messages.
    in_doubt = [row.row.seq for row in stored if row.row.digest not in same and row.dialect != "openai_chat"]
    if len(kinds) > 1 or not in_doubt:
        return [row.row.seq for row in stored]
    content = await messages.content(connection, tenant, session.id, in_doubt)
    others = {message.seq for message in content if is_outside_messages(message.raw) not in kinds}
    return [row.row.seq for row in stored if row.row.seq not in others]


async def _asked_before(
    connection: Connection,
    tenant: str,
    incoming: IncomingHistory,
    tail: Sequence[TailRow],
    session: Session,
    hints: SessionHints,
    now: datetime,
) -> Sequence[StoredLink]:
    """Return the stored messages that a delta repeats; an empty sequence if it is new."""
    rows = [row.row for row in tail]
    earlier = await appends.find(connection, tenant, session.id, hints.key) if hints.key else None
    if earlier is not None and earlier.digest == incoming.question_digest:
        named = [row for row in rows if earlier.first_seq <= row.seq <= earlier.last_seq]
        if (before := find_earlier_question(named, incoming.identities)) is not None:
            return before.rows
    before = find_earlier_question(rows, incoming.identities)
    if before is None:
        return ()
    question = before.answered.seq
    created_at = next(row.created_at for row in tail if row.row.seq == question)
    end = EndOfCall()
    if not (hints.is_retry or (before.is_last and not before.replies)):
        reply = before.replies[-1].seq if before.replies else 0
        end = await messages.end_of_call(connection, tenant, session.id, question, reply, calls=session.calls)
    if not end.is_question:
        return ()
    is_repeated = is_repetition(
        before,
        is_retry=hints.is_retry,
        age=now - created_at,
        client_left=end.client_left,
        ended=None if end.ended_at is None else now - end.ended_at,
    )
    return before.rows if is_repeated else ()


async def _whole_chain(
    connection: Connection, tenant: str, incoming: IncomingHistory, tail: Sequence[TailRow], session: Session
) -> bytes:
    """Return the chain value of the stored and the new messages together, by which later requests with the whole
    history match.
    """
    links = [row.row for row in tail if row.row.is_link]
    last = max((index for index, row in enumerate(links) if row.relayed), default=None)
    if last is not None:
        chain = await messages.chain_of(connection, tenant, session.id, links[last].seq)
        after = links[last + 1 :]
    else:
        # The beginning of a cut history is not loaded. Use a chain value that no request matches.
        chain, after = b"" if session.cut == 1 else session.id.encode(), links
    digests = [row.digest for row in after] + [incoming.identities[index].digest for index in incoming.links]
    return await run_in_thread_if_large(len(digests) * ROW_SIZE, reduce, extend, digests, chain)


def continued(
    incoming: IncomingHistory, hints: SessionHints, reply_match: ReplyMatch, *, is_beginning_known: bool = False
) -> SessionMatch | None:
    """Return the match of a request that continues from a reply in its session's tail; None if more rows are needed.

    ``is_beginning_known``: the messages before the tail were compared with the request at the session's last call.
    """
    if reply_match.tail is None:
        return None
    first_link = _links_before(
        reply_match.tail, incoming, reply_match.session, reply_match.seq, incoming.index_of_chain(reply_match.chain)
    )
    if first_link < 0 or (_is_in_doubt(reply_match.session) and not is_beginning_known):
        return None
    return _match_from_rows(
        incoming, reply_match.session, hints.client.source or "lineage", reply_match.tail, first_link
    )


async def with_everything(
    connection: Connection, tenant: str, incoming: IncomingHistory, match: SessionMatch
) -> SessionMatch:
    """Return the match of the same session, based on all of its rows."""
    assert match.session is not None
    return await _compare_with_stored(connection, tenant, incoming, match.session, match.source, None)


async def _by_lineage(
    connection: Connection,
    tenant: str,
    incoming: IncomingHistory,
    hints: SessionHints,
    now: datetime,
    newest: NewestMatch | None,
) -> SessionMatch | None:
    client = hints.client
    source: SessionSource = client.source or "lineage"
    chains = incoming.reply_chains()[:MAX_CHAINS]
    reply_match = None if newest is None else newest.reply_match
    for some in (chains[:NEWEST] if newest is None else [], chains[NEWEST:]):
        if reply_match is None and some:
            reply_match = await sessions.find_by_chain(connection, tenant, some, client.id)
    if reply_match is not None:
        tail: list[TailRow] | None = None
        if reply_match.is_current and reply_match.seq >= reply_match.session.cut:
            tail = await messages.tail_rows(
                connection, tenant, reply_match.session.id, reply_match.session.cut, last=reply_match.session.last_seq
            )
        index = incoming.index_of_chain(reply_match.chain)
        return await _compare_with_stored(
            connection, tenant, incoming, reply_match.session, source, tail, hit_seq=reply_match.seq, hit_index=index
        )
    if chains:
        session = None
        if replies := incoming.identifying_replies():
            session = await sessions.find_by_reply(connection, tenant, replies, client.id)
        if session is not None:
            return await _compare_with_stored(connection, tenant, incoming, session, source, None)
    if summaries := await run_in_thread_if_large(incoming.summary_size, incoming.summaries):
        by = clients.requester_id(hints.headers, client)
        session = await sessions.find_by_side_reply(connection, tenant, summaries, now - SUMMARY_WITHIN, by)
        if session is not None:
            return await _compare_with_stored(connection, tenant, incoming, session, source, None)
    if not chains and hints.key is not None:
        earlier = await appends.find_anywhere(connection, tenant, hints.key, incoming.question_digest)
        session = await sessions.get(connection, tenant, earlier.session_id) if earlier is not None else None
        if session is not None and session.client_id == client.id:
            return await _compare_with_stored(connection, tenant, incoming, session, source, None)
    session = await _without_replies(connection, tenant, incoming, hints, now)
    return (
        await _compare_with_stored(connection, tenant, incoming, session, source, None) if session is not None else None
    )


async def _without_replies(
    connection: Connection, tenant: str, incoming: IncomingHistory, hints: SessionHints, now: datetime
) -> Session | None:
    """Find the session of a history without replies: a retry, a refusal of a reply, or further messages of the user."""
    client = hints.client
    if not incoming.reply_chains() and incoming.links:
        # Under a client's own id, equal beginnings belong to the same conversation.
        session = await sessions.find_unanswered(
            connection,
            tenant,
            incoming.head_chain,
            now - RETRY_WITHIN,
            client.id,
            is_retry=hints.is_retry or client.id is not None,
        )
        if session is not None:
            return session
    if (refused := incoming.refused_beginning()) is not None:
        chain = sessions.answered_in_words(refused)
        session = await sessions.find_begun(connection, tenant, [chain], now - GO_ON_WITHIN, client.id)
        if session is not None:
            return session
    if beginnings := incoming.unanswered_beginnings()[:MAX_CHAINS]:
        return await sessions.find_begun(connection, tenant, beginnings, now - GO_ON_WITHIN, client.id)
    return None


async def _compare_with_stored(
    connection: Connection,
    tenant: str,
    incoming: IncomingHistory,
    session: Session,
    source: SessionSource,
    tail: list[TailRow] | None,
    *,
    hit_seq: int = 0,
    hit_index: int = 0,
) -> SessionMatch:
    """Reconcile the request with the tail where that suffices, else with all stored rows."""
    first_link = 0
    if tail is not None and hit_seq:
        first_link = _links_before(tail, incoming, session, hit_seq, hit_index)
        if first_link >= 0 and _is_in_doubt(session):
            before = await messages.links_before(connection, tenant, session.id, session.cut)
            if before != [incoming.identities[index].digest for index in incoming.links[:first_link]]:
                first_link = -1
    elif tail is not None and session.cut > 1:
        tail = None
    if tail is None or first_link < 0:
        tail, first_link = await messages.all_rows(connection, tenant, session.id, last=session.last_seq), 0
    return await run_in_thread_if_large(incoming.size, _match_from_rows, incoming, session, source, tail, first_link)


def _match_from_rows(
    incoming: IncomingHistory, session: Session, source: SessionSource, tail: list[TailRow], first_link: int
) -> SessionMatch:
    shown = _shown(tail)
    rows: list[StoredLink] = [each.row for each in shown]
    decision = reconcile(
        rows,
        incoming.identities,
        last_seq=session.last_seq,
        turns=session.turns,
        first_link=first_link,
        allow_restore=True,
        is_summary=incoming.is_framed_summary,
    )
    return SessionMatch(
        session_id=session.id,
        session=session,
        source=source,
        decision=decision,
        rows=shown,
        hidden=[each for each in tail if each.is_hidden] if len(shown) < len(tail) else (),
        first_link=first_link,
    )


def _shown(tail: Sequence[TailRow]) -> list[TailRow]:
    """Return the rows that the client knows."""
    return [row for row in tail if not row.is_hidden]


def _is_in_doubt(session: Session) -> bool:
    """Return whether the messages before the tail may have changed since a reply's chain value was stored."""
    return session.cut > 1 and session.edits > 0


def _links_before(
    tail: Sequence[TailRow], incoming: IncomingHistory, session: Session, hit_seq: int, hit_index: int
) -> int:
    """Return how many links of the incoming history come before the tail, given one that is in both; -1 if it is
    unclear.
    """
    links = [row.row for row in tail if row.row.is_link and not row.is_hidden]
    digests = [identity.digest for identity in incoming.identities[:hit_index] if identity.is_link]
    # A client may omit messages that were taken back, or still send them.
    for stored in (links, [row for row in links if row.status == "live"]):
        index = next((index for index, row in enumerate(stored) if row.seq == hit_seq), None)
        if index is None or index > len(digests):
            continue
        first_link = len(digests) - index
        # A client may have put its summary in front later; then the messages in between are not in the tail. If all
        # current rows are loaded, the client has gone back to superseded ones.
        if digests[first_link:] == [row.digest for row in stored[:index]]:
            return -1 if first_link and session.cut == 1 else first_link
    return -1


async def _new(
    connection: Connection, tenant: str, incoming: IncomingHistory, hints: SessionHints, new_id: Callable[[], str]
) -> SessionMatch:
    """Create a new session. The first one under a client's own id takes that id; later ones are its children.

    A request with an idempotency key always gets the same session, also if it is sent several times at once.
    """
    client = hints.client
    if client.id is None:
        session_id = new_id() if hints.key is None else extend(incoming.head_chain, hints.key.encode()).hex()
        return await _fresh(session_id, incoming, parent=client.parent)
    existing = await sessions.get(connection, tenant, client.id)
    if existing is None:
        return await _fresh(client.id, incoming, parent=client.parent, spare_id=new_id())
    # Several sessions may share a client's id. The session that was given this id is looked up by it.
    first = existing if existing.client_id == client.id else None
    if first is None:
        first = await sessions.find_by_client_id(connection, tenant, client.id)
    return await _fresh(new_id(), incoming, parent=first.id if first else client.parent)
