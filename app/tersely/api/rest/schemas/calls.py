"""Upstream calls, the contexts that they sent, epochs, and savings."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from tersely.api.rest.schemas.common import Money, Reported, Shadow, TurnId
from tersely.api.rest.schemas.contexts import LayerOut


class CallOut(BaseModel):
    """An upstream call. Tersely counted `tokens_before` and `tokens_after`; the provider reported the other tokens."""

    session: str
    number: int
    turn: TurnId | None
    model: str
    client: str | None
    host: str | None = Field(
        description="The name of the model host in `TERSELY_UPSTREAMS`; empty: the default host of the dialect. "
        "Null for calls of earlier versions."
    )
    strategy: str
    epoch: int
    cut: int
    tokens_before: int
    tokens_after: int
    input_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    money: Money | None
    overhead_ms: float | None
    status: int | None
    created_at: str
    finished_at: str | None
    request_id: str | None
    layers: list[LayerOut]


class CallPage(BaseModel):
    """Calls."""

    items: list[CallOut]
    next: int | str | None


class LineOut(BaseModel):
    """A message and how the context kept it. `seq` is null for a message that Tersely added. `index` is its position in
    `messages`.
    """

    seq: int | None
    turn: TurnId | None
    role: str
    kept: Literal["full", "truncated", "terse", "summary", "left_out", "added"]
    reason: str
    tokens: int
    index: int | None
    layer: str | None


class CallContextOut(BaseModel):
    """The context that a call sent to the model.

    `messages` are the elements of the request's message list, byte for byte; `instructions` is the system text outside
    of that list. Both are null if they can no longer be restored from the store; then `reason` says why. The same holds
    for `tools`, the request's tool definitions, with `tools_reason`.
    """

    call: CallOut
    dialect: str
    exact: bool
    reason: str | None
    messages: list[Any] | None
    instructions: Any
    tools: list[Any] | None
    own_tools: list[str] = Field(description="The names of the tools that Tersely added to the client's.")
    tools_reason: str | None
    rounds: list[int] = Field(description="For a call with several rounds: the lengths of the earlier message lists.")
    lines: list[LineOut]


class StoredEpochOut(BaseModel):
    """An epoch. The tail begins at `cut`; the head stands for the messages before it."""

    number: int
    cut: int
    reason: str
    head_tokens: int
    tokens_before: int
    tokens_after: int
    created_at: str


class EpochPage(BaseModel):
    """Epochs in order."""

    items: list[StoredEpochOut]
    next: int | None


class SavingsRowOut(BaseModel):
    """Sums over the calls of one key. The summarizer's cost is part of `money.sent`."""

    key: str
    calls: int
    tokens_before: int
    tokens_after: int
    tokens_saved: int
    reported: Reported
    priced_calls: int
    summary_calls: int
    summary_tokens: int
    money: Money | None
    shadow: Shadow | None


class SavingsOut(BaseModel):
    """Tokens and money as sent, against the full history with a perfect cache."""

    since: str
    until: str
    by: str
    items: list[SavingsRowOut]
    total: SavingsRowOut
