"""Values that several schemas share: the base of request bodies, ids, limits of pages, errors."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field

MAX_SEQ = 2**53
MAX_TURN = 2**31 - 1
Limit = Annotated[int, Field(ge=1, le=1000, description="Items of a page, 1 to 1000.")]
Setting = Annotated[
    str | dict[str, Any] | None,
    Field(max_length=2000, description="A name, or an object with parameters; null: the configured default."),
]
Wire = dict[str, Any]
StatusName = Literal["live", "superseded", "dropped", "undone", "removed"]
TurnId = Annotated[str, Field(examples=["t7"], description="`t1`, `t2`, ...; never reused.")]


class Body(BaseModel):
    """A request body: strict types, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True)


Since = Annotated[datetime | None, Query(description="A time in ISO 8601 with its zone.")]


class Problem(BaseModel):
    """An error (RFC 9457)."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "type": "about:blank",
                    "title": "Invalid request",
                    "status": 422,
                    "detail": "limit: input should be less than or equal to 1000",
                    "field": "limit",
                }
            ]
        }
    )

    type: str
    title: str
    status: int
    detail: str
    field: str | None = Field(None, description="The invalid part of the input, if there is one.")


class ShadowMoney(BaseModel):
    """The cost of the shadow's contexts, and the cost of the requests that were sent."""

    currency: str
    shadow: float
    sent: float


class ShadowReferences(BaseModel):
    """Tool calls that repeat an earlier name (`referring`; `pointing`: in a short value, as a path to open), and how
    many of them would have lost one.
    """

    referring: int
    lost: int
    pointing: int
    lost_pointing: int


class ShadowEdits(BaseModel):
    """Tool calls that replace a text; how many of these texts would have stood in the context (`ready`), and how many
    stood in what was sent (`full_ready`).
    """

    calls: int
    ready: int
    full_ready: int


class Shadow(BaseModel):
    """The contexts of a strategy that is only tried out.

    `relative_price` is the price relative to what was sent: in money where all calls have a price, else of the tokens
    with a perfect cache. `missing_calls` used something that would have been missing.
    """

    strategy: str | None = Field(description="As a setting; null in sums over several strategies.")
    calls: int
    tokens: int
    cached_tokens: int
    full_tokens: int
    full_cached: int
    relative_price: float | None
    missing_calls: int
    references: ShadowReferences
    edits: ShadowEdits
    money: ShadowMoney | None
    text: str = Field(description="The same in one sentence, each strategy by itself.")


class Money(BaseModel):
    """USD as sent, as the full history with a perfect cache would have cost, and the difference."""

    currency: str
    sent: float
    full: float
    saved: float


class Reported(BaseModel):
    """Tokens as the provider reported them; `cached` is part of `input`."""

    input: int
    cached: int
    output: int
