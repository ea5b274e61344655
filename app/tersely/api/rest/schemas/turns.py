"""Turns with the figures of their calls."""

from __future__ import annotations

from pydantic import BaseModel, Field

from tersely.api.rest.schemas.common import StatusName, TurnId


class UsageOut(BaseModel):
    """The calls of a turn: tokens before and after as Tersely counts them, and as the provider reported them."""

    calls: int
    tokens_before: int
    tokens_after: int
    input: int | None
    cached: int | None
    output: int | None
    weight: int | None = Field(description="The tokens of prompt and completion at the last round of the last call.")


class TurnOut(BaseModel):
    """A turn, computed from its live messages, or from all if none is live."""

    turn: TurnId
    status: StatusName
    messages: int
    first_seq: int
    last_seq: int
    tokens: int
    terse: list[str]
    usage: UsageOut
    created_at: str
    updated_at: str


class TurnPage(BaseModel):
    """Turns in order, without removed ones."""

    items: list[TurnOut]
    next: TurnId | None
