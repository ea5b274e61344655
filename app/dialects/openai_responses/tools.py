"""Tools in OpenAI's responses format: offering more than the client does, and asking for an answer without any."""

from __future__ import annotations

from collections.abc import Sequence

from app.dialects import raw_json
from app.dialects.dialect import ToolOffer
from app.dialects.members import append_items, split_body
from app.dialects.rounds import tool_names

_BESIDE = (b'"additional_tools"', b'"tool_search_output"')


def add_tools(body: bytes, offers: Sequence[ToolOffer]) -> bytes:
    """The request with ``offers`` behind the client's own tools; all else keeps its bytes."""
    members = split_body(body)
    definitions = [
        {"type": "function", "name": o.name, "description": o.description, "parameters": o.parameters, "strict": False}
        for o in offers
    ]
    members["tools"] = append_items(members.get("tools"), definitions)
    return raw_json.join_object(members)


def forbid_tools(body: bytes) -> bytes:
    """The request with the same tools, so that a cached prefix holds, none of which may be called."""
    members = split_body(body)
    if "tools" in members:
        members["tool_choice"] = b'"none"'
    return raw_json.join_object(members)


def brought_along(body: bytes) -> frozenset[str]:
    """The names of tools that stand among the items of a request, not in its list: Codex has them there."""
    if not any(kind in body for kind in _BESIDE):
        return frozenset()
    try:
        items = raw_json.split_array(raw_json.split_object(body).get("input", b"[]"))
        beside = [raw_json.split_object(item) for item in items if any(kind in item for kind in _BESIDE)]
    except ValueError:
        return frozenset()
    return frozenset().union(*(tool_names(item.get("tools", b"")) for item in beside if item.get("type") in _BESIDE))
