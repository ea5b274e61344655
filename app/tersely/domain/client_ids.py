"""The ids that a client sends for its own purposes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

IdSource = Literal["header", "body"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientIds:
    """The id a client sends for its own purposes, where it was found, and its parent's."""

    id: str | None = None
    source: IdSource | None = None
    parent: str | None = None
