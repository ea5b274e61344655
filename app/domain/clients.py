"""What real clients tell about themselves: ids of their own, and calls that are no turns.

An id that a client sends for its own purposes covers everything it does: main agent, subagents, side calls. It
narrows the search for a session; it never names one. A side call (a title, a summary, a routing or memory question) is
a call beside the conversation: it is forwarded and forgotten. Everything here is data from recorded clients.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from app.domain.messages import Message, Text

IdSource = Literal["header", "body"]
SideCall = Literal[
    "title", "summary", "memory", "routing", "planning", "commit", "subagent", "suggestion", "quota", "prewarm"
]

MAX_ID = 256
_PRINTABLE = re.compile(r"[\x21-\x7e]{1,256}")

# In order of trust; the client or convention beside each.
SESSION_HEADERS = (
    "x-session-id",  # opencode, vLLM's router
    "x-claude-code-session-id",  # Claude Code
    "session-id",  # Codex
    "thread-id",  # Codex
    "session_id",  # pi
    "x-session-affinity",  # opencode
    "x-conversation-id",
    "x-chat-id",
    "x-openwebui-chat-id",  # Open WebUI
    "x-opencode-session",
    "x-litellm-session-id",
    "x-litellm-trace-id",
    "helicone-session-id",
    "x-sm-conversation-id",
)
PARENT_HEADERS = ("x-parent-session-id",)  # opencode's subagents
BODY_IDS = ("session_id", "conversation_id", "prompt_cache_key")

# Headers by which a client says itself that a call is none of the conversation's turns.
SIDE_HEADERS: tuple[tuple[str, str, SideCall], ...] = (
    ("x-interaction-type", "conversation-compaction", "summary"),  # Copilot CLI
    ("x-interaction-type", "conversation-title", "title"),
)

# What Codex says of a call, as JSON: the names and values by which it marks what is no turn.
CODEX_METADATA = "x-codex-turn-metadata"
CODEX_MARKS: Mapping[tuple[str, str], SideCall] = {
    ("request_kind", "compaction"): "summary",
    ("request_kind", "prewarm"): "prewarm",
    ("thread_source", "thread_title"): "title",
}

# Words at the beginning of a part of the instructions. Further in, an agent may be told about others in the same words.
MARK_WITHIN = 200
SIDE_INSTRUCTIONS: tuple[tuple[str, SideCall], ...] = (
    ("You are a title generator", "title"),  # opencode
    ("Generate a concise, sentence-case title", "title"),  # Claude Code
    ("context summarization agent", "summary"),  # opencode
    ("context summarization assistant", "summary"),  # pi
    ("one-line Git commit messages", "commit"),  # aider
    ("*Briefly* summarize this partial conversation", "summary"),  # aider
    ("managed memory extraction subagent", "memory"),  # Qwen Code
    ("component that summarizes internal chat history", "summary"),  # Qwen Code, Gemini CLI (older)
    ("responsible for distilling chat history", "summary"),  # Gemini CLI
    ("Summarize the provided coding session into a concise continuation note", "summary"),  # Cline
    ("Write a concise summary about the contents", "summary"),  # LlamaIndex
    ("Task Routing AI", "routing"),  # Gemini CLI
)

# How a part of the last user message of a side call begins.
SIDE_QUESTIONS: tuple[tuple[str, SideCall], ...] = (
    ("Generate a title for this conversation:", "title"),  # opencode
    ("<role>\nContext Extraction Assistant", "summary"),  # LangChain
    ("Please provide a concise summary of our conversation so far", "summary"),  # Continue
    ("Please create a detailed summary of the conversation so far", "summary"),  # Copilot CLI
    ("First, reason in your scratchpad", "summary"),  # Qwen Code, Gemini CLI
    ("Managed memory directory:", "memory"),  # Qwen Code
    ("CRITICAL: Respond with TEXT ONLY", "summary"),  # Claude Code, behind what the user said last
    ("You are performing a CONTEXT CHECKPOINT COMPACTION", "summary"),  # Codex
    ("### Task:\nGenerate a concise, 3-5 word title", "title"),  # Open WebUI
    ("### Task:\nGenerate 1-3 broad tags", "title"),  # Open WebUI
    ("### Task:\nSuggest 3-5 relevant follow-up questions", "suggestion"),  # Open WebUI
)

# All that Claude Code says to learn how much it may still use.
QUOTA_QUESTION = "quota"

_INSTRUCTION_MARKS = re.compile("|".join(re.escape(mark) for mark, _ in SIDE_INSTRUCTIONS))
_QUESTION_MARKS = tuple(mark for mark, _ in SIDE_QUESTIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientIds:
    """The id a client sends for its own purposes, where it was found, and its parent's."""

    id: str | None = None
    source: IdSource | None = None
    parent: str | None = None


def client_ids(headers: Mapping[str, str], body: Mapping[str, object]) -> ClientIds:
    """Read a client's own ids. ``headers`` have lower-case names; ``body`` holds the members named in `BODY_IDS`."""
    parent = _first(headers, PARENT_HEADERS)
    found = _first(headers, SESSION_HEADERS)
    if found is not None:
        return ClientIds(id=found, source="header", parent=parent)
    found = _first(body, BODY_IDS)
    return ClientIds(id=found, source="body" if found else None, parent=parent)


def _first(values: Mapping[str, object], names: Sequence[str]) -> str | None:
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
    """What kind of side call a request is, or None for a call of the conversation itself.

    The shape alone proves nothing (frameworks make plain calls without tools): a mark is needed.
    ``stops`` is the request's ``stop`` member as sent.
    """
    for header, value, kind in SIDE_HEADERS:
        if headers.get(header) == value:
            return kind
    if CODEX_METADATA in headers and (said := _codex_call(headers[CODEX_METADATA])) is not None:
        return said
    instructions = [message for message in messages[:3] if message.is_instruction]
    openings = "\n".join(text[:MARK_WITHIN] for message in instructions for text in _texts(message))
    if _INSTRUCTION_MARKS.search(openings):
        return next(kind for mark, kind in SIDE_INSTRUCTIONS if mark in openings)
    if b"<end_plan>" in stops and not has_tools:
        return "planning"  # smolagents
    last = next((message for message in reversed(messages) if message.role == "user"), None)
    if last is None:
        return None
    if max_tokens == 1 and last.text.strip() == QUOTA_QUESTION:
        return "quota"
    for text in _texts(last):
        if text.startswith(_QUESTION_MARKS):
            return next(kind for mark, kind in SIDE_QUESTIONS if text.startswith(mark))
    return None


def _texts(message: Message) -> list[str]:
    return [part.text.lstrip() for part in message.parts if isinstance(part, Text)]


def _codex_call(metadata: str) -> SideCall | None:
    try:
        said = json.loads(metadata)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict):
        return None
    return next((kind for (name, value), kind in CODEX_MARKS.items() if said.get(name) == value), None)


def is_retry(headers: Mapping[str, str]) -> bool:
    """Whether the client says that it sends the same request again."""
    count = headers.get("x-stainless-retry-count", "0")  # OpenAI's and Anthropic's SDKs
    return count.isdigit() and int(count[:4]) > 0
