"""From the domain to OpenAI's responses format: requests are patched, not rebuilt; what is not changed keeps its bytes.

Everything here is deterministic: the same input gives the same bytes, so that prompt prefixes stay stable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, assert_never

from tersely.dialects.dialect import RequestPatch
from tersely.dialects.openai_chat.write import error_body as error_body
from tersely.dialects.openai_content import is_text, prepend, with_words, without_lines
from tersely.dialects.openai_responses.content import (
    INSTRUCTIONS,
    answered_call,
    as_message,
    as_run,
    call_id,
    is_instructions,
    is_run,
    item_type,
    items_of,
)
from tersely.dialects.openai_responses.read import read_message, result_media, string_message
from tersely.dialects.wire import raw_json
from tersely.dialects.wire.members import split_body
from tersely.domain.errors import InvalidRequest
from tersely.domain.messages import Media, Message, Reasoning, Role, Text, ToolCall, ToolResult

REPLY_ID, CONVERSATION = "previous_response_id", "conversation"
CHAIN = (REPLY_ID, CONVERSATION)
"""Members by which the provider puts a history of its own in front of the input."""

_UNFINISHED = ("in_progress", "incomplete")
_IDLESS = frozenset({"message", "function_call", "custom_tool_call"})
"""Types of items that may come without an id."""
_BLANK_IMAGE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYAAAAAYAAjCB0C8AAAAASUVORK5CYII="
)


def write_request(body: bytes, patch: RequestPatch) -> bytes:
    """Return the request ``body`` with the messages of ``patch`` (wire form, see `items`).

    The patch's instructions follow the client's. The member ``instructions`` would replace those of a stored
    ``prompt``: beside one, the patch's are the first item of the input. The provider always reports usage and needs no
    cache marks. Every other member of the request keeps its bytes and its place, ``previous_response_id`` and
    ``conversation`` too: see ``without_history``. Raises ``InvalidRequest`` for a body that ``read_request`` refuses.
    """
    messages, instructions = patch.messages, patch.instructions
    members = split_body(body)
    try:
        client_instructions = [raw_json.split_object(raw)[INSTRUCTIONS] for raw in messages if is_instructions(raw)]
        items = [item for raw in messages if not is_instructions(raw) for item in items_of(raw)]
        if instructions and (members.get("prompt", b"null") != b"null" or _is_list(client_instructions)):
            items.insert(0, write_text("developer", instructions))
            instructions = None
        _put_instructions(members, client_instructions, instructions)
        _put_input(members, _fit_results(items))
    except ValueError as error:
        raise InvalidRequest(f"The request body is not valid JSON: {error}.") from error
    return raw_json.join_object(members)


def without_history(body: bytes) -> bytes:
    """Return the request without the history that the provider would put in front of its input."""
    members = split_body(body)
    if not any(name in members for name in CHAIN):
        return body
    return raw_json.join_object({name: value for name, value in members.items() if name not in CHAIN})


def write_text(role: Role, text: str) -> bytes:
    """Return a message of plain text."""
    return raw_json.dump({"type": "message", "role": "user" if role == "tool" else role, "content": text})


def write_message(message: Message) -> bytes:
    """Write a message from its parts; ``raw`` is ignored. For messages that Tersely makes itself.

    Reasoning is left out. Media cannot be written (their bytes are not in the domain) and become a note. Results are
    those of functions: ``write_request`` gives them the form of the calls that they answer.
    """
    texts: list[str] = []
    items: list[bytes] = []
    for part in message.parts:
        match part:
            case Text(text=text):
                texts.append(text)
            case Media(kind=kind):
                texts.append(f"[{kind}]")
            case ToolCall():
                call = {"call_id": part.id, "name": part.name, "arguments": part.arguments or "{}"}
                items.append(raw_json.dump({"type": "function_call", **call}))
            case ToolResult(call_id=called, text=text):
                items.append(raw_json.dump({"type": "function_call_output", "call_id": called, "output": text}))
            case Reasoning():
                pass
            case _:
                assert_never(part)
    words = [write_text(message.role, "\n".join(texts))] if texts or not items else []
    return as_message([*words, *items] if message.role == "assistant" else [*items, *words])


def as_input(reply: bytes) -> bytes:
    """Return the items of a reply in the form that the provider accepts in a request.

    Incomplete calls, thoughts that only the provider has, and thoughts without a following item are left out. Texts and
    calls after a removed thought lose their ids, because the provider would look for the thought; an item of the
    provider's own tools needs its id and is left out too.
    """
    items = items_of(reply)
    kept: list[bytes] = []
    is_missed = False
    for raw in items:
        item = raw_json.load(raw)
        if item_type(item) == "reasoning" and not (item.get("encrypted_content") or item.get("content")):
            is_missed = True
        elif item_type(item) in {"message", "reasoning"} or item.get("status") not in _UNFINISHED:
            sent = _with_arguments_as_text(raw) if isinstance(item.get("arguments"), dict | list) else raw
            if is_missed and item_type(item) in _IDLESS:
                kept.append(_without_id(sent))
            elif not (is_missed and _is_the_providers(item)):
                kept.append(sent)
    while kept and _is_thought(kept[-1]):
        kept.pop()
    if kept == items:
        return reply
    return as_message(kept) if kept else write_text("assistant", "")


def _with_arguments_as_text(raw: bytes) -> bytes:
    """Return a call whose arguments are the text of their JSON, as they are in requests."""
    members = raw_json.split_object(raw)
    return raw_json.join_object({**members, "arguments": raw_json.dump(members["arguments"].decode())})


def as_reply(message: bytes) -> bytes:
    """Return the body of a reply that consists of ``message``."""
    return as_run(items_of(message))


def restore_reply(client_raw: bytes, model_raw: bytes) -> bytes:
    """Return the client's ``client_raw`` of a reply with the model's text, from ``model_raw``, restored.

    The echo decides about everything else. If it has as many texts as the model's reply, each is restored in its place;
    otherwise the first one takes them all.
    """
    ours = [part for item in items_of(model_raw) for part in _text_parts(item)]
    shown_parts = [part for item in items_of(client_raw) for part in _text_parts(item)]
    if len(ours) != len(shown_parts):
        return with_text(client_raw, read_message(model_raw).text_without_refusal)
    words = iter(ours)
    return _with_items(client_raw, [_restore_item(item, words) for item in items_of(client_raw)])


def with_text(raw: bytes, text: str | None) -> bytes:
    """Return a message with ``text`` in its first text and without the other texts; everything else verbatim.

    In a reply without text it goes after the thoughts.
    """
    items = items_of(raw)
    texts = [index for index, item in enumerate(items) if _is_message(item)]
    if not texts:
        index = next((index for index, item in enumerate(items) if not _is_thought(item)), len(items))
        message = [write_text("assistant", text)] if text else []
        return _with_items(raw, [*items[:index], *message, *items[index:]])
    first = next((index for index in texts if _text_parts(items[index])), texts[0])
    written: list[bytes] = []
    for index, item in enumerate(items):
        if index not in texts:
            written.append(item)
        elif index == first:
            written.append(_with_content_text(item, text or ""))
        elif (rest := _with_content_text(item, "")) and _other_parts(item):
            written.append(rest)
    return _with_items(raw, written)


def with_results(raw: bytes, texts: Mapping[str, str]) -> bytes:
    """Return an item with another text as its output, by call id; everything else verbatim, including media in a list.

    Outputs that are no text (screenshots, found tools, approvals) stay unchanged.
    """
    return _with_items(raw, [_with_result(item, texts) for item in items_of(raw)])


def with_prefix(raw: bytes, text: str) -> bytes:
    """Return a message with ``text`` in front of its text: a string is extended by it and a blank line, a list by a
    text part.

    In front of items without text it is a message of its own.
    """
    items = items_of(raw)
    members = raw_json.split_object(items[0])
    if not _is_message(items[0]):
        role: Role = "assistant" if read_message(raw).role == "assistant" else "user"
        return as_run([write_text(role, text), *items])
    content = prepend(members.get("content", b"null"), text, _text_kind(members))
    return _with_items(raw, [raw_json.join_object({**members, "content": content}), *items[1:]])


def error_event(body: bytes) -> bytes:
    """Return an error in the middle of a stream, both in the documented form and in the provider's actual form."""
    error = raw_json.load(body)["error"]
    flat = {name: error.get(name) for name in ("code", "message", "param")}
    return b"event: error\ndata: " + raw_json.dump({"type": "error", **flat, "error": error}) + b"\n\n"


