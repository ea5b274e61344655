"""Which session a request belongs to, and what the request means for it. Never fuzzy, always within the tenant."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import reduce
from hashlib import blake2b
from typing import Literal

from tersely.dialects.clients import known as clients
from tersely.domain.client_ids import ClientIds
from tersely.domain.history.reconciliation import (
    Reconciliation,
    StoredLink,
    append_messages,
    find_earlier_question,
    is_repetition,
    reconcile,
    reconcile_repetition,
)
from tersely.domain.history.sessions import Session
from tersely.domain.messages import is_outside_messages
from tersely.service.common.offload import run_in_thread_if_large
from tersely.service.recognition.incoming_history import NEWEST, IncomingHistory, extend
from tersely.store.commit import idempotency_keys as appends
from tersely.store.db.connection import Connection
from tersely.store.history import messages, sessions
from tersely.store.history.messages import TailRow
from tersely.store.history.sessions import ReplyMatch
from tersely.store.history.tail_cache import ROW_SIZE

Source = Literal["header", "body", "lineage", "new"]

# A request without a reply is tried again within this time; later, the same words are a conversation of their own.
RETRY_WITHIN = timedelta(minutes=10)
# So long after a call that came to nothing (a blocked prompt, an empty reply) its history may be gone on with.
GO_ON_WITHIN = timedelta(hours=6)
# How long the reply to a client's own summary call is remembered.
SUMMARY_WITHIN = timedelta(hours=6)
MAX_CHAINS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionHints:
    """What a request says about its session: the id in Tersely's own header, and a client's own ids; the reply that it
    goes on from, or the conversation that it is part of, where that is all it says of its history.

    ``key`` identifies the client's idempotency key (None: it sent none). ``headers`` are those of the request.
    """

    session_id: str | None = None
    client: ClientIds = field(default_factory=ClientIds)
    is_retry: bool = False
    key: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    reply_id: str = ""
    conversation: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionMatch:
    """The session of a request (None: to be made under ``session_id``) and what the request means for it.

    ``rows`` are the stored rows that the decision was made on: the current ones from the session's cut on, or all;
    ``hidden`` those among them that the client knows nothing of.
    ``first_link`` says how many links of the history come before them. In ``delta`` mode the request carries only
    what is new, ``rows`` is the stored tail that comes before it, and ``head_chain`` the identity of both together.
    ``spare_id`` is for a session whose id turns out to be taken by another conversation of the same client.
    ``start``: the history was not sent but named, and was laid out from that sequence number on (0: it was sent).
    """

    session_id: str
    session: Session | None
    source: Source
    decision: Reconciliation
    rows: Sequence[TailRow]
    hidden: Sequence[TailRow] = ()
    first_link: int = 0
    is_delta: bool = False
    parent: str | None = None
    head_chain: bytes | None = None
    spare_id: str | None = None
    start: int = 0

    def needs_all(self, reach: int) -> bool:
        """Whether a context that reaches back to sequence number ``reach`` needs rows that were not loaded."""
        return self.session is not None and not self.is_delta and self.first_link > 0 and reach < self.session.cut


def idempotency_key(headers: Mapping[str, str]) -> str | None:
    """Return what stands in the store for the idempotency key of a call; None where the client sent none."""
    key = clients.idempotency_key(headers)
    return None if key is None else f"call {blake2b(key.encode(errors='replace'), digest_size=16).hexdigest()}"


async def find(
    connection: Connection,
    tenant: str,
    arrival: IncomingHistory,
    asked: SessionHints,
    *,
    now: datetime,
    new_id: Callable[[], str],
) -> SessionMatch:
    """Find the session: by Tersely's own id; else by lineage, within a client's own id where there is one."""
    if asked.session_id is not None:
        return await _by_own_id(connection, tenant, arrival, asked, asked.session_id, now)
    found = await _by_lineage(connection, tenant, arrival, asked, now)
    return found or await _new(connection, tenant, arrival, asked, new_id)


async def _fresh(
    session_id: str,
    arrival: IncomingHistory,
    *,
    source: Source = "new",
    parent: str | None = None,
    spare_id: str | None = None,
) -> SessionMatch:
    return SessionMatch(
        session_id=session_id,
        session=None,
        source=source,
        decision=await run_in_thread_if_large(arrival.size, reconcile, (), arrival.incoming, last_seq=0, turns=0),
        rows=(),
        parent=parent,
        spare_id=spare_id,
    )


async def _by_own_id(
    connection: Connection, tenant: str, arrival: IncomingHistory, asked: SessionHints, session_id: str, now: datetime
) -> SessionMatch:
    session = await sessions.get(connection, tenant, session_id)
    if session is None:
        return await _fresh(session_id, arrival, source="header")
    tail = await messages.tail_rows(connection, tenant, session_id, session.cut, last=session.last_seq)
    weight = len(tail) * ROW_SIZE
    shown = await run_in_thread_if_large(weight, _shown, tail)
    if await run_in_thread_if_large(weight, _is_delta, arrival, shown, session):
        return await _delta(connection, tenant, arrival, shown, session, asked, now)
    hit = None
    if session.cut > 1 and (chains := arrival.reply_chains()[:NEWEST]):
        hit = await sessions.find_by_chain(connection, tenant, chains, session.client_id, session_id=session_id)
    if hit is None or not hit.is_current:
        found = await _lay_beside(connection, tenant, arrival, session, "header", tail)
        if found.decision.kind != "edited":
            return found
        # The client may have gone back to superseded messages, which the tail does not hold.
        return await _lay_beside(connection, tenant, arrival, session, "header", None)
    index = arrival.index_of_chain(hit.chain)
    return await _lay_beside(connection, tenant, arrival, session, "header", tail, hit_seq=hit.seq, hit_index=index)


def _is_delta(arrival: IncomingHistory, tail: Sequence[TailRow], session: Session) -> bool:
    """Whether a request under Tersely's own id carries only what is new.

    A whole history carries replies, or is the whole of what is stored so far.
    """
    links = [arrival.incoming[index] for index in arrival.links]
    if arrival.has_replies:
        return False
    stored = [row.row for row in tail if row.row.is_link and row.row.status == "live"]
    if session.cut > 1:
        return session.last_seq > 0
    return bool(stored) and [row.digest for row in stored] != [link.digest for link in links]


async def _delta(
    connection: Connection,
    tenant: str,
    arrival: IncomingHistory,
    tail: Sequence[TailRow],
    session: Session,
    asked: SessionHints,
    now: datetime,
) -> SessionMatch:
    """Put what is new at the end, and what repeats an earlier delta at the place of that."""
    counters = {"last_seq": session.last_seq, "turns": session.turns}
    instructions = [row.row for row in tail if not row.row.is_link]
    has_instructions = any(not incoming.is_link for incoming in arrival.incoming)
    again = await _asked_before(connection, tenant, arrival, tail, session, asked, now)
    if again:
        decision = reconcile_repetition(again, instructions if has_instructions else (), arrival.incoming, **counters)
        before = [each for each in tail if not each.row.is_link or each.row.position < again[0].position]
    else:
        turn = max((row.row.turn for row in tail), default=session.turns)
        replaced = await _replaced_instructions(connection, tenant, arrival, tail, session)
        decision = append_messages(arrival.incoming, **counters, turn=turn, superseded=replaced)
        before = list(tail)
    return SessionMatch(
        session_id=session.id,
        session=session,
        source="header",
        decision=decision,
        rows=tail,
        is_delta=True,
        head_chain=await _whole_chain(connection, tenant, arrival, before, session),
    )


async def _replaced_instructions(
    connection: Connection, tenant: str, arrival: IncomingHistory, tail: Sequence[TailRow], session: Session
) -> list[int]:
    """The stored instructions that those of a request replace: what stands beside the messages replaces its like, and
    so does what stands among them.
    """
    brought = [message.raw for message in arrival.messages if message.is_instruction]
    stored = [row for row in tail if row.row.is_instruction] if brought else []
    kinds = {is_outside_messages(raw) for raw in brought}
    same = {incoming.digest for incoming in arrival.incoming if incoming.is_instruction}
    # Chat completions have no place beside the messages.
    in_doubt = [row.row.seq for row in stored if row.row.digest not in same and row.dialect != "openai_chat"]
    if len(kinds) > 1 or not in_doubt:
        return [row.row.seq for row in stored]
    content = await messages.content(connection, tenant, session.id, in_doubt)
    others = {message.seq for message in content if is_outside_messages(message.raw) not in kinds}
    return [row.row.seq for row in stored if row.row.seq not in others]


async def _asked_before(
    connection: Connection,
    tenant: str,
    arrival: IncomingHistory,
    tail: Sequence[TailRow],
    session: Session,
    asked: SessionHints,
    now: datetime,
) -> Sequence[StoredLink]:
    """Return the stored messages that a delta repeats; none where it says something new."""
    rows = [row.row for row in tail]
    earlier = await appends.find(connection, tenant, session.id, asked.key) if asked.key else None
    if earlier is not None and earlier.digest == arrival.asked_digest:
        named = [row for row in rows if earlier.first_seq <= row.seq <= earlier.last_seq]
        if (before := find_earlier_question(named, arrival.incoming)) is not None:
            return before.rows
    before = find_earlier_question(rows, arrival.incoming)
    if before is None:
        return ()
    question = before.answered.seq
    created_at = next(row.created_at for row in tail if row.row.seq == question)
    broke_off, ended_at = False, None
    if not (asked.is_retry or (before.is_last and not before.replies)):
        reply = before.replies[-1].seq if before.replies else 0
        broke_off, ended_at = await messages.end_of_call(
            connection, tenant, session.id, question, reply, calls=session.calls
        )
    is_repeated = is_repetition(
        before,
        is_retry=asked.is_retry,
        age=now - created_at,
        broke_off=broke_off,
        ended=None if ended_at is None else now - ended_at,
    )
    return before.rows if is_repeated else ()


async def _whole_chain(
    connection: Connection, tenant: str, arrival: IncomingHistory, tail: Sequence[TailRow], session: Session
) -> bytes:
    """The identity of what is stored with what has arrived, so that a later request that carries it all is known."""
    links = [row.row for row in tail if row.row.is_link]
    last = max((index for index, row in enumerate(links) if row.relayed), default=None)
    if last is not None:
        chain = await messages.chain_of(connection, tenant, session.id, links[last].seq)
        after = links[last + 1 :]
    else:
        # The beginning of a history that was cut is not at hand: a chain of the session's own, which nothing matches.
        chain, after = b"" if session.cut == 1 else session.id.encode(), links
    digests = [row.digest for row in after] + [arrival.incoming[index].digest for index in arrival.links]
    return await run_in_thread_if_large(len(digests) * ROW_SIZE, reduce, extend, digests, chain)


def continued(
    arrival: IncomingHistory, asked: SessionHints, hit: ReplyMatch, *, is_beginning_known: bool = False
) -> SessionMatch | None:
    """Return the finding for a request that goes on from a reply in the tail of its session; None where more is needed.

    ``is_beginning_known``: what comes before the tail was compared with the request when the session was last called.
    """
    if hit.tail is None:
        return None
    first_link = _links_before(hit.tail, arrival, hit.session, hit.seq, arrival.index_of_chain(hit.chain))
    if first_link < 0 or (_is_in_doubt(hit.session) and not is_beginning_known):
        return None
    return _laid(arrival, hit.session, asked.client.source or "lineage", hit.tail, first_link)


async def with_everything(
    connection: Connection, tenant: str, arrival: IncomingHistory, found: SessionMatch
) -> SessionMatch:
    """The same finding, made on all rows of the session."""
    assert found.session is not None
    return await _lay_beside(connection, tenant, arrival, found.session, found.source, None)


async def _by_lineage(
    connection: Connection, tenant: str, arrival: IncomingHistory, asked: SessionHints, now: datetime
) -> SessionMatch | None:
    client = asked.client
    source: Source = client.source or "lineage"
    chains = arrival.reply_chains()[:MAX_CHAINS]
    for some in (chains[:NEWEST], chains[NEWEST:]):
        hit = await sessions.find_by_chain(connection, tenant, some, client.id) if some else None
        if hit is None:
            continue
        tail: list[TailRow] | None = None
        if hit.is_current and hit.seq >= hit.session.cut:
            tail = await messages.tail_rows(
                connection, tenant, hit.session.id, hit.session.cut, last=hit.session.last_seq
            )
        index = arrival.index_of_chain(hit.chain)
        return await _lay_beside(
            connection, tenant, arrival, hit.session, source, tail, hit_seq=hit.seq, hit_index=index
        )
    if chains:
        session = None
        if replies := arrival.telling_replies():
            session = await sessions.find_by_reply(connection, tenant, replies, client.id)
        if session is not None:
            return await _lay_beside(connection, tenant, arrival, session, source, None)
    if summaries := arrival.summaries():
        by = clients.requester_id(asked.headers, client)
        session = await sessions.find_by_side_reply(connection, tenant, summaries, now - SUMMARY_WITHIN, by)
        if session is not None:
            return await _lay_beside(connection, tenant, arrival, session, source, None)
    if not chains and asked.key is not None:
        earlier = await appends.find_anywhere(connection, tenant, asked.key, arrival.asked_digest)
        session = await sessions.get(connection, tenant, earlier.session_id) if earlier is not None else None
        if session is not None and session.client_id == client.id:
            return await _lay_beside(connection, tenant, arrival, session, source, None)
    session = await _without_replies(connection, tenant, arrival, asked, now)
    return await _lay_beside(connection, tenant, arrival, session, source, None) if session is not None else None


async def _without_replies(
    connection: Connection, tenant: str, arrival: IncomingHistory, asked: SessionHints, now: datetime
) -> Session | None:
    """The session of a history without replies: it asks again, refuses the reply that it got, or says more."""
    client = asked.client
    if not arrival.reply_chains() and arrival.links:
        # Under an id of the client's own, the same beginning is the same conversation.
        session = await sessions.find_unanswered(
            connection,
            tenant,
            arrival.head_chain,
            now - RETRY_WITHIN,
            client.id,
            is_retry=asked.is_retry or client.id is not None,
        )
        if session is not None:
            return session
    if (refused := arrival.refused_beginning()) is not None:
        chain = sessions.answered_in_words(refused)
        session = await sessions.find_begun(connection, tenant, [chain], now - GO_ON_WITHIN, client.id)
        if session is not None:
            return session
    if beginnings := arrival.unanswered_beginnings()[:MAX_CHAINS]:
        return await sessions.find_begun(connection, tenant, beginnings, now - GO_ON_WITHIN, client.id)
    return None


async def _lay_beside(
    connection: Connection,
    tenant: str,
    arrival: IncomingHistory,
    session: Session,
    source: Source,
    tail: list[TailRow] | None,
    *,
    hit_seq: int = 0,
    hit_index: int = 0,
) -> SessionMatch:
    """Reconcile with the tail where that is enough, with everything that is stored where it is not."""
    first_link = 0
    if tail is not None and hit_seq:
        first_link = _links_before(tail, arrival, session, hit_seq, hit_index)
        if first_link >= 0 and _is_in_doubt(session):
            before = await messages.links_before(connection, tenant, session.id, session.cut)
            if before != [arrival.incoming[index].digest for index in arrival.links[:first_link]]:
                first_link = -1
    elif tail is not None and session.cut > 1:
        tail = None
    if tail is None or first_link < 0:
        tail, first_link = await messages.all_rows(connection, tenant, session.id, last=session.last_seq), 0
    return await run_in_thread_if_large(arrival.size, _laid, arrival, session, source, tail, first_link)


def _laid(
    arrival: IncomingHistory, session: Session, source: Source, tail: list[TailRow], first_link: int
) -> SessionMatch:
    shown = _shown(tail)
    rows: list[StoredLink] = [each.row for each in shown]
    decision = reconcile(
        rows,
        arrival.incoming,
        last_seq=session.last_seq,
        turns=session.turns,
        first_link=first_link,
        allow_restore=True,
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
    """The rows that the client knows of."""
    return [row for row in tail if not row.is_hidden]


def _is_in_doubt(session: Session) -> bool:
    """Whether a reply's chain may tell of another beginning than the one that stands before the tail by now."""
    return session.cut > 1 and session.edits > 0


