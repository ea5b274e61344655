"""The refusals of OpenAI's Responses, in OpenAI's own words. Pure."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from tersely.fakellm.strict.openai_chat import Refusal

ROLES = ("assistant", "system", "developer", "user")
_PARTS = {
    "user": frozenset({"input_text", "input_image", "input_file", "input_audio"}),
    "assistant": frozenset({"output_text", "refusal"}),
}
_PAIRS = {
    "function_call": "function_call_output",
    "custom_tool_call": "custom_tool_call_output",
    "local_shell_call": "local_shell_call_output",
    "shell_call": "shell_call_output",
    "apply_patch_call": "apply_patch_call_output",
    "computer_call": "computer_call_output",
}


def check(request: dict[str, Any]) -> Refusal | None:
    """Return the first thing that is wrong with a request."""
    if not request.get("model") and not request.get("prompt"):
        return Refusal(message="Missing required parameter: 'model'.", param="model", code="missing_required_parameter")
    input_items = request.get("input")
    if isinstance(input_items, str):
        return None
    if not isinstance(input_items, list):
        return Refusal(message="Missing required parameter: 'input'.", param="input")
    if not (input_items or request.get("previous_response_id") or request.get("conversation")):
        return Refusal(message="One of 'input', 'previous_response_id' or 'conversation' must be provided.")
    for index, item in enumerate(input_items):
        if refusal := _check_item(item, index):
            return refusal
    if refusal := _check_thoughts(input_items):
        return refusal
    ids = [item["id"] for item in input_items if item.get("id")]
    if repeated := next((each for each in ids if ids.count(each) > 1), None):
        message = f"Duplicate item found with id {repeated}. Remove duplicate items from your input and try again."
        return Refusal(message=message, param="input")
    return None if request.get("previous_response_id") or request.get("conversation") else check_pairing(input_items)


def overflow(*, window: int, messages: int, tools: int) -> Refusal | None:
    """Return the refusal of an input over ``window`` tokens."""
    if messages + tools <= window:
        return None
    return Refusal(
        message="Your input exceeds the context window of this model. Please adjust your input and try again.",
        param="input",
        code="context_length_exceeded",
    )


def check_pairing(items: list[dict[str, Any]]) -> Refusal | None:
    """Check that every call precedes its output, and that every output has a call."""
    calls: dict[str, str] = {}
    answered: set[str] = set()
    for item in items:
        kind, call_id = item.get("type", "message"), item.get("call_id")
        if kind in _PAIRS and isinstance(call_id, str):
            calls[call_id] = kind
        elif kind in _PAIRS.values() and isinstance(call_id, str):
            if _PAIRS.get(calls.get(call_id, "")) != kind:
                return Refusal(message=f"No tool call found for function call output with call_id {call_id}.")
            answered.add(call_id)
    missing = next((each for each in calls if each not in answered), None)
    return Refusal(message=f"No tool output found for function call {missing}.", param="input") if missing else None


def _check_thoughts(items: list[dict[str, Any]]) -> Refusal | None:
    """Check that every thought is followed by the item that it led to."""
    for item, following in pairwise([*items, {"role": "user"}]):
        kind = str(following.get("type", "message"))
        is_reply = following.get("role") == "assistant" if kind == "message" else not kind.endswith("_output")
        if item.get("type") == "reasoning" and not is_reply:
            name = f"Item '{item.get('id')}' of type 'reasoning'"
            return Refusal(message=f"{name} was provided without its required following item.", param="input")
    return None


def _check_item(item: object, index: int) -> Refusal | None:
    path = f"input[{index}]"
    if not isinstance(item, dict):
        return Refusal(message=f"Invalid type for '{path}': expected an object.", param=path, code="invalid_type")
    kind = item.get("type", "message")
    if kind == "message":
        return _check_message(item, path)
    # A call of a remote server that the provider made carries its output.
    if "output" in item and kind != "mcp_call" and not kind.endswith("_output"):
        return Refusal(message=f"Unknown parameter: '{path}.output'.", param=path, code="unknown_parameter")
    if (kind in _PAIRS or kind in _PAIRS.values()) and not isinstance(item.get("call_id"), str):
        return Refusal(message=f"Missing required parameter: '{path}.call_id'.", param=f"{path}.call_id")
    if kind == "function_call" and not (item.get("name") and isinstance(item.get("arguments"), str)):
        return Refusal(message=f"Missing required parameter: '{path}.name'.", param=f"{path}.name")
    if kind == "function_call_output" and not isinstance(item.get("output"), str | list):
        return Refusal(message=f"Missing required parameter: '{path}.output'.", param=f"{path}.output")
    return None


def _check_message(item: dict[str, Any], path: str) -> Refusal | None:
    if item.get("role") not in ROLES:
        return Refusal(message=f"Invalid value: '{item.get('role')}'.", param=f"{path}.role", code="invalid_value")
    content = item.get("content")
    if isinstance(content, str):
        return None
    if not isinstance(content, list):
        return Refusal(message=f"Missing required parameter: '{path}.content'.", param=f"{path}.content")
    allowed = _PARTS["assistant" if item["role"] == "assistant" else "user"]
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in allowed:
            where = f"{path}.content[{number}]"
            return Refusal(message=f"Invalid value: '{kind}'. Supported values are: {', '.join(sorted(allowed))}.",
                           param=where, code="invalid_value")  # fmt: skip
    return None
