"""Parse the arguments that a model gives to a tool, and check them against the tool's schema.

Error texts are written for a model: they name the error and a valid alternative.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tersely.domain.errors import InvalidRequest
from tersely.domain.tools.catalog import Tool

MAX_ARGUMENTS = 256 * 1024
"""Bytes of arguments."""


def read_arguments(tool: Tool, arguments: object) -> dict[str, Any]:
    """Parse and validate tool arguments (JSON text or a decoded object). Null means absent.

    Raises `InvalidRequest` unless they are a JSON object with the parameters of ``tool``, complete and of the right
    kinds.
    """
    arguments = {name: value for name, value in as_object(tool, arguments).items() if value is not None}
    properties: Mapping[str, Mapping[str, Any]] = tool.parameters["properties"]
    for name in arguments:
        if name not in properties:
            raise InvalidRequest(f"unknown parameter {str(name)[:40]!r}. {_usage(tool)}", field=str(name)[:40])
    for name in tool.parameters["required"]:
        if name not in arguments:
            raise InvalidRequest(f"{name} is missing. {_usage(tool)}", field=name)
    return {name: _checked(name, value, properties[name]) for name, value in arguments.items()}


def as_object(tool: Tool, arguments: object) -> Mapping[str, Any]:
    """Return the arguments, not checked but for their being a JSON object. Raises `InvalidRequest`."""
    if isinstance(arguments, Mapping):
        return arguments
    if not isinstance(arguments, bytes | str):
        raise InvalidRequest(f"the arguments must be a JSON object. {_usage(tool)}")
    if len(arguments) > MAX_ARGUMENTS:
        raise InvalidRequest(f"the arguments are too long: at most {MAX_ARGUMENTS} bytes, not {len(arguments)}")
    try:
        # Some models send no arguments at all for a tool without required ones.
        parsed = json.loads(arguments) if arguments.strip() else {}
    except RecursionError as error:
        raise InvalidRequest("the arguments are nested too deep") from error
    except ValueError as error:
        raise InvalidRequest(f"the arguments are not valid JSON ({error}). {_usage(tool)}") from error
    if not isinstance(parsed, dict):
        raise InvalidRequest(f"the arguments must be a JSON object. {_usage(tool)}")
    return parsed


def _checked(name: str, value: Any, schema: Mapping[str, Any]) -> Any:
    match schema["type"]:
        case "string":
            return _checked_text(name, value, schema)
        case "integer":
            if isinstance(value, float) and value.is_integer():
                value = int(value)  # models write 2.0
            low, high = schema["minimum"], schema["maximum"]
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                _refuse(name, f"an integer from {low} to {high}", value)
        case _:
            if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
                _refuse(name, "a list of strings", value)
    return value


def _checked_text(name: str, value: Any, schema: Mapping[str, Any]) -> str:
    choices = schema.get("enum")
    if choices is not None and value not in choices:
        _refuse(name, f"one of {', '.join(map(repr, choices))}", value)
    if not isinstance(value, str):
        _refuse(name, "a string", value)
    most = schema.get("maxLength")
    if most is not None and len(value) > most:
        raise InvalidRequest(f"{name} must have at most {most} characters, not {len(value)}", field=name)
    return str(value)


def _refuse(name: str, expected: str, value: Any) -> None:
    raise InvalidRequest(f"{name} must be {expected}, not {str(value)[:40]!r}", field=name)


def _usage(tool: Tool) -> str:
    """``Parameters: mode (required), query, before.``"""
    required = tool.parameters["required"]
    names = (f"{name} (required)" if name in required else name for name in tool.parameters["properties"])
    return f"Parameters: {', '.join(names)}."
