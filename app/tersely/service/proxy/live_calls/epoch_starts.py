"""Calls that continue a live session where an epoch starts.

The full path plans the epoch and writes the request, from the messages that the live session holds: what stands before
the session's cut is not read from the body again.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from tersely.domain.history.links import MessageIdentity, PlacedMessage
from tersely.domain.history.reconciliation import Reconciliation
from tersely.domain.messages import Message
from tersely.service.proxy.live_calls.live_call import Continuation
from tersely.service.proxy.live_sessions.live_session import LeadingMessages, LiveSession
from tersely.service.recognition.incoming_history import IncomingHistory, identify
from tersely.strategies.presets import Tiered


def may_start_epoch(live: LiveSession) -> bool:
    """Return whether the live session holds all messages that the plan of its next epoch reads.

    It lacks those before its cut: `Tiered` brings some of them back, a plan that starts anew reads them all, and a turn
    that a clear has interrupted goes on with them. It also lacks the places of instructions that the client sends among
    its messages, and the history of a client that references it.
    """
    epoch, config = live.snapshot.epoch, live.config
    if epoch is None or live.reference is not None or (live.leading is None and live.deltas is None):
        return False
    if isinstance(config.strategy, Tiered) or config.first_seq(epoch) != epoch.cut:
        return False
    if 1 < epoch.cut == epoch.cleared_at:
        return False  # the turn that was cleared may go on
    return not any(row.is_hidden for row in live.rows[: live.row_count])


def leading_messages(history: IncomingHistory, placed: Sequence[PlacedMessage]) -> LeadingMessages | None:
    """Return the instructions that lead a history; None if some, or messages of blocks alone, stand elsewhere."""
    count = len(history.messages) - len(history.links)
    if not all(message.is_instruction for message in history.messages[:count]):
        return None
    return LeadingMessages(
        messages=history.messages[:count],
        identities=history.identities[:count],
        placed=tuple([replace(each, is_new=False) for each in placed[:count]]),
    )


def reduced_history(found: Continuation, decision: Reconciliation) -> tuple[IncomingHistory, Reconciliation]:
    """Return the history of a call without the messages that stand between its instructions and those that it brings
    again or anew, and the decision on it.
    """
    live, brought, leading = found.live, found.history, found.live.leading
    if leading is None:
        return brought, decision  # a call with its new messages alone
    positions = {row.row.seq: row.row.position for row in live.rows[: live.row_count]} if found.revised else {}
    again: list[Message] = [entry.message for entry in found.revised]
    identities: list[MessageIdentity] = [identify(message) for message in again]
    placed = [
        PlacedMessage(seq=each.seq, turn=each.turn, position=positions[each.seq], is_new=False, status="live")
        for each in found.revised
    ]
    front = len(leading.messages)
    history = IncomingHistory(
        messages=(*leading.messages, *again, *brought.messages),
        identities=(*leading.identities, *identities, *brought.identities),
        chains=(*[b""] * front, *[live.chain] * len(again), *brought.chains),
    )
    return history, replace(decision, placed=(*leading.placed, *placed, *decision.placed))
