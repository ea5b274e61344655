"""The wire shapes of the REST API. Bodies refuse fields that they do not know; answers are described, not checked."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field

MAX_SEQ = 2**53
MAX_TURN = 2**31 - 1
MAX_DAYS = 36_500

Limit = Annotated[int, Field(ge=1, le=1000, description="Items of a page, 1 to 1000.")]
Setting = Annotated[
    str | dict[str, Any] | None,
    Field(max_length=2000, description="A name, or an object with parameters; null: the configured default."),
]
Wire = dict[str, Any]
Kept = Literal["full", "truncated", "terse", "summary", "left_out"]
StatusName = Literal["live", "superseded", "dropped", "undone", "removed"]
TurnId = Annotated[str, Field(examples=["t7"], description="`t1`, `t2`, ...; never reused.")]


class Body(BaseModel):
    """What is sent to Tersely: strict types, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True)


class CreateSession(Body):
    """A new session. Everything is optional."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"id": "support-4711", "strategy": {"name": "slim", "recent_turns": 5}}]}
    )

    id: str | None = Field(None, description="1 to 256 printable characters. Default: generated.")
    strategy: Setting = Field(None, examples=["slim", {"name": "slim", "recent_turns": 5}])
    epoch: Setting = Field(None, examples=["auto", "every_request", {"high": 32000, "low": 12000}, {"stride": 8}])
    metadata: dict[str, Any] | None = Field(None, description="Any JSON object of at most 16 KiB.")
    parent: str | None = Field(None, max_length=256, description="The id of the session that this one belongs to.")


class PatchSession(Body):
    """The fields to change. A field that is left out keeps its value; null restores the default."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"strategy": "full", "metadata": {"owner": "ops"}}]})

    strategy: Setting = None
    epoch: Setting = None
    metadata: dict[str, Any] | None = Field(None, description="Replaces all metadata.")


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
    id: str | None = None
    parent: str | None = Field(None, max_length=256)
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


class PutText(Body):
    """The new text, whole."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"text": "Goal: a palette\nContext: palette.css"}]})

    text: str


class AppendText(Body):
    """The text to add, on a new line."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"text": "- [ ] the footer"}]})

    text: str


class NewMemo(Body):
    """Knowledge for later sessions."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"content": "Migrations run before the first worker starts.", "tags": ["arch-decision", "deploy"]}
            ]
        }
    )

    content: str = Field(description="At most 8,000 characters.")
    tags: list[str] = Field(default_factory=list, description="At most 20, of 1 to 64 characters; case does not count.")
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


class PutPriority(Body):
    """How important a message is."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"priority": 75}]})

    priority: int = Field(ge=0, le=100, description="Default: 50. From 75 on the message counts as important.")


class PatchMessage(Body):
    """The visibility of a message. A field that is left out keeps its value."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"model_visible": False}, {"client_visible": True}]})

    client_visible: bool | None = Field(None, description="Whether the client's view, exports and searches show it.")
    model_visible: bool | None = Field(None, description="Whether contexts may show it to the model.")


class RunCommand(Body):
    """A command as it is typed into a chat."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"text": "/context show"}, {"text": "/message list 5"}]})

    text: str = Field(max_length=4_000)


class SearchMemory(Body):
    """A search by words, optionally within one day or one session."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"query": "which port did we choose?"}]})

    query: str = Field(
        max_length=8000, description="Finds entries that share a word with this text, apart from stop words."
    )
    day: str | None = Field(None, max_length=10, examples=["2026-01-31"], description="YYYY-MM-DD, in UTC.")
    session: str | None = Field(None, max_length=256)
    limit: int = Field(5, ge=1, le=100)


class CallTool(Body):
    """A tool call. `arguments`: as the model wrote them, JSON text or the decoded object."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"arguments": {"mode": "tail", "last": 5}}]})

    arguments: Any = Field(default_factory=dict)


# Answers


Since = Annotated[datetime | None, Query(description="A time in ISO 8601 with its zone.")]


