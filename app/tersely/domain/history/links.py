"""Links: the messages of a history without their content, as stored, as sent and as placed."""

from __future__ import annotations

import msgspec

from tersely.domain.history.history import Status
from tersely.domain.messages import INSTRUCTION_ROLES, Role

# Statuses of messages that no context contains, though clients may still send them.
HIDDEN: frozenset[Status] = frozenset({"dropped", "undone", "removed"})


class StoredLink(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A stored message without its content. Instruction rows (system text, injected context) have turn 0.

    ``follows`` is the sequence number of the link that precedes the message (0: none; None: unknown).
    """

    seq: int
    position: float
    turn: int
    tokens: int
    role: Role
    status: Status
    digest: bytes
    relayed: bool
    call: int
    follows: int | None = None

    @property
    def is_link(self) -> bool:
        """Return whether the message is part of the history proper."""
        return self.turn > 0

    @property
    def is_instruction(self) -> bool:
        """Return whether the message is system or developer text. A message of injected blocks alone is not."""
        return self.role in INSTRUCTION_ROLES


class MessageIdentity(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The identity of a request's message, and the facts that reconciliation needs.

    ``seq`` is the number of the stored message that it equals; 0 if only the content can show that.
    """

    digest: bytes
    is_link: bool
    starts_turn: bool
    role: Role
    seq: int = 0

    @property
    def is_instruction(self) -> bool:
        """Return whether the message is system or developer text."""
        return self.role in INSTRUCTION_ROLES


def as_incoming(row: StoredLink) -> MessageIdentity:
    """Return a stored message as if it had been sent again."""
    starts_turn = row.is_link and row.role == "user"
    return MessageIdentity(digest=row.digest, is_link=row.is_link, starts_turn=starts_turn, role=row.role, seq=row.seq)


class PlacedMessage(msgspec.Struct, frozen=True, kw_only=True, gc=False, rename={"position": "place"}):
    """An incoming message at its place. ``is_new`` ones are to be stored under ``seq``."""

    seq: int
    turn: int
    position: float
    is_new: bool
    status: Status = "live"


# The number of a link before the loaded rows: it is stored, and its position is not needed.
BEFORE_LOADED = PlacedMessage(seq=0, turn=1, position=0.0, is_new=False)
