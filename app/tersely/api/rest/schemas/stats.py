"""Statistics of a session, and events."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from tersely.api.rest.schemas.common import Money, Shadow, TurnId


class TenantEventPage(BaseModel):
    """Calls (`type` is `call`), epochs and compactions, in order of time."""

    items: list[dict[str, Any]]
    next: str | None


class ReportedOut(BaseModel):
    """Tokens as the provider reported them."""

    input: int
    cached: int
    output: int


class EpochCounts(BaseModel):
    """The number of started epochs, by reason."""

    total: int
    current: int
    by_reason: dict[str, int]


class SummaryMoney(BaseModel):
    """The cost."""

    currency: str
    sent: float


class SummaryDay(BaseModel):
    """The use and the limits of the summarizer today (UTC); null: no limit. `refused`: summaries that were extracted
    without a model because of the limit.
    """

    calls: int
    tokens: int
    max_calls: int | None
    max_tokens: int | None
    refused: int


class SummariesOut(BaseModel):
    """The results of compactions. `compression_ratio` is the mean of tokens before / after.

    `calls`, `input_tokens` and `output_tokens` count the summarizer's own calls. `money` is null without a configured
    price.
    """

    total: int
    compression_ratio: float | None
    last_at: str | None
    calls: int
    input_tokens: int
    output_tokens: int
    money: SummaryMoney | None
    today: SummaryDay


class LevelOut(BaseModel):
    """A memory level of `tiered`, in tokens. A level without a budget uses the remaining tokens."""

    name: Literal["permanent", "session", "working", "volatile"]
    tokens: int
    budget: int | None


class TieredOut(BaseModel):
    """The next context under `tiered`: how much of its budget each level uses."""

    tokens: int
    budget: int
    share: float
    levels: list[LevelOut]
    retrieved: list[TurnId] = Field(description="Turns that were retrieved because of their relevance.")


class StatsOut(BaseModel):
    """Statistics of a session. A share is null if its divisor is 0."""

    messages: int
    messages_by_status: dict[str, int]
    turns: int
    tokens: int
    live_tokens: int
    calls: int
    failed_calls: int
    tokens_before: int = Field(
        description=(
            "The tokens that would have been sent without Tersely, summed over all calls that did not fail, as "
            "Tersely counts them."
        )
    )
    tokens_after: int = Field(description="The tokens that were sent by these calls.")
    saved: int
    saved_share: float | None
    reported: ReportedOut
    cache_hit_share: float | None
    epochs: EpochCounts
    terse: dict[str, int] = Field(
        description="The stored entries of the log, by source. A line without a model is stored when its turn is cut."
    )
    summaries: SummariesOut
    money: Money | None = Field(description="Of the calls; null where none has a price. Summaries have their own.")
    shadow: Shadow | None = Field(description="null where no strategy was tried out.")
    tiered: TieredOut | None = Field(description="null under other strategies.")


class EpochStarted(BaseModel):
    """An epoch that started."""

    type: Literal["epoch"]
    number: int
    reason: str
    cut: int
    head_tokens: int
    tokens_before: int
    tokens_after: int
    created_at: str


class CompactionEvent(BaseModel):
    """A summary of a range of messages: requested, finished or given up."""

    type: Literal["compaction_start", "compaction_end"]
    number: int
    purpose: str
    strategy: str
    first_seq: int
    last_seq: int
    messages: int
    tokens_before: int
    tokens_after: int | None = None
    result: str | None = Field(
        None, description="The result, at the end of a compaction: see `POST /sessions/{session_id}/compact`."
    )
    error: str | None = Field(None, description="Why no model wrote the summary, if one was configured.")
    created_at: str


class EventPage(BaseModel):
    """Events in order."""

    items: list[EpochStarted | CompactionEvent]
    next: str | None
