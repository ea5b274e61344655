"""Recognise what real clients declare: their own ids, and calls that are no turns.

An id that a client sends for its own purposes covers everything it does: main agent, subagents, side calls. It narrows
the search for a session but never names one. A side call (a title, a summary, a routing or memory question) is a call
outside the conversation: it is forwarded and not stored. All data here comes from recorded clients.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

from tersely.domain.client_ids import ClientIds
from tersely.domain.messages import Message, Role, Text

SideCall = Literal[
    "title", "summary", "memory", "routing", "planning", "commit", "subagent", "suggestion", "quota", "prewarm"
]

MAX_ID = 256
_PRINTABLE = re.compile(r"[\x21-\x7e]{1,256}")

# The version of each client whose marks were last checked by running the program (`make clients`). Marks of other
# clients come from their sources or from recorded traffic.
SEEN: Mapping[str, str] = {
    "aider": "0.86.2",
    "AutoGen": "0.7.5",
    "Claude Code": "2.1.330",
    "Cline": "3.0.65",
    "Codex": "0.169.0",
    "Continue": "1.5.47",
    "Copilot CLI": "1.0.102",
    "CrewAI": "1.15.30",
    "Gemini CLI": "0.61.0",
    "LangChain": "1.4.7",
    "LlamaIndex": "0.14.25",
    "llm": "0.36",
    "mini-swe-agent": "2.4.6",
    "openai-agents": "0.24.0",
    "opencode": "1.18.33",
    "pi": "0.87.1",
    "Pydantic AI": "2.68.0",
    "Qwen Code": "0.24.4",
    "smolagents": "1.26.0",
    "Vercel AI SDK": "7.0.173",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SideCallMark:
    """A text by which ``client`` makes a side call of that ``kind``."""

    client: str
    kind: SideCall
    text: str


# Header -> the client or convention that identifies a session by it, in order of trust.
SESSION_HEADERS: Mapping[str, str] = {
    "x-session-id": "opencode",
    "x-claude-code-session-id": "Claude Code",
    "session-id": "Codex",
    "thread-id": "Codex",
    "session_id": "pi",
    "x-session-affinity": "opencode",
    "x-conversation-id": "generic",
    "x-chat-id": "generic",
    "x-openwebui-chat-id": "Open WebUI",
    "x-opencode-session": "opencode",
    "x-litellm-session-id": "LiteLLM",
    "x-litellm-trace-id": "LiteLLM",
    "helicone-session-id": "Helicone",
    "x-sm-conversation-id": "Supermemory",
}
PARENT_HEADERS: Mapping[str, str] = {"x-parent-session-id": "opencode"}
BODY_IDS = ("session_id", "conversation_id")  # `prompt_cache_key` routes to a cache, and names no conversation

# Headers by which a client marks a call as outside of the conversation: (client, header, value, kind).
SIDE_HEADERS: tuple[tuple[str, str, str, SideCall], ...] = (
    ("Copilot CLI", "x-interaction-type", "conversation-compaction", "summary"),
    ("Copilot CLI", "x-interaction-type", "conversation-title", "title"),
)

# The JSON by which Codex describes a call: the names and values that mark a side call.
CODEX_METADATA = "x-codex-turn-metadata"
CODEX_MARKS: Mapping[tuple[str, str], SideCall] = {
    ("request_kind", "compaction"): "summary",
    ("request_kind", "prewarm"): "prewarm",
    ("thread_source", "thread_title"): "title",
}

# Texts at the beginning of a part of the instructions. Further in, the same words may describe another agent.
MARK_WITHIN = 200
SIDE_INSTRUCTIONS = (
    SideCallMark(client="opencode", kind="title", text="You are a title generator"),
    SideCallMark(client="Claude Code", kind="title", text="Generate a concise, sentence-case title"),
    SideCallMark(client="opencode", kind="summary", text="context summarization agent"),
    SideCallMark(client="pi", kind="summary", text="context summarization assistant"),
    SideCallMark(client="aider", kind="commit", text="one-line Git commit messages"),
    SideCallMark(client="aider", kind="summary", text="*Briefly* summarize this partial conversation"),
    SideCallMark(client="Qwen Code", kind="memory", text="managed memory extraction subagent"),
    SideCallMark(
        client="Qwen Code", kind="summary", text="You are the component that summarizes a conversation when its context"
    ),
    SideCallMark(client="Qwen Code (older)", kind="summary", text="component that summarizes internal chat history"),
    SideCallMark(client="Gemini CLI", kind="summary", text="responsible for distilling chat history"),
    SideCallMark(
        client="Cline", kind="summary", text="Summarize the provided coding session into a concise continuation note"
    ),
    SideCallMark(client="LlamaIndex", kind="summary", text="Write a concise summary about the contents"),
    SideCallMark(client="Gemini CLI", kind="routing", text="Task Routing AI"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptForm:
    """The form in which ``client`` writes a history to be summarised: one text, with the ``speaker`` in front of each
    message.
    """

    client: str
    opening: str
    closing: str
    speaker: re.Pattern[str]


TRANSCRIPTS = (
    TranscriptForm(
        client="LlamaIndex",
        opening='"Transcript so far: ',
        closing='"',
        speaker=re.compile(r"(?:\A|\n\n)(system|developer|user|assistant|tool|function|chatbot|model): "),
    ),
    TranscriptForm(
        client="pi",
        opening="<conversation>\n",
        closing="\n</conversation>",
        speaker=re.compile(r"(?:\A|\n\n)\[(User|Assistant(?: thinking| tool calls)?|Tool result)\]: "),
    ),
)
_SPEAKERS: Mapping[str, Role] = {"user": "user", "User": "user", "assistant": "assistant", "Assistant": "assistant"}

# How a part of the last user message of a side call begins.
SIDE_QUESTIONS = (
    SideCallMark(client="opencode", kind="title", text="Generate a title for this conversation:"),
    SideCallMark(client="LangChain", kind="summary", text="<role>\nContext Extraction Assistant"),
    SideCallMark(client="Continue", kind="summary", text="Please provide a concise summary of our conversation so far"),
    SideCallMark(
        client="Copilot CLI", kind="summary", text="Please create a detailed summary of the conversation so far"
    ),
    SideCallMark(
        client="Qwen Code", kind="summary", text="You are the component that summarizes a conversation when its context"
    ),
    SideCallMark(client="Qwen Code", kind="summary", text="First, reason in your <analysis> block"),
    SideCallMark(client="Gemini CLI", kind="summary", text="First, reason in your scratchpad"),
    SideCallMark(client="Qwen Code", kind="memory", text="Managed memory has TWO directories"),
    SideCallMark(client="Qwen Code (older)", kind="memory", text="Managed memory directory:"),
    # The text after the user's last message.
    SideCallMark(client="Claude Code", kind="summary", text="CRITICAL: Respond with TEXT ONLY"),
    SideCallMark(client="Codex", kind="summary", text="You are performing a CONTEXT CHECKPOINT COMPACTION"),
    SideCallMark(client="Open WebUI", kind="title", text="### Task:\nGenerate a concise, 3-5 word title"),
    SideCallMark(client="Open WebUI", kind="title", text="### Task:\nGenerate 1-3 broad tags"),
    SideCallMark(client="Open WebUI", kind="suggestion", text="### Task:\nSuggest 3-5 relevant follow-up questions"),
)

# How the user message begins by which a client refuses a reply without tool calls. Such a reply is never sent again.
REFUSALS_OF_WORDS = (("mini-swe-agent", "Tool call error:\n\n<error>\n"),)

# The message that Claude Code sends to learn its quota.
QUOTA_QUESTION = "quota"

_INSTRUCTION_MARKS = re.compile("|".join(re.escape(mark.text) for mark in SIDE_INSTRUCTIONS))
_QUESTION_MARKS = tuple(mark.text for mark in SIDE_QUESTIONS)


def client_ids(headers: Mapping[str, str], body: Mapping[str, object]) -> ClientIds:
    """Read a client's own ids. ``headers`` have lower-case names; ``body`` holds the members named in `BODY_IDS`."""
    parent = _first(headers, PARENT_HEADERS)
    found = _first(headers, SESSION_HEADERS)
    if found is not None:
        return ClientIds(id=found, source="header", parent=parent)
    found = _first(body, BODY_IDS)
    return ClientIds(id=found, source="body" if found else None, parent=parent)


