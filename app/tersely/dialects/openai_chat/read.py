"""From OpenAI's chat format to the domain: requests, messages, replies.

The messages are read, and the few settings that Tersely uses. A body that cannot be parsed (no JSON, no ``messages``
array, a wrong type in a setting that Tersely uses) raises ``InvalidRequest``. A body that can be parsed but not
understood (an unknown role, a message that is not an object, a number as content) is left to the provider: the request
is ``unreadable``, has no messages, and goes upstream unchanged.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from tersely.dialects import undescribed
from tersely.dialects.dialect import Request, Usage
from tersely.dialects.openai_content import TEXT_TYPES
from tersely.dialects.wire import raw_json
from tersely.dialects.wire.bodies import BodyDecoder, MessageDecoder, check_caller, decode_counts, session_ids, verbatim
from tersely.dialects.wire.media import data_url_size, image_size, media_digest, opaque_size
from tersely.domain.errors import InvalidRequest
from tersely.domain.history.chain import set_injected_apart
from tersely.domain.messages import Media, MediaKind, Message, Part, Reasoning, Role, Text, ToolCall, ToolResult

_SILENT = frozenset({"role", "content", "annotations", "name", "tool_call_id"})
"""Members of a reply's message with which it says nothing yet."""

LEGACY_CALL_PREFIX = "function_call:"
"""``function_call`` messages carry no id; the call is known by its name, as role ``function`` answers it."""

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Request(msgspec.Struct):
    messages: list[msgspec.Raw]
    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: int | None = None
    tools: msgspec.Raw = msgspec.Raw()
    functions: msgspec.Raw = msgspec.Raw()
    tool_choice: msgspec.Raw = msgspec.Raw()
    function_call: msgspec.Raw = msgspec.Raw()
    response_format: msgspec.Raw = msgspec.Raw()
    modalities: Any = None
    stop: msgspec.Raw = msgspec.Raw()
    max_tokens: Any = None
    max_completion_tokens: Any = None
    session_id: Any = None
    conversation_id: Any = None
    metadata: Any = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None
    prompt_cache_hit_tokens: int | None = None


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: Any = None


class _Call(msgspec.Struct):
    id: str | int | None = None
    function: _Function | None = None
    custom: dict[str, Any] | None = None


class _Part(msgspec.Struct):
    type: str = ""
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    refusal: str | None = None


class _Audio(msgspec.Struct):
    id: str = ""


class _Message(msgspec.Struct):
    role: str = ""
    content: str | list[_Part | str] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | int | None = None
    function_call: _Function | None = None
    name: Any = None
    refusal: Any = None
    audio: _Audio | None = None
    reasoning_content: Any = None
    reasoning: Any = None
    reasoning_details: Any = None


_usage_decoder = msgspec.json.Decoder(_Usage)
_UNKNOWN = Media(kind="other", digest="")

_bodies = BodyDecoder(_Request)
_messages = MessageDecoder(_Message)


def read_request(body: bytes) -> Request:
    """Read a request body.

    Raises ``InvalidRequest`` (``field`` names the member, where one is to blame) for invalid UTF-8, malformed JSON,
    nesting too deep, no object, ``messages`` missing or no array, and wrong types of ``model``, ``stream``,
    ``stream_options`` and ``n``.
    """
    return _to_request(_bodies.decode(body))


def read_message(raw: bytes, *, default_role: str = "") -> Message:
    """Read one message; ``raw`` is kept. Raises ``InvalidRequest`` for a message that cannot be read.

    Content is a string, a list of parts, null or absent. ``tool_calls``, the older ``function_call`` and the role
    ``function`` are read. The reasoning fields of several providers become ``Reasoning``; parts of an unknown type
    become ``Media(kind="other")``.
    """
    message = _messages.decode(raw)
    role = _ROLES.get(message.role or default_role)
    if role is None:
        raise InvalidRequest(f"unknown role {message.role!r}", field="role")
    if role == "tool":
        return Message(role=role, parts=(_read_result(message, raw),), raw=raw)
    content = message.content
    if type(content) is str and message.tool_calls is None and role != "assistant":
        own, injected = set_injected_apart(role, (Text(text=content),) if content else ())
        return Message(role=role, parts=own, raw=raw, injected=injected)
    has_reasoning = (
        message.reasoning_content is not None or message.reasoning is not None or message.reasoning_details is not None
    )
    parts = _read_reasoning(message) if has_reasoning else []
    parts.extend(_read_content(content, raw))
    if message.refusal is not None and (refusal := _as_text(message.refusal)):
        parts.append(Text(text=refusal, is_refusal=True))
    if message.audio is not None:
        parts.append(Media(kind="audio", digest=message.audio.id))
    if message.tool_calls is not None or message.function_call is not None:
        parts.extend(_read_calls(message))
    check_caller(role, parts)
    own, injected = set_injected_apart(role, tuple(parts))
    return Message(role=role, parts=own, raw=raw, injected=injected)


