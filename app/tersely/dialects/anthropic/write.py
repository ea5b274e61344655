"""From the domain to Anthropic's Messages format: requests are patched, not rebuilt; what was not changed keeps its
bytes.

Everything here is deterministic: the same input gives the same bytes, so that prompt prefixes stay stable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import assert_never

from tersely.dialects.anthropic.caching import add_breakpoints, limit_breakpoints
from tersely.dialects.anthropic.content import (
    THINKING,
    Block,
    block_type,
    content_of,
    insert_text,
    read_block,
    replace_text,
    split_content,
    string_member,
    text_block,
    with_text_member,
)
from tersely.dialects.dialect import ErrorDescription, RequestPatch
from tersely.dialects.wire import raw_json
from tersely.domain.errors import InvalidRequest
from tersely.domain.messages import INSTRUCTION_ROLES, Media, Message, Reasoning, Role, Text, ToolCall, ToolResult

OPENING = "[Earlier messages were left out.]"
"""Said by the user where a context would begin with the model's words, which the provider refuses."""

PARTIAL = "partial_json"
"""A member of ours: the part of a call's input that came before the reply broke off."""
MALFORMED = "malformed_json"
"""A member of ours: the text of a call's input that is no JSON. Hosts stream such with fine-grained tool streaming."""

_CALL_TYPES = frozenset({"tool_use", "server_tool_use", "mcp_tool_use"})

_ERROR_TYPES = {
    "invalid_api_key": "authentication_error",
    "forbidden": "permission_error",
    "not_found": "not_found_error",
    "request_too_large": "request_too_large",
    "upstream_error": "api_error",
    "server_error": "api_error",
}


def write_request(body: bytes, patch: RequestPatch) -> bytes:
    """Return the request ``body`` with the messages of ``patch`` (instruction messages first).

    The leading instruction messages, followed by the patch's instructions, become ``system``. Those with settings
    (``output_config``) stay messages, after the first of the others. Results in several messages are joined in one.
    Without breakpoints in the patch, Tersely adds no cache mark, see `caching`. Every other member keeps its bytes and
    its place, except that ``tools`` may get a mark. Raises ``InvalidRequest`` for a body that ``read_request`` refuses.
    """
    messages = patch.messages
    try:
        members = raw_json.split_object(body)
        leading = _count_leading(messages)
        settings = [raw for raw in messages[:leading] if _sets_more(raw)]
        words = [raw for raw in messages[:leading] if not _sets_more(raw)]
        _put_system(members, write_system(words, patch.instructions))
        written, positions = _join_results(messages[leading:])
        if written and _role(written[0]) == "assistant":
            written = [write_text("user", OPENING), *written]
            positions = [position + 1 for position in positions]
        if written and settings:
            written = [written[0], *settings, *written[1:]]
            positions = [position + len(settings) if position else position for position in positions]
        written = limit_breakpoints(members, written)
        if patch.breakpoints:
            marks = [positions[index - leading] for index in patch.breakpoints if index >= leading]
            written = add_breakpoints(members, written, marks)
        members["messages"] = raw_json.join_array(written)
    except ValueError as error:
        raise InvalidRequest(f"The request body is not valid JSON: {error}.") from error
    return raw_json.join_object(members)


def write_system(messages: Sequence[bytes], instructions: str | None = None) -> bytes:
    """Return the member ``system`` for instruction messages followed by a text; empty if both are empty.

    The provider caches by prefix, so the client's own text stays in front.
    """
    contents = [_system_content(raw) for raw in messages]
    if len(contents) == 1 and not instructions:
        return contents[0]
    if len(contents) < 2 and instructions:
        text_blocks = raw_json.load(contents[0]) if contents else None
        if not isinstance(text_blocks, list):
            return raw_json.dump(f"{text_blocks}\n\n{instructions}" if text_blocks else instructions)
    blocks = [block for content in contents for block in split_content(content)]
    if instructions:
        blocks.append(text_block(instructions))
    return raw_json.join_array(blocks) if blocks else b""


def write_text(role: Role, text: str) -> bytes:
    """Return a message of plain text."""
    return raw_json.dump({"role": "system" if role in INSTRUCTION_ROLES else role, "content": text})


def write_message(message: Message) -> bytes:
    """Write a message from its parts; ``raw`` is ignored. For messages that Tersely makes itself.

    Reasoning is left out (its signature is not in the domain); media become a note. Results come first, as the provider
    expects.
    """
    if message.is_instruction:
        return write_text(message.role, message.text)
    words: list[bytes] = []
    results: list[bytes] = []
    calls: list[bytes] = []
    for part in message.parts:
        match part:
            case Text(text=text):
                words += [text_block(text)] if text.strip() else []
            case Media(kind=kind):
                words.append(text_block(f"[{kind}]"))
            case ToolCall():
                calls.append(_write_call(part))
            case ToolResult(call_id=call_id, text=text):
                results.append(raw_json.dump({"type": "tool_result", "tool_use_id": call_id, "content": text}))
            case Reasoning():
                pass
            case _:
                assert_never(part)
    role = "assistant" if message.role == "assistant" else "user"
    return _write_blocks(role, [*results, *words, *calls])


