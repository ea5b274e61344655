"""Tools in OpenAI's responses format: offering more than the client does, and asking for an answer without any."""

from __future__ import annotations

from collections.abc import Sequence

from tersely.dialects.dialect import ToolOffer
from tersely.dialects.openai_content import requires_call as requires_call
from tersely.dialects.tool_rounds import tool_names
from tersely.dialects.wire import raw_json
from tersely.dialects.wire.members import append_tools, split_body

_BESIDE = (b'"additional_tools"', b'"tool_search_output"')


def add_tools(body: bytes, offers: Sequence[ToolOffer]) -> bytes:
    """Return the request with ``offers`` after the client's own tools. All other members keep their bytes."""
    definitions = [
        {"type": "function", "name": o.name, "description": o.description, "parameters": o.parameters, "strict": False}
        for o in offers
    ]
    return append_tools(body, definitions)


def forbid_tools(body: bytes) -> bytes:
    """Return the request with its tools, none of which the model may call. A cached prefix stays valid."""
    members = split_body(body)
    if "tools" in members:
        members["tool_choice"] = b'"none"'
    return raw_json.join_object(members)


def tools_outside_list(body: bytes) -> frozenset[str]:
    """Return the names of tools among the items of a request, outside of its list. Codex puts tools there."""
    if not any(kind in body for kind in _BESIDE):
        return frozenset()
    try:
        items = raw_json.split_array(raw_json.split_object(body).get("input", b"[]"))
        tool_items = [raw_json.split_object(item) for item in items if any(kind in item for kind in _BESIDE)]
    except ValueError:
        return frozenset()
    return frozenset().union(
        *(tool_names(item.get("tools", b"")) for item in tool_items if item.get("type") in _BESIDE)
    )
