"""The refusals of Gemini's ``generateContent``, in its own words. Pure."""

from __future__ import annotations

import re
from typing import Any

from tersely.data.known_fields import unknown_members
from tersely.fakellm.strict.openai_chat import Refusal, UnknownField

_DATA = frozenset(
    {"text", "inlineData", "fileData", "functionCall", "functionResponse", "executableCode", "codeExecutionResult"}
    | {"inline_data", "file_data", "function_call", "function_response"}
)
_BARE = re.compile(r"gemma-|gemini-[\w.-]*-(?:image|tts)")


def check(request: dict[str, Any]) -> Refusal | None:
    """Return the first thing that is wrong with a request."""
    contents = request.get("contents")
    if isinstance(contents, dict):
        contents = [contents]
    if not isinstance(contents, list) or not contents:
        return Refusal(message="* GenerateContentRequest.contents: contents is not specified\n")
    for index, content in enumerate(contents):
        if refusal := _check_content(content, f"contents[{index}]"):
            return refusal
    return check_pairing(contents)


def check_model(request: dict[str, Any], model: str) -> Refusal | None:
    """Return the refusal that only models of this name give."""
    declared = [tool for tool in request.get("tools") or () if "functionDeclarations" in tool]
    if _BARE.match(model):
        if request.get("systemInstruction"):
            return Refusal(message=f"Developer instruction is not enabled for models/{model}")
        if declared:
            return Refusal(message=f"Function calling is not enabled for models/{model}")
    kind = (request.get("generationConfig") or {}).get("responseMimeType")
    if declared and kind == "application/json" and not wants_signatures(model):
        return Refusal(message=f"Function calling with a response mime type: '{kind}' is unsupported")
    contents = request["contents"]
    return check_signatures(contents) if isinstance(contents, list) and wants_signatures(model) else None


def wants_signatures(model: str) -> bool:
    """Return whether the model signs its calls, and wants to see that."""
    return model.startswith("gemini-3")


def check_signatures(contents: list[dict[str, Any]]) -> Refusal | None:
    """Check that the first call of each step of the current turn is signed.

    The turn begins with the user's last text.
    """
    is_step = False
    for index in range(len(contents) - 1, -1, -1):
        content = contents[index]
        calls = [part for part in content["parts"] if "functionCall" in part]
        if content.get("role") != "model" and not any("functionResponse" in part for part in content["parts"]):
            return None
        is_step = bool(calls) and contents[index - 1].get("role") != "model"
        if is_step and not (calls[0].get("thoughtSignature") or calls[0].get("thought_signature")):
            name = calls[0]["functionCall"]["name"]
            return Refusal(
                message="Function call is missing a thought_signature in functionCall parts. This is required for "
                "tools to work correctly, and missing thought_signature may lead to degraded model performance. "
                f"Additional data, function call `default_api:{name}` , position {index + 1}."
            )
    return None


def overflow(*, window: int, messages: int, tools: int) -> Refusal | None:
    """Return the refusal of a prompt over ``window`` tokens."""
    needed = messages + tools
    if needed <= window:
        return None
    return Refusal(message=f"The input token count ({needed}) exceeds the maximum number of tokens allowed ({window}).")


def check_pairing(contents: list[dict[str, Any]]) -> Refusal | None:
    """Return a turn of calls follows the user or results, and the results of all its calls follow it."""
    calls: list[dict[str, Any]] = []
    before = ""
    for content in contents:
        parts = content["parts"]
        results = _distinct([part["functionResponse"] for part in parts if "functionResponse" in part])
        made = [part["functionCall"] for part in parts if "functionCall" in part]
        if calls and made and before == content.get("role") == "model" and not results:
            calls += made  # neighbouring contents of calls are one turn
            continue
        if results and not calls:
            return Refusal(
                message="Please ensure that function response turn comes immediately after a function call turn."
            )
        if calls and len(results) != len(calls):
            return Refusal(
                message="Please ensure that the number of function response parts is equal to the number of function "
                "call parts of the function call turn."
            )
        if calls and sorted(str(each.get("name")) for each in results) != sorted(str(c.get("name")) for c in calls):
            return Refusal(message="Please ensure that function responses are named after the functions they answer.")
        calls = made
        if calls and before == "model":
            return Refusal(
                message="Please ensure that function call turn comes immediately after a user turn or after a function "
                "response turn."
            )
        if calls and content.get("role") != "model":
            return Refusal(message="Please use the role model for function calls.")
        before = content.get("role", "user")
    if calls:
        return Refusal(message="Please ensure that a function response turn comes after each function call turn.")
    return None


def _distinct(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the results without repetitions, which a client that resumes may send."""
    kept: list[dict[str, Any]] = []
    for result in results:
        if not (result.get("id") and result in kept):
            kept.append(result)
    return kept


def _check_content(content: object, path: str) -> Refusal | None:
    if not isinstance(content, dict):
        return Refusal(message=f"Invalid value at '{path}'.")
    for name in unknown_members("gemini", "content", content):
        return _unknown(name, path, "content", content)
    if content.get("role", "user") not in {"user", "model", "function"}:
        return Refusal(message="Please use a valid role: user, model.")
    parts = content.get("parts")
    if not isinstance(parts, list) or not parts:
        return Refusal(message=f"* GenerateContentRequest.{path}.parts: contents.parts must not be empty.\n")
    for index, part in enumerate(parts):
        if not isinstance(part, dict) or not part.keys() & _DATA:
            return Refusal(
                message=f"* GenerateContentRequest.{path}.parts[{index}].data: required oneof field 'data' must have "
                "one initialized field\n"
            )
        for name in unknown_members("gemini", "part", part):
            return _unknown(name, f"{path}.parts[{index}]", "part", part)
        for key in ("functionCall", "functionResponse"):
            if key in part and not part[key].get("name"):
                return Refusal(message=f"* GenerateContentRequest.{path}.parts[{index}].{key}.name: [FIELD_INVALID]\n")
        response = part.get("functionResponse")
        if response is not None and not isinstance(response.get("response"), dict):
            return Refusal(message=f"Invalid value at '{path}.parts[{index}].function_response.response'.")
    return None


def _unknown(name: str, path: str, block: str, holder: dict[str, Any]) -> Refusal:
    return Refusal(
        message=f"Invalid JSON payload received. Unknown name \"{name}\" at '{path}': Cannot find field.",
        unknown=UnknownField(block=block, name=name, holder=holder),
    )
