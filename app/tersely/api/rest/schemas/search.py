"""Searches in one session and in all, and queries by SQL."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from tersely.api.rest.schemas.common import Body, TurnId


class SearchRequest(Body):
    """The arguments of `context_search`. Arguments of other modes are ignored."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"mode": "search", "query": "colour palette", "before": 2, "after": 2},
                {"mode": "relevant", "query": "which colours did we agree on?", "first": 5},
                {"mode": "tail", "last": 20},
                {"mode": "head", "first": 10},
                {"mode": "turn", "turnId": "t5", "before": 2, "after": 1},
            ]
        }
    )

    mode: Literal["search", "relevant", "tail", "head", "turn"]
    query: str | None = Field(
        None, max_length=1000, description="The text to find (case is ignored), or for `relevant` the subject."
    )
    before: int | None = Field(None, ge=0, le=1000, description="Messages before each match, or turns.")
    after: int | None = Field(None, ge=0, le=1000, description="Messages after each match, or turns.")
    last: int | None = Field(None, ge=0, le=1000)
    first: int | None = Field(
        None, ge=0, le=1000, description="The number of first messages, or of most relevant ones."
    )
    turnId: str | None = Field(None, max_length=20, examples=["t5"])  # noqa: N815 the document's name


class RunQuery(Body):
    """A query."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "sql": "SELECT id, role, content FROM messages WHERE status != 'dropped' "
                    "AND content LIKE '%refactor plan%' ORDER BY id DESC LIMIT 5"
                },
                {"sql": "SELECT content FROM messages WHERE id = 17"},
            ]
        }
    )

    sql: str = Field(description="One SELECT (or WITH ... SELECT), of at most 20,000 characters.")


class NeighbourOut(BaseModel):
    """A message beside one that was found."""

    seq: int
    turn: TurnId | None
    role: str
    excerpt: str


class HitOut(BaseModel):
    """A message that was found, with the messages before and after it. `excerpt`: the text around the first match."""

    session: str
    title: str | None
    seq: int
    turn: TurnId | None
    role: str
    excerpt: str
    before: NeighbourOut | None
    after: NeighbourOut | None


class HitsOut(BaseModel):
    """The messages that were found in `searched` sessions."""

    hits: list[HitOut]
    searched: int
    is_whole: bool


class FoundMessage(BaseModel):
    """A message of an excerpt; `number` is its position in the live history, from 1 on."""

    number: int
    seq: int
    turn: TurnId
    role: str
    text: str = Field(description="The text that `context_search` prints.")
    rank: int | None = Field(description="Mode `relevant`: 1 for the best match, 2 for the next; null: a neighbour.")


class ExcerptOut(BaseModel):
    """A contiguous range of the history."""

    first: int
    last: int
    messages: list[FoundMessage]


class SearchOut(BaseModel):
    """The result of a search."""

    text: str = Field(examples=["--- messages 14-18 of 42 ---\n[user t7] Can you make a colour palette?"])
    excerpts: list[ExcerptOut]
    total: int = Field(description="Messages of the live history.")
    truncated: bool = Field(description="Whether results were left out; `text` names them.")


class QueryOut(BaseModel):
    """The result of a query."""

    columns: list[str]
    rows: list[list[str | int | float | None]] = Field(
        description="A blob is shown as `x'00ff'`, an infinite number as `Infinity`."
    )
    truncated: bool = Field(description="Whether rows or values were left out; `notes` name them.")
    notes: list[str]
