"""From Gemini's format to the domain: requests, contents, replies.

A content is a message, but for two things. The system instruction lies outside of ``contents``; as a message it is the
object ``{"systemInstruction": ...}`` under the key it came with. And google-genai's chats send each chunk of a
streamed reply back as a content of its own: neighbouring contents of the model are one message, all their parts in one
content.

Calls and results may come without ids. Such a call is known by its name and by which of its message's calls of that
name it is; a result likewise, and where that does not meet, by name and order among the calls that are open.

What cannot be read is the provider's to judge: the request is then ``unreadable`` and goes upstream as it came.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from msgspec.structs import replace

from tersely.dialects import undescribed
from tersely.dialects.dialect import Request, Usage
from tersely.dialects.wire import raw_json
from tersely.dialects.wire.bodies import check_caller
from tersely.dialects.wire.media import image_size, media_digest, opaque_size, text_size
from tersely.dialects.wire.members import split_body
from tersely.domain.errors import InvalidRequest
from tersely.domain.history.chain import set_injected_apart
from tersely.domain.messages import Media, MediaKind, Message, Part, Reasoning, Role, Text, ToolCall, ToolResult

CALL_PREFIX = "gemini_call:"
"""Begins our own id of a call that came without one: prefix, name, ``:``, which of its message's calls it is."""

INSTRUCTION_KEYS = ("systemInstruction", "system_instruction")

_SILENT = frozenset({"role", "parts"})
"""Members of a content with which it says nothing yet."""

_ROLES: dict[str, Role] = {"user": "user", "model": "assistant", "function": "tool", "tool": "tool"}
_SIGNATURES = frozenset({"thoughtSignature", "thought_signature"})
_DECLARATIONS = frozenset({"functionDeclarations", "function_declarations"})
_MEDIA_HEAD = 80_000  # characters of base64 that suffice to read an image's size


def read_request(body: bytes) -> Request:
    """Read a request body.

    The address contains model and streaming, so ``model`` is empty and ``stream`` False here. Raises ``InvalidRequest``
    unless the body is a JSON object in UTF-8.
    """
    members = split_body(body)
    config = _config(members)
    messages, unreadable = _read_messages(members)
    limit, candidates = config.get("maxOutputTokens"), config.get("candidateCount")
    return Request(
        model="",
        messages=messages,
        include_usage=True,  # it is always sent
        n=candidates if isinstance(candidates, int) else 1,
        tools=_verbatim(members, "tools"),
        tool_choice=_verbatim(members, "toolConfig", "tool_config"),
        response_format=_response_format(config),
        is_text=_is_text(config.get("responseModalities")),
        takes_tools=_takes_tools(members),
        stop=raw_json.dump(config["stopSequences"]) if config.get("stopSequences") else b"",
        max_tokens=limit if isinstance(limit, int) else None,
        unreadable=unreadable,
    )


