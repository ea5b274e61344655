"""The terse log, the state block and the scratchpad of a session."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from tersely.api.rest.schemas.common import Body, TurnId


class PutText(Body):
    """The new text, whole."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"text": "Goal: a palette\nContext: palette.css"}]})

    text: str


class AppendText(Body):
    """The text to add, on a new line."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"text": "- [ ] the footer"}]})

    text: str


class TerseOut(BaseModel):
    """An entry of the terse log."""

    ts: str
    turnId: TurnId  # noqa: N815 the document's name
    role: str
    summary: str
    source: Literal["model", "derived"]


class TersePage(BaseModel):
    """The terse log in order."""

    items: list[TerseOut]
    next: str | None


class StateOut(BaseModel):
    """The state block without its heading; empty if there is none."""

    text: str
    seq: int = Field(description="The message that contained it; 0: none.")
    source: Literal["model", "client", "rebuilt"] | None
    created_at: str | None


class PastStateOut(StateOut):
    """A state of the history."""

    live: bool = Field(description="Whether its message is live: not superseded, dropped or undone.")


class StatePage(BaseModel):
    """States in order, newest last."""

    items: list[PastStateOut]
    next: str | None


class ScratchpadOut(BaseModel):
    """The scratchpad; empty where nothing was written."""

    text: str
    updated_at: str | None
