"""Sessions as files: import and export."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from tersely.api.rest.schemas.common import Body, Setting, Wire
from tersely.api.rest.schemas.notes import TerseOut


class ImportSession(Body):
    """A session in the formats of `context.json` and `context.terse.json`, as written by `export`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "context": [
                        {"turnId": "t1", "ts": "2024-01-15T10:30:00Z", "role": "user", "content": "Make a dashboard"},
                        {"turnId": "t1", "ts": "2024-01-15T10:30:09Z", "role": "assistant", "content": "Done."},
                    ],
                    "terse": [
                        {
                            "ts": "2024-01-15T10:30:09Z",
                            "turnId": "t1",
                            "role": "assistant",
                            "summary": "created dashboard",
                        }
                    ],
                }
            ]
        }
    )

    context: list[Wire] = Field(
        max_length=200_000,
        description=(
            "Wire messages with `turnId` and `ts`. Messages without them are assigned to turns by the usual rule."
        ),
    )
    terse: list[Wire] = Field(default_factory=list, max_length=200_000, description="`{ts, turnId, role, summary}`")
    dialect: str | None = Field(
        None,
        description=(
            "The wire format of the context. Default: detected from the messages; `openai_chat` for plain text."
        ),
    )
    id: str | None = Field(None, min_length=1, max_length=256)
    parent: str | None = Field(None, min_length=1, max_length=256)
    strategy: Setting = None
    epoch: Setting = None
    metadata: dict[str, Any] | None = None
    tersely: dict[str, Any] | None = Field(
        None,
        description=(
            "The data that an export contains besides history and log. It is valid only with the `context` "
            "of the same export."
        ),
    )


class ExportOut(BaseModel):
    """A session in the formats of `context.json` and `context.terse.json`."""

    context: list[Wire]
    terse: list[TerseOut]
    tersely: dict[str, Any] = Field(description="Further data that restores the same session at import.")