def read_reply(raw: bytes) -> Message:
    """Read the ``message`` of a reply's choice; the role is the assistant's when the provider left it out."""
    return undescribed.read_known_reply(_read_described_reply, _mend_reply, raw)


def _read_described_reply(raw: bytes) -> Message:
    """Read a message like `read_message`, but refuse calls that no host accepts back, and messages without known
    content.
    """
    message = read_message(raw, default_role="assistant")
    if not message.parts and undescribed.has_unknown_text(raw_json.load(raw), _SILENT):
        raise InvalidRequest("a message of an unknown form")
    if message.role == "assistant" and message.calls:
        calls = raw_json.load(raw).get("tool_calls")
        if isinstance(calls, list) and not all(map(_is_described_call, calls)):
            raise InvalidRequest("a call that hosts refuse in a history", field="tool_calls")
    return message


def _is_described_call(call: dict[str, Any]) -> bool:
    function = call.get("function")
    arguments = function.get("arguments") if isinstance(function, dict) else None
    return isinstance(call.get("id"), str | None) and isinstance(arguments, str | None)


def _repair_call(call: object) -> object:
    """Return a call with its id and its arguments as texts."""
    if not isinstance(call, dict):
        return call
    repaired = {**call, "id": str(call["id"])} if isinstance(call.get("id"), int) else call
    function = call.get("function")
    if isinstance(function, dict):
        repaired = {**repaired, "function": {**function, "arguments": _arguments(function.get("arguments"))}}
    return repaired


def _mend_reply(raw: bytes) -> bytes:
    """Return the members of a reply's message that can be understood by themselves; of lists the elements."""
    repaired: dict[str, Any] = {"role": "assistant"}
    for key, value in raw_json.load(raw).items():
        kept = value
        if isinstance(value, list):
            repair = _repair_call if key == "tool_calls" else _same
            kept = [each for each in map(repair, value) if _is_described(key, [each])]
        elif key == "content" and isinstance(value, int | float):
            kept = json.dumps(value)
        if key != "role" and _is_described(key, kept):
            repaired[key] = kept
    return raw_json.dump(repaired)


def _same(value: object) -> object:
    return value


def _is_described(key: str, value: object) -> bool:
    return bool(undescribed.readable(_read_described_reply, [raw_json.dump({key: value})]))


def _to_request(request: _Request) -> Request:
    messages: tuple[Message, ...] = ()
    unreadable = None
    try:
        messages = tuple([read_message(bytes(raw)) for raw in request.messages])
    except InvalidRequest as error:
        unreadable = error.detail
    options = request.stream_options
    return Request(
        model=request.model or "",
        messages=messages,
        stream=bool(request.stream),
        include_usage=options is not None and bool(options.include_usage),
        n=1 if request.n is None else request.n,
        tools=verbatim(request.tools) or verbatim(request.functions),
        tool_choice=verbatim(request.tool_choice) or verbatim(request.function_call),
        response_format=_read_format(verbatim(request.response_format)),
        is_text=not isinstance(request.modalities, list) or all(each == "text" for each in request.modalities),
        stop=verbatim(request.stop),
        max_tokens=_whole(request.max_completion_tokens) or _whole(request.max_tokens),
        ids=session_ids(msgspec.structs.asdict(request)),
        unreadable=unreadable,
    )


def _read_format(raw: bytes) -> bytes:
    chosen = raw_json.load(raw) if raw else None
    return b"" if isinstance(chosen, dict) and chosen.get("type") == "text" else raw


