"""From OpenAI's responses format to the domain: requests, items, replies.

`content` defines how items form messages. A body that cannot be understood is left to the provider: the request is
``unreadable``, has no messages, and goes upstream unchanged. So does a request whose results answer calls that only the
provider has (an ``item_reference``), and one whose reply comes later, to another request.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from tersely.dialects import undescribed
from tersely.dialects.dialect import Request, Usage
from tersely.dialects.openai_content import is_text
from tersely.dialects.openai_responses.content import (
    CALLS,
    INSTRUCTIONS,
    RUN,
    answered_call,
    as_run,
    call_id,
    group,
    is_run,
    item_type,
    items_of,
    role_of,
)
from tersely.dialects.wire import raw_json
from tersely.dialects.wire.bodies import BodyDecoder, decode_counts, session_ids, verbatim
from tersely.dialects.wire.media import data_url_size, image_size, media_digest, opaque_size
from tersely.domain.errors import InvalidRequest
from tersely.domain.history.chain import set_injected_apart
from tersely.domain.messages import Media, MediaKind, Message, Part, Reasoning, Text, ToolCall, ToolResult

_SILENT = frozenset({"id", "type", "role", "status", "phase", "content", "created_by", "metadata"})
"""Members of a message with which it says nothing yet."""

_VOLATILE = frozenset({"id", "status", "created_by", "internal_chat_message_metadata_passthrough"})
"""Members that clients drop or rewrite when they send an item back."""


class _Request(msgspec.Struct):
    input: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    model: str | None = None
    stream: bool | None = None
    tools: msgspec.Raw = msgspec.Raw()
    tool_choice: msgspec.Raw = msgspec.Raw()
    text: Any = None
    max_output_tokens: Any = None
    previous_response_id: Any = None
    conversation: Any = None
    store: Any = None
    background: Any = None
    max_tool_calls: Any = None
    prompt: msgspec.Raw = msgspec.Raw()
    session_id: Any = None
    conversation_id: Any = None
    metadata: Any = None


class _InputDetails(msgspec.Struct):
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None


class _Usage(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _InputDetails | None = None


_bodies = BodyDecoder(_Request)
_usage_decoder = msgspec.json.Decoder(_Usage)


def read_request(body: bytes) -> Request:
    """Read a request body.

    ``ids`` are the client's names of its session, including ``previous_response_id`` and ``conversation``. Raises
    ``InvalidRequest`` (``field`` names the invalid member) unless the body is a JSON object in UTF-8, and for wrong
    types of ``model`` and ``stream``.
    """
    request = _bodies.decode(body)
    messages: tuple[Message, ...] = ()
    unreadable = None
    try:
        messages = tuple([read_message(raw) for raw in _raw_messages(request)])
        unreadable = _why_incomplete(messages)
    except InvalidRequest as error:
        unreadable = error.detail
    except ValueError as error:
        unreadable = str(error)
    if request.background is True:
        unreadable = unreadable or "the reply is fetched later"
    limit = request.max_output_tokens
    ids = _read_ids(request)
    return Request(
        model=request.model or "",
        messages=() if unreadable else messages,
        stream=bool(request.stream),
        include_usage=True,  # it is always sent
        tools=verbatim(request.tools),
        tool_choice=verbatim(request.tool_choice),
        response_format=_read_format(request.text),
        takes_tools=_takes_tools(request),
        max_tokens=limit if type(limit) is int and limit > 0 else None,
        ids=ids,
        reply_id=ids.get("previous_response_id", ""),
        conversation=ids.get("conversation", ""),
        is_stored=request.store is not False,
        unreadable=unreadable,
    )


def _takes_tools(request: _Request) -> bool:
    """Return False if each round would get a new limit of calls, or if tools would replace those of a stored prompt."""
    is_bounded = request.max_tool_calls is not None
    is_stored = bool(verbatim(request.prompt)) and not verbatim(request.tools)
    return not is_bounded and not is_stored


def string_message(text: bytes) -> bytes:
    """Return the message for an ``input`` that is a string; ``text`` is its JSON."""
    return b'{"role":"user","content":' + text + b"}"


def read_message(raw: bytes) -> Message:
    """Read an item, a reply's items, or instructions; ``raw`` is kept. Raises ``InvalidRequest`` for anything else.

    All kinds of calls are calls and their outputs results, except those that the provider answers itself. These and
    items of unknown types become ``Media(kind="other")``.
    """
    try:
        item = raw_json.load(raw)
    except ValueError as error:
        raise InvalidRequest(f"an item that cannot be read: {error}") from error
    if not isinstance(item, dict):
        raise InvalidRequest("an item that is not an object", field="input")
    if item.keys() == {INSTRUCTIONS}:
        text = item[INSTRUCTIONS]
        return Message(role="system", parts=(Text(text=text),) if isinstance(text, str) and text else (), raw=raw)
    if is_run(item):
        return Message(role="assistant", parts=tuple(_read_run(item[RUN])), raw=raw)
    role = role_of(item)
    parts, injected = set_injected_apart(role, tuple(_read_item(item)))
    return Message(role=role, parts=parts, raw=raw, injected=injected)


def read_appended(raws: Sequence[bytes]) -> list[Message]:
    """Read the items behind those of an earlier request. Raises ``InvalidRequest`` for references, and for results of
    functions beside calls of another kind: these may be written in another form.
    """
    calls = {item_type(item) for item in map(raw_json.load, raws) if isinstance(item, dict)} & CALLS.keys()
    if any(b'"item_reference"' in raw for raw in raws):
        raise InvalidRequest("an item that is only referred to", field="input")
    if calls - {"function_call"} and any(b'"function_call_output"' in raw for raw in raws):
        raise InvalidRequest("a result whose form depends on its call", field="input")
    return [read_message(raw) for raw in group(raws)]


def read_reply(raw: bytes) -> Message:
    """Read a reply's items."""
    return undescribed.read_known_reply(_read_described_reply, _mend_reply, raw)


