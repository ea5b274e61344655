"""A response that its client asks for again, by its id: the provider has it as the model said it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tersely.dialects.openai_responses.items import INSTRUCTIONS, items_of
from tersely.dialects.openai_responses.strip_tags import replace_output
from tersely.dialects.wire import raw_json


def restore_response(
    body: bytes, message: bytes | None, *, instructions: Sequence[str], tools: Mapping[str, str], usage: bytes = b""
) -> bytes:
    """Return a response with the items of ``message``, those that its client was given (None: its own), with ``usage``
    (empty: its own), and without what was added to its request: ``instructions``, and ``tools``, which are described
    so. The very same bytes where nothing of that is in it. Raises ``ValueError`` for what is no response.
    """
    members = raw_json.split_object(body)
    changed = members if message is None else replace_output(members, items_of(message))
    if usage and "usage" in members:
        changed = {**changed, "usage": usage}
    said = raw_json.load(members.get(INSTRUCTIONS, b"null"))
    if isinstance(said, str) and (own := _without(said, instructions)) != said:
        changed = {**changed, INSTRUCTIONS: raw_json.dump(own or None)}
    if members.get("tools", b"").startswith(b"["):
        listed = raw_json.split_array(members["tools"])
        kept = [raw for raw in listed if not _is_among(raw, tools)]
        if kept != listed:
            changed = {**changed, "tools": raw_json.join_array(kept)}
    return body if changed is members else raw_json.like_original(body, raw_json.join_object(changed))


def _without(said: str, instructions: Sequence[str]) -> str:
    """They stand behind the client's own."""
    for text in instructions:
        if said.endswith(text):
            return said.removesuffix(text).removesuffix("\n\n")
    return said


def _is_among(raw: bytes, tools: Mapping[str, str]) -> bool:
    tool = raw_json.load(raw)
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        return False
    return tool["name"] in tools and tools[tool["name"]] == tool.get("description")