class Problem(BaseModel):
    """An error (RFC 9457)."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "type": "about:blank",
                    "title": "Invalid request",
                    "status": 422,
                    "detail": "limit: input should be less than or equal to 1000",
                    "field": "limit",
                }
            ]
        }
    )

    type: str
    title: str
    status: int
    detail: str
    field: str | None = Field(None, description="The invalid part of the input, if there is one.")


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


class Money(BaseModel):
    """USD as sent, as the full history with a perfect cache would have cost, and the difference."""

    currency: str
    sent: float
    full: float
    saved: float


class Reported(BaseModel):
    """Tokens as the provider reported them; `cached` is part of `input`."""

    input: int
    cached: int
    output: int


class SessionOut(ImportedSessionOut):
    """A session with sums over its calls."""

    title: str | None = Field(description="The first words of the user.")
    client: str | None = Field(description="The program that called last, by its user agent.")
    models: list[str]
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


class CallOut(BaseModel):
    """An upstream call. Tersely counted `tokens_before` and `tokens_after`; the provider reported the other tokens."""

    session: str
    number: int
    turn: TurnId | None
    model: str
    client: str | None
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
    """Whether and how one message was kept. `seq` is null for a message that Tersely added. `index` is its position in
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
    of that list. Both are null if they can no longer be restored from the store; then `reason` says why.
    """

    call: CallOut
    dialect: str
    exact: bool
    reason: str | None
    messages: list[Any] | None
    instructions: Any
    rounds: list[int] = Field(description="For a call with several rounds: the lengths of the earlier message lists.")
    lines: list[LineOut]


class TenantEventPage(BaseModel):
    """Calls (`type` is `call`), epochs and compactions, in order of time."""

    items: list[dict[str, Any]]
    next: str | None


class HitOut(BaseModel):
    """A message that was found."""

    session: str
    title: str | None
    seq: int
    turn: TurnId | None
    role: str
    excerpt: str


class HitsOut(BaseModel):
    """The messages that were found in `searched` sessions."""

    hits: list[HitOut]
    searched: int
    is_whole: bool


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


class SavingsOut(BaseModel):
    """Tokens and money as sent, against the full history with a perfect cache."""

    since: str
    until: str
    by: str
    items: list[SavingsRowOut]
    total: SavingsRowOut


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


class UsageOut(BaseModel):
    """The calls of a turn: tokens before and after as Tersely counts them, and as the provider reported them."""

    calls: int
    tokens_before: int
    tokens_after: int
    input: int | None
    cached: int | None
    output: int | None
    weight: int | None = Field(description="The tokens of prompt and completion at the last round of the last call.")


class TurnOut(BaseModel):
    """A turn, computed from its live messages, or from all if none is live."""

    turn: TurnId
    status: StatusName
    messages: int
    first_seq: int
    last_seq: int
    tokens: int
    terse: list[str]
    usage: UsageOut
    created_at: str
    updated_at: str


class TurnPage(BaseModel):
    """Turns in order, without removed ones."""

    items: list[TurnOut]
    next: TurnId | None


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
    """Whether and how a turn was kept, and why."""

    turn: TurnId
    kept: Kept
    tokens: int
    reason: str


class ReportOut(BaseModel):
    """Which turns were kept, shortened or left out, and why."""

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


class MemoryOut(BaseModel):
    """A summary of a session's messages `first_seq` to `last_seq`."""

    day: str
    session: str
    first_seq: int
    last_seq: int
    text: str
    created_at: str


class MemoryPage(BaseModel):
    """Memory entries: a list is newest first, a search result best first."""

    items: list[MemoryOut]
    next: str | None


class ForgottenOut(BaseModel):
    """How many entries were deleted."""

    deleted: int


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


class ExportOut(BaseModel):
    """A session in the formats of `context.json` and `context.terse.json`."""

    context: list[Wire]
    terse: list[TerseOut]
    tersely: dict[str, Any] = Field(description="Further data that restores the same session at import.")


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
            "The tokens that would have been sent without Tersely, summed over all calls, as Tersely counts them."
        )
    )
    tokens_after: int = Field(description="The tokens that were sent.")
    saved: int
    saved_share: float | None
    reported: ReportedOut
    cache_hit_share: float | None
    epochs: EpochCounts
    terse: dict[str, int]
    summaries: SummariesOut
    money: Money | None = Field(description="Of the calls; null where none has a price. Summaries have their own.")
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


