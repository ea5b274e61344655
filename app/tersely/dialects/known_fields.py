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
        body = _decode(message.raw)
    except (ValueError, RecursionError):  # lone surrogates and the like
        return []
    blocks = _blocks(name, body) if isinstance(body, dict) else ()
    return [(name, block) for block, members in blocks for _ in unknown_members(name, block, members)]


def _blocks(dialect: str, body: Mapping[str, object]) -> Iterable[tuple[str, Mapping[str, object]]]:
    """Return a message and the blocks in it, by name."""
    match dialect:
        case "openai_chat":
            yield "message", body
            yield from (("tool_call", each) for each in _objects(body.get("tool_calls")))
        case "anthropic":
            yield ("system" if "role" not in body else f"message:{body['role']}"), body
            yield from ((str(each.get("type")), each) for each in _objects(body.get("content")))
        case "gemini":
            yield ("content" if "parts" in body else "systemInstruction"), body
            yield from (("part", each) for each in _objects(body.get("parts")))
        case _:
            is_item = not body.keys() & {"instructions", "output"} or "type" in body
            items = [body] if is_item else _objects(body.get("output"))
            yield from ((str(each.get("type", "message")), each) for each in items)


def _objects(value: object) -> list[Mapping[str, object]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