def as_input(reply: bytes) -> bytes:
    """Return a reply's message in the form that the provider accepts in a request.

    Empty texts, unsigned thoughts and calls with incomplete input are left out: they come from streams that broke off.
    A call whose input is no object keeps an empty one, since its client may answer it.
    """
    members = raw_json.split_object(reply)
    content = members.get("content", b"null")
    blocks = split_content(content)
    kept = [_as_call(block) for block in map(read_block, blocks) if _is_fit(block)]
    if kept == blocks and members.keys() == {"role", "content"}:
        return reply
    return raw_json.join_object({"role": members.get("role", b'"assistant"'), "content": raw_json.join_array(kept)})


def with_text(raw: bytes, text: str | None) -> bytes:
    """Return a message with ``text`` as its text, everything else verbatim. Text blocks become one."""
    members = raw_json.split_object(raw)
    content = members.get("content", b"null")
    if content.startswith(b"["):
        members["content"] = raw_json.join_array(replace_text(raw_json.split_array(content), text or ""))
    else:
        members["content"] = raw_json.dump(text or "")
    return raw_json.join_object(members)


def as_reply(message: bytes) -> bytes:
    """Return the body of a reply that consists of ``message``: in this format a reply is a message."""
    return message


def restore_reply(client_raw: bytes, model_raw: bytes) -> bytes:
    """Return the client's ``client_raw`` of a reply with the model's text, from ``model_raw``, restored.

    The echo decides about everything else: parts that it omits (thoughts) stay out, and additions (``cache_control``)
    stay in. Text is restored between the same blocks as in the model's reply.
    """
    members = raw_json.split_object(client_raw)
    content = members.get("content", b"null")
    ours = [block for block in map(read_block, content_of(model_raw)) if _is_fit(block)]
    if not content.startswith(b"["):
        words = "".join([string_member(block.members, "text") for block in ours if block.type == "text"])
        return raw_json.join_object({**members, "content": raw_json.dump(words)})
    shown = [*map(read_block, raw_json.split_array(content))]
    restored: list[bytes] = []
    texts: list[Block] = []
    start = 0
    for block in ours:
        if block.type == "text":
            texts.append(block)
            continue
        stop = next((index for index in range(start, len(shown)) if shown[index].type != "text"), len(shown))
        if stop < len(shown) and shown[stop].type == block.type:
            restored += [*_restore_words(shown[start:stop], texts), shown[stop].raw]
            start, texts = stop + 1, []
    echoed = [block for block in shown[start:] if block.type == "text"]
    others = [block.raw for block in shown[start:] if block.type != "text"]
    content = raw_json.join_array([*restored, *_restore_words(echoed, texts), *others])
    return raw_json.join_object({**members, "content": content})


def with_results(raw: bytes, texts: Mapping[str, str]) -> bytes:
    """Return a message with other texts of its tool results, given by call id; everything else verbatim, media too."""
    members = raw_json.split_object(raw)
    content = members.get("content", b"null")
    if not content.startswith(b"["):
        return raw
    members["content"] = raw_json.join_array([_with_result(each, texts) for each in raw_json.split_array(content)])
    return raw_json.join_object(members)


def with_prefix(raw: bytes, text: str) -> bytes:
    """Return a message with ``text`` in front of its words: a string grows by it and a blank line, a list by a text
    block.
    """
    members = raw_json.split_object(raw)
    content = members.get("content", b"null")
    if content.startswith(b"["):
        members["content"] = raw_json.join_array(insert_text(raw_json.split_array(content), text))
    else:
        text_blocks = raw_json.load(content)
        members["content"] = raw_json.dump(f"{text}\n\n{text_blocks}" if text_blocks else text)
    return raw_json.join_object(members)


def error_body(error: ErrorDescription) -> bytes:
    """Return an error in Anthropic's shape. It has no code and no parameter: a known code becomes the type."""
    kind = _ERROR_TYPES.get(error.code or "") or _ERROR_TYPES.get(error.type, error.type)
    return raw_json.dump({"type": "error", "error": {"type": kind, "message": error.message}})


def error_event(body: bytes) -> bytes:
    """Return an error in the middle of a stream."""
    return b"event: error\ndata: " + body + b"\n\n"


