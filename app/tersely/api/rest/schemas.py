"""The wire shapes of the REST API. Bodies refuse fields that they do not know; answers are described, not checked."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field

MAX_SEQ = 2**53
MAX_TURN = 2**31 - 1

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

    id: str | None = Field(None, description="1 to 256 printable characters; generated when left out.")
    strategy: Setting = Field(None, examples=["slim", {"name": "slim", "recent_turns": 5}])
    epoch: Setting = Field(None, examples=["auto", "every_request", {"high": 32000, "low": 12000}, {"stride": 8}])
    metadata: dict[str, Any] | None = Field(None, description="Any JSON object of at most 16 KiB.")
    parent: str | None = Field(None, max_length=256, description="A session of yours that this one belongs to.")


class PatchSession(Body):
    """What is to be changed; what is left out stays, null goes back to the default."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"strategy": "full", "metadata": {"owner": "ops"}}]})

    strategy: Setting = None
    epoch: Setting = None
    metadata: dict[str, Any] | None = Field(None, description="Replaces all metadata.")


class AppendMessages(Body):
    """Messages to be put at the end of a session."""

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
        None, description="The wire format of the messages. Left out: told by their shapes; plain words: `openai_chat`."
    )
    messages: list[Wire] = Field(min_length=1, max_length=10_000, description="Wire messages, stored byte for byte.")
    model: str | None = Field(
        None,
        max_length=200,
        description="The model that the agent calls by itself: its window bounds the session's contexts, as `model` of "
        "`POST context` does. Left out: the model of the session's last proxied call.",
    )
    created_at: list[Annotated[str, Field(max_length=64)]] | None = Field(
        None,
        max_length=10_000,
        description="When each message was written: one RFC 3339 time with a zone per message, from 1970 to five "
        "minutes from now. They need not ascend. Left out: now.",
        examples=[["2024-01-15T10:30:00Z", "2024-01-15T11:30:09+01:00"]],
    )


class BuildContext(Body):
    """What the context is to be built for. Nothing of it is stored."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"model": "gpt-4o", "messages": [{"role": "user", "content": "And now in blue?"}]},
                {"strategy": "slim", "epoch": "every_request", "max_tokens": 8000},
            ]
        }
    )

    dialect: str = Field("openai_chat", description="The wire format of messages and answer.")
    strategy: Setting = None
    epoch: Setting = None
    model: str = Field("", max_length=200, description="Decides how tokens are counted, and the window if known.")
    max_tokens: int | None = Field(
        None, ge=1, le=100_000_000, description="The window that the context must fit into, instructions included."
    )
    messages: list[Wire] = Field(
        default_factory=list, max_length=10_000, description="Messages that come after the stored ones."
    )
    tools: list[str] | None = Field(
        None,
        max_length=20,
        description="The tools of Tersely that the model will have: hints name these alone. Left out: those of the "
        "session's proxied calls, or none where there were none.",
    )
    format: Literal["json", "text"] = Field("json", description="`text`: for people to read.")


class ChosenSettings(Body):
    """Strategy and policy of the calls to come, where they are neither the session's nor the configured ones."""

    model_config = ConfigDict(json_schema_extra={"examples": [{}, {"strategy": "compact"}]})

    strategy: Setting = None
    epoch: Setting = None


class SearchRequest(Body):
    """The arguments of `context_search`. What belongs to another mode is passed over."""

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
        None, max_length=1000, description="Text to find, whatever its case; or what to find messages about."
    )
    before: int | None = Field(None, ge=0, le=1000, description="Messages before each match, or turns.")
    after: int | None = Field(None, ge=0, le=1000, description="Messages after each match, or turns.")
    last: int | None = Field(None, ge=0, le=1000)
    first: int | None = Field(None, ge=0, le=1000, description="So many of the first, or of the most relevant.")
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
    """A session in the shapes of `context.json` and `context.terse.json`, as `export` gives them."""

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
        description="Wire messages tagged with `turnId` and `ts`; untagged ones get their turns by the usual rule.",
    )
    terse: list[Wire] = Field(default_factory=list, max_length=200_000, description="`{ts, turnId, role, summary}`")
    dialect: str | None = Field(
        None, description="The wire format of the context. Left out: told by its shapes; plain words: `openai_chat`."
    )
    id: str | None = None
    parent: str | None = Field(None, max_length=256)
    strategy: Setting = None
    epoch: Setting = None
    metadata: dict[str, Any] | None = None
    tersely: dict[str, Any] | None = Field(
        None, description="What an export has beside history and log; it goes with the `context` of that export alone."
    )


