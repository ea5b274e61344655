"""Recorded replies in the wire form of their dialect: read one, list its parts, replace its last text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tersely.domain.messages import Dialect as DialectName
from tersely.transcripts.conversations import BadTranscript

TEXT = "content"
THOUGHT = "thought"
CALL = "tool call"

Bit = tuple[str, str]
"""The kind of a part, and its text (or its JSON with sorted keys)."""

Path = tuple[str | int, ...]


def bits(message: Mapping[str, Any], dialect: DialectName) -> list[Bit]:
    """Return the parts of a reply, in order. Adjacent texts are joined, since a stream may cut them anywhere."""
    joined: list[Bit] = []
    for kind, words in _BITS[dialect](message):
        if not words:
            continue
        if joined and kind == joined[-1][0] and kind in {TEXT, THOUGHT}:
            joined[-1] = (kind, joined[-1][1] + words)
        else:
            joined.append((kind, words))
    return joined


def last_text(message: Mapping[str, Any], dialect: DialectName) -> str | None:
    """Return the last text of a reply, or None."""
    found = _TEXT_PATHS[dialect](message)
    value: Any = message
    for key in found or ():
        value = value[key]
    return value if found and isinstance(value, str) else None


def with_last_text(message: Mapping[str, Any], dialect: DialectName, text: str) -> dict[str, Any]:
    """Return the reply with another last text."""
    changed: dict[str, Any] = _set(message, _TEXT_PATHS[dialect](message) or (), text)
    return changed


def has_calls(message: Mapping[str, Any], dialect: DialectName) -> bool:
    """Return whether a reply calls tools."""
    return any(kind == CALL for kind, _ in _BITS[dialect](message))


def read_reply(recorded: Any, dialect: DialectName, number: int) -> Mapping[str, Any]:
    """Return a recorded reply: a message (of blocks, parts or items), or the whole answer, or all chunks of Gemini's.

    Raises `BadTranscript` for anything else.
    """
    message = _message_of(recorded, dialect)
    if message is None:
        raise BadTranscript(f"line {number}: the reply is not in the format of {dialect}")
    return message


def _message_of(recorded: Any, dialect: DialectName) -> Mapping[str, Any] | None:
    match dialect:
        case "openai_chat":
            choices = recorded.get("choices") if isinstance(recorded, dict) else None
            message = choices[0].get("message") if isinstance(choices, list) and choices else recorded
            is_one = isinstance(message, dict) and message.keys() & {"content", "tool_calls", "role"}
            return message if is_one else None
        case "anthropic":
            content = recorded.get("content") if isinstance(recorded, dict) else recorded
            return {"role": "assistant", "content": content} if isinstance(content, list | str) else None
        case "openai_responses":
            output, reply_id = (
                (recorded.get("output"), recorded.get("id")) if isinstance(recorded, dict) else (recorded, None)
            )
            return {"output": output, "id": reply_id} if isinstance(output, list) else None
        case _:
            parts = list(_parts_of(recorded))
            return {"role": "model", "parts": parts} if parts or isinstance(recorded, list | dict) else None


def _parts_of(recorded: Any) -> Iterator[Any]:
    for chunk in recorded if isinstance(recorded, list) else [recorded]:
        inner = chunk.get("response", chunk) if isinstance(chunk, dict) else {}
        for candidate in inner.get("candidates") or ():
            yield from (candidate.get("content") or {}).get("parts") or ()
        yield from inner.get("parts") or ()


def _set(value: Any, path: Path, text: str) -> Any:
    if not path:
        return text
    key, rest = path[0], path[1:]
    if isinstance(value, Mapping):
        return {**value, key: _set(value[key], rest, text)}
    return [_set(each, rest, text) if index == key else each for index, each in enumerate(value)]


def _chat_bits(message: Mapping[str, Any]) -> Iterator[Bit]:
    yield TEXT, str(message.get("content") or "")
    for call in message.get("tool_calls") or ():
        yield CALL, _dump(call)


def _anthropic_bits(message: Mapping[str, Any]) -> Iterator[Bit]:
    content = message.get("content") or ()
    if isinstance(content, str):
        yield TEXT, content
        return
    for block in content:
        match block.get("type"):
            case "text":
                yield TEXT, str(block.get("text") or "")
            case "tool_use":
                yield CALL, _dump(block)
            case kind:
                yield str(kind), _dump(block)


def _gemini_bits(message: Mapping[str, Any]) -> Iterator[Bit]:
    signatures: dict[str, None] = {}  # of texts: each piece of a streamed one repeats it
    for part in message.get("parts") or ():
        if "text" in part:
            yield (THOUGHT if part.get("thought") else TEXT), str(part["text"] or "")
            signatures[str(part.get("thoughtSignature") or "")] = None
        elif "functionCall" in part:
            yield CALL, _dump(part)
        else:
            yield "part", _dump(part)
    for signature in signatures:
        yield "signature", signature


def _response_bits(message: Mapping[str, Any]) -> Iterator[Bit]:
    for item in message.get("output") or ():
        match item.get("type", "message"):
            case "message" if isinstance(item.get("content"), str):
                yield TEXT, item["content"]
            case "message":
                for part in item.get("content") or ():
                    is_text = part.get("type") == "output_text"
                    yield (TEXT, str(part.get("text") or "")) if is_text else ("part", _dump(part))
            case kind:
                is_call = kind in {"function_call", "custom_tool_call"}
                yield (CALL if is_call else str(kind)), _dump({**item, "status": None})


def _dump(value: Mapping[str, Any]) -> str:
    """Return a value as JSON, without empty members."""
    return json.dumps({key: each for key, each in value.items() if each not in (None, "")}, sort_keys=True)


def _chat_place(message: Mapping[str, Any]) -> Path | None:
    return ("content",) if isinstance(message.get("content"), str) else None


def _anthropic_place(message: Mapping[str, Any]) -> Path | None:
    content = message.get("content")
    if isinstance(content, str):
        return ("content",)
    indexes = [index for index, block in enumerate(content or ()) if block.get("type") == "text"]
    return ("content", indexes[-1], "text") if indexes else None


def _gemini_place(message: Mapping[str, Any]) -> Path | None:
    parts = list(message.get("parts") or ())
    indexes = [index for index, part in enumerate(parts) if "text" in part and not part.get("thought")]
    return ("parts", indexes[-1], "text") if indexes else None


def _response_place(message: Mapping[str, Any]) -> Path | None:
    output = list(message.get("output") or ())
    for index in range(len(output) - 1, -1, -1):
        content = output[index].get("content")
        if output[index].get("type", "message") == "message" and isinstance(content, list) and content:
            is_text = content[-1].get("type") == "output_text"
            return ("output", index, "content", len(content) - 1, "text") if is_text else None
    return None


_BITS = {
    "openai_chat": _chat_bits,
    "anthropic": _anthropic_bits,
    "gemini": _gemini_bits,
    "gemini_gca": _gemini_bits,
    "openai_responses": _response_bits,
}
_TEXT_PATHS = {
    "openai_chat": _chat_place,
    "anthropic": _anthropic_place,
    "gemini": _gemini_place,
    "gemini_gca": _gemini_place,
    "openai_responses": _response_place,
}
