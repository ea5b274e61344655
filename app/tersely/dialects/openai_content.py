"""Content in both of OpenAI's formats: a string, or a list of parts, each with its original bytes."""

from __future__ import annotations

from collections.abc import Iterable

from tersely.dialects.wire import raw_json

TEXT_TYPES = frozenset({"text", "input_text", "output_text", ""})
"""Parts of these types are text."""

_MODES = ("auto", "none", "required", "any")


def is_text(part: object) -> bool:
    """Return whether a part is text."""
    if isinstance(part, dict):
        kind = part.get("type", "")
        return isinstance(kind, str) and kind in TEXT_TYPES and isinstance(part.get("text"), str)
    return isinstance(part, str)


def requires_call(choice: bytes) -> bool:
    """Return whether a ``tool_choice`` requires that the model calls a tool: any, or a certain one.

    An object names a tool, unless it lists allowed ones, with a mode. The older ``function_call`` reads the same.
    """
    try:
        value = raw_json.load(choice)
    except ValueError:
        return False
    if isinstance(value, dict):
        kind, inner = value.get("type"), value.get("allowed_tools")
        if kind not in ("allowed_tools", *_MODES):
            return True
        value = kind if kind in _MODES else (inner if isinstance(inner, dict) else value).get("mode")
    return isinstance(value, str) and value.lower() in ("required", "any")


def text_part(text: str, kind: str = "text") -> bytes:
    """Return a part of text."""
    return raw_json.dump({"type": kind, "text": text})


def replace_text(parts: list[bytes], text: str, kind: str = "text") -> list[bytes]:
    """Return ``text`` in the first of the text parts, without the other ones; media and the like stay.

    ``kind``: the type of the part that is made where there was none.
    """
    kept: list[bytes] = []
    placed = False
    for part in parts:
        value = raw_json.load(part)
        if not is_text(value):
            kept.append(part)
        elif not placed:
            placed = True
            words = raw_json.dump(text)
            is_bare = isinstance(value, str)
            kept.append(words if is_bare else raw_json.join_object({**raw_json.split_object(part), "text": words}))
    if not placed and text:
        kept.append(text_part(text, kind))
    return kept


def with_words(content: bytes, text: str | None, kind: str = "text") -> bytes:
    """Return a content with ``text`` as its text."""
    if content.startswith(b"[") and text is not None:
        return raw_json.join_array(replace_text(raw_json.split_array(content), text, kind))
    return raw_json.dump(text)


def prepend(content: bytes, text: str, kind: str = "text") -> bytes:
    """Return a content with ``text`` in front: a string grows by it and a blank line, a list by a text part."""
    if content.startswith(b"["):
        return raw_json.join_array([text_part(text, kind), *raw_json.split_array(content)])
    value = raw_json.load(content)
    return raw_json.dump(f"{text}\n\n{value}" if value else text)


def append(content: bytes, text: str, kind: str = "text") -> bytes:
    """Return a content with ``text`` at its end: a string grows by a blank line and it, a list by a text part."""
    if content.startswith(b"["):
        return raw_json.join_array([*raw_json.split_array(content), text_part(text, kind)])
    value = raw_json.load(content)
    return raw_json.dump(f"{value}\n\n{text}" if value else text)


def without_lines(text: str, placeholders: Iterable[str]) -> str:
    """Return ``text`` without the placeholder lines of media, which stay in the message themselves."""
    lines = text.split("\n")
    for placeholder in placeholders:
        if placeholder in lines:
            lines.remove(placeholder)
    return "\n".join(lines)