class PutText(Body):
    """The new text, whole."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"text": "Goal: a palette\nContext: palette.css"}]})

    text: str


class AppendText(Body):
    """What is to be added, on a new line."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"text": "- [ ] the footer"}]})

    text: str


class NewMemo(Body):
    """Something worth knowing in later sessions."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"content": "Migrations run before the first worker starts.", "tags": ["arch-decision", "deploy"]}
            ]
        }
    )

    content: str = Field(description="At most 8,000 characters.")
    tags: list[str] = Field(default_factory=list, description="At most 20, of 1 to 64 characters; case does not count.")
    session: str | None = Field(None, max_length=256, description="The session of yours that it comes from.")


class SearchMemos(Body):
    """By tags, by words, or by words among those with the tags."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"query": "when do migrations run?"}, {"tags": ["gotcha"]}]}
    )

    tags: list[str] = Field(default_factory=list, description="Memos with any of these.")
    query: str | None = Field(None, max_length=8000, description="Memos that share a word with this, stop words aside.")
    limit: int = Field(5, ge=1, le=100)


class PutPriority(Body):
    """How important a message is."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"priority": 75}]})

    priority: int = Field(ge=0, le=100, description="50 unless set; from 75 on it counts as important.")


class PatchMessage(Body):
    """Who sees a message; what is left out stays as it is."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"model_visible": False}, {"client_visible": True}]})

    client_visible: bool | None = Field(None, description="Whether the client's view, exports and searches show it.")
    model_visible: bool | None = Field(None, description="Whether contexts may show it to the model.")


class RunCommand(Body):
    """A command as it is typed into a chat."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"text": "/context show"}, {"text": "/message list 5"}]})

    text: str = Field(max_length=4_000)


class SearchMemory(Body):
    """By words, perhaps of one day or of one session only."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"query": "which port did we choose?"}]})

    query: str = Field(max_length=8000, description="Entries that share a word with this, stop words aside.")
    day: str | None = Field(None, max_length=10, examples=["2026-01-31"], description="YYYY-MM-DD, in UTC.")
    session: str | None = Field(None, max_length=256)
    limit: int = Field(5, ge=1, le=100)


class CallTool(Body):
    """A call of a tool, with the arguments as the model gave them: JSON text, or what that says."""

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
    field: str | None = Field(None, description="The offending part of the input, where there is one.")


class ImportedSessionOut(BaseModel):
    """A session. `turns`, `messages` and `tokens` count all that is stored, hidden messages too."""

    id: str
    parent: str | None
    client_id: str | None = Field(description="An id that a client sends for its own purposes, if the proxy saw one.")
    strategy: str | dict[str, Any] = Field(
        description="The session's own, else what its last call's header asked for, else the configured default."
    )
    epoch: str | dict[str, Any] = Field(description="The epoch policy, found in the same order.")
    last_call_strategy: str | dict[str, Any] | None = Field(
        description="What `X-Tersely-Strategy` of the last call asked for; null where it came without."
    )
    last_call_epoch: str | dict[str, Any] | None = Field(description="What `X-Tersely-Epoch` of it asked for.")
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
    """A session and what its calls came to."""

    title: str | None = Field(description="The first words of the user.")
    client: str | None = Field(description="The program that called last, by its user agent.")
    models: list[str]
    calls: int
    tokens_saved: int
    reported: Reported
    cache_hit_share: float | None
    money: Money | None = Field(description="Null where no call's model has a price.")
    last_call_at: str | None
    live: bool = Field(description="Whether the last call began less than a minute ago.")


class SessionPage(BaseModel):
    """Sessions, the newest first."""

    items: list[SessionOut]
    next: str | None


class CallOut(BaseModel):
    """An upstream call. Tokens before and after are our own counts, the others the provider's."""

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
    """What became of one message. `seq` is null for what Tersely added; `index` is its place in `messages`."""

    seq: int | None
    turn: TurnId | None
    role: str
    kept: Literal["full", "truncated", "terse", "summary", "left_out", "added"]
    reason: str
    tokens: int
    index: int | None
    layer: str | None


