"""A reply in the wire form of its dialect: what it says, and the text in it that a tag can be added to."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from app.domain.messages import Dialect as DialectName

TEXT = "content"
THOUGHT = "thought"
CALL = "tool call"

Bit = tuple[str, str]
"""The kind of something that was said, and its words (or its JSON with sorted keys)."""

Path = tuple[str | int, ...]


def bits(message: Mapping[str, Any], dialect: DialectName) -> list[Bit]:
    """What a reply says, in order. Texts that follow each other are one: a stream may cut them anywhere."""
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
    """The last text of a reply; None where there is none."""
    found = _PLACES[dialect](message)
    value: Any = message
    for key in found or ():
        value = value[key]
    return value if found and isinstance(value, str) else None


def with_last_text(message: Mapping[str, Any], dialect: DialectName, text: str) -> dict[str, Any]:
    """The reply with another last text."""
    changed: dict[str, Any] = _set(message, _PLACES[dialect](message) or (), text)
    return changed


def has_calls(message: Mapping[str, Any], dialect: DialectName) -> bool:
    """Whether a reply calls tools of the client's."""
    return any(kind == CALL for kind, _ in _BITS[dialect](message))


def _set(value: Any, path: Path, text: str) -> Any:
    if not path:
        return text
    key, rest = path[0], path[1:]
    if isinstance(value, Mapping):
        return {**value, key: _set(value[key], rest, text)}
    return [_set(each, rest, text) if place == key else each for place, each in enumerate(value)]


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
    """As JSON; a member that says nothing is as good as none."""
    return json.dumps({key: each for key, each in value.items() if each not in (None, "")}, sort_keys=True)


def _chat_place(message: Mapping[str, Any]) -> Path | None:
    return ("content",) if isinstance(message.get("content"), str) else None


def _anthropic_place(message: Mapping[str, Any]) -> Path | None:
    content = message.get("content")
    if isinstance(content, str):
        return ("content",)
    places = [place for place, block in enumerate(content or ()) if block.get("type") == "text"]
    return ("content", places[-1], "text") if places else None


def _gemini_place(message: Mapping[str, Any]) -> Path | None:
    parts = list(message.get("parts") or ())
    places = [place for place, part in enumerate(parts) if "text" in part and not part.get("thought")]
    return ("parts", places[-1], "text") if places else None


def _response_place(message: Mapping[str, Any]) -> Path | None:
    output = list(message.get("output") or ())
    for place in range(len(output) - 1, -1, -1):
        content = output[place].get("content")
        if output[place].get("type", "message") == "message" and isinstance(content, list) and content:
            is_text = content[-1].get("type") == "output_text"
            return ("output", place, "content", len(content) - 1, "text") if is_text else None
    return None


_BITS = {
    "openai_chat": _chat_bits,
    "anthropic": _anthropic_bits,
    "gemini": _gemini_bits,
    "gemini_gca": _gemini_bits,
    "openai_responses": _response_bits,
}
_PLACES = {
    "openai_chat": _chat_place,
    "anthropic": _anthropic_place,
    "gemini": _gemini_place,
    "gemini_gca": _gemini_place,
    "openai_responses": _response_place,
}
