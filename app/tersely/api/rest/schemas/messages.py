"""Messages: append, list, pin, hide."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from tersely.api.rest.schemas.common import Body, StatusName, TurnId, Wire


class AppendMessages(Body):
    """Messages to append to a session."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "messages": [
                        {"role": "user", "content": "Can you make a colour palette?"},
                        {"role": "assistant", "content": "Here it is. <terse>made a palette</terse>"},
                    ]
                }
            ]
        }
    )

    dialect: str | None = Field(
        None,
        description=(
            "The wire format of the messages. Default: detected from the messages; `openai_chat` for plain text."
        ),
    )
    messages: list[Wire] = Field(min_length=1, max_length=10_000, description="Wire messages, stored byte for byte.")
    model: str | None = Field(
        None,
        max_length=200,
        description=(
            "The model that the agent calls without the proxy. Its window limits the session's contexts, "
            "like `model` of `POST context`. Default: the model of the session's last proxied call."
        ),
    )
    created_at: list[Annotated[str, Field(max_length=64)]] | None = Field(
        None,
        max_length=10_000,
        description=(
            "The time of each message: one RFC 3339 time with a zone per message, from 1970 to five minutes "
            "from now. The times need not ascend. Default: now."
        ),
        examples=[["2024-01-15T10:30:00Z", "2024-01-15T11:30:09+01:00"]],
    )


class PutPriority(Body):
    """The importance of a message."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"priority": 75}]})

    priority: int = Field(ge=0, le=100, description="Default: 50. From 75 on the message counts as important.")


class PatchMessage(Body):
    """The visibility of a message. A field that is left out keeps its value."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"model_visible": False}, {"client_visible": True}]})

    client_visible: bool | None = Field(None, description="Whether the client's view, exports and searches show it.")
    model_visible: bool | None = Field(None, description="Whether contexts may show it to the model.")


class AppendedOut(BaseModel):
    """The numbers of the appended messages."""

    first_seq: int
    last_seq: int
    turn: TurnId | None = Field(description="The turn of the last message; null if all are instructions.")


class MessageOut(BaseModel):
    """A stored message. `model_raw`, `client_visible` and `model_visible` are only present with `view=all`."""

    seq: int
    turn: TurnId | None = Field(description="null for instructions, which belong to no turn.")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    status: StatusName
    dialect: str
    tokens: int
    pinned: bool = Field(description="Whether it stays in every context.")
    priority: int = Field(description="0 to 100. From 75 on the message counts as important.")
    finish: str | None
    created_at: str
    raw: Wire | None = Field(description="The message in wire form, byte for byte; null once removed.")
    model_raw: Wire | None = Field(None, description="The model's view, if it differs.")
    client_visible: bool = True
    model_visible: bool = True


class MessagePage(BaseModel):
    """Messages in the order of the view."""

    items: list[MessageOut]
    next: int | None = Field(description="The `after` of the next page.")
