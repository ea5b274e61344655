"""Bodies of the routes that build, compact and clear contexts, and the report on a context."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from tersely.api.rest.schemas.common import Body, Setting, TurnId, Wire

Kept = Literal["full", "truncated", "terse", "summary", "left_out"]


class BuildContext(Body):
    """The request that a context is built for. It is not stored."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"model": "gpt-4o", "messages": [{"role": "user", "content": "And now in blue?"}]},
                {"strategy": "slim", "epoch": "every_request", "max_tokens": 8000},
            ]
        }
    )

    dialect: str = Field("openai_chat", description="The wire format of `messages` and of the answer.")
    strategy: Setting = None
    epoch: Setting = None
    model: str = Field(
        "",
        max_length=200,
        description="The model whose tokenizer is used, and whose window limits the context if it is known.",
    )
    max_tokens: int | None = Field(
        None, ge=1, le=100_000_000, description="The window that the context must fit into, instructions included."
    )
    messages: list[Wire] = Field(
        default_factory=list, max_length=10_000, description="Messages that come after the stored ones."
    )
    tools: list[str] | None = Field(
        None,
        max_length=20,
        description=(
            "The tools of Tersely that the model will have. Hints in the context name only these. Default: "
            "those of the session's proxied calls, or none without such calls."
        ),
    )
    format: Literal["json", "text"] = Field("json", description="`text`: readable text.")


class ChosenSettings(Body):
    """Strategy and epoch policy of future calls, where they differ from the session's and from the configured ones."""

    model_config = ConfigDict(json_schema_extra={"examples": [{}, {"strategy": "compact"}]})

    strategy: Setting = None
    epoch: Setting = None


class EpochOut(BaseModel):
    """The epoch that a context belongs to. `cut` is the first sequence number of its tail."""

    number: int
    reason: str
    cut: int


class LayerOut(BaseModel):
    """A layer of the context."""

    name: str
    tokens: int


class TurnReportOut(BaseModel):
    """A turn: how it was kept, and why."""

    turn: TurnId
    kept: Kept
    tokens: int
    reason: str


class ReportOut(BaseModel):
    """The turns that were kept, shortened or left out, and why."""

    tokens_before: int
    tokens_after: int
    epoch: EpochOut
    layers: list[LayerOut]
    turns: list[TurnReportOut]
    turns_omitted: int = Field(description="The number of older turns that are not listed because there are too many.")


class ShortReportOut(BaseModel):
    """The context of the started epoch, in short."""

    tokens_before: int
    tokens_after: int
    epoch: EpochOut
    layers: list[LayerOut]


class SummaryOut(BaseModel):
    """The result of a summary: `model`, `extractive`, `done` (it existed already), `unchanged` (nothing shorter was
    found), `empty`, `stale` (the history changed meanwhile) or `failed`.
    """

    result: str
    first_seq: int | None
    last_seq: int | None
    tokens_before: int
    tokens_after: int
    error: str | None = Field(description="Why no model wrote the summary, if one was configured.")


class CompactedOut(BaseModel):
    """The result of a compaction."""

    summary: SummaryOut | None = Field(description="null if the strategy replaces no messages by a summary.")
    report: ShortReportOut


class ClearedOut(BaseModel):
    """The context after it was cleared."""

    report: ShortReportOut


class ContextOut(BaseModel):
    """A context. The proxy would send `instruction_messages` followed by `messages`."""

    instructions: str | None = Field(description="The text of the instructions, including Tersely's own.")
    instruction_messages: list[Wire]
    messages: list[Wire]
    strategy: str
    report: ReportOut
