"""The fields of a message that no provider describes and no known client sends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from tersely.data.known_fields import unknown_members
from tersely.domain.messages import Dialect, Message

_SHARING: Mapping[Dialect, Dialect] = {"gemini_gca": "gemini"}
_decode = msgspec.json.Decoder().decode


def unknown_fields(dialect: Dialect, message: Message) -> list[tuple[str, str]]:
    """Return dialect and block of each member of a client's message that the table lacks."""
    name = _SHARING.get(dialect, dialect)
    try:
        said = _decode(message.raw)
    except (ValueError, RecursionError):  # lone surrogates and the like
        return []
    blocks = _blocks(name, said) if isinstance(said, dict) else ()
    return [(name, block) for block, members in blocks for _ in unknown_members(name, block, members)]


def _blocks(dialect: str, said: Mapping[str, object]) -> Iterable[tuple[str, Mapping[str, object]]]:
    """Return a message and the blocks in it, by name."""
    match dialect:
        case "openai_chat":
            yield "message", said
            yield from (("tool_call", each) for each in _objects(said.get("tool_calls")))
        case "anthropic":
            yield ("system" if "role" not in said else f"message:{said['role']}"), said
            yield from ((str(each.get("type")), each) for each in _objects(said.get("content")))
        case "gemini":
            yield ("content" if "parts" in said else "systemInstruction"), said
            yield from (("part", each) for each in _objects(said.get("parts")))
        case _:
            is_item = not said.keys() & {"instructions", "output"} or "type" in said
            items = [said] if is_item else _objects(said.get("output"))
            yield from ((str(each.get("type", "message")), each) for each in items)


def _objects(value: object) -> list[Mapping[str, object]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