# Requests


def _is_list(client_instructions: Sequence[bytes]) -> bool:
    return any(not value.startswith(b'"') for value in client_instructions)


def _put_instructions(members: dict[str, bytes], client_instructions: Sequence[bytes], ours: str | None) -> None:
    """Write both instructions. The client's stand in front, because the provider caches by prefix."""
    if len(client_instructions) == 1 and not ours:
        members[INSTRUCTIONS] = client_instructions[0]
        return
    texts = [*map(raw_json.load, client_instructions), *([ours] if ours else [])]
    if texts:
        members[INSTRUCTIONS] = raw_json.dump("\n\n".join(filter(None, texts)))
    elif members.get(INSTRUCTIONS, b"null") != b"null":
        del members[INSTRUCTIONS]


def _put_input(members: dict[str, bytes], items: list[bytes]) -> None:
    own = members.get("input", b"null")
    is_own = items == [string_message(own)] if own.startswith(b'"') else own == b"null" and not items
    if not is_own:
        members["input"] = raw_json.join_array(items)


def _fit_results(items: list[bytes]) -> list[bytes]:
    """Write function results in the form of the calls that they answer."""
    forms: dict[str, str] = {}
    fitted: list[bytes] = []
    for raw in items:
        if b'_call"' in raw or b'"mcp_approval_request"' in raw:
            item = raw_json.load(raw)
            forms[call_id(item)] = item_type(item)
        elif b'"function_call_output"' in raw and any(form != "function_call" for form in forms.values()):
            fitted.append(_fit_result(raw, forms))
            continue
        fitted.append(raw)
    return fitted


