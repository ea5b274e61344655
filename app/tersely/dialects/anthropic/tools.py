"""Tools in Anthropic's format: offering more than the client does, and asking for an answer without any."""

from __future__ import annotations

from collections.abc import Sequence

from tersely.dialects.dialect import ToolOffer
from tersely.dialects.wire import raw_json
from tersely.dialects.wire.members import append_tools, split_body


def add_tools(body: bytes, offers: Sequence[ToolOffer]) -> bytes:
    """Return the request with ``offers`` after the client's own tools. All other members keep their bytes."""
    definitions = [{"name": o.name, "description": o.description, "input_schema": o.parameters} for o in offers]
    return append_tools(body, definitions)


def requires_call(choice: bytes) -> bool:
    """Return whether a ``tool_choice`` requires that the model calls a tool: any, or a certain one."""
    try:
        value = raw_json.load(choice)
    except ValueError:
        return False
    return isinstance(value, dict) and value.get("type") in ("any", "tool")


def forbid_tools(body: bytes) -> bytes:
    """Return the request with its tools, none of which the model may call. A cached prefix stays valid."""
    members = split_body(body)
    if "tools" in members:
        members["tool_choice"] = b'{"type":"none"}'
    return raw_json.join_object(members)
