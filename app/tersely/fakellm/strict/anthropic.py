"""The refusals of Anthropic's Messages API, in its own words. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from tersely.data.known_fields import unknown_members
from tersely.fakellm.strict.openai_chat import Refusal, UnknownField

MAX_BREAKPOINTS = 4
_CALL_ID = re.compile(r"[a-zA-Z0-9_-]+")
_BLOCKS = frozenset(
    {"text", "image", "document", "search_result", "thinking", "redacted_thinking", "tool_use", "tool_result"}
    | {"server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result"}
    | {"mcp_tool_use", "mcp_tool_result", "container_upload", "bash_code_execution_tool_result"}
    | {"text_editor_code_execution_tool_result", "tool_search_tool_result"}
)


def check(request: dict[str, Any]) -> Refusal | None:
    """Return the first thing that is wrong with a request."""
    if not isinstance(request.get("model"), str) or not request["model"]:
        return Refusal(message="model: Field required")
    limit = request.get("max_tokens")
    if type(limit) is not int or limit < 1:
        return Refusal(
            message="max_tokens: Field required" if limit is None else "max_tokens: Input should be positive"
        )
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        return Refusal(message="messages: at least one message is required")
    return (
        _check_system(request.get("system"))
        or next(filter(None, (_check_message(m, index) for index, m in enumerate(messages))), None)
        or _check_order(messages)
        or check_pairing(messages)
        or _check_breakpoints(request)
    )


def overflow(*, window: int, messages: int, tools: int) -> Refusal | None:
    """Return the refusal of a prompt over ``window`` tokens."""
    needed = messages + tools
    return None if needed <= window else Refusal(message=f"prompt is too long: {needed} tokens > {window} maximum")


def check_pairing(messages: list[dict[str, Any]]) -> Refusal | None:
    """Check that the next message answers every call, and that every result answers the message before it."""
    open_ids: list[str] = []
    seen: set[str] = set()
    for position, message in enumerate(messages):
        if message["role"] == "system":
            continue
        blocks = _blocks(message)
        answered = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
        if missing := [each for each in open_ids if each not in answered]:
            return Refusal(
                message=f"messages.{position - 1}: `tool_use` ids were found without `tool_result` blocks immediately "
                f"after: {', '.join(missing)}. Each `tool_use` block must have a corresponding `tool_result` block in "
                "the next message."
            )
        for index, call_id in enumerate(answered):
            if call_id not in open_ids or call_id in answered[:index]:
                return Refusal(
                    message=f"messages.{position}.content.{index}: unexpected `tool_use_id` found in `tool_result` "
                    f"blocks: {call_id}. Each `tool_result` block must have a corresponding `tool_use` block in the "
                    "previous message."
                )
        open_ids = [block["id"] for block in blocks if block["type"] == "tool_use"]
        if repeated := seen.intersection(open_ids) or len(set(open_ids)) < len(open_ids):
            return Refusal(message=f"messages.{position}: `tool_use` ids must be unique: {repeated}")
        seen.update(open_ids)
    if open_ids:
        return Refusal(
            message=f"messages.{len(messages) - 1}: `tool_use` ids were found without `tool_result` blocks immediately "
            f"after: {', '.join(open_ids)}."
        )
    return None


def _check_system(system: object) -> Refusal | None:
    if system is None or isinstance(system, str):
        return None
    if not isinstance(system, list):
        return Refusal(message="system: Input should be a valid list")
    for index, block in enumerate(system):
        if not isinstance(block, dict) or block.get("type") != "text":
            return Refusal(message=f"system.{index}.type: Input should be 'text'")
        if not str(block.get("text", "")):
            return Refusal(message="system: text content blocks must be non-empty")
    return None


def _check_message(message: object, index: int) -> Refusal | None:
    if not isinstance(message, dict):
        return Refusal(message=f"messages.{index}: Input should be a valid dictionary")
    if message.get("role") not in {"user", "assistant", "system"}:
        return Refusal(message=f"messages.{index}.role: Input should be 'user' or 'assistant'")
    if refusal := _check_fields(message, f"message:{message['role']}", f"messages.{index}"):
        return refusal
    content = message.get("content")
    if not isinstance(content, str | list):
        return Refusal(message=f"messages.{index}.content: Input should be a valid list")
    if not content and message["role"] == "system":
        return None  # Claude Code sends one behind its own compaction
    if not content:
        return Refusal(
            message=f"messages.{index}: all messages must have non-empty content except for the optional final "
            "assistant message"
        )
    if isinstance(content, str):
        return None if content.strip() else _blank()
    if isinstance(content[-1], dict) and content[-1].get("type") == "thinking":
        return Refusal(message=f"messages.{index}: The final block in an assistant message cannot be `thinking`.")
    return next(filter(None, (_check_block(b, f"messages.{index}.content.{i}") for i, b in enumerate(content))), None)


def _check_block(block: object, path: str) -> Refusal | None:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(block, dict) or kind not in _BLOCKS:
        return Refusal(message=f"{path}.type: Input tag '{kind}' found using 'type' does not match any of the tags")
    match kind:
        case "text":
            text = block.get("text")
            return None if isinstance(text, str) and text.strip() else _blank()
        case "thinking":
            has_all = isinstance(block.get("thinking"), str) and block.get("signature")
            return None if has_all else Refusal(message=f"{path}.thinking.signature: Field required")
        case "tool_use":
            return _check_call(block, path)
        case "tool_result":
            if refusal := _check_fields(block, "tool_result", f"{path}.tool_result"):
                return refusal
            if not isinstance(block.get("tool_use_id"), str):
                return Refusal(message=f"{path}.tool_result.tool_use_id: Field required")
        case _:
            pass
    return None


def _check_fields(members: dict[str, Any], block: str, path: str) -> Refusal | None:
    for name in unknown_members("anthropic", block, members):
        return Refusal(
            message=f"{path}.{name}: Extra inputs are not permitted",
            unknown=UnknownField(block=block, name=name, holder=members),
        )
    return None


def _check_call(block: dict[str, Any], path: str) -> Refusal | None:
    if refusal := _check_fields(block, "tool_use", f"{path}.tool_use"):
        return refusal
    if not isinstance(block.get("id"), str) or not _CALL_ID.fullmatch(block["id"]):
        return Refusal(message=f"{path}.tool_use.id: String should match pattern '^[a-zA-Z0-9_-]+$'")
    if not isinstance(block.get("input"), dict):
        return Refusal(message=f"{path}.tool_use.input: Input should be a valid dictionary")
    return None if block.get("name") else Refusal(message=f"{path}.tool_use.name: Field required")


def _check_order(messages: list[dict[str, Any]]) -> Refusal | None:
    if messages[0]["role"] != "user":
        return Refusal(message='messages: first message must use the "user" role')
    for index, message in enumerate(messages):
        kinds = [block["type"] for block in _blocks(message)]
        if "tool_result" in kinds:
            last = len(kinds) - 1 - kinds[::-1].index("tool_result")
            if any(kind != "tool_result" for kind in kinds[:last]):
                return Refusal(message=f"messages.{index}: `tool_result` blocks must come first in content")
    return None


def _check_breakpoints(request: dict[str, Any]) -> Refusal | None:
    holders = [*_dicts(request.get("tools")), *_dicts(request.get("system"))]
    for message in request["messages"]:
        for block in _dicts(message["content"]):
            holders += [block, *_dicts(block.get("content"))]
    marked = [holder for holder in holders if holder.get("cache_control")]
    if any(holder.get("type") in {"thinking", "redacted_thinking"} for holder in marked):
        return Refusal(message="cache_control cannot be set for thinking blocks")
    count = len(marked) + bool(request.get("cache_control"))
    if count > MAX_BREAKPOINTS:
        return Refusal(message=f"A maximum of 4 blocks with cache_control may be provided. Found {count}.")
    return None


def _dicts(value: object) -> Iterable[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _blocks(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message["content"]
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _blank() -> Refusal:
    return Refusal(message="messages: text content blocks must contain non-whitespace text")
