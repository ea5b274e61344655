"""The history that one context is built from."""

from __future__ import annotations

import msgspec

from tersely.domain.history.history import (
    Epoch,
    EpochInputs,
    Snapshot,
)
from tersely.domain.messages import (
    Message,
)
from tersely.service.context.context_config import ContextConfig
from tersely.service.context.epoch_inputs import restored_links, superseded_links
from tersely.service.recognition.session_lookup import SessionMatch
from tersely.strategies.epochs.policies import StartEpoch
from tersely.strategies.planning import (
    planning_basis,
)


class BlockMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A stored message that consists of injected blocks alone, numbered ``seq``.

    ``before``: the next message of the tail (`AFTER_ALL_MESSAGES`: none follows; 0: it was cut and is not rendered).
    """

    message: Message
    seq: int
    before: int


class History(msgspec.Struct, frozen=True, kw_only=True):
    """The data of one context: a snapshot and, where an epoch starts, the inputs of its head.

    ``is_verbatim``: the entries are all of the request's own messages, unaltered. ``instructions``: the stored ones,
    for requests that bring none. ``blocks``: stored messages that consist of injected blocks alone. ``overflows``: how
    often the upstream refused a context of this history as too long.
    """

    snapshot: Snapshot
    epoch_start: StartEpoch | None
    epoch_inputs: EpochInputs
    is_verbatim: bool
    instructions: tuple[bytes, ...] = ()
    blocks: tuple[BlockMessage, ...] = ()
    overflows: int = 0

    @property
    def size(self) -> int:
        """Bytes of the loaded messages."""
        return sum(len(entry.message.raw) for entry in self.snapshot.entries)


def epoch_of(match: SessionMatch, config: ContextConfig) -> Epoch | None:
    """Return the session's epoch, adapted to the history that the request carries and to its configuration."""
    return planning_basis(epoch_of_history(match), strategy=config.strategy, policy=config.policy)


def epoch_of_history(match: SessionMatch) -> Epoch | None:
    epoch = match.session.plan if match.session else None
    # A delta only adds messages. The instructions that it may replace are in no head.
    if epoch is None or match.decision.kind == "delta" or not (match.decision.superseded or match.decision.restored):
        return epoch
    back = restored_links(match)
    pinned = [row.row.seq for row in match.rows if row.pinned and row.row.seq in back]
    return epoch.without_messages(superseded_links(match), back, pinned, last=match.decision.last_known)
