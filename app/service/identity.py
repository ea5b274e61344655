"""Which session a request belongs to, and what the request means for it. Never fuzzy, always within the tenant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal

from app.domain.clients import ClientIds
from app.domain.lineage import Decision, Row, append, reconcile, repeat
from app.domain.sessions import Session
from app.service.arrival import NEWEST, Arrival, extend
from app.service.aside import aside
from app.store import messages, sessions
from app.store.connection import Connection
from app.store.messages import TailRow
from app.store.sessions import Hit

Source = Literal["header", "body", "lineage", "new"]

# A request without a reply is tried again within this time; later, the same words are a conversation of their own.
RETRY_WITHIN = timedelta(minutes=10)
# So long after a call that came to nothing (a blocked prompt, an empty reply) its history may be gone on with.
GO_ON_WITHIN = timedelta(hours=6)
# How long the reply to a client's own summary call is remembered.
SUMMARY_WITHIN = timedelta(hours=6)
MAX_CHAINS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a request says about its session: the id in Tersely's own header, and a client's own ids; the reply that it
    goes on from, or the conversation that it is part of, where that is all it says of its history.
    """

    session_id: str | None = None
    client: ClientIds = field(default_factory=ClientIds)
    is_retry: bool = False
    reply_id: str = ""
    conversation: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
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
    decision: Decision
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


async def find(
    connection: Connection,
    tenant: str,
    arrival: Arrival,
    asked: Asked,
    *,
    now: datetime,
    new_id: Callable[[], str],
) -> Found:
    """Find the session: by Tersely's own id; else by lineage, within a client's own id where there is one."""
    if asked.session_id is not None:
        return await _by_own_id(connection, tenant, arrival, asked, asked.session_id)
    found = await _by_lineage(connection, tenant, arrival, asked, now)
    return found or await _new(connection, tenant, arrival, asked.client, new_id)


async def _fresh(
    session_id: str,
    arrival: Arrival,
    *,
    source: Source = "new",
    parent: str | None = None,
    spare_id: str | None = None,
) -> Found:
    return Found(
        session_id=session_id,
        session=None,
        source=source,
        decision=await aside(arrival.size, reconcile, (), arrival.incoming, last_seq=0, turns=0),
        rows=(),
        parent=parent,
        spare_id=spare_id,
    )


async def _by_own_id(connection: Connection, tenant: str, arrival: Arrival, asked: Asked, session_id: str) -> Found:
    session = await sessions.get(connection, tenant, session_id)
    if session is None:
        return await _fresh(session_id, arrival, source="header")
    tail = await messages.tail_rows(connection, tenant, session_id, session.cut)
    if _is_delta(arrival, _shown(tail), session, is_retry=asked.is_retry):
        return await _delta(connection, tenant, arrival, _shown(tail), session, is_retry=asked.is_retry)
    hit = None
    if session.cut > 1 and (chains := arrival.reply_chains()[:NEWEST]):
        hit = await sessions.find_by_chain(connection, tenant, chains, session.client_id, session_id=session_id)
    if hit is None or not hit.is_current:
        return await _lay_beside(connection, tenant, arrival, session, "header", tail)
    index = arrival.index_of_chain(hit.chain)
    return await _lay_beside(connection, tenant, arrival, session, "header", tail, hit_seq=hit.seq, hit_index=index)


def _is_delta(arrival: Arrival, tail: Sequence[TailRow], session: Session, *, is_retry: bool) -> bool:
    """Whether a request under Tersely's own id carries only what is new.

    A whole history carries replies, or is the whole of what is stored so far: unanswered, or said to be a retry.
    """
    links = [arrival.incoming[index] for index in arrival.links]
    if any(link.role == "assistant" for link in links):
        return False
    stored = [row.row for row in tail if row.row.is_link]
    if session.cut > 1:
        return session.last_seq > 0
    while is_retry and stored and stored[-1].role == "assistant":
        stored.pop()
    return bool(stored) and [row.digest for row in stored] != [link.digest for link in links]


async def _delta(
    connection: Connection, tenant: str, arrival: Arrival, tail: Sequence[TailRow], session: Session, *, is_retry: bool
) -> Found:
    """What is new goes to the end. Messages that are the last ones already are a retry when the client says so or
    nothing has answered them yet.
    """
    replaced: list[int] = []
    if any(not incoming.is_link for incoming in arrival.incoming):
        replaced = [row.row.seq for row in tail if not row.row.is_link]
    turn = max((row.row.turn for row in tail), default=session.turns)
    counters = {"last_seq": session.last_seq, "turns": session.turns}
    again = repeat([each.row for each in tail], arrival.incoming, **counters, is_answered=is_retry)
    before = tail
    if again is not None:
        first = min(placed.place for placed in again.placed if placed.turn > 0)
        before = [each for each in tail if not each.row.is_link or each.row.place < first]
    return Found(
        session_id=session.id,
        session=session,
        source="header",
        decision=again or append(arrival.incoming, **counters, turn=turn, superseded=replaced),
        rows=tail,
        is_delta=True,
        head_chain=await _whole_chain(connection, tenant, arrival, before, session),
    )


