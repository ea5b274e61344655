"""Tersely's tools, and chat commands."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from tersely.api.rest.schemas.common import Body


class RunCommand(Body):
    """A command as it is typed into a chat."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"text": "/context show"}, {"text": "/message list 5"}]})

    text: str = Field(max_length=4_000)


class CallTool(Body):
    """A tool call. `arguments`: as the model wrote them, JSON text or the decoded object."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"arguments": {"mode": "tail", "last": 5}}]})

    arguments: Any = Field(default_factory=dict)


class CommandAnswer(BaseModel):
    """The answer of a command."""

    text: str


class ToolOut(BaseModel):
    """The definition of a tool; `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: dict[str, Any]
    strategies: list[str] = Field(description="The strategies under which the tool is offered in proxied calls.")


class ToolPage(BaseModel):
    """The tools."""

    items: list[ToolOut]
    next: str | None


class ToolAnswer(BaseModel):
    """The answer of a tool to a model."""

    text: str
    is_error: bool = Field(description="Whether the tool failed; `text` says why.")