def _fit_result(raw: bytes, forms: Mapping[str, str]) -> bytes:
    item = raw_json.load(raw)
    if item_type(item) != "function_call_output":
        return raw
    called, text = answered_call(item), item.get("output")
    head: dict[str, Any] = {"call_id": called}
    match forms.get(called, ""):
        case "custom_tool_call":
            return raw_json.dump({"type": "custom_tool_call_output", **head, "output": text})
        case "local_shell_call":
            return raw_json.dump({"type": "local_shell_call_output", **head, "id": called, "output": text})
        case "shell_call":
            output = {"stdout": text, "stderr": "", "outcome": {"type": "exit", "exit_code": 1}}
            return raw_json.dump({"type": "shell_call_output", **head, "output": [output]})
        case "apply_patch_call":
            return raw_json.dump({"type": "apply_patch_call_output", **head, "status": "failed", "output": text})
        case "computer_call":
            shot = {"type": "computer_screenshot", "image_url": _BLANK_IMAGE}
            return raw_json.dump({"type": "computer_call_output", **head, "output": shot})
        case "tool_search_call":
            found = {"execution": "client", "status": "completed", "tools": []}
            return raw_json.dump({"type": "tool_search_output", **head, **found})
        case "mcp_approval_request":
            answer = {"approval_request_id": called, "approve": False}
            return raw_json.dump({"type": "mcp_approval_response", **answer})
        case _:
            return raw


# Items


def _with_items(raw: bytes, items: list[bytes]) -> bytes:
    """Return the message with other items, in its original form."""
    if items == items_of(raw):
        return raw
    return as_run(items) if is_run(raw_json.split_object(raw)) else as_message(items)


