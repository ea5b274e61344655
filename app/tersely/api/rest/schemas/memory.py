"""Knowledge that outlives a session: memos and daily memory."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from tersely.api.rest.schemas.common import Body
from tersely.service.memos.memos import MAX_CONTENT, MAX_TAG, MAX_TAGS


class NewMemo(Body):
    """Knowledge for later sessions."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"content": "Migrations run before the first worker starts.", "tags": ["arch-decision", "deploy"]}
            ]
        }
    )

    content: str = Field(description="At most 8,000 characters.", json_schema_extra={"maxLength": MAX_CONTENT})
    tags: list[str] = Field(
        default_factory=list,
        description="At most 20, of 1 to 64 characters; case does not count.",
        json_schema_extra={"maxItems": MAX_TAGS, "items": {"type": "string", "minLength": 1, "maxLength": MAX_TAG}},
    )
    session: str | None = Field(None, max_length=256, description="The session that it comes from.")


class SearchMemos(Body):
    """A search by tags, by words, or by both."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"query": "when do migrations run?"}, {"tags": ["gotcha"]}]}
    )

    tags: list[str] = Field(default_factory=list, description="Memos with any of these.")
    query: str | None = Field(
        None, max_length=8000, description="Finds memos that share a word with this text, apart from stop words."
    )
    limit: int = Field(5, ge=1, le=100)


class SearchMemory(Body):
    """A search by words, optionally within one day or one session."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"query": "which port did we choose?"}]})

    query: str = Field(
        max_length=8000, description="Finds entries that share a word with this text, apart from stop words."
    )
    day: str | None = Field(None, max_length=10, examples=["2026-01-31"], description="YYYY-MM-DD, in UTC.")
    session: str | None = Field(None, max_length=256)
    limit: int = Field(5, ge=1, le=100)


class MemoOut(BaseModel):
    """A memo."""

    id: str
    content: str
    tags: list[str]
    session: str | None = Field(description="The session that it came from. It may have been deleted.")
    created_at: str


class MemoPage(BaseModel):
    """Memos: a list is newest first, a search result best first."""

    items: list[MemoOut]
    next: str | None


class SeqRange(BaseModel):
    """A run of messages, from `first_seq` to `last_seq`, both included."""

    first_seq: int
    last_seq: int


class MemoryOut(BaseModel):
    """A summary of a session's messages in `ranges`, which lie between `first_seq` and `last_seq`."""

    day: str
    session: str
    first_seq: int
    last_seq: int
    ranges: list[SeqRange] = Field(
        description="The runs of messages that the entry covers. No two entries of a session cover the same message."
    )
    text: str
    created_at: str


class MemoryPage(BaseModel):
    """Memory entries: a list is newest first, a search result best first."""

    items: list[MemoryOut]
    next: str | None


class ForgottenOut(BaseModel):
    """The number of deleted entries."""

    deleted: int