# Headers that are the same in all requests of one client, and distinguish it from others without an id.
REQUESTER_HEADERS = (
    "authorization",
    "x-api-key",
    "api-key",
    "x-goog-api-key",
    "openai-organization",
    "openai-project",
    "x-app",  # Claude Code
    "originator",  # Codex
    "x-gemini-api-privileged-user-id",  # Gemini CLI: the installation
    "x-stainless-lang",
    "x-stainless-os",
    "x-stainless-arch",
    "x-stainless-runtime",
    "x-stainless-runtime-version",
)
# The first product of a user agent. OpenAI's Python SDK adds whether it is asynchronous; Gemini CLI adds the model.
_PRODUCT = re.compile(r"(?:Async)?([^/\s]+/[^/\s]*)")


def requester_id(headers: Mapping[str, str], ids: ClientIds) -> bytes:
    """Identify the sender of a request: by the client's own id, or else by headers that distinguish clients.

    16 bytes, from which no credentials can be recovered.
    """
    marks: tuple[str, ...] = (ids.id or "",)
    if ids.id is None:
        product = _PRODUCT.match(headers.get("user-agent", ""))
        marks = (*marks, product[1] if product else "", *[headers.get(name, "") for name in REQUESTER_HEADERS])
    return blake2b(repr(marks).encode("utf-8", "replace"), digest_size=16).digest()


