"""The history that one context is built from."""

from __future__ import annotations

from dataclasses import dataclass

from tersely.domain.history.history import (
    Epoch,
    EpochInputs,
    Snapshot,
)
from tersely.domain.messages import (
    Message,
)
from tersely.service.context.context_config import ContextConfig
from tersely.service.context.epoch_inputs import brought_back, left_behind
from tersely.service.recognition.session_lookup import SessionMatch
from tersely.strategies.epochs.policies import Advance
from tersely.strategies.planning import (
    planning_basis,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMessage:
    """A stored message that consists of injected blocks alone, numbered ``seq``.

    ``before`` is the message of the tail behind it (`AFTER_ALL_MESSAGES`: none; 0: it was cut, and is not laid out).
    """

    message: Message
    seq: int
    before: int


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What was read for one context: the snapshot and, where an epoch starts, what its head is made of.

    ``is_verbatim``: the entries are the request's own messages, all of them and unaltered. ``instructions`` are the
    stored ones, for requests that bring none. ``blocks`` are stored messages that consist of blocks
    alone. ``overflows``: how often the upstream has refused what was built of it.
    """

    snapshot: Snapshot
    advance: Advance | None
    material: EpochInputs
    is_verbatim: bool
    instructions: tuple[bytes, ...] = ()
    blocks: tuple[BlockMessage, ...] = ()
    overflows: int = 0

    @property
    def size(self) -> int:
        """Bytes of the messages that were loaded."""
        return sum(len(entry.message.raw) for entry in self.snapshot.entries)


def epoch_of(found: SessionMatch, recipe: ContextConfig) -> Epoch | None:
    """The session's epoch, as it is for the history that the request carries and under its configuration."""
    return planning_basis(epoch_of_history(found), strategy=recipe.strategy, policy=recipe.policy)


def epoch_of_history(found: SessionMatch) -> Epoch | None:
    epoch = found.session.plan if found.session else None
    # What is only added to replaces instructions, if anything: no head tells of them.
    if epoch is None or found.decision.kind == "delta" or not (found.decision.superseded or found.decision.restored):
        return epoch
    back = brought_back(found)
    pinned = [row.row.seq for row in found.rows if row.pinned and row.row.seq in back]
    return epoch.without_messages(left_behind(found), back, pinned, last=found.decision.last_known)
