"""From Anthropic's Messages format to the domain: requests, messages, replies.

Instructions are outside of the messages, in the member ``system``. They become the first message, whose raw form is
that member alone: ``{"system": ...}``. It cannot be confused with the API's messages of the role ``system`` between the
others.

Tool results come in messages of the user. A message without other content has the role ``tool`` here; reminders that a
client puts beside results do not count as content.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from tersely.dialects import undescribed
from tersely.dialects.dialect import HOUR_WRITES, Request, Usage
from tersely.dialects.wire import raw_json
from tersely.dialects.wire.bodies import BodyDecoder, MessageDecoder, check_caller, decode_counts, verbatim
from tersely.dialects.wire.media import image_size, media_digest, opaque_size, text_size, utf8_size
from tersely.domain.errors import InvalidRequest
from tersely.domain.history.chain import set_injected_apart
from tersely.domain.messages import Media, Message, Part, Reasoning, Role, Text, ToolCall, ToolResult

_ROLES: dict[str, Role] = {"user": "user", "assistant": "assistant", "system": "system"}

_OLD_USER_ID = re.compile(r"_session_([0-9a-fA-F-]{36})\Z")
_IMAGE_HEAD = 64 * 1024


class _Request(msgspec.Struct):
    messages: list[msgspec.Raw]
    system: msgspec.Raw = msgspec.Raw()
    model: str | None = None
    stream: bool | None = None
    tools: msgspec.Raw = msgspec.Raw()
    tool_choice: msgspec.Raw = msgspec.Raw()
    stop_sequences: msgspec.Raw = msgspec.Raw()
    output_format: msgspec.Raw = msgspec.Raw()
    output_config: Any = None
    max_tokens: Any = None
    metadata: Any = None


class _Block(msgspec.Struct):
    type: str = ""
    text: str | None = None
    thinking: Any = None
    signature: Any = None
    data: Any = None
    id: Any = None
    name: Any = None
    input: Any = None
    tool_use_id: Any = None
    content: Any = None
    source: Any = None
    file_id: Any = None


class _Message(msgspec.Struct):
    role: str = ""
    content: str | list[_Block] | None = None
    system: str | list[_Block] | None = None


class _Usage(msgspec.Struct):
    input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    output_tokens: int | None = None
    cache_creation: Any = None


_bodies = BodyDecoder(_Request)
_messages = MessageDecoder(_Message)
_usage_decoder = msgspec.json.Decoder(_Usage)


def read_request(body: bytes) -> Request:
    """Read a request body.

    Raises ``InvalidRequest`` (``field`` names the member, where one is to blame) for invalid UTF-8, malformed JSON,
    nesting too deep, no object, ``messages`` missing or no array, and wrong types of ``model`` and ``stream``.
    """
    request = _bodies.decode(body)
    messages: tuple[Message, ...] = ()
    unreadable = None
    system = bytes(request.system)
    raws = [raw_json.join_object({"system": system})] if system else []
    try:
        messages = tuple([read_message(raw) for raw in (*raws, *map(bytes, request.messages))])
    except InvalidRequest as error:
        unreadable = error.detail
    return Request(
        model=request.model or "",
        messages=messages,
        stream=bool(request.stream),
        include_usage=True,  # a stream always reports it
        tools=verbatim(request.tools),
        tool_choice=verbatim(request.tool_choice),
        response_format=_read_format(request),
        stop=verbatim(request.stop_sequences),
        max_tokens=request.max_tokens if type(request.max_tokens) is int and request.max_tokens > 0 else None,
        ids=_read_ids(request.metadata),
        unreadable=unreadable,
    )


def read_message(raw: bytes) -> Message:
    """Read one message; ``raw`` is kept. Raises ``InvalidRequest`` for a message that cannot be parsed.

    Blocks of the provider's own tools and of unknown types become ``Media(kind="other")``.
    """
    message = _messages.decode(raw)
    role = _ROLES.get(message.role or ("system" if message.system is not None else ""))
    if role is None:
        raise InvalidRequest(f"unknown role {message.role!r}", field="role")
    content = message.content if message.role else message.system
    if not content:
        return Message(role=role, parts=(), raw=raw)
    if isinstance(content, str):
        parts: tuple[Part, ...] = (Text(text=content),)
    else:
        blocks = (_read_block(block, raw, index) for index, block in enumerate(content))
        parts = tuple(part for part in blocks if part is not None)
        check_caller(role, parts)
    parts, injected = set_injected_apart(role, parts)
    author: Role = "tool" if role == "user" and _only_results(parts) else role
    return Message(role=author, parts=parts, raw=raw, injected=injected)


def read_reply(raw: bytes) -> Message:
    """Read a reply's message."""
    return undescribed.read_known_reply(_read_described_reply, _mend_reply, raw)


def _read_described_reply(raw: bytes) -> Message:
    """As `read_message`, but for calls that the provider does not take back as they are."""
    message = read_message(raw)
    if any(isinstance(part, Media) for part in message.parts):
        for block in raw_json.load(raw)["content"]:
            if not isinstance(block.get("type"), str):
                raise InvalidRequest("a block without a type", field="content")
    for call in message.calls:
        if not (call.id and call.name and call.arguments[:1] in ("", "{")):
            raise InvalidRequest("a call of an unknown form", field="content")
    return message