def _first(values: Mapping[str, object], names: Iterable[str]) -> str | None:
    if values.keys().isdisjoint(names):
        return None
    for name in names:
        value = values.get(name)
        if isinstance(value, str) and _PRINTABLE.fullmatch(value):
            return value
    return None


def side_call(
    headers: Mapping[str, str],
    messages: Sequence[Message],
    *,
    has_tools: bool,
    stops: bytes = b"",
    max_tokens: int | None = None,
) -> SideCall | None:
    """Return the kind of a side call, or None for a call of the conversation itself.

    The shape alone proves nothing, since frameworks make plain calls without tools: a mark is needed. ``stops`` is the
    request's ``stop`` member as sent.
    """
    for _, header, value, kind in SIDE_HEADERS:
        if headers.get(header) == value:
            return kind
    if CODEX_METADATA in headers and (purpose := _codex_call(headers[CODEX_METADATA])) is not None:
        return purpose
    instructions = [message for message in messages[:3] if message.is_instruction]
    openings = "\n".join(text[:MARK_WITHIN] for message in instructions for text in _texts(message))
    if _INSTRUCTION_MARKS.search(openings):
        return next(mark.kind for mark in SIDE_INSTRUCTIONS if mark.text in openings)
    if b"<end_plan>" in stops and not has_tools:
        return "planning"  # smolagents
    last = next((message for message in reversed(messages) if message.role == "user"), None)
    return None if last is None else side_question(last, max_tokens=max_tokens)


def side_question(last: Message, *, max_tokens: int | None) -> SideCall | None:
    """Return the kind of side call that a request's last user message makes of it."""
    if max_tokens == 1 and last.text.strip() == QUOTA_QUESTION:
        return "quota"
    for text in _texts(last):
        if text.startswith(_QUESTION_MARKS):
            return next(mark.kind for mark in SIDE_QUESTIONS if text.startswith(mark.text))
    return None


def quoted_messages(messages: Sequence[Message]) -> list[Message]:
    """Return the messages of a history that a client sends as one text to be summarised."""
    text = messages[-1].text.strip() if messages else ""
    form = next((each for each in TRANSCRIPTS if text.startswith(each.opening)), None)
    if form is None:
        return []
    quoted = text[len(form.opening) :].rpartition(form.closing)[0]
    parts = form.speaker.split(quoted)
    return [
        Message(role=_SPEAKERS[speaker], parts=(Text(text=words),), raw=b"")
        for speaker, words in zip(parts[1::2], parts[2::2], strict=True)
        if speaker in _SPEAKERS
    ]


def refuses_for_client(message: Message) -> bool:
    """Return whether a client's message reports that the reply before it was refused because it called no tool."""
    return message.role == "user" and message.text.startswith(tuple(text for _, text in REFUSALS_OF_WORDS))


def _texts(message: Message) -> list[str]:
    return [part.text.lstrip() for part in message.parts if isinstance(part, Text)]


def _codex_call(metadata: str) -> SideCall | None:
    try:
        metadata_fields = json.loads(metadata)
    except (ValueError, RecursionError):
        return None
    if not isinstance(metadata_fields, dict):
        return None
    return next((kind for (name, value), kind in CODEX_MARKS.items() if metadata_fields.get(name) == value), None)


def idempotency_key(headers: Mapping[str, str]) -> str | None:
    """Return the key that the client sends with a request and with its retries."""
    return headers.get("idempotency-key") or None


def is_retry(headers: Mapping[str, str]) -> bool:
    """Return whether the client marks the request as a retry."""
    count = headers.get("x-stainless-retry-count", "0")  # OpenAI's and Anthropic's SDKs
    return count.isdigit() and int(count[:4]) > 0
