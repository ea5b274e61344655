"""Sessions: create, configure, list."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from tersely.api.rest.schemas.common import Body, Money, Reported, Setting


class CreateSession(Body):
    """A new session. Everything is optional."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"id": "support-4711", "strategy": {"name": "slim", "recent_turns": 5}}]}
    )

    id: str | None = Field(
        None, min_length=1, max_length=256, description="1 to 256 printable characters. Default: generated."
    )
    strategy: Setting = Field(None, examples=["slim", {"name": "slim", "recent_turns": 5}])
    epoch: Setting = Field(None, examples=["auto", "every_request", {"high": 32000, "low": 12000}, {"stride": 8}])
    metadata: dict[str, Any] | None = Field(None, description="Any JSON object of at most 16 KiB.")
    parent: str | None = Field(
        None, min_length=1, max_length=256, description="The id of the session that this one belongs to."
    )


class PatchSession(Body):
    """The fields to change. A field that is left out keeps its value; null restores the default."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"strategy": "full", "metadata": {"owner": "ops"}}]})

    strategy: Setting = None
    epoch: Setting = None
    metadata: dict[str, Any] | None = Field(None, description="Replaces all metadata.")


class ImportedSessionOut(BaseModel):
    """A session. `turns`, `messages` and `tokens` count everything that is stored, including hidden messages."""

    id: str
    parent: str | None
    client_id: str | None = Field(description="An id that a client sends for its own purposes, if the proxy saw one.")
    strategy: str | dict[str, Any] = Field(
        description=(
            "The session's own strategy, or else that of its last call's header, or else the configured default."
        )
    )
    epoch: str | dict[str, Any] = Field(description="The epoch policy, chosen in the same order.")
    last_call_strategy: str | dict[str, Any] | None = Field(
        description="The value of `X-Tersely-Strategy` at the last call; null without the header."
    )
    last_call_epoch: str | dict[str, Any] | None = Field(description="The value of `X-Tersely-Epoch` at the last call.")
    metadata: dict[str, Any]
    turns: int
    messages: int = Field(description="The last sequence number.")
    tokens: int
    created_at: str
    updated_at: str


class SessionOut(ImportedSessionOut):
    """A session with sums over its calls."""

    title: str | None = Field(description="The first words of the user.")
    client: str | None = Field(description="The program that called last, by its user agent.")
    models: list[str]
    host: str | None = Field(description="The model host of the last call, as in a call.")
    calls: int
    tokens_saved: int
    reported: Reported
    cache_hit_share: float | None
    money: Money | None = Field(description="null if no call's model has a price.")
    last_call_at: str | None
    live: bool = Field(description="Whether the last call began less than a minute ago.")


class SessionPage(BaseModel):
    """Sessions, newest first."""

    items: list[SessionOut]
    next: str | None
