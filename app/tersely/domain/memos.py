"""Memos: tagged knowledge of a tenant, across sessions."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Memo:
    """A memo. ``session_id`` is the session that it came from, which may have been deleted."""

    id: str
    content: str
    tags: tuple[str, ...]
    session_id: str | None
    created_at: datetime