def _mend_reply(raw: bytes) -> bytes:
    """Return the blocks of a reply that can be understood by themselves."""
    content = raw_json.load(raw)["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    written = (raw_json.dump({"role": "assistant", "content": [block]}) for block in blocks)
    kept = [raw_json.load(each)["content"][0] for each in undescribed.readable(_read_described_reply, list(written))]
    return raw_json.dump({"role": "assistant", "content": kept})


def read_usage(raw: bytes) -> Usage:
    """Read the ``usage`` of a reply. ``input`` includes tokens that were read from the cache and written to it."""
    usage = decode_counts(_usage_decoder, raw)
    if usage is None:
        return Usage()
    fresh, cached, written = usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens
    total = None if fresh is None else fresh + (cached or 0) + (written or 0)
    if written and isinstance(usage.cache_creation, dict):
        long = usage.cache_creation.get("ephemeral_1h_input_tokens")
        written += (HOUR_WRITES - 1) * min(long, written) if isinstance(long, int) else 0
    return Usage(input=total, cached=cached, output=usage.output_tokens, written=written)


def _only_results(parts: tuple[Part, ...]) -> bool:
    """Return whether a user's message contains only tool results."""
    others = [part for part in parts if not isinstance(part, ToolResult)]
    return len(others) < len(parts) and all(isinstance(part, Text) and not part.text.strip() for part in others)


def _read_block(block: _Block, raw: bytes, index: int) -> Part | None:
    match block.type:
        case "text":
            return Text(text=block.text) if block.text else None
        case "thinking" | "redacted_thinking":
            hidden = len(_string(block.signature)) + len(_string(block.data))
            return Reasoning(text=_string(block.thinking), hidden=hidden)
        case "tool_use":
            arguments = "" if block.input is None else raw_json.dump(block.input).decode()
            return ToolCall(id=_string(block.id), name=_string(block.name), arguments=arguments)
        case "tool_result":
            return ToolResult(call_id=_string(block.tool_use_id), text=_result_text(block.content))
        case "image":
            return _read_image(block.source)
        case "document":
            return Media(kind="file", digest=_source_digest(block.source), size=_document_size(block.source))
        case "container_upload":
            return Media(kind="file", digest=media_digest(block.file_id))
        case _:
            return _read_other(block, raw, index)


def _read_other(block: _Block, raw: bytes, index: int) -> Media:
    """Read a part that only the provider understands, identified by its id or, without one, by its content."""
    if name := _string(block.id) or _string(block.tool_use_id):
        size = opaque_size({key: value for key, value in msgspec.structs.asdict(block).items() if value is not None})
        return Media(kind="other", digest=media_digest(f"{block.type}\n{name}"), size=size)
    members = raw_json.load(raw)
    content = members["content" if members.get("role") else "system"][index]
    return Media(
        kind="other",
        digest=media_digest(
            json.dumps({key: value for key, value in content.items() if key != "cache_control"}, sort_keys=True)
        ),
        size=opaque_size(content),
    )


def _read_image(source: object) -> Media:
    members = source if isinstance(source, dict) else {}
    data = members.get("data")
    width, height = 0, 0
    if isinstance(data, str):
        width, height = image_size(f"data:{members.get('media_type')};base64,{data[:_IMAGE_HEAD]}")
    return Media(kind="image", digest=_source_digest(source), width=width, height=height)


def _document_size(source: object) -> int:
    """Bytes of a document that is text; 0 for others."""
    match source:
        case {"type": "text", "data": str(text)}:
            return utf8_size(text)
        case {"type": "content", "content": content}:
            return opaque_size(content)
        case {"media_type": str(mime), "data": data}:
            return text_size(mime, data)
        case _:
            return 0


def _source_digest(source: object) -> str:
    members = source if isinstance(source, dict) else {}
    content = next((v for key in ("data", "url", "file_id") if isinstance(v := members.get(key), str)), None)
    return media_digest(content if content is not None else source)


def _result_text(content: object) -> str:
    if not isinstance(content, list):
        return _string(content)
    return "\n".join(map(_result_line, content))


def _result_line(block: object) -> str:
    if isinstance(block, str):
        return block
    members = block if isinstance(block, dict) else {}
    return _string(members.get("text")) if members.get("type") == "text" else f"[{members.get('type', 'other')}]"


def _read_format(request: _Request) -> bytes:
    config = request.output_config
    chosen = config.get("format") if isinstance(config, dict) else None
    return verbatim(request.output_format) or (raw_json.dump(chosen) if chosen else b"")


def _read_ids(metadata: object) -> dict[str, str]:
    """Claude Code names its session within ``metadata.user_id``; any other value there names a person."""
    user_id = metadata.get("user_id") if isinstance(metadata, dict) else None
    if not isinstance(user_id, str):
        return {}
    if old := _OLD_USER_ID.search(user_id):
        return {"session_id": old[1]}
    try:
        named = raw_json.load(user_id.encode("utf-8", "surrogatepass")) if user_id.startswith("{") else None
    except ValueError:
        return {}
    session_id = named.get("session_id") if isinstance(named, dict) else None
    return {"session_id": session_id} if isinstance(session_id, str) else {}


def _string(value: object) -> str:
    return value if isinstance(value, str) else ""
