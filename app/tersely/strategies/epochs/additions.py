"""Decide when Tersely adds its own instructions and tools to the requests of a session.

Both cost tokens at every call and are of use only once something is cut. So an epoch that shows everything as the
client sent it is *plain*: its requests carry nothing of Tersely's. When the content reaches a share of the high
watermark, the instructions go in front of the newest question and stay there, so that no cached prefix changes. The
first epoch that changes the beginning anyway has instructions and tools in front, as all later ones have.

Every function here depends on nothing but the stored epoch and the history of the request. Whatever continues a session
without planning (a live session, another replica, a process after a restart) comes to the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from tersely.domain.history.history import Entry, Epoch, Prefix, Snapshot
from tersely.domain.tokens import Encode
from tersely.strategies.epochs.policies import Auto, CutConditions, EveryRequest, Policy, content_tokens
from tersely.strategies.pipeline import Draft

LAYER = "note"


def note_of(epoch: Epoch) -> Prefix | None:
    """Return the instructions that stand in front of a message of ``epoch``."""
    return next((prefix for prefix in epoch.prefixes if prefix.layer == LAYER), None)


def additions_from(policy: Policy, needs: CutConditions, window: int | None = None) -> float:
    """Return from how many tokens of content on a session gets instructions; ``window`` is the room for content."""
    auto = policy if isinstance(policy, Auto) else Auto()
    high = needs.high or auto.high
    return auto.instructions_at * (high if window is None else min(high, window))


def waits(policy: Policy) -> bool:
    """Return whether sessions begin plain under ``policy``."""
    return not isinstance(policy, EveryRequest) and (policy if isinstance(policy, Auto) else Auto()).instructions_at > 0


def is_due(snapshot: Snapshot, policy: Policy, needs: CutConditions) -> bool:
    """Return whether the additions of a plain epoch start with this request.

    They start where the content reaches the share and a question is new, which can carry the instructions; and where a
    text is shortened that the model can read back with a tool.
    """
    epoch = snapshot.epoch
    if epoch is None or not epoch.is_plain or isinstance(policy, EveryRequest):
        return False
    if epoch.tiers and snapshot.read_back and any(e.is_shortened and not e.is_folded for e in snapshot.entries):
        return True
    return _due_question(snapshot, epoch, policy, needs) is not None


def may_be_due(snapshot: Snapshot, policy: Policy, needs: CutConditions, *, content: int) -> bool:
    """Return False only where `is_due` does. Decide by the tokens of the content, without reading the messages."""
    epoch = snapshot.epoch
    if epoch is None or not epoch.is_plain:
        return False
    note = note_of(epoch)
    if not epoch.tiers and (snapshot.instructions is None or (note is not None and note.text == snapshot.instructions)):
        return False
    return bool(epoch.tiers) or content >= additions_from(policy, needs, _room(snapshot))


def stays_plain(snapshot: Snapshot, draft: Draft, policy: Policy, needs: CutConditions) -> bool:
    """Return whether an epoch that is planned as ``draft`` shows everything as the client sent it, and is to do so.

    An epoch that began with additions keeps them: they are part of a prefix that is cached. Memos in front of messages
    are the user's own knowledge; they come at any size.
    """
    if isinstance(policy, EveryRequest) or draft.cut > 1 or draft.head or draft.kept or draft.gone:
        return False
    if any(entry.is_shortened for entry in draft.entries):
        return False
    if snapshot.epoch is not None:
        return snapshot.epoch.is_plain
    return waits(policy) and content_tokens(snapshot) < additions_from(policy, needs, _room(snapshot))


def place_note(snapshot: Snapshot, policy: Policy, needs: CutConditions, encode: Encode) -> Prefix | None:
    """Return the instructions of a plain epoch that starts now: those that stand in front of a message stay there."""
    epoch, text = snapshot.epoch, snapshot.instructions
    if epoch is None:
        return None
    if (note := _stored_note(snapshot, epoch)) is not None or not text:
        return note
    question = _due_question(snapshot, epoch, policy, needs)
    return None if question is None else Prefix(layer=LAYER, seq=question.seq, text=text, tokens=encode(text))


def shown_prefixes(epoch: Epoch, instructions: str | None) -> tuple[Prefix, ...]:
    """Return the prefixes that a request shows whose own instructions are ``instructions``.

    A request may take none (a response format, several replies at once): then the note is left out of it.
    """
    if not epoch.prefixes:
        return ()
    return tuple(each for each in epoch.prefixes if each.layer != LAYER or each.text == instructions)


def _due_question(snapshot: Snapshot, epoch: Epoch, policy: Policy, needs: CutConditions) -> Entry | None:
    """Return the question that the instructions have to be put in front of."""
    question = _new_question(snapshot.entries) if snapshot.instructions else None
    if question is None or _stored_note(snapshot, epoch) is not None:
        return None
    return question if content_tokens(snapshot) >= additions_from(policy, needs, _room(snapshot)) else None


def _stored_note(snapshot: Snapshot, epoch: Epoch) -> Prefix | None:
    """Return the instructions in front of a message that the history still has; not those of another strategy."""
    note = note_of(epoch)
    if note is None or snapshot.instructions not in {None, note.text}:
        return None
    return note if any(entry.seq == note.seq for entry in snapshot.entries) else None


def _new_question(entries: Sequence[Entry]) -> Entry | None:
    """Return the newest question that no request has carried yet."""
    for entry in reversed(entries):
        if entry.message.role == "assistant":
            return None
        if entry.message.starts_turn and entry.message.text.strip():
            return entry
    return None


def _room(snapshot: Snapshot) -> int | None:
    return None if snapshot.window is None else max(0, snapshot.window - snapshot.fixed_tokens)