def _role(raw: bytes) -> str:
    return string_member(raw_json.split_object(raw), "role")


def _count_leading(messages: Sequence[bytes]) -> int:
    """Return how many instruction messages lead: `read_request` makes one of the member ``system``."""
    return next((index for index, raw in enumerate(messages) if _role(raw) not in {"", "system"}), len(messages))


def _sets_more(raw: bytes) -> bool:
    """Return whether an instruction message between the others has members that ``system`` cannot hold."""
    members = raw_json.split_object(raw)
    return "role" in members and bool(members.keys() - {"role", "content"})


def _system_content(raw: bytes) -> bytes:
    members = raw_json.split_object(raw)
    return members.get("system") or members.get("content", b"null")


def _put_system(members: dict[str, bytes], system: bytes) -> None:
    if system:
        members["system"] = system
    else:
        members.pop("system", None)


def _join_results(messages: Sequence[bytes]) -> tuple[list[bytes], list[int]]:
    """Return ``messages`` with all results of one reply in one message, and the new index of each message.

    The provider expects the results of a reply's calls in the one message after it.
    """
    joined: list[bytes] = []
    positions: list[int] = []
    was_user = False
    for raw in messages:
        is_user = _role(raw) == "user"
        if is_user and was_user and _has_results(joined[-1]) and _has_results(raw):
            content = raw_json.join_array([*content_of(joined[-1]), *content_of(raw)])
            joined[-1] = raw_json.join_object({**raw_json.split_object(joined[-1]), "content": content})
        else:
            joined.append(raw)
        positions.append(len(joined) - 1)
        was_user = is_user
    return joined, positions


def _has_results(raw: bytes) -> bool:
    return b'"tool_result"' in raw and any(block_type(block) == "tool_result" for block in content_of(raw))


def _write_blocks(role: str, blocks: list[bytes]) -> bytes:
    if len(blocks) == 1 and block_type(blocks[0]) == "text":
        content = raw_json.split_object(blocks[0])["text"]
    else:
        content = raw_json.join_array(blocks)
    return raw_json.join_object({"role": raw_json.dump(role), "content": content})


def _write_call(call: ToolCall) -> bytes:
    """Write a call. Its input must be an object; any other value is wrapped in one."""
    arguments = call.arguments.encode("utf-8", "surrogatepass") or b"{}"
    try:
        raw_json.split_object(arguments)
    except ValueError:
        arguments = raw_json.dump({"arguments": call.arguments})
    head = {"type": b'"tool_use"', "id": raw_json.dump(call.id), "name": raw_json.dump(call.name)}
    return raw_json.join_object({**head, "input": arguments})


def _is_fit(block: Block) -> bool:
    if block.type == "text":
        return bool(string_member(block.members, "text").strip())
    if block.type in THINKING:
        return bool(string_member(block.members, "signature") or string_member(block.members, "data"))
    return not (block.type in _CALL_TYPES and PARTIAL in block.members)


def _as_call(block: Block) -> bytes:
    """Return a block; that of a call without a member of ours, and with an object as its input."""
    if block.type not in _CALL_TYPES:
        return block.raw
    given = block.members.get("input", b"null")
    if MALFORMED not in block.members and given.startswith(b"{"):
        return block.raw
    members = {key: value for key, value in block.members.items() if key != MALFORMED}
    return raw_json.join_object({**members, "input": given if given.startswith(b"{") else b"{}"})


def _restore_words(echoed: Sequence[Block], ours: Sequence[Block]) -> list[bytes]:
    """Return the model's text blocks for those that the client was shown."""
    if len(echoed) != len(ours):
        return [block.raw for block in ours]
    return [
        with_text_member(shown.members, string_member(block.members, "text"))
        for shown, block in zip(echoed, ours, strict=True)
    ]


def _with_result(block: bytes, texts: Mapping[str, str]) -> bytes:
    members = raw_json.split_object(block)
    text = texts.get(string_member(members, "tool_use_id"))
    if text is None or string_member(members, "type") != "tool_result":
        return block
    content = members.get("content", b"null")
    if content.startswith(b"["):
        blocks = raw_json.split_array(content)
        members["content"] = raw_json.join_array(replace_text(blocks, _without_placeholders(text, blocks)))
    else:
        members["content"] = raw_json.dump(text)
    return raw_json.join_object(members)


def _without_placeholders(text: str, blocks: list[bytes]) -> str:
    """Return ``text`` without the placeholder lines of other blocks, which stay in the message themselves."""
    lines = text.split("\n")
    for block in blocks:
        line = f"[{block_type(block)}]"
        if line in lines and line != "[text]":
            lines.remove(line)
    return "\n".join(lines)
