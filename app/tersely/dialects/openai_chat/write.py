"""From the domain to OpenAI's chat format: requests are patched, not rebuilt; what was not changed keeps its bytes.

Everything here is deterministic: the same input gives the same bytes, so that prompt prefixes stay stable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, assert_never

import msgspec

from tersely.dialects.dialect import ErrorDescription, RequestPatch
from tersely.dialects.openai_chat.read import LEGACY_CALL_PREFIX, read_message, read_reply
from tersely.dialects.openai_content import append, prepend, with_words, without_lines
from tersely.dialects.wire import raw_json
from tersely.dialects.wire.bodies import try_decode
from tersely.domain.errors import InvalidRequest
from tersely.domain.messages import INSTRUCTION_ROLES, Media, Message, Reasoning, Role, Text, ToolCall, ToolResult

ECHOED_FIELDS = frozenset(
    {
        "role",
        "content",
        "name",
        "refusal",
        "tool_calls",
        "function_call",
        "reasoning_content",
        "reasoning",
        "reasoning_details",
        "provider_specific_fields",
        "extra_content",
        "thinking_blocks",
    }
)
"""The members of a reply that are fit to be sent back as input.

OpenAI's own six, and what compatible providers want to see again: DeepSeek's and Moonshot's
``reasoning_content`` (their thinking models refuse a tool call without it), OpenRouter's ``reasoning`` and
``reasoning_details``, Gemini's thought signatures in ``extra_content``, LiteLLM's
``provider_specific_fields`` and ``thinking_blocks``. What else a reply carries (``annotations``, ``audio``:
null, ``citations``, ``images``) describes it and is left out.
"""


class _PlainReply(msgspec.Struct):
    """A reply whose words are one string, as nearly all are."""

    content: str


_plain_replies = msgspec.json.Decoder(_PlainReply)


def write_request(body: bytes, patch: RequestPatch) -> bytes:
    """Return the request ``body`` with the messages of ``patch`` (instruction messages first).

    The patch's instructions are added by ``add_instructions``. These providers need no cache marks. Every other member
    of the request keeps its bytes and its place. Raises ``InvalidRequest`` for a body that ``read_request`` refuses.
    """
    messages = patch.messages
    try:
        members = raw_json.split_object(body)
        if patch.instructions:
            messages = add_instructions(messages, patch.instructions)
        members["messages"] = raw_json.join_array(list(messages))
        if patch.include_usage:
            members["stream_options"] = _with_usage(members.get("stream_options"))
    except ValueError as error:
        raise InvalidRequest(f"The request body is not valid JSON: {error}.") from error
    return raw_json.join_object(members)


def add_instructions(messages: Sequence[bytes], text: str) -> list[bytes]:
    """Return ``messages`` with ``text`` at the end of the last leading system or developer message.

    A string is extended by a blank line and the text, a list by a text part. Without such a message, a system message
    is put in front. The provider caches by prefix, so the client's own text stays in front.
    """
    leading = 0
    while leading < len(messages) and _role(messages[leading]) in INSTRUCTION_ROLES:
        leading += 1
    if leading == 0:
        return [write_text("system", text), *messages]
    last = leading - 1
    return [*messages[:last], _append_text(messages[last], text), *messages[leading:]]


def write_text(role: Role, text: str) -> bytes:
    """Return a message of plain text."""
    return raw_json.dump({"role": role, "content": text})


def write_message(message: Message) -> bytes:
    """Write a message from its parts; ``raw`` is ignored. For messages that Tersely makes itself.

    Reasoning is left out. Media cannot be written (their bytes are not in the domain) and become a note. This format
    has no message with several tool results: use one message for each.
    """
    if message.role == "tool":
        (result,) = message.results
        return _write_result(result)
    wire: dict[str, Any] = {"role": message.role, "content": _content_text(message)}
    calls = message.calls
    if calls:
        wire["content"] = wire["content"] or None
        wire |= _write_calls(calls)
    return raw_json.dump(wire)


def as_input(reply: bytes) -> bytes:
    """Return a reply's message in the form that a provider accepts in a request: see ``ECHOED_FIELDS``. Members keep
    their bytes.

    An audio reply is referenced by its id. ``null`` members other than ``content`` are left out, because some providers
    refuse ``"tool_calls": null``. An empty reply gets empty content.
    """
    members = raw_json.split_object(reply)
    kept = {
        key: value
        for key, value in members.items()
        if key in ECHOED_FIELDS
        and (value != b"null" or key == "content")
        and not (key == "tool_calls" and not raw_json.load(value))
    }
    kept.setdefault("role", b'"assistant"')
    audio = raw_json.load(members.get("audio", b"null"))
    if isinstance(audio, dict) and isinstance(audio.get("id"), str):
        kept["audio"] = raw_json.dump({"id": audio["id"]})
    if kept.get("content", b"null") == b"null" and not kept.keys() & {
        "tool_calls",
        "function_call",
        "audio",
        "refusal",
    }:
        kept["content"] = b'""'
    return raw_json.join_object(kept)


def as_reply(message: bytes) -> bytes:
    """Return the body of a reply that consists of ``message``."""
    return b'{"choices":[{"index":0,"message":' + message + b"}]}"


def restore_reply(client_raw: bytes, model_raw: bytes) -> bytes:
    """Return the client's ``client_raw`` of a reply with the model's own words, those of ``model_raw``, put back."""
    plain = try_decode(_plain_replies, model_raw)
    return with_text(client_raw, read_reply(model_raw).text_without_refusal if plain is None else plain.content)


def with_text(raw: bytes, text: str | None) -> bytes:
    """Return the client's view of a reply with ``text``, the model's own text, as its content. Keep everything else.

    Where the echo's content is a list, the first text part takes the text and other text parts go.
    """
    members = raw_json.split_object(raw)
    words = with_words(members.get("content", b"null"), text)
    return raw_json.with_member(raw, members, "content", words)


def with_results(raw: bytes, texts: Mapping[str, str]) -> bytes:
    """Return a tool message with another text, by call id; everything else verbatim, including media in a list.

    A message that answers none of the calls in ``texts`` is returned unchanged.
    """
    members = raw_json.split_object(raw)
    text = texts.get(_answered_call(members))
    if text is None:
        return raw
    content = members.get("content", b"null")
    members["content"] = with_words(content, _without_placeholders(text, content))
    return raw_json.join_object(members)


def with_prefix(raw: bytes, text: str) -> bytes:
    """Return a message with ``text`` in front of its words: a string grows by it and a blank line, a list by a text
    part.
    """
    members = raw_json.split_object(raw)
    members["content"] = prepend(members.get("content", b"null"), text)
    return raw_json.join_object(members)


def error_body(error: ErrorDescription) -> bytes:
    """Return an error in OpenAI's shape."""
    members = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return raw_json.dump({"error": members})