def _links_before(
    tail: Sequence[TailRow], arrival: IncomingHistory, session: Session, hit_seq: int, hit_index: int
) -> int:
    """How many links of the incoming history come before the tail, given one that stands in both; -1: unclear."""
    links = [row.row for row in tail if row.row.is_link and not row.is_hidden]
    said = [incoming.digest for incoming in arrival.incoming[:hit_index] if incoming.is_link]
    # A client may know that messages were taken back, or go on sending them.
    for stored in (links, [row for row in links if row.status == "live"]):
        place = next((place for place, row in enumerate(stored) if row.seq == hit_seq), None)
        if place is None or place > len(said):
            continue
        first_link = len(said) - place
        # What a client's summary put in front came late: then what stands between is not in the tail. Where all that
        # is current is at hand, the client has come back to what was superseded.
        if said[first_link:] == [row.digest for row in stored[:place]]:
            return -1 if first_link and session.cut == 1 else first_link
    return -1


async def _new(
    connection: Connection, tenant: str, arrival: IncomingHistory, asked: SessionHints, new_id: Callable[[], str]
) -> SessionMatch:
    """A new session. The first one under a client's own id takes that id; later ones are its children.

    A request with an idempotency key makes the same session however often, and wherever at once, it is sent.
    """
    client = asked.client
    if client.id is None:
        session_id = new_id() if asked.key is None else extend(arrival.head_chain, asked.key.encode()).hex()
        return await _fresh(session_id, arrival, parent=client.parent)
    taken = await sessions.get(connection, tenant, client.id)
    if taken is None:
        return await _fresh(client.id, arrival, parent=client.parent, spare_id=new_id())
    # Under an id that means everything a client does, sessions are many: the one that bears it is asked for by name.
    first = taken if taken.client_id == client.id else None
    if first is None:
        first = await sessions.find_by_client_id(connection, tenant, client.id)
    return await _fresh(new_id(), arrival, parent=first.id if first else client.parent)