def _read_described_reply(raw: bytes) -> Message:
    """As `read_message`, but for items that the provider does not take back as they are."""
    message = read_message(raw)
    if message.role == "assistant" and b'"output"' in raw:
        for item in raw_json.load(raw).get(RUN) or ():
            _check_item(item)
    return message


def _check_item(item: object) -> None:
    """Raise ``InvalidRequest`` for an invalid item, a call without id or name, or a text of another role."""
    if not isinstance(item, dict):
        raise InvalidRequest("an item that is not an object", field="output")
    kind = item_type(item)
    if kind == "message" and item.get("role", "assistant") != "assistant":
        raise InvalidRequest("a reply with a message of another role", field="role")
    if kind == "message" and not item.get("content") and undescribed.has_unknown_text(item, _SILENT):
        raise InvalidRequest("a message of an unknown form", field="content")
    named = (CALLS[kind].id, *(("name",) if kind == "function_call" else ())) if kind in CALLS else ()
    if any(item.get(name) is not None and not isinstance(item[name], str) for name in named):
        raise InvalidRequest("a call of an unknown form", field="call_id")


def _mend_reply(raw: bytes) -> bytes:
    """Return the items of a reply that can be understood by themselves."""
    return as_run(undescribed.readable(_read_alone, items_of(raw)))


def _read_alone(item: bytes) -> Message:
    return _read_described_reply(as_run([item]))


def read_usage(raw: bytes) -> Usage:
    """Read the ``usage`` member of a reply, including OpenRouter's name for tokens that were written to the cache.
    Empty if it cannot be read.
    """
    usage = decode_counts(_usage_decoder, raw)
    if usage is None:
        return Usage()
    details = usage.input_tokens_details
    if details is None:
        return Usage(input=usage.input_tokens, output=usage.output_tokens)
    return Usage(
        input=usage.input_tokens,
        cached=details.cached_tokens,
        output=usage.output_tokens,
        written=details.cache_write_tokens,
    )


def result_media(item: dict[str, Any]) -> list[str]:
    """Return the placeholder lines of media in a result's text."""
    output = item.get("output")
    parts = map(_read_part, output) if isinstance(output, list) else ()
    return [f"[{part.kind}]" for part in parts if isinstance(part, Media)]


# Requests


def _raw_messages(request: _Request) -> list[bytes]:
    instructions, input_json = verbatim(request.instructions), verbatim(request.input)
    leading = [raw_json.join_object({INSTRUCTIONS: instructions})] if instructions else []
    if input_json.startswith(b'"'):
        return [*leading, string_message(input_json)]
    return [*leading, *group(raw_json.split_array(input_json or b"[]"))]


def _why_incomplete(messages: Sequence[Message]) -> str | None:
    if not any(b'"item_reference"' in message.raw for message in messages):
        return None
    calls = {call.id for message in messages for call in message.calls}
    is_whole = all(result.call_id in calls for message in messages for result in message.results)
    return None if is_whole else "a result answers a call that is only referred to"


def _read_format(text: object) -> bytes:
    chosen = text.get("format") if isinstance(text, dict) else None
    is_plain = not isinstance(chosen, dict) or chosen.get("type") in {None, "text"}
    return b"" if is_plain else raw_json.dump(chosen)


def _read_ids(request: _Request) -> dict[str, str]:
    conversation = request.conversation
    named = {
        "previous_response_id": request.previous_response_id,
        "conversation": conversation.get("id") if isinstance(conversation, dict) else conversation,
    }
    found = {name: value for name, value in named.items() if isinstance(value, str) and value}
    return session_ids(msgspec.structs.asdict(request)) | found


# Items