async def _whole_chain(
    connection: Connection, tenant: str, arrival: Arrival, tail: Sequence[TailRow], session: Session
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
    for digest in [row.digest for row in after] + [arrival.incoming[index].digest for index in arrival.links]:
        chain = extend(chain, digest)
    return chain


def continued(arrival: Arrival, asked: Asked, hit: Hit) -> Found | None:
    """The finding for a request that goes on from a reply in the tail of its session; None where more is needed."""
    if hit.tail is None:
        return None
    first_link = _links_before(hit.tail, arrival, hit.session, hit.seq, arrival.index_of_chain(hit.chain))
    if first_link < 0 or _is_in_doubt(hit.session):
        return None
    return _laid(arrival, hit.session, asked.client.source or "lineage", hit.tail, first_link)


async def with_everything(connection: Connection, tenant: str, arrival: Arrival, found: Found) -> Found:
    """The same finding, made on all rows of the session."""
    assert found.session is not None
    return await _lay_beside(connection, tenant, arrival, found.session, found.source, None)


async def _by_lineage(
    connection: Connection, tenant: str, arrival: Arrival, asked: Asked, now: datetime
) -> Found | None:
    client = asked.client
    source: Source = client.source or "lineage"
    chains = arrival.reply_chains()[:MAX_CHAINS]
    for some in (chains[:NEWEST], chains[NEWEST:]):
        hit = await sessions.find_by_chain(connection, tenant, some, client.id) if some else None
        if hit is None:
            continue
        tail: list[TailRow] | None = None
        if hit.is_current and hit.seq >= hit.session.cut:
            tail = await messages.tail_rows(connection, tenant, hit.session.id, hit.session.cut)
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
        session = await sessions.find_by_side_reply(connection, tenant, summaries, now - SUMMARY_WITHIN, client.id)
        if session is not None:
            return await _lay_beside(connection, tenant, arrival, session, source, None)
    if not chains and arrival.links:
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
            return await _lay_beside(connection, tenant, arrival, session, source, None)
    if beginnings := arrival.unanswered_beginnings()[:MAX_CHAINS]:
        session = await sessions.find_begun(connection, tenant, beginnings, now - GO_ON_WITHIN, client.id)
        if session is not None:
            return await _lay_beside(connection, tenant, arrival, session, source, None)
    return None


async def _lay_beside(
    connection: Connection,
    tenant: str,
    arrival: Arrival,
    session: Session,
    source: Source,
    tail: list[TailRow] | None,
    *,
    hit_seq: int = 0,
    hit_index: int = 0,
) -> Found:
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
        tail, first_link = await messages.all_rows(connection, tenant, session.id), 0
    return await aside(arrival.size, _laid, arrival, session, source, tail, first_link)


def _laid(arrival: Arrival, session: Session, source: Source, tail: list[TailRow], first_link: int) -> Found:
    shown = _shown(tail)
    rows: list[Row] = [each.row for each in shown]
    decision = reconcile(
        rows,
        arrival.incoming,
        last_seq=session.last_seq,
        turns=session.turns,
        first_link=first_link,
        revivable=True,
    )
    return Found(
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


def _links_before(tail: Sequence[TailRow], arrival: Arrival, session: Session, hit_seq: int, hit_index: int) -> int:
    """How many links of the incoming history come before the tail, given one that stands in both; -1: unclear."""
    stored = [row.row for row in tail if row.row.is_link and not row.is_hidden]
    place = next((place for place, row in enumerate(stored) if row.seq == hit_seq), None)
    said = [incoming.digest for incoming in arrival.incoming[:hit_index] if incoming.is_link]
    if place is None or place > len(said):
        return -1
    first_link = len(said) - place
    if first_link and session.cut == 1:
        return -1  # all that is current is at hand: the client has come back to what was superseded
    # What a client's summary put in front came late: then what stands between is not in the tail.
    return first_link if said[first_link:] == [row.digest for row in stored[:place]] else -1


async def _new(
    connection: Connection, tenant: str, arrival: Arrival, client: ClientIds, new_id: Callable[[], str]
) -> Found:
    """A new session. The first one under a client's own id takes that id; later ones are its children."""
    if client.id is None:
        return await _fresh(new_id(), arrival, parent=client.parent)
    taken = await sessions.get(connection, tenant, client.id)
    if taken is None:
        return await _fresh(client.id, arrival, parent=client.parent, spare_id=new_id())
    # Under an id that means everything a client does, sessions are many: the one that bears it is asked for by name.
    first = taken if taken.client_id == client.id else None
    if first is None:
        first = await sessions.find_by_client_id(connection, tenant, client.id)
    return await _fresh(new_id(), arrival, parent=first.id if first else client.parent)
