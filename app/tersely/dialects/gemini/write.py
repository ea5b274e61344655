"""From the domain to Gemini's format: requests are patched, not rebuilt; what was not changed keeps its bytes.

Everything here is deterministic: the same input gives the same bytes, so that prompt prefixes stay stable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, assert_never

from tersely.dialects.dialect import ErrorDescription, RequestPatch
from tersely.dialects.gemini.read import (
    CALL_PREFIX,
    INSTRUCTION_KEYS,
    Numbering,
    function_call,
    function_response,
    is_instruction,
    items,
    join_runs,
    name_of_own_id,
    parts_of,
    read_message,
    string,
    text_member,
    visible_text,
)
from tersely.dialects.wire import raw_json
from tersely.dialects.wire.members import split_body
from tersely.domain.errors import InvalidRequest
from tersely.domain.messages import INSTRUCTION_ROLES, Media, Message, Part, Reasoning, Role, Text, ToolCall, ToolResult

NO_SIGNATURE = "skip_thought_signature_validator"
"""Google's own word for a call that was not made by the model in this form: its newer models refuse one without a
signature.
"""

_STATUSES = {
    "invalid_api_key": (401, "UNAUTHENTICATED"),
    "forbidden": (403, "PERMISSION_DENIED"),
    "not_found": (404, "NOT_FOUND"),
    "conflict": (409, "ABORTED"),
    "request_too_large": (413, "INVALID_ARGUMENT"),
    "rate_limit_exceeded": (429, "RESOURCE_EXHAUSTED"),
    "upstream_unavailable": (502, "UNAVAILABLE"),
    "database_unavailable": (503, "UNAVAILABLE"),
    "shutting_down": (503, "UNAVAILABLE"),
}


def write_request(body: bytes, patch: RequestPatch) -> bytes:
    """Return the request ``body`` with the messages of ``patch`` (wire form, see `tersely.dialects.gemini.read`).

    Instruction messages become the system instruction, followed by the patch's instructions. Cached content contains a
    system instruction and forbids another: beside it, these texts become a user message. The provider always reports
    usage and needs no cache marks. Every other member of the request keeps its bytes and its place. Raises
    ``InvalidRequest`` for a body that ``read_request`` refuses.
    """
    messages, instructions = patch.messages, patch.instructions
    members = split_body(body)
    try:
        runs = join_runs(items(members.get("contents", b"null")))
        system = [raw for raw in messages if is_instruction(raw)]
        contents = [raw for raw in messages if not is_instruction(raw)]
        if instructions:
            system.append(write_text("system", instructions))
        if system and (members.keys() & {"cachedContent", "cached_content"}):
            texts = [read_message(raw).text for raw in system]
            contents.insert(0, write_text("user", "\n\n".join(filter(None, texts))))
            system = []
        for key in INSTRUCTION_KEYS:
            members.pop(key, None)
        if system:
            members |= _join_instructions(system)
        members["contents"] = raw_json.join_array(_arrange(contents, runs))
    except ValueError as error:
        raise InvalidRequest(f"The request body is not valid JSON: {error}.") from error
    return raw_json.join_object(members)


def write_text(role: Role, text: str) -> bytes:
    """Return a message of plain text."""
    if role in INSTRUCTION_ROLES:
        return raw_json.dump({"systemInstruction": {"parts": [{"text": text}]}})
    return raw_json.dump({"role": "model" if role == "assistant" else "user", "parts": [{"text": text}]})


def write_message(message: Message) -> bytes:
    """Write a message from its parts; ``raw`` is ignored. For messages that Tersely makes itself.

    Reasoning is left out. Media cannot be written (their bytes are not in the domain) and become a note. A result knows
    its function's name only by an id of ours: ``write_request`` adds it from the call.
    """
    if message.is_instruction:
        return write_text(message.role, message.text)
    parts = [written for part in message.parts if (written := _write_part(part)) is not None]
    call = next((part for part in parts if "functionCall" in part), None)
    if call is not None:
        call["thoughtSignature"] = NO_SIGNATURE
    return raw_json.dump({"role": "model" if message.role == "assistant" else "user", "parts": parts or [{"text": ""}]})


def as_input(reply: bytes) -> bytes:
    """Return a reply's content in the form that the provider accepts in a request: with a role and at least
    one part.
    """
    members = raw_json.split_object(reply)
    if members.get("role", b"null") != b"null" and items(members.get("parts", b"null")):
        return reply
    if not items(members.get("parts", b"null")):
        members["parts"] = b'[{"text":""}]'
    if members.get("role", b"null") == b"null":
        members["role"] = b'"model"'
    return raw_json.join_object(members)


def as_reply(content: bytes) -> bytes:
    """Return the body of a reply that consists of ``content``."""
    return b'{"candidates":[{"content":' + content + b"}]}"


def restore_reply(client_raw: bytes, model_raw: bytes) -> bytes:
    """Return the client's ``client_raw`` of a reply with the model's text, from ``model_raw``, restored.

    The echo decides about everything else. Text is restored between the same parts as in the model's reply.
    """
    members = raw_json.split_object(client_raw)
    shown_parts = items(members.get("parts", b"null"))
    ours = list(map(raw_json.load, items(raw_json.split_object(model_raw).get("parts", b"null"))))
    runs = _text_runs(ours)
    if len(runs) != len(_text_runs(map(raw_json.load, shown_parts))):
        runs = ["".join(runs)]
    members["parts"] = raw_json.join_array(_with_runs(shown_parts, runs))
    return raw_json.join_object(members)


def with_text(raw: bytes, text: str | None) -> bytes:
    """Return a content with ``text`` in its first text part and without the other text parts; everything else verbatim.

    A text part with a signature stays, empty.
    """
    members = raw_json.split_object(raw)
    members["parts"] = raw_json.join_array(_with_runs(items(members.get("parts", b"null")), [text or ""]))
    return raw_json.join_object(members)


def patch_texts(parts: Sequence[bytes], texts: Mapping[int, str]) -> list[bytes]:
    """Return ``parts`` with other texts, by index. A part that becomes empty and has no other member is removed."""
    patched: list[bytes] = []
    for index, part in enumerate(parts):
        text = texts.get(index)
        if text is None:
            patched.append(part)
            continue
        members = raw_json.split_object(part)
        if text or members.keys() - {"text"}:
            patched.append(raw_json.join_object({**members, "text": raw_json.dump(text)}))
    return patched


def with_results(raw: bytes, texts: Mapping[str, str]) -> bytes:
    """Return a content with other texts in its function responses, by call id; everything else verbatim.

    A result is also found by our own id for it. A content that answers none of the calls is returned unchanged.
    """
    members = raw_json.split_object(raw)
    parts = items(members.get("parts", b"null"))
    patched = list(parts)
    numbering = Numbering()
    for index, part in enumerate(parts):
        response = function_response(raw_json.load(part))
        if response is not None:
            own = numbering.next(string(response.get("name")))
            text = texts.get(string(response.get("id")) or own, texts.get(own))
            patched[index] = part if text is None else _with_response(part, text)
    return raw if patched == parts else raw_json.join_object({**members, "parts": raw_json.join_array(patched)})


def with_prefix(raw: bytes, text: str) -> bytes:
    """Return a content with ``text`` in front, as a part of its own."""
    members = raw_json.split_object(raw)
    parts = items(members.get("parts", b"null"))
    members["parts"] = raw_json.join_array([raw_json.dump({"text": text}), *parts])
    return raw_json.join_object(members)


def error_body(error: ErrorDescription) -> bytes:
    """Return an error in Google's shape."""
    default = (500, "INTERNAL") if error.type in {"server_error", "upstream_error"} else (400, "INVALID_ARGUMENT")
    number, status = _STATUSES.get(error.code or "", default)
    members: dict[str, Any] = {"code": number, "message": error.message, "status": status}
    if error.param is not None:
        violation = {"field": error.param, "description": error.message}
        members["details"] = [{"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": [violation]}]
    if error.retry_after is not None:
        delay = f"{error.retry_after}s"
        members["details"] = [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": delay}]
    return raw_json.dump({"error": members})


def error_event(body: bytes) -> bytes:
    """Return an error in the middle of a stream."""
    return b"data: " + body + b"\r\n\r\n"


def _text_runs(parts: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the texts between the parts that are neither text nor thought; one more than there are such parts."""
    runs = [""]
    for part in parts:
        if (text := visible_text(part)) is not None:
            runs[-1] += text
        elif not part.get("thought"):
            runs.append("")
    return runs


def _with_runs(parts: Sequence[bytes], runs: Sequence[str]) -> list[bytes]:
    """Return ``parts`` with other runs of text, each in the first text of its run. A text with a signature stays,
    empty.
    """
    written: list[bytes] = []
    waiting = list(runs)
    index = 0
    for part in parts:
        value = raw_json.load(part)
        if visible_text(value) is not None:
            written += patch_texts([part], {0: waiting[index]})
            waiting[index] = ""
        else:
            if not value.get("thought") and index + 1 < len(waiting):
                written += _text_part(waiting[index])
                index += 1
            written.append(part)
    return [*written, *_text_part(waiting[index])] or [raw_json.dump({"text": ""})]


def _text_part(text: str) -> list[bytes]:
    return [raw_json.dump({"text": text})] if text else []


def _join_instructions(system: Sequence[bytes]) -> dict[str, bytes]:
    """Join several instruction messages under the key of the first; a single one keeps its bytes."""
    ((key, first),) = raw_json.split_object(system[0]).items()
    if len(system) == 1:
        return {key: first}
    is_text = first.lstrip()[:1] == b'"'
    members = {"parts": raw_json.dump({"text": raw_json.load(first)})} if is_text else raw_json.split_object(first)
    parts = items(members.get("parts", b"null"))
    for raw in system[1:]:
        ((_, value),) = raw_json.split_object(raw).items()
        parts += items(raw_json.split_object(value).get("parts", b"null"))
    return {key: raw_json.join_object({**members, "parts": raw_json.join_array(parts)})}


def _arrange(messages: Sequence[bytes], runs: Sequence[tuple[bytes, list[bytes]]]) -> list[bytes]:
    """Return the client's messages (``runs``, each with its contents) as they came, and other messages adapted to them.

    The provider expects the results of one content's calls in one content, each with the name of its function, and no
    call directly after another content of the model. Contents that the client sent one after the other stay apart.
    """
    own = dict(runs)
    neighbours = set(pairwise(raw for raw, _ in runs))
    arranged: list[bytes] = []
    before: bytes | None = None  # the last message, where its contents are the client's
    for raw in messages:
        first, *more = own.get(raw) or [_with_names(raw, arranged)]
        is_joined = bool(arranged) and (before, raw) not in neighbours and _is_one_turn(arranged[-1], first)
        if is_joined:
            first = _join_parts(arranged.pop(), first)
        arranged += [first, *more]
        before = raw if raw in own and not is_joined else None
    return arranged


def _is_one_turn(before: bytes, raw: bytes) -> bool:
    return (_is_model(before) and _is_model(raw)) or (_is_results(before) and _is_results(raw))


def _is_model(raw: bytes) -> bool:
    return b'"model"' in raw and raw_json.split_object(raw).get("role") == b'"model"'


def _join_parts(first: bytes, second: bytes) -> bytes:
    members = raw_json.split_object(first)
    parts = items(members["parts"]) + items(raw_json.split_object(second)["parts"])
    return raw_json.join_object({**members, "parts": raw_json.join_array(parts)})


def _is_results(raw: bytes) -> bool:
    if b"unctionResponse" not in raw and b"unction_response" not in raw:
        return False
    parts = parts_of(raw_json.load(raw))
    return bool(parts) and all(function_response(part) is not None for part in parts)


def _with_names(raw: bytes, before: Sequence[bytes]) -> bytes:
    """Return ``raw`` with the functions' names in results that were written without; unchanged if all have theirs."""
    if b'"functionResponse"' not in raw:
        return raw
    members = raw_json.split_object(raw)
    parts = items(members["parts"])
    is_changed = False
    for index, part in enumerate(parts):
        response = function_response(raw_json.load(part))
        if response is not None and not response.get("name"):
            name = _name_of_call(response.get("id", ""), before)
            parts[index] = raw_json.dump({"functionResponse": {**response, "name": name}})
            is_changed = True
    if not is_changed:
        return raw
    return raw_json.join_object({**members, "parts": raw_json.join_array(parts)})


def _name_of_call(call_id: str, before: Sequence[bytes]) -> str:
    for raw in reversed(before):
        if b"unctionCall" in raw or b"unction_call" in raw:
            for part in parts_of(raw_json.load(raw)):
                call = function_call(part)
                if call is not None and call.get("id") == call_id:
                    return str(call.get("name"))
    return "unknown"


def _write_part(part: Part) -> dict[str, Any] | None:
    match part:
        case Text(text=text):
            return {"text": text}
        case Media(kind=kind):
            return {"text": f"[{kind}]"}
        case ToolCall():
            return {"functionCall": {**_own_or_id(part.id), "name": part.name, "args": _arguments(part.arguments)}}
        case ToolResult():
            name = name_of_own_id(part.call_id)
            named = {"name": name} if name else {}
            return {"functionResponse": {**_own_or_id(part.call_id), **named, "response": {"output": part.text}}}
        case Reasoning():
            return None
        case _:
            assert_never(part)


def _own_or_id(call_id: str) -> dict[str, str]:
    """Return the provider's own call id, or none for an id of Tersely's: the provider then pairs by name and order."""
    return {} if call_id.startswith(CALL_PREFIX) or not call_id else {"id": call_id}


def _arguments(text: str) -> object:
    try:
        arguments = raw_json.load(text.encode("utf-8", "surrogatepass")) if text.strip() else {}
    except ValueError:
        arguments = text
    return arguments if isinstance(arguments, dict) else {"arguments": arguments}


def _with_response(part: bytes, text: str) -> bytes:
    members = raw_json.split_object(part)
    (key,) = [key for key in members if key in {"functionResponse", "function_response"}]
    response = raw_json.split_object(members[key])
    response_value = raw_json.load(response.get("response", b"null"))
    media = [
        f"[{each.kind}]"
        for each in read_message(b'{"parts":%b}' % response.get("parts", b"[]")).parts
        if isinstance(each, Media)
    ]
    for line in reversed(media):
        text = text.removesuffix(line).removesuffix("\n")
    response["response"] = raw_json.dump({text_member(response_value) or "output": text})
    return raw_json.join_object({**members, key: raw_json.join_object(response)})
