"""A session's own facts: what is known without reading its messages."""

from __future__ import annotations

from datetime import datetime

import msgspec

from app.domain.history import Epoch


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """One stored conversation.

    ``version`` changes with every write, ``edits`` counts rewrites of history (undo, drop, client rewrite);
    ``edited`` says that one came since the last epoch.
    ``client_id`` is an id that a client sends for its own purposes and that several sessions may share.
    ``strategy`` and ``epoch_policy`` are the session's own settings in the form of the configuration, if any.
    """

    id: str
    parent: str | None
    client_id: str | None
    strategy: str | None
    epoch_policy: str | None
    metadata: bytes
    last_seq: int
    turns: int
    tokens: int
    version: int
    edits: int
    edited: bool
    calls: int
    epoch: int
    cut: int
    plan: Epoch | None
    last_call_at: datetime | None
    created_at: datetime
    updated_at: datetime

    @property
    def floor(self) -> int:
        """The first sequence number that a context may speak of."""
        return self.plan.floor if self.plan else 1
