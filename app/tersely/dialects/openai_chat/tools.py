"""Tools in OpenAI's chat format: offering more than the client does, and asking for an answer without any."""

from __future__ import annotations

from collections.abc import Sequence

from tersely.dialects.dialect import ToolOffer
from tersely.dialects.openai_content import requires_call as requires_call
from tersely.dialects.wire import raw_json
from tersely.dialects.wire.members import append_tools, split_body


def add_tools(body: bytes, offers: Sequence[ToolOffer]) -> bytes:
    """Return the request with ``offers`` after the client's own tools. All other members keep their bytes."""
    definitions = [
        {"type": "function", "function": {"name": o.name, "description": o.description, "parameters": o.parameters}}
        for o in offers
    ]
    return append_tools(body, definitions)


def forbid_tools(body: bytes) -> bytes:
    """Return the request with its tools, none of which the model may call. A cached prefix stays valid."""
    members = split_body(body)
    if "tools" in members:
        members["tool_choice"] = b'"none"'
    if "functions" in members:
        members["function_call"] = b'"none"'
    return raw_json.join_object(members)