def error_event(body: bytes) -> bytes:
    """Return an error in the middle of a stream."""
    return b"data: " + body + b"\n\n"


def _answered_call(members: Mapping[str, bytes]) -> str:
    call_id = raw_json.load(members.get("tool_call_id", b"null"))
    if isinstance(call_id, str):
        return call_id
    if raw_json.load(members.get("role", b"null")) != "function":
        return ""
    return f"{LEGACY_CALL_PREFIX}{raw_json.load(members.get('name', b'null'))}"


def _without_placeholders(text: str, content: bytes) -> str:
    if not content.startswith(b"["):
        return text
    parts = read_message(raw_json.join_object({"role": b'"user"', "content": content})).parts
    return without_lines(text, [f"[{part.kind}]" for part in parts if isinstance(part, Media)])


def _with_usage(options: bytes | None) -> bytes:
    members = {} if options is None or options == b"null" else raw_json.split_object(options)
    members["include_usage"] = b"true"
    return raw_json.join_object(members)


def _role(raw: bytes) -> str:
    role = raw_json.load(raw_json.split_object(raw).get("role", b"null"))
    return role if isinstance(role, str) else ""


def _append_text(raw: bytes, text: str) -> bytes:
    members = raw_json.split_object(raw)
    members["content"] = append(members.get("content", b"null"), text)
    return raw_json.join_object(members)


def _content_text(message: Message) -> str:
    lines: list[str] = []
    for part in message.parts:
        match part:
            case Text(text=text):
                lines.append(text)
            case Media(kind=kind):
                lines.append(f"[{kind}]")
            case Reasoning() | ToolCall() | ToolResult():
                pass
            case _:
                assert_never(part)
    return "\n".join(lines)


def _write_result(result: ToolResult) -> bytes:
    if result.call_id.startswith(LEGACY_CALL_PREFIX):
        name = result.call_id.removeprefix(LEGACY_CALL_PREFIX)
        return raw_json.dump({"role": "function", "name": name, "content": result.text})
    return raw_json.dump({"role": "tool", "tool_call_id": result.call_id, "content": result.text})


def _write_calls(calls: tuple[ToolCall, ...]) -> dict[str, Any]:
    if calls[0].id.startswith(LEGACY_CALL_PREFIX):
        return {"function_call": {"name": calls[0].name, "arguments": calls[0].arguments}}
    return {
        "tool_calls": [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    }