def _whole(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def read_usage(raw: bytes) -> Usage:
    """Read the ``usage`` member of a reply, including DeepSeek's name for cached tokens and OpenRouter's for those that
    were written to the cache. Empty if it cannot be read.
    """
    usage = decode_counts(_usage_decoder, raw)
    if usage is None:
        return Usage()
    details = usage.prompt_tokens_details
    if details is None:
        return Usage(input=usage.prompt_tokens, cached=usage.prompt_cache_hit_tokens, output=usage.completion_tokens)
    return Usage(
        input=usage.prompt_tokens,
        cached=details.cached_tokens,
        output=usage.completion_tokens,
        written=details.cache_write_tokens,
    )


def _read_result(message: _Message, raw: bytes) -> ToolResult:
    call_id = message.tool_call_id
    if call_id is None:
        call_id = f"{LEGACY_CALL_PREFIX}{message.name}" if message.role == "function" else ""
    content = message.content
    if not isinstance(content, str):
        content = "\n".join(
            part.text if isinstance(part, Text) else f"[{part.kind}]"
            for part in _read_content(content, raw)
            if isinstance(part, Text | Media)
        )
    return ToolResult(call_id=str(call_id), text=content)


def _read_reasoning(message: _Message) -> list[Part]:
    """Return the first non-empty reasoning field: providers repeat one thought under several names."""
    text = _as_text(message.reasoning_content) or _as_text(message.reasoning) or _as_text(message.reasoning_details)
    hidden = _hidden_size(message.reasoning_details)
    return [Reasoning(text=text, hidden=hidden)] if text or hidden else []


def _hidden_size(details: object) -> int:
    """Return the number of encrypted characters."""
    known = [each for each in details if isinstance(each, dict)] if isinstance(details, list) else []
    return sum(len(v) for each in known for key in ("data", "signature") if isinstance(v := each.get(key), str))


def _as_text(value: object) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list):
        return "\n".join(filter(None, map(_as_text, value)))
    if isinstance(value, dict):
        return next((v for k in ("text", "summary", "content") if isinstance(v := value.get(k), str)), "")
    return ""


def _read_content(content: str | list[_Part | str] | None, raw: bytes) -> list[Part]:
    if not content:
        return []
    if isinstance(content, str):
        return [Text(text=content)]
    parts = [_read_part(item) for item in content]
    if _UNKNOWN in parts:
        _describe_unknown(parts, raw)
    return [part for part in parts if part is not None]


def _read_part(part: _Part | str) -> Part | None:
    if isinstance(part, str):
        return Text(text=part) if part else None
    if part.text is not None and part.type in TEXT_TYPES:
        return Text(text=part.text) if part.text else None
    match part.type:
        case "image_url" | "input_image":
            return _read_image(part.image_url)
        case "input_audio":
            return _media("audio", part.input_audio, "data")
        case "file" | "input_file":
            return _media("file", part.file, "file_id", "file_data", "filename")
        case "refusal":
            return Text(text=part.refusal, is_refusal=True) if part.refusal else None
        case "thinking" | "reasoning":
            return Reasoning(text=part.text or "")
        case _:
            return _UNKNOWN


def _describe_unknown(parts: list[Part | None], raw: bytes) -> None:
    """Describe parts of unknown types by their whole content."""
    items = raw_json.load(raw)["content"]
    for index, part in enumerate(parts):
        if part == _UNKNOWN:
            known = {key: value for key, value in items[index].items() if key != "cache_control"}
            digest = media_digest(json.dumps(known, sort_keys=True))
            parts[index] = Media(kind="other", digest=digest, size=opaque_size(known))


def _read_image(value: object) -> Media:
    image = value if isinstance(value, dict) else {"url": value}
    url, detail = image.get("url"), image.get("detail")
    width, height = image_size(url) if isinstance(url, str) else (0, 0)
    return Media(
        kind="image",
        digest=media_digest(url if isinstance(url, str) else image),
        detail=detail if isinstance(detail, str) else "",
        width=width,
        height=height,
    )


def _media(kind: MediaKind, value: object, *keys: str) -> Media:
    """Read media. ``keys``: members with the data itself, in order of preference; the whole part if all are missing."""
    members = value if isinstance(value, dict) else {}
    content = next((v for key in keys if isinstance(v := members.get(key), str)), None)
    digest = media_digest(content if content is not None else value)
    return Media(kind=kind, digest=digest, size=data_url_size(content))


def _read_calls(message: _Message) -> list[Part]:
    calls: list[Part] = [_read_call(call) for call in message.tool_calls or ()]
    legacy = message.function_call
    if legacy is not None:
        calls.append(
            ToolCall(
                id=f"{LEGACY_CALL_PREFIX}{legacy.name}",
                name=legacy.name or "",
                arguments=_arguments(legacy.arguments),
            )
        )
    return calls


def _read_call(call: _Call) -> ToolCall:
    function = call.function
    if function is not None:
        return ToolCall(id=_id_of(call), name=function.name or "", arguments=_arguments(function.arguments))
    custom = call.custom or {}
    name, text = custom.get("name"), custom.get("input")
    return ToolCall(id=_id_of(call), name=name if isinstance(name, str) else "", arguments=_arguments(text))


def _id_of(call: _Call) -> str:
    return "" if call.id is None else str(call.id)


def _arguments(value: object) -> str:
    """Some clients send the arguments as an object instead of its JSON text."""
    if value is None:
        return ""
    return value if isinstance(value, str) else raw_json.dump(value).decode()