class NewTenant(Body):
    """A tenant without keys."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"tenant": "acme"}]})

    tenant: str = Field(min_length=1, max_length=128, description="Letters, digits, and `. _ @ : -` (not first).")


class NewKey(Body):
    """A key of a tenant. The tenant is created with its first key."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"tenant": "acme", "name": "laptop", "scope": "proxy"}]})

    tenant: str = Field(min_length=1, max_length=128)
    name: str = Field("", max_length=200, description="A label to know the key by.")
    scope: Literal["read", "proxy"] | None = Field(
        None, description="`read`: only read over REST; `proxy`: only call models; null: everything."
    )
    client: str | None = Field(
        None, min_length=1, max_length=64, description="The only client that may use it, by its name in lists of calls."
    )
    days: int | None = Field(None, ge=1, le=MAX_DAYS, description="The key expires after so many days.")


Count = Annotated[int | None, Field(ge=0, le=MAX_SEQ)]
Amount = Annotated[float | None, Field(ge=0, le=MAX_SEQ, strict=False)]
PER_MINUTE = "Requests, proxied and REST, in any 60 seconds."
CONCURRENT = "Proxied requests under way at a time."
PER_DAY = "Tokens of model calls, sent and answered, in a day (UTC), as the provider reports them."
PER_MONTH = "USD of model calls in a month (UTC), where the model's price is known."
STORED = "Bytes of the messages that are stored."


class KeyLimitsIn(Body):
    """Limits of a key, beside those of its tenant; null: none."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"requests_per_minute": 60, "money_per_month": 20}]})

    requests_per_minute: Count = Field(None, description=PER_MINUTE)
    concurrent: Count = Field(None, description=CONCURRENT)
    tokens_per_day: Count = Field(None, description=PER_DAY)
    money_per_month: Amount = Field(None, description=PER_MONTH)


class LimitsIn(KeyLimitsIn):
    """Limits of a tenant; null: the configured default."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"requests_per_minute": 600, "concurrent": 20, "tokens_per_day": 5_000_000}]}
    )

    stored_bytes: Count = Field(None, description=STORED)
    retention_days: int | None = Field(
        None, ge=1, le=MAX_DAYS, description="Sessions go after so many idle days; null: as configured."
    )


class KeyLimits(BaseModel):
    """Limits of a key; null: none."""

    requests_per_minute: int | None = Field(description=PER_MINUTE)
    concurrent: int | None = Field(description=CONCURRENT)
    tokens_per_day: int | None = Field(description=PER_DAY)
    money_per_month: float | None = Field(description=PER_MONTH)


class EffectiveLimits(KeyLimits):
    """The effective limits: the tenant's own, or else the configured defaults."""

    stored_bytes: int | None = Field(description=STORED)


class TenantLimits(EffectiveLimits):
    """A tenant's own limits; null: the configured default."""

    retention_days: int | None = Field(description="Sessions go after so many idle days.")


class KeyUse(BaseModel):
    """What has been used of the limits. Workers take up to a hundredth of a limit ahead of need."""

    requests_per_minute: int
    concurrent: int
    tokens_per_day: int
    money_per_month: float


class TenantUse(KeyUse):
    """The use of a tenant. Only limited quantities are counted; `stored_bytes` is null until it is measured."""

    stored_bytes: int | None


class KeyLimitsOut(BaseModel):
    """A key's limits and use."""

    limits: KeyLimits
    used: KeyUse


class TenantLimitsOut(BaseModel):
    """A tenant's limits and use."""

    limits: TenantLimits
    effective: EffectiveLimits
    used: TenantUse


class KeyOut(BaseModel):
    """A key without its secret."""

    id: str
    tenant: str
    name: str
    scope: Literal["read", "proxy"] | None
    client: str | None
    created_at: str
    expires_at: str | None
    revoked_at: str | None


class NewKeyOut(KeyOut):
    """A new key."""

    key: str = Field(description="The key itself. It is shown this once.")


class KeyPage(BaseModel):
    """Keys by tenant, oldest first."""

    items: list[KeyOut]
    next: str | None


class LimitedKeyOut(KeyOut, KeyLimitsOut):
    """A key with its limits and use."""


class TenantOut(TenantLimitsOut):
    """A tenant with limits, use and keys."""

    tenant: str
    created_at: str | None = Field(description="null for the tenant that needs no key.")
    keys: list[LimitedKeyOut]


class TenantPage(BaseModel):
    """Tenants by name."""

    items: list[TenantOut]
    next: str | None