class CallContextOut(BaseModel):
    """What the model was sent at a call.

    `messages` are byte for byte the elements of the request's message list, `instructions` the value beside it. Both
    are null where what is stored does not give them any more, and `reason` says why.
    """

    call: CallOut
    dialect: str
    exact: bool
    reason: str | None
    messages: list[Any] | None
    instructions: Any
    rounds: list[int] = Field(description="Lengths of the earlier message lists of a call in several rounds.")
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
    """What was found in `searched` sessions."""

    hits: list[HitOut]
    searched: int
    is_whole: bool


class StoredEpochOut(BaseModel):
    """An epoch: from `cut` on the tail, before it the head."""

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
    """Where the messages came to stand."""

    first_seq: int
    last_seq: int
    turn: TurnId | None = Field(description="The turn of the last one; null where all are instructions.")


class MessageOut(BaseModel):
    """A stored message. `model_raw`, `client_visible` and `model_visible` come with `view=all` alone."""

    seq: int
    turn: TurnId | None = Field(description="null for instructions, which belong to no turn.")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    status: StatusName
    dialect: str
    tokens: int
    pinned: bool = Field(description="Whether it stays in every context.")
    priority: int = Field(description="0 to 100; from 75 on it is marked important.")
    finish: str | None
    created_at: str
    raw: Wire | None = Field(description="The message in wire form, byte for byte; null once removed.")
    model_raw: Wire | None = Field(None, description="The model's view where it differs.")
    client_visible: bool = True
    model_visible: bool = True


class MessagePage(BaseModel):
    """Messages in the order of the view."""

    items: list[MessageOut]
    next: int | None = Field(description="The `after` of the next page.")


class UsageOut(BaseModel):
    """Calls made for a turn: tokens by our count before and after, and as the provider reported them."""

    calls: int
    tokens_before: int
    tokens_after: int
    input: int | None
    cached: int | None
    output: int | None
    weight: int | None = Field(
        description="What the session weighed at the last round of the last call: its prompt and its completion."
    )


class TurnOut(BaseModel):
    """A turn: of its live messages, or of all where none is live."""

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
    """Turns in order; removed ones are left out."""

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
    """What became of a turn, and why."""

    turn: TurnId
    kept: Kept
    tokens: int
    reason: str


class ReportOut(BaseModel):
    """What was kept, shortened, left out, and why."""

    tokens_before: int
    tokens_after: int
    epoch: EpochOut
    layers: list[LayerOut]
    turns: list[TurnReportOut]
    turns_omitted: int = Field(description="Older turns that are not listed, because there are too many.")


class ShortReportOut(BaseModel):
    """What the context of the epoch that was started is made of."""

    tokens_before: int
    tokens_after: int
    epoch: EpochOut
    layers: list[LayerOut]


class SummaryOut(BaseModel):
    """How a summary came out: `model`, `extractive`, `done` (there was one), `unchanged` (nothing shorter was found),
    `empty`, `stale` (the history changed meanwhile) or `failed`.
    """

    result: str
    first_seq: int | None
    last_seq: int | None
    tokens_before: int
    tokens_after: int
    error: str | None = Field(description="Why no model wrote it, if one should have.")


class CompactedOut(BaseModel):
    """What a compaction did."""

    summary: SummaryOut | None = Field(description="null where the strategy puts no summary in the place of messages.")
    report: ShortReportOut


class ClearedOut(BaseModel):
    """What is left of a context that was cleared."""

    report: ShortReportOut


class ContextOut(BaseModel):
    """A context. A request that sends `instruction_messages` and then `messages` is what the proxy would send."""

    instructions: str | None = Field(description="What the instructions say, Tersely's own text included.")
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
    text: str = Field(description="As `context_search` prints it.")
    rank: int | None = Field(description="Mode `relevant`: 1 for the best match, 2 for the next; null: a neighbour.")


class ExcerptOut(BaseModel):
    """A contiguous range of the history."""

    first: int
    last: int
    messages: list[FoundMessage]


class SearchOut(BaseModel):
    """What a search found."""

    text: str = Field(examples=["--- messages 14-18 of 42 ---\n[user t7] Can you make a colour palette?"])
    excerpts: list[ExcerptOut]
    total: int = Field(description="Messages of the live history.")
    truncated: bool = Field(description="Whether something was left out; `text` says what.")


class QueryOut(BaseModel):
    """What a query gave."""

    columns: list[str]
    rows: list[list[str | int | float | None]] = Field(
        description="A blob is shown as `x'00ff'`, an infinite number as `Infinity`."
    )
    truncated: bool = Field(description="Whether something was left out; `notes` say what.")
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
    """The state block, without its heading; empty where there is none."""

    text: str
    seq: int = Field(description="The message that it came with; 0: none.")
    source: Literal["model", "client", "rebuilt"] | None
    created_at: str | None