def read_message(raw: bytes, *, default_role: str = "user") -> Message:
    """Read one content, or a system instruction; ``raw`` is kept. Raises ``InvalidRequest`` for anything else.

    A content that consists of function responses has the role ``tool``, whatever its own role. The model's text is one
    text even if it comes in several parts. Thoughts become ``Reasoning``; parts of unknown kinds, including executable
    code and its result, ``Media(kind="other")``.
    """
    try:
        content = raw_json.load(raw)
    except ValueError as error:
        raise InvalidRequest(f"a content that cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise InvalidRequest("a content that is not an object")
    for key in INSTRUCTION_KEYS:
        if key in content:
            return Message(role="system", parts=_read_instruction(content[key]), raw=raw)
    given_role = content.get("role") or default_role
    role = _ROLES.get(given_role) if isinstance(given_role, str) else None
    if role is None:
        raise InvalidRequest(f"unknown role {given_role!r}", field="role")
    parts = _read_parts(parts_of(content))
    if role == "assistant":
        parts = _join_texts(parts)
    elif role != "user" or parts:
        is_result = bool(parts) and all(isinstance(part, ToolResult) for part in parts)
        role = "tool" if is_result else "user"
        check_caller(role, parts)
    own, injected = set_injected_apart(role, tuple(parts))
    return Message(role=role, parts=own, raw=raw, injected=injected)


def read_appended(raws: Sequence[bytes]) -> list[Message]:
    """Read the contents behind those of an earlier request. Raises ``InvalidRequest`` where two of one role follow each
    other: the provider is sent one content for them.
    """
    messages = list(_pair([read_message(raw) for raw in raws]))
    is_model = [message.role == "assistant" for message in messages]
    if any(one == other for one, other in pairwise(is_model)):
        raise InvalidRequest("two contents of one role follow each other", field="contents")
    return messages


def read_reply(raw: bytes) -> Message:
    """Read the ``content`` of a candidate; the role is the model's when it was left out."""
    return undescribed.read_known_reply(_read_described_reply, _mend_reply, raw)


def _read_described_reply(raw: bytes) -> Message:
    """As `read_message`, but for parts that the provider does not take back as they are."""
    message = read_message(raw, default_role="model")
    if not message.parts and undescribed.has_unknown_text(raw_json.load(raw), _SILENT):
        raise InvalidRequest("a content of an unknown form")
    if b"unction" in raw and message.role == "assistant":
        for part in parts_of(raw_json.load(raw)):
            call = part.get("functionCall", part.get("function_call"))
            if call is not None and not _is_described_call(call):
                raise InvalidRequest("a call of an unknown form", field="parts")
    return message


def _is_described_call(call: object) -> bool:
    return (
        isinstance(call, dict)
        and isinstance(call.get("name"), str | None)
        and isinstance(call.get("args"), dict | None)
    )


def _mend_reply(raw: bytes) -> bytes:
    """Return the parts of a reply that can be understood by themselves."""
    parts = raw_json.load(raw)["parts"]
    written = [raw_json.dump({"role": "model", "parts": [part]}) for part in parts]
    kept = [raw_json.load(each)["parts"][0] for each in undescribed.readable(_read_described_reply, written)]
    return raw_json.dump({"role": "model", "parts": kept})


def read_usage(raw: bytes) -> Usage:
    """Read ``usageMetadata``. ``output`` includes thoughts, ``input`` not what the provider's own tools read."""
    try:
        usage = raw_json.load(raw)
    except ValueError:
        usage = None
    if not isinstance(usage, dict):
        return Usage()

    def count(key: str) -> int | None:
        return value if isinstance(value := usage.get(key), int) else None

    output, thought = count("candidatesTokenCount"), count("thoughtsTokenCount")
    return Usage(
        input=count("promptTokenCount"),
        cached=count("cachedContentTokenCount"),
        output=None if output is None and thought is None else (output or 0) + (thought or 0),
    )


# What reading, writing and streams have in common


def items(raw: bytes) -> list[bytes]:
    """Return the elements of a repeated field, verbatim. Google accepts a lone object as a list of one."""
    if raw.lstrip()[:1] == b"[":
        return raw_json.split_array(raw)
    return [] if raw == b"null" else [raw]


def parts_of(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a content, parsed. Raises ``InvalidRequest`` for what are no objects."""
    parts = content.get("parts")
    parts = parts if isinstance(parts, list) else [] if parts is None else [parts]
    if not all(isinstance(part, dict) for part in parts):
        raise InvalidRequest("a part that is not an object", field="parts")
    return parts


def visible_text(part: Mapping[str, Any]) -> str | None:
    """Return the text of a part that is text and no thought, else None."""
    text = part.get("text")
    return text if isinstance(text, str) and not part.get("thought") else None


def function_response(part: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the function response in a part, or None."""
    return _member(part, "functionResponse", "function_response")


def function_call(part: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the function call in a part, or None."""
    return _member(part, "functionCall", "function_call")


def text_member(response: object) -> str | None:
    """Return the name of the text that a function response consists of, or None."""
    if isinstance(response, dict) and len(response) == 1:
        ((key, value),) = response.items()
        return key if isinstance(value, str) else None
    return None


def is_instruction(raw: bytes) -> bool:
    """Return whether a message is the system instruction."""
    return b"nstruction" in raw[:40] and any(key in INSTRUCTION_KEYS for key in raw_json.split_object(raw))


def name_of_own_id(call_id: str) -> str:
    """Return the function's name in an id of ours; empty for any other id."""
    return call_id.removeprefix(CALL_PREFIX).rpartition(":")[0] if call_id.startswith(CALL_PREFIX) else ""


def join_runs(contents: Iterable[bytes]) -> list[tuple[bytes, list[bytes]]]:
    """Join neighbouring contents of the model to one message. Returns each message with its contents."""
    messages: list[tuple[bytes, list[bytes]]] = []
    parts: list[bytes] = []
    for raw in contents:
        members = raw_json.split_object(raw) if b'"model"' in raw else {}
        is_model = members.keys() == {"role", "parts"} and members["role"] == b'"model"'
        more = items(members["parts"]) if is_model else []
        if more and parts:
            parts += more
            joined = raw_json.join_object({**members, "parts": raw_json.join_array(parts)})
            messages[-1] = (joined, [*messages[-1][1], raw])
        else:
            parts = more
            messages.append((raw, [raw]))
    return messages


def string(value: object) -> str:
    """Return ``value`` if it is a string, else an empty string."""
    return value if isinstance(value, str) else ""


class Numbering:
    """Our own ids for the calls, or for the results, of one message, by name and order."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def next(self, name: str) -> str:
        """Return the id of the next call with that name."""
        index = self._counts.get(name, 0)
        self._counts[name] = index + 1
        return f"{CALL_PREFIX}{name}:{index}"


# Requests


def _config(members: Mapping[str, bytes]) -> dict[str, Any]:
    raw = _verbatim(members, "generationConfig", "generation_config")
    config = raw_json.load(raw) if raw else None
    return {_camel(key): value for key, value in config.items()} if isinstance(config, dict) else {}


def _camel(key: str) -> str:
    first, *rest = key.split("_")
    return first + "".join(word.capitalize() for word in rest)


def _verbatim(members: Mapping[str, bytes], *keys: str) -> bytes:
    return next((members[key] for key in keys if members.get(key, b"null") != b"null"), b"")


def _response_format(config: Mapping[str, Any]) -> bytes:
    for key in ("responseJsonSchema", "responseSchema"):
        if config.get(key) is not None:
            return raw_json.dump(config[key])
    kind = config.get("responseMimeType")
    return raw_json.dump(kind) if isinstance(kind, str) and kind != "text/plain" else b""


def _is_text(modalities: object) -> bool:
    wanted = modalities if isinstance(modalities, list) else [modalities] if modalities else []
    return all(isinstance(each, str) and each.upper() == "TEXT" for each in wanted)


def _streams_arguments(config: object) -> bool:
    calling = (
        (config.get("functionCallingConfig") or config.get("function_calling_config"))
        if isinstance(config, dict)
        else None
    )
    names = ("streamFunctionCallArguments", "stream_function_call_arguments")
    return isinstance(calling, dict) and any(calling.get(name) is True for name in names)


def _takes_tools(members: Mapping[str, bytes]) -> bool:
    """Return whether tools may be added: not beside the provider's own tools (search, code execution), with cached
    content, or where the arguments of a call come in pieces.
    """
    if members.keys() & {"cachedContent", "cached_content"}:
        return False
    try:
        if _streams_arguments(raw_json.load(_verbatim(members, "toolConfig", "tool_config") or b"null")):
            return False
        return all(raw_json.split_object(tool).keys() & _DECLARATIONS for tool in items(members.get("tools", b"null")))
    except ValueError:
        return False


def _read_messages(members: Mapping[str, bytes]) -> tuple[tuple[Message, ...], str | None]:
    try:
        raws = [raw_json.join_object({key: members[key]}) for key in INSTRUCTION_KEYS if _verbatim(members, key)]
        raws += [raw for raw, _ in join_runs(items(members.get("contents", b"null")))]
        return tuple(_pair([read_message(raw) for raw in raws])), None
    except InvalidRequest as error:
        return (), error.detail
    except ValueError as error:
        return (), str(error)


def _pair(messages: Iterable[Message]) -> Iterable[Message]:
    """Give results the ids of the calls that they answer."""
    calls: tuple[ToolCall, ...] = ()
    open_calls: list[ToolCall] = []
    for message in messages:
        if message.calls:
            calls, open_calls = message.calls, list(message.calls)
            yield message
        else:
            yield _answer(message, calls, open_calls) if calls and message.results else message


def _answer(message: Message, calls: tuple[ToolCall, ...], open_calls: list[ToolCall]) -> Message:
    """Return ``message`` with each result's call found; calls that are answered leave ``open_calls``."""
    names = iter(_result_names(message.raw))
    known = {call.id for call in calls}
    parts: list[Part] = []
    for part in message.parts:
        if not isinstance(part, ToolResult):
            parts.append(part)
            continue
        name = next(names)
        has_id = part.call_id in known and not name_of_own_id(part.call_id)
        answered = next(
            (call for call in open_calls if (call.id == part.call_id if has_id else call.name == name)), None
        )
        if answered is not None:
            open_calls.remove(answered)
        parts.append(part if answered is None else replace(part, call_id=answered.id))
    return message if tuple(parts) == message.parts else replace(message, parts=tuple(parts))


def _result_names(raw: bytes) -> list[str]:
    responses = map(function_response, parts_of(raw_json.load(raw)))
    return [string(response.get("name")) for response in responses if response is not None]


# Contents


def _read_instruction(value: object) -> tuple[Part, ...]:
    if isinstance(value, str):
        return (Text(text=value),) if value else ()
    return tuple(_read_parts(parts_of(value))) if isinstance(value, dict) else ()


def _read_parts(parts: Iterable[dict[str, Any]]) -> list[Part]:
    calls, results = Numbering(), Numbering()
    found = [_read_part(part, calls, results) for part in parts]
    return [part for part in found if part is not None]


def _read_part(part: dict[str, Any], calls: Numbering, results: Numbering) -> Part | None:
    if isinstance(text := part.get("text"), str):
        if part.get("thought"):
            return Reasoning(text=text)
        return Text(text=text) if text else None
    if (call := function_call(part)) is not None:
        return _read_call(call, calls)
    if (response := function_response(part)) is not None:
        return _read_response(response, results)
    if (media := _read_media(part)) is not None:
        return media
    members = {key: value for key, value in part.items() if key not in _SIGNATURES}
    if not members:
        return None
    return Media(kind="other", digest=media_digest(json.dumps(members, sort_keys=True)), size=opaque_size(members))


def _read_call(call: dict[str, Any], numbering: Numbering) -> ToolCall | None:
    name = string(call.get("name"))
    if not name:
        return None  # the next piece of a call whose arguments are streamed
    arguments = call.get("args")
    text = raw_json.dump(arguments if arguments is not None else {}).decode()
    return ToolCall(id=string(call.get("id")) or numbering.next(name), name=name, arguments=text)


def _read_response(response: dict[str, Any], numbering: Numbering) -> ToolResult:
    text = _response_text(response.get("response"))
    media = [media for part in parts_of(response) if (media := _read_media(part)) is not None]
    return ToolResult(
        call_id=string(response.get("id")) or numbering.next(string(response.get("name"))),
        text="\n".join([text, *(f"[{each.kind}]" for each in media)]),
    )


def _response_text(response: object) -> str:
    if response is None:
        return ""
    key = text_member(response)
    return raw_json.dump(response).decode() if key is None else str(response[key])  # type: ignore[index]


def _read_media(part: Mapping[str, Any]) -> Media | None:
    inline, file = _member(part, "inlineData", "inline_data"), _member(part, "fileData", "file_data")
    if inline is not None:
        mime, data = _mime_type(inline), string(inline.get("data"))
        width, height = image_size(f"data:{mime};base64,{data[:_MEDIA_HEAD]}")
        size = text_size(mime, data)
        return Media(kind=_media_kind(mime), digest=media_digest(data), width=width, height=height, size=size)
    if file is not None:
        address = string(file.get("fileUri") or file.get("file_uri"))
        return Media(kind=_media_kind(_mime_type(file)), digest=media_digest(address))
    return None


def _mime_type(blob: Mapping[str, Any]) -> str:
    return string(blob.get("mimeType") or blob.get("mime_type"))


def _media_kind(mime: str) -> MediaKind:
    match mime.partition("/")[0]:
        case "image":
            return "image"
        case "audio":
            return "audio"
        case "video":
            return "video"
        case _:
            return "file"


def _join_texts(parts: Iterable[Part]) -> list[Part]:
    """Join texts that only thoughts separate."""
    joined: list[Part] = []
    last = -1
    for part in parts:
        before = joined[last] if last >= 0 else None
        if isinstance(part, Text) and isinstance(before, Text):
            joined[last] = Text(text=before.text + part.text)
            continue
        joined.append(part)
        if isinstance(part, Text):
            last = len(joined) - 1
        elif not isinstance(part, Reasoning):
            last = -1
    return joined


def _member(part: Mapping[str, Any], *keys: str) -> dict[str, Any] | None:
    return next((value for key in keys if isinstance(value := part.get(key), dict)), None)
