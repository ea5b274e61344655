"""The refusals of a strict chat completions provider, in OpenAI's own words. Pure.

`tersely.fakellm.scripted` answers with them, so that a context which a provider would refuse fails here too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec

ROLES = ("system", "assistant", "user", "function", "tool", "developer")
PART_TYPES = ("text", "image_url", "input_audio", "refusal", "audio", "file")

# Name in the wire format -> Python type, and how OpenAI calls it.
_TOP_LEVEL_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "model": ((str,), "a string"),
    "messages": ((list,), "an array of objects"),
    "stream": ((bool,), "a boolean"),
    "stream_options": ((dict,), "an object"),
    "n": ((int,), "an integer"),
    "temperature": ((int, float), "a decimal"),
    "top_p": ((int, float), "a decimal"),
    "max_tokens": ((int,), "an integer"),
    "max_completion_tokens": ((int,), "an integer"),
    "tools": ((list,), "an array of objects"),
    "functions": ((list,), "an array of objects"),
    "response_format": ((dict,), "an object"),
}

_UNPARSABLE = (
    "We could not parse the JSON body of your request. (HINT: This likely means you aren't using your HTTP library "
    "correctly. The OpenAI API expects a JSON payload, but what was sent was not valid JSON.)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownField:
    """A member that no table knows: ``name`` in ``holder``, a ``block`` of the request."""

    block: str
    name: str
    holder: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An error answer: ``status`` and the members of OpenAI's error object.

    ``unknown``: what is refused is this member alone.
    """

    message: str
    param: str | None = None
    code: str | None = None
    type: str = "invalid_request_error"
    status: int = 400
    unknown: UnknownField | None = None

    def body(self) -> bytes:
        """Return the answer's body."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


def parse_body(body: bytes) -> dict[str, Any] | Refusal:
    """Return the request as Python values, lone surrogates included."""
    try:
        value = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        try:
            value = json.loads(body.decode())
        except (ValueError, RecursionError):
            return Refusal(message=_UNPARSABLE)
    return value if isinstance(value, dict) else Refusal(message=_UNPARSABLE)


def check(request: dict[str, Any]) -> Refusal | None:
    """Return the first error in a request, in the order in which a provider checks."""
    if not request.get("model"):
        return Refusal(message="you must provide a model parameter")
    for name, (types, words) in _TOP_LEVEL_TYPES.items():
        value = request.get(name)
        if value is not None and not _is(value, types):
            return _wrong_type(name, words, value)
    messages = request.get("messages")
    if messages is None:
        return _missing("messages")
    if not messages:
        return _empty_array("messages")
    for index, message in enumerate(messages):
        refusal = _check_message(message, f"messages[{index}]", index)
        if refusal is not None:
            return refusal
    return check_pairing(messages)


def check_pairing(messages: list[dict[str, Any]]) -> Refusal | None:
    """Check that one tool message right after each call answers it, and that each tool message answers a call."""
    open_ids: list[str] = []
    answered: set[str] = set()
    for index, message in enumerate(messages):
        role = message["role"]
        if role == "tool":
            call_id = message["tool_call_id"]
            if call_id in answered:
                return _duplicate(call_id, index)
            if call_id not in open_ids:
                return Refusal(
                    message="Invalid parameter: messages with role 'tool' must be a response to a preceeding message "
                    "with 'tool_calls'.",
                    param=f"messages.[{index}].role",
                )
            open_ids.remove(call_id)
            answered.add(call_id)
            continue
        if open_ids:
            return _unanswered(open_ids, index)
        answered = set()
        if role == "assistant":
            open_ids = [call["id"] for call in message.get("tool_calls") or ()]
            for call_id in open_ids:
                if open_ids.count(call_id) > 1:
                    return _duplicate(call_id, index)
    return _unanswered(open_ids, len(messages)) if open_ids else None


def overflow(*, window: int, messages: int, tools: int) -> Refusal | None:
    """OpenAI's refusal when ``messages`` and ``tools`` (tokens) together pass ``window``."""
    needed = messages + tools
    if needed <= window:
        return None
    detail = f" ({messages} in the messages, {tools} in the functions)" if tools else ""
    reduce = "messages or functions" if tools else "messages"
    return Refusal(
        message=f"This model's maximum context length is {window} tokens. However, your messages resulted in "
        f"{needed} tokens{detail}. Please reduce the length of the {reduce}.",
        param="messages",
        code="context_length_exceeded",
    )


def _check_message(message: object, path: str, index: int) -> Refusal | None:
    if not isinstance(message, dict):
        return _wrong_type(path, "an object", message)
    role = message.get("role")
    if role is None:
        return _missing(f"{path}.role")
    if role not in ROLES:
        return _invalid_value(f"{path}.role", role, ROLES)
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        return _missing(f"{path}.tool_call_id")
    refusal = _check_calls(message, f"{path}.tool_calls") if role == "assistant" else None
    return refusal or _check_content(message, path, index)