def _is_the_providers(item: dict[str, Any]) -> bool:
    """Return whether the provider made the item itself and knows it only by its id."""
    return not (call_id(item) or item.get("encrypted_content") or item_type(item) in {"message", "reasoning"})


def _without_id(raw: bytes) -> bytes:
    members = raw_json.split_object(raw)
    members.pop("id", None)
    return raw_json.join_object(members)


def _is_message(item: bytes) -> bool:
    return item_type(raw_json.load(item)) == "message"


def _is_thought(item: bytes) -> bool:
    return item_type(raw_json.load(item)) == "reasoning"


def _text_kind(members: Mapping[str, bytes]) -> str:
    return "output_text" if members.get("role") == b'"assistant"' else "input_text"


def _content(item: bytes) -> list[bytes]:
    """Return the parts of a message; a string is one, in a list's form."""
    if not _is_message(item):
        return []
    content = raw_json.split_object(item).get("content", b"null")
    if content.startswith(b"["):
        return raw_json.split_array(content)
    return [content] if content.startswith(b'"') else []


def _text_parts(item: bytes) -> list[bytes]:
    return [part for part in _content(item) if is_text(raw_json.load(part))]


def _other_parts(item: bytes) -> list[bytes]:
    return [part for part in _content(item) if not is_text(raw_json.load(part))]


def _with_content_text(item: bytes, text: str) -> bytes:
    members = raw_json.split_object(item)
    content = members.get("content", b"null")
    if not text and content.startswith(b"["):
        return raw_json.join_object({**members, "content": raw_json.join_array(_other_parts(item))})
    return raw_json.join_object({**members, "content": with_words(content, text, _text_kind(members))})


def _restore_item(item: bytes, words: Iterator[bytes]) -> bytes:
    members = raw_json.split_object(item)
    parts = _content(item)
    if not parts:
        return item
    if members["content"].startswith(b'"'):
        return raw_json.join_object({**members, "content": _text_of(next(words))})
    restored = [_restore_part(part, next(words)) if is_text(raw_json.load(part)) else part for part in parts]
    if restored == parts:
        return item
    return raw_json.join_object({**members, "content": raw_json.join_array(restored)})


def _restore_part(echoed: bytes, original: bytes) -> bytes:
    """Return the client's part with the model's text and annotations."""
    if echoed.startswith(b'"'):
        return _text_of(original)
    shown_parts = raw_json.split_object(echoed)
    ours = {} if original.startswith(b'"') else raw_json.split_object(original)
    if shown_parts.get("text") == _text_of(original):
        return echoed
    pointing: dict[str, bytes] = {
        key: ours[key] for key in ("annotations", "logprobs") if key in ours and key in shown_parts
    }
    return raw_json.join_object({**shown_parts, "text": _text_of(original), **pointing})


def _text_of(part: bytes) -> bytes:
    return part if part.startswith(b'"') else raw_json.split_object(part)["text"]


def _with_result(raw: bytes, texts: Mapping[str, str]) -> bytes:
    item = raw_json.load(raw)
    text = texts.get(answered_call(item) or "\0")
    if text is None:
        return raw
    members = raw_json.split_object(raw)
    match item_type(item):
        case "shell_call_output" if isinstance(item.get("output"), list):
            output = _with_shell_text(raw_json.split_array(members["output"]), text)
        case "computer_call_output" | "tool_search_output" | "mcp_approval_response":
            return raw
        case _:
            output = with_words(
                members.get("output", b"null"), without_lines(text, result_media(item)), kind="input_text"
            )
    return raw_json.join_object({**members, "output": output})


def _with_shell_text(outputs: Sequence[bytes], text: str) -> bytes:
    """Put the text into the first output. The others stay, empty: there is one for each command."""
    new_texts = [text, *("" for _ in outputs[1:])]
    return raw_json.join_array(
        [
            raw_json.join_object({**raw_json.split_object(raw), "stdout": raw_json.dump(words), "stderr": b'""'})
            for raw, words in zip(outputs, new_texts, strict=False)
        ]
    )