def _read_run(items: object) -> list[Part]:
    found = [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []
    answered = {answered_call(item) for item in found} - {""}
    parts: list[Part] = []
    for item in found:
        is_answered = bool({call_id(item), answered_call(item)} & answered)
        parts += [_read_other(item)] if is_answered else _read_item(item)
    return parts


def _read_item(item: dict[str, Any]) -> list[Part]:
    kind = item_type(item)
    if kind == "message":
        return _read_content(item.get("content"))
    if kind == "reasoning":
        thoughts = [*_list(item.get("summary")), *_list(item.get("content"))]
        texts = [_string(thought.get("text")) for thought in thoughts if isinstance(thought, dict)]
        hidden = len(_string(item.get("encrypted_content")))
        return [Reasoning(text="\n".join(filter(None, texts)), hidden=hidden)]
    if called := call_id(item):
        return [_read_call(item, called)]
    if answered := answered_call(item):
        return [ToolResult(call_id=answered, text=_result_text(item))]
    if kind == "image_generation_call" and isinstance(item.get("result"), str):
        return [Media(kind="image", digest=media_digest(item["result"]))]
    return [_read_other(item)]


def _read_call(item: dict[str, Any], called: str) -> ToolCall:
    kind = CALLS[item_type(item)]
    arguments = item.get(kind.input)
    if not isinstance(arguments, str):
        arguments = "" if arguments is None else raw_json.dump(arguments).decode()
    return ToolCall(id=called, name=kind.name or _string(item.get("name")), arguments=arguments)


def _result_text(item: dict[str, Any]) -> str:
    match item_type(item):
        case "mcp_approval_response":
            return "approved" if item.get("approve") else "denied"
        case "tool_search_output":
            return raw_json.dump(item.get("tools")).decode()
        case "shell_call_output":
            outputs = [each for each in _list(item.get("output")) if isinstance(each, dict)]
            streams = [_string(each.get(stream)) for each in outputs for stream in ("stdout", "stderr")]
            return "\n".join(filter(None, streams)) if outputs else _string(item.get("output"))
        case _:
            return _output_text(item.get("output"))


def _output_text(output: object) -> str:
    if isinstance(output, dict):
        output = [output]
    if not isinstance(output, list):
        return _string(output)
    parts = [part for part in map(_read_part, output) if isinstance(part, Text | Media)]
    return "\n".join(part.text if isinstance(part, Text) else f"[{part.kind}]" for part in parts)


def _read_other(item: dict[str, Any]) -> Media:
    members = {key: value for key, value in item.items() if key not in _VOLATILE}
    if item_type(item) == "item_reference":
        members["id"] = item.get("id")
    return Media(kind="other", digest=media_digest(json.dumps(members, sort_keys=True)), size=opaque_size(item))


def _read_content(content: object) -> list[Part]:
    if isinstance(content, str):
        return [Text(text=content)] if content else []
    if not (content is None or isinstance(content, list)):
        raise InvalidRequest("content that is neither text nor a list", field="content")
    return [part for part in map(_read_part, _list(content)) if part is not None]


def _read_part(part: object) -> Part | None:
    if isinstance(part, str):
        return Text(text=part) if part else None
    if isinstance(part, dict) and is_text(part):
        return Text(text=part["text"]) if part["text"] else None
    if not isinstance(part, dict):
        raise InvalidRequest("a part that is not an object", field="content")
    match part.get("type"):
        case "input_image" | "computer_screenshot":
            return _read_image(part)
        case "input_file":
            return _media("file", part, "file_id", "file_data", "file_url", "filename")
        case "input_audio":
            audio = part.get("input_audio")
            return _media("audio", audio if isinstance(audio, dict) else part, "data")
        case "refusal":
            refusal = _string(part.get("refusal"))
            return Text(text=refusal, is_refusal=True) if refusal else None
        case "reasoning_text" | "summary_text":
            return Reasoning(text=_string(part.get("text")))
        case _:
            return _read_other(part)


def _read_image(part: dict[str, Any]) -> Media:
    url = part.get("image_url")
    if isinstance(url, dict):  # as chat completions have it
        part = {**part, **url}
        url = url.get("url")
    address = url if isinstance(url, str) else part.get("file_id")
    width, height = image_size(url) if isinstance(url, str) else (0, 0)
    digest = media_digest(address if isinstance(address, str) else part)
    return Media(kind="image", digest=digest, detail=_string(part.get("detail")), width=width, height=height)


def _media(kind: MediaKind, members: dict[str, Any], *keys: str) -> Media:
    """``keys``: where the thing itself lies, in order of preference."""
    content = next((value for key in keys if isinstance(value := members.get(key), str)), None)
    size = data_url_size(content)
    return Media(kind=kind, digest=media_digest(members if content is None else content), size=size)


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _string(value: object) -> str:
    return value if isinstance(value, str) else ""
