"""Decide again under a session's lock, on what the session has become since the first decision."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from tersely.domain.history.links import StoredLink, as_incoming
from tersely.domain.history.reconciliation import Reconciliation, append_messages, reconcile
from tersely.domain.history.repetition import find_earlier_question, find_unanswered, reconcile_repetition
from tersely.domain.messages import INSTRUCTION_ROLES, is_outside_messages
from tersely.store.commit import conversations
from tersely.store.commit.conversations import ConversationLinks
from tersely.store.commit.idempotency_keys import KeyedAppend
from tersely.store.commit.records import ReferencedReply, RequestWrite, SessionCounters
from tersely.store.db.connection import Connection
from tersely.store.history import messages


async def decide_again(
    connection: Connection, tenant: str, write: RequestWrite, state: SessionCounters, earlier: KeyedAppend | None
) -> Reconciliation | None:
    """Decide on what the session has become since the first decision, under its lock.

    ``earlier`` are the messages that came with the same idempotency key. None where the id went to another
    conversation of the same client: two histories that share nothing are not one session.
    """
    if write.referenced is not None:
        return await _reconcile_again(connection, tenant, write, write.referenced, state)
    if write.mode == "append":
        again = await _repeat_again(connection, tenant, write, state, earlier) if write.is_call else None
        return again or await append_again(connection, tenant, write, state)
    rows = [tail.row for tail in await messages.all_rows(connection, tenant, state.id) if not tail.is_hidden]
    decision = reconcile(rows, write.incoming, last_seq=state.last_seq, turns=state.turns, allow_restore=True)
    is_other = write.decision.kind != "edited" and _knows_nothing(write.decision) and _knows_nothing(decision)
    if is_other and write.create is not None and write.create.spare_id is not None:
        return None
    return decision


async def _repeat_again(
    connection: Connection, tenant: str, write: RequestWrite, state: SessionCounters, earlier: KeyedAppend | None
) -> Reconciliation | None:
    """Return the decision for a delta whose messages are stored already; None where they are not.

    They are where the first decision found them, or were stored since: by whoever sent the same at the same time.
    """
    again = await _rows_of_repetition(connection, tenant, write, state, earlier)
    if again is None:
        return None
    has_instructions = any(not message.is_link for message in write.incoming)
    instructions = await messages.instruction_rows(connection, tenant, state.id) if has_instructions else []
    return reconcile_repetition(again, instructions, write.incoming, last_seq=state.last_seq, turns=state.turns)


async def _rows_of_repetition(
    connection: Connection, tenant: str, write: RequestWrite, state: SessionCounters, earlier: KeyedAppend | None
) -> Sequence[StoredLink] | None:
    links_sent = [message.digest for message in write.incoming if message.is_link]
    known = [placed.seq for placed in write.decision.placed if placed.turn > 0 and not placed.is_new]
    if not known and earlier is not None and earlier.digest == write.key_digest:
        known = list(range(earlier.first_seq, earlier.last_seq + 1))
    if known:
        rows = [tail.row for tail in await messages.rows_of(connection, tenant, state.id, known)]
        links = sorted((row for row in rows if row.is_link and row.status == "live"), key=lambda row: row.seq)
        if [row.digest for row in links] == links_sent:
            return links
    since = write.session.last_seq if write.session is not None else 0
    before = find_earlier_question(await messages.links_since(connection, tenant, state.id, since), write.incoming)
    return before.rows if before is not None else None


def _knows_nothing(decision: Reconciliation) -> bool:
    """Return whether nothing of the history that was sent is stored."""
    return not any(placed.turn and not placed.is_new for placed in decision.placed)


async def _reconcile_again(
    connection: Connection, tenant: str, write: RequestWrite, named: ReferencedReply, state: SessionCounters
) -> Reconciliation:
    """Return the decision for the request's own messages, placed behind the reply that it references."""
    rows = [tail.row for tail in await messages.all_rows(connection, tenant, state.id) if not tail.is_hidden]
    known = {place.seq for index, place in enumerate(write.decision.placed) if index not in named.own_indexes}
    history = await messages.leading_to(connection, tenant, state.id, rows, named.seq)
    if history is None:
        history = [row for row in rows if row.seq in known]
    links = ConversationLinks()
    if named.is_conversation:
        links = await conversations.links_of(connection, tenant, state.id, named.conversation, rows, calls=state.calls)
        history = [row for row in history if row.seq not in links.failed]
    history = [row for row in history if row.is_link or row.seq in known]
    own, front = [write.incoming[index] for index in named.own_indexes], named.own_before_reply
    incoming = [*own[:front], *map(as_incoming, history), *own[front:]]
    again = reconcile(
        rows,
        incoming,
        last_seq=state.last_seq,
        turns=state.turns,
        allow_restore=True,
        question_index=front + len(history),
        staying=links.staying,
    )
    placed = list(write.decision.placed)
    for index, place in zip(
        named.own_indexes, [*again.placed[:front], *again.placed[front + len(history) :]], strict=True
    ):
        placed[index] = place
    return structs.replace(again, placed=tuple(placed))


async def append_again(
    connection: Connection, tenant: str, write: RequestWrite, state: SessionCounters
) -> Reconciliation:
    """Return the decision for messages that are appended at the present end of the session."""
    seq, turn = await messages.last_link(connection, tenant, state.id)
    superseded: list[int] = []
    if write.replaces_instructions:
        stored = await messages.instructions(connection, tenant, state.id)
        brought = zip(write.incoming, write.raws, strict=True)
        kinds = {is_outside_messages(raw) for message, raw in brought if message.is_instruction}
        given = [message for message in stored if message.role in INSTRUCTION_ROLES]
        superseded = [message.seq for message in given if is_outside_messages(message.raw) in kinds]
    repeated = await _unanswered_still(connection, tenant, write, state, seq)
    return append_messages(
        write.incoming,
        last_seq=state.last_seq,
        turns=state.turns,
        turn=turn,
        follows_seq=None if repeated else seq,
        superseded=superseded,
        repeated=repeated,
    )


async def _unanswered_still(
    connection: Connection, tenant: str, write: RequestWrite, state: SessionCounters, last: int
) -> Sequence[StoredLink]:
    """Return the stored messages with which an appended list begins, if they are still the session's last ones."""
    known = [placed.seq for placed in write.decision.placed if placed.turn > 0 and not placed.is_new]
    if not known or known[-1] != last:
        return ()
    rows = [tail.row for tail in await messages.rows_of(connection, tenant, state.id, known)]
    return find_unanswered(sorted(rows, key=lambda row: row.seq), write.incoming)