class PastStateOut(StateOut):
    """A state of the history."""

    live: bool = Field(description="Whether its message counts: not superseded, dropped or undone.")


class StatePage(BaseModel):
    """States in order, the newest last."""

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
    session: str | None = Field(description="The session that it came from, which may be gone.")
    created_at: str


class MemoPage(BaseModel):
    """Memos: listed, the newest first; found by words, the best first."""

    items: list[MemoOut]
    next: str | None


class MemoryOut(BaseModel):
    """What is remembered of a session's messages `first_seq` to `last_seq`."""

    day: str
    session: str
    first_seq: int
    last_seq: int
    text: str
    created_at: str


class MemoryPage(BaseModel):
    """Memory: listed, the newest first; found by words, the best first."""

    items: list[MemoryOut]
    next: str | None


class ForgottenOut(BaseModel):
    """How many entries were deleted."""

    deleted: int


class CommandAnswer(BaseModel):
    """What a command says to whoever typed it."""

    text: str


class ToolOut(BaseModel):
    """A tool as a model is told of it; `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: dict[str, Any]
    strategies: list[str] = Field(description="Under which a model is offered it in proxied chats.")


class ToolPage(BaseModel):
    """The tools."""

    items: list[ToolOut]
    next: str | None


class ToolAnswer(BaseModel):
    """What a tool says to a model."""

    text: str
    is_error: bool = Field(description="It could not do what it was asked to; `text` says why.")


class ExportOut(BaseModel):
    """A session in the shapes of `context.json` and `context.terse.json`."""

    context: list[Wire]
    terse: list[TerseOut]
    tersely: dict[str, Any] = Field(description="What else makes the session what it is, for an import.")


class ReportedOut(BaseModel):
    """Tokens as the provider reported them."""

    input: int
    cached: int
    output: int


class EpochCounts(BaseModel):
    """How many epochs started, and for which reasons."""

    total: int
    current: int
    by_reason: dict[str, int]


class SummaryMoney(BaseModel):
    """What was spent."""

    currency: str
    sent: float


class SummaryDay(BaseModel):
    """What summaries cost today (UTC), and what they may cost; null: no limit. `refused`: extracted for the limit."""

    calls: int
    tokens: int
    max_calls: int | None
    max_tokens: int | None
    refused: int


class SummariesOut(BaseModel):
    """What became of compactions; `compression_ratio` is the mean of tokens before / after.

    `calls`, `input_tokens` and `output_tokens` are those of the summarizer's model; `money` is null where no price is
    configured.
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
    """A memory level of `tiered`, in tokens; without a budget it takes what is left."""

    name: Literal["permanent", "session", "working", "volatile"]
    tokens: int
    budget: int | None


class TieredOut(BaseModel):
    """The next context under `tiered`: how much of its budget is used, and by what."""

    tokens: int
    budget: int
    share: float
    levels: list[LevelOut]
    retrieved: list[TurnId] = Field(description="Turns that were brought back for their relevance.")


class StatsOut(BaseModel):
    """Figures of a session. Shares are null where there is nothing to divide by."""

    messages: int
    messages_by_status: dict[str, int]
    turns: int
    tokens: int
    live_tokens: int
    calls: int
    failed_calls: int
    tokens_before: int = Field(description="What would have been sent, summed over all calls, by our count.")
    tokens_after: int = Field(description="What was sent.")
    saved: int
    saved_share: float | None
    reported: ReportedOut
    cache_hit_share: float | None
    epochs: EpochCounts
    terse: dict[str, int]
    summaries: SummariesOut
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
    """A summary that is about to be made, or that was made or given up, of the messages of a range."""

    type: Literal["compaction_start", "compaction_end"]
    number: int
    purpose: str
    strategy: str
    first_seq: int
    last_seq: int
    messages: int
    tokens_before: int
    tokens_after: int | None = None
    result: str | None = Field(None, description="At the end: see `POST /sessions/{session_id}/compact`.")
    error: str | None = Field(None, description="Why no model wrote it, if one should have.")
    created_at: str


class EventPage(BaseModel):
    """Events in order."""

    items: list[EpochStarted | CompactionEvent]
    next: str | None
