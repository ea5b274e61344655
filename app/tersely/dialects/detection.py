"""Detect the dialect of messages by shapes that only one dialect has.

Plain messages (a role and a text) look alike in several dialects and are taken as `openai_chat`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tersely.dialects.wire import raw_json
from tersely.domain.errors import InvalidRequest
from tersely.domain.messages import Dialect as DialectName

DEFAULT: DialectName = "openai_chat"
_ANTHROPIC_BLOCKS = frozenset(
    {
        "tool_use",
        "tool_result",
        "thinking",
        "redacted_thinking",
        "server_tool_use",
        "web_search_tool_result",
        "document",
    }
)
_CHAT_PARTS = frozenset({"image_url", "input_audio", "refusal"})
_RESPONSES_PARTS = frozenset({"input_text", "output_text", "input_image", "input_file"})
_RESPONSES_ITEMS = frozenset(
    {"function_call", "function_call_output", "reasoning", "item_reference", "custom_tool_call", "compaction",
     "custom_tool_call_output", "local_shell_call", "local_shell_call_output", "web_search_call"}
)  # fmt: skip


def detect_dialect(raws: Sequence[bytes], *, field: str) -> DialectName:
    """Return the dialect of ``raws``. Raises `InvalidRequest` where they have the shapes of several dialects.

    ``field`` is the name of the list in the request.
    """
    first: dict[DialectName, int] = {}
    for index, raw in enumerate(raws):
        for name in _marks(raw):
            first.setdefault(name, index)
    if len(first) > 1:
        seen = ", ".join(f"{name} ({field}[{index}])" for name, index in first.items())
        raise InvalidRequest(
            f"the messages have shapes of several dialects: {seen}; name one as `dialect`, and import messages of "
            "others apart",
            field="dialect",
        )
    return next(iter(first), DEFAULT)


def _marks(raw: bytes) -> Iterator[DialectName]:
    """Yield the dialects that alone have a member of this message."""
    try:
        message = raw_json.load(raw)
    except (ValueError, RecursionError):
        return
    if not isinstance(message, dict):
        return
    if isinstance(message.get("parts"), list) or message.get("role") == "model":
        yield "gemini"
    elif message.get("tool_calls") or "tool_call_id" in message or message.get("role") in {"tool", "function"}:
        yield "openai_chat"
    if message.get("type") in _RESPONSES_ITEMS:
        yield "openai_responses"
    kinds = {part.get("type") for part in _parts(message) if isinstance(part.get("type"), str)}
    if kinds & _RESPONSES_PARTS:
        yield "openai_responses"
    if kinds & _CHAT_PARTS and not kinds & _RESPONSES_PARTS:
        yield "openai_chat"
    if kinds & _ANTHROPIC_BLOCKS or any(isinstance(part.get("source"), dict) for part in _parts(message)):
        yield "anthropic"


def _parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
