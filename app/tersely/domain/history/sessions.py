"""The session row: what is known about a session without reading its messages."""

from __future__ import annotations

from datetime import datetime

import msgspec

from tersely.domain.errors import InvalidRequest
from tersely.domain.history.history import Epoch

MAX_SESSION_ID = 256
# What a client or a proxy on the way would take for a step in a path: nobody could reach such a session again.
NOT_IDS = frozenset({".", ".."})


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """One stored conversation.

    ``version`` changes with every write. ``edits`` counts rewrites of history (undo, drop, client rewrite); ``edited``:
    one happened since the last epoch. ``client_id`` is an id that a client sends for its own purposes and that several
    sessions may share. ``strategy`` and ``epoch_policy`` are the session's own settings as configuration texts, if any;
    ``last_strategy`` and ``last_epoch_policy`` are those of the headers of its last call.
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
    last_strategy: str | None = None
    last_epoch_policy: str | None = None
    created_at: datetime
    updated_at: datetime

    @property
    def cleared_at(self) -> int:
        """Return the first sequence number that a context may include."""
        return self.plan.cleared_at if self.plan else 1


MAX_TITLE = 120


def title_of(text: str) -> str | None:
    """Return the first words of ``text`` on one line, as a session's title; None if there are none."""
    words = " ".join(text[: 8 * MAX_TITLE].split())
    kept = words if words.isprintable() else "".join(filter(str.isprintable, words))
    return (kept if len(kept) <= MAX_TITLE else kept[: MAX_TITLE - 1].rstrip() + "…") or None


def check_session_id(value: str, name: str) -> str:
    """Return a session id: 1 to 256 printable characters without blanks at its ends. Raises `InvalidRequest`."""
    if value in NOT_IDS:
        raise InvalidRequest(f"{name} must not be '.' or '..'", field=name)
    if not value or len(value) > MAX_SESSION_ID or not value.isprintable() or value != value.strip():
        raise InvalidRequest(f"{name} must be 1 to {MAX_SESSION_ID} printable characters", field=name)
    return value