def _check_content(message: dict[str, Any], path: str, position: int) -> Refusal | None:
    content, role = message.get("content"), message["role"]
    may_be_empty = role in {"tool", "function"} or any(
        message.get(key) for key in ("tool_calls", "function_call", "refusal", "audio")
    )
    if content is None:
        if role == "assistant" and may_be_empty:
            return None
        return Refusal(
            message="Invalid value for 'content': expected a string, got null.",
            param=f"messages.[{position}].content",
        )
    if isinstance(content, str):
        return None if content.strip() or may_be_empty else _empty_content(role, position)
    if not isinstance(content, list):
        return _wrong_type(f"{path}.content", "one of a string or array of objects", content)
    if not content:
        return None if may_be_empty else _empty_array(f"{path}.content")
    for index, part in enumerate(content):
        refusal = _check_part(part, f"{path}.content[{index}]", role, position)
        if refusal is not None:
            return refusal
    return None


def _check_part(part: object, path: str, role: str, index: int) -> Refusal | None:
    if not isinstance(part, dict):
        return _wrong_type(path, "an object", part)
    kind = part.get("type")
    if kind is None:
        return _missing(f"{path}.type")
    if kind not in PART_TYPES:
        return _invalid_value(f"{path}.type", kind, PART_TYPES)
    if kind != "text":
        return None
    text = part.get("text")
    if not isinstance(text, str):
        return _wrong_type(f"{path}.text", "a string", text)
    return None if text or role == "tool" else _empty_content(role, index)


def _check_calls(message: dict[str, Any], path: str) -> Refusal | None:
    calls = message.get("tool_calls")
    if calls is None:
        return None
    if not isinstance(calls, list):
        return _wrong_type(path, "an array of objects", calls)
    if not calls:
        return _empty_array(path)
    for index, call in enumerate(calls):
        refusal = _check_call(call, f"{path}[{index}]")
        if refusal is not None:
            return refusal
    return None


def _check_call(call: object, path: str) -> Refusal | None:
    if not isinstance(call, dict):
        return _wrong_type(path, "an object", call)
    if not isinstance(call.get("id"), str):
        return _missing(f"{path}.id")
    kind = call.get("type")
    if kind not in {"function", "custom"}:
        return _missing(f"{path}.type") if kind is None else _invalid_value(f"{path}.type", kind, ("function",))
    body = call.get(kind)
    if not isinstance(body, dict):
        return _missing(f"{path}.{kind}")
    if not isinstance(body.get("name"), str) or not body["name"]:
        return _missing(f"{path}.{kind}.name")
    text = "arguments" if kind == "function" else "input"
    if not isinstance(body.get(text), str):
        return _wrong_type(f"{path}.{kind}.{text}", "a string", body.get(text))
    return None


def _is(value: object, types: tuple[type, ...]) -> bool:
    """Return a JSON ``true`` is no number."""
    return isinstance(value, types) and not (isinstance(value, bool) and bool not in types)


def _missing(param: str) -> Refusal:
    return Refusal(message=f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")


def _empty_array(param: str) -> Refusal:
    return Refusal(
        message=f"Invalid '{param}': empty array. Expected an array with minimum length 1, but got an empty array "
        "instead.",
        param=param,
        code="empty_array",
    )


def _empty_content(role: str, index: int) -> Refusal:
    """Moonshot's words: OpenAI itself takes empty text, most others do not."""
    return Refusal(
        message=f"Invalid request: the message at position {index} with role '{role}' must not be empty",
        param=f"messages[{index}].content",
    )


def _invalid_value(param: str, value: object, supported: tuple[str, ...]) -> Refusal:
    names = [f"'{name}'" for name in supported]
    words = f"{', '.join(names[:-1])}, and {names[-1]}" if len(names) > 1 else names[0]
    return Refusal(
        message=f"Invalid value: '{value}'. Supported values are: {words}.", param=param, code="invalid_value"
    )


def _wrong_type(param: str, expected: str, value: object) -> Refusal:
    got = {
        bool: "a boolean", str: "a string", int: "an integer", float: "a decimal", list: "an array", dict: "an object",
    }.get(type(value), "null")  # fmt: skip
    return Refusal(
        message=f"Invalid type for '{param}': expected {expected}, but got {got} instead.",
        param=param,
        code="invalid_type",
    )


def _duplicate(call_id: str, index: int) -> Refusal:
    return Refusal(
        message=f"Duplicate value for 'tool_call_id' of '{call_id}' in message[{index}].",
        param=f"messages.[{index}]",
    )


def _unanswered(ids: list[str], index: int) -> Refusal:
    return Refusal(
        message="An assistant message with 'tool_calls' must be followed by tool messages responding to each "
        f"'tool_call_id'. The following tool_call_ids did not have response messages: {', '.join(ids)}",
        param=f"messages.[{index}].role",
    )
