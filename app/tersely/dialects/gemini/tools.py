"""Tools in Gemini's format: offering more than the client does, and asking for an answer without any."""

from __future__ import annotations

from collections.abc import Sequence

from tersely.dialects.dialect import ToolOffer
from tersely.dialects.wire import raw_json
from tersely.dialects.wire.members import append_tools, split_body

CONFIGS = ("toolConfig", "tool_config")
CALLING = ("functionCallingConfig", "function_calling_config")


def add_tools(body: bytes, offers: Sequence[ToolOffer]) -> bytes:
    """Return the request with ``offers`` after the client's own tools. All other members keep their bytes."""
    declarations = [{"name": o.name, "description": o.description, "parameters": o.parameters} for o in offers]
    return append_tools(body, [{"functionDeclarations": declarations}])


def requires_call(choice: bytes) -> bool:
    """Return whether a ``toolConfig`` requires that the model calls a function."""
    try:
        value = raw_json.load(choice)
    except ValueError:
        return False
    config = next((value[name] for name in CALLING if name in value), None) if isinstance(value, dict) else None
    mode = config.get("mode") if isinstance(config, dict) else None
    return isinstance(mode, str) and mode.upper() == "ANY"


def forbid_tools(body: bytes) -> bytes:
    """Return the request with its tools, none of which the model may call. A cached prefix stays valid."""
    members = split_body(body)
    if "tools" not in members:
        return body
    key = next((name for name in CONFIGS if name in members), CONFIGS[0])
    config = raw_json.split_object(members.get(key, b"{}"))
    for name in CALLING:
        config.pop(name, None)
    config[CALLING[0]] = b'{"mode":"NONE"}'
    members[key] = raw_json.join_object(config)
    return raw_json.join_object(members)
