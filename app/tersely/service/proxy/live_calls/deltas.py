"""Live sessions whose calls bring only their new messages, under a session id of Tersely's own header.

Their histories are read from the store by the full path; a live call takes the last reply from what was stored.
"""

from __future__ import annotations

from datetime import datetime

from msgspec.structs import replace

from tersely.dialects.dialect import Dialect
from tersely.domain.history.history import Entry
from tersely.domain.history.reconciliation import Reconciliation, append_messages
from tersely.service.context.building import build
from tersely.service.context.entries import new_entry, stored_entries
from tersely.service.proxy.live_sessions.live_session import DeltaSession, LiveSession
from tersely.service.proxy.preparing.stages import PreparedCall
from tersely.service.recognition.incoming_history import IncomingHistory
from tersely.service.recognition.session_lookup import SessionMatch
from tersely.store.commit.records import ReplyWrite
from tersely.store.history.messages import StoredMessage, TailRow

# A session with more messages in its context is read from the store at each call: to take it over would hold the loop.
MOST_ROWS = 2_000


def first_deltas(prepared: PreparedCall, write: ReplyWrite) -> DeltaSession:
    """Return what the next call of a session needs after a call of the full path that brought only new messages."""
    (reply,) = write.replies
    digests = {row.row.digest for row in prepared.match.rows}
    digests.update(each.digest for each in prepared.history.identities)
    return DeltaSession(prepared.loaded.instructions, reply.raw, digests)


def shows_delta(prepared: PreparedCall) -> bool:
    """Return whether a context that is not too long shows the messages of a call as it brought them, with nothing
    injected.
    """
    if len(prepared.match.rows) > MOST_ROWS:
        return False
    shown = {entry.seq: entry.message for entry in prepared.loaded.snapshot.entries}
    placed = prepared.match.decision.placed
    pairs = zip(prepared.history.messages, placed, strict=True)
    return all(shown.get(each.seq) is message and not message.injected for message, each in pairs)


def next_deltas(deltas: DeltaSession, history: IncomingHistory, write: ReplyWrite) -> DeltaSession:
    """Return the same after a live call."""
    (reply,) = write.replies
    deltas.digests.update(each.digest for each in history.identities)
    return DeltaSession(deltas.instructions, reply.raw, deltas.digests)


def append_delta(live: LiveSession, history: IncomingHistory) -> Reconciliation:
    """Place the messages of a call behind the last reply, as the full path does."""
    session, reply = live.session, live.reply.row
    return append_messages(
        history.identities,
        last_seq=session.last_seq,
        turns=session.turns,
        turn=reply.turn,
        follows_seq=reply.seq,
    )


def entries_of_delta(
    live: LiveSession,
    deltas: DeltaSession,
    history: IncomingHistory,
    decision: Reconciliation,
    dialect: Dialect,
    now: datetime,
) -> list[Entry] | None:
    """Return the entries of the last reply and of the messages of a call; None where the messages before the reply
    decide how these are shown.
    """
    new = [
        new_entry(message, placed.seq, placed.turn, now)
        for message, placed in zip(history.messages, decision.placed, strict=True)
    ]
    entries = stored_entries([as_stored_message(live.reply, deltas.reply)], dialect, new)
    if len(entries) != 1 + len(new):
        return None
    is_as_sent = all(entry.message is each.message for entry, each in zip(entries[1:], new, strict=True))
    return entries if is_as_sent else None


def match_of_delta(live: LiveSession, decision: Reconciliation, history: IncomingHistory) -> SessionMatch:
    """Return the match of a call as the full path makes it."""
    return SessionMatch(
        session_id=live.session.id,
        session=live.session,
        source="header",
        decision=decision,
        rows=live.rows[: live.row_count],
        is_delta=True,
        head_chain=history.head_chain,
    )


def build_whole(prepared: PreparedCall) -> PreparedCall:
    """Return a live call with its whole context."""
    built = build(prepared.loaded, prepared.config, prepared.budget, prepared.request.model)
    return replace(prepared, built=built, live=None, added=None, expand=None)


def as_stored_message(reply: TailRow, raw: bytes) -> StoredMessage:
    """Return the last reply of a session as the store has it; ``raw`` is the client's view."""
    row = reply.row
    return StoredMessage(
        seq=row.seq,
        turn=row.turn,
        position=row.position,
        tokens=row.tokens,
        role=row.role,
        status=row.status,
        dialect=reply.dialect,
        client_visible=True,
        model_visible=True,
        pinned=reply.pinned,
        priority=reply.priority,
        finish=None,
        call=row.call,
        digest=row.digest,
        created_at=reply.created_at,
        raw=raw,
        model_raw=reply.model_raw,
    )
