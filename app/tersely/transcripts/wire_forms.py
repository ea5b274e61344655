"""The wire form of a whole conversation in each dialect: recognise it, split it, make requests of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any

from tersely.dialects.openai_responses.content import as_run, group, items_of
from tersely.dialects.registry import DIALECTS
from tersely.dialects.wire import raw_json
from tersely.domain.errors import InvalidRequest
from tersely.domain.messages import Dialect as DialectName
from tersely.transcripts.conversations import TIME, BadTranscript, RecordedCall, ReplayRequest, ReplyForm

ANNOTATION = "x_"
ANNOTATIONS = frozenset({"id", "meta", "dialect"})
MAX_TOKENS = 4096
LOOKED_FOR = (
    "looked for messages (openai_chat; with system, or blocks of tools and thoughts: anthropic), contents (gemini), "
    "request.contents (gemini_gca) and input (openai_responses)"
)

_BLOCKS = frozenset({"tool_use", "tool_result", "thinking", "redacted_thinking", "document", "image"})
_REPLY_FORM_FIELDS = frozenset({"model", "stream", "stream_options"})


def recognise(line: Mapping[str, Any], dialect: DialectName | None = None) -> DialectName:
    """Return the dialect of a conversation: the one that it names, or else ``dialect``, or else the one that it
    looks like.

    Raises `BadTranscript` if there is none.
    """
    named = line.get("dialect", dialect)
    if named is not None and named not in DIALECTS:
        raise BadTranscript(f"no such dialect: {named!r}; there are {', '.join(DIALECTS)}")
    found = named or _by_shape(line)
    if found is None or not isinstance(_envelope(line, found).get(FORMS[found].key), list | str):
        has = ", ".join(list(line)[:12]) or "nothing"
        looked = f"{found} has {FORMS[found].key}" if found else LOOKED_FOR
        raise BadTranscript(f"the line fits no dialect: {looked}; it has {has}")
    return found


def _by_shape(line: Mapping[str, Any]) -> DialectName | None:
    inner = line.get("request")
    if isinstance(inner, Mapping) and "contents" in inner:
        return "gemini_gca"
    if "contents" in line:
        return "gemini"
    if "input" in line:
        return "openai_responses"
    messages = line.get("messages")
    if not isinstance(messages, list):
        return None
    if "system" in line or "anthropic_version" in line or any(map(_is_anthropic, messages)):
        return "anthropic"
    return "openai_chat"


def _is_anthropic(message: object) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else None
    blocks = content if isinstance(content, list) else ()
    return any(isinstance(block, Mapping) and block.get("type") in _BLOCKS for block in blocks)


def _envelope(line: Mapping[str, Any], dialect: DialectName) -> Mapping[str, Any]:
    inner = line.get("request") if dialect == "gemini_gca" else line
    return inner if isinstance(inner, Mapping) else {}


def steps_of(line: Mapping[str, Any], dialect: DialectName) -> list[RecordedCall]:
    """Return a call for each reply of the model, with everything before it as its request."""
    form = FORMS[dialect]
    rest = {
        key: value for key, value in line.items() if key not in ANNOTATIONS | _REPLY_FORM_FIELDS and not _is_note(key)
    }
    given = _envelope(line, dialect)[form.key]
    items = form.items(_read_messages(given))
    messages = [raw for raw, _ in items]
    times = _times(given, [size for _, size in items])
    return [
        RecordedCall(
            index=index,
            dialect=dialect,
            reply=form.reply(raw),
            source=_RequestMaker(form, rest, messages[:index]),
            at=times[index - 1] or times[index],
        )
        for index, raw in enumerate(messages)
        if index > 0 and is_reply(raw, dialect)
    ]


def _times(given: object, sizes: Sequence[int]) -> list[datetime | None]:
    """Return when each message ended, by the annotations of its parts. ``sizes``: how many parts each has."""
    parts = iter(given if isinstance(given, list) else [])
    found: list[datetime | None] = []
    for size in sizes:
        known = [at for part in islice(parts, size) if (at := _time_of(part)) is not None]
        found.append(known[-1] if known else None)
    return found


def _time_of(message: object) -> datetime | None:
    text = message.get(TIME) if isinstance(message, Mapping) else None
    try:
        at = datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None
    return None if at is None or at.tzinfo is None else at


def is_reply(raw: bytes, dialect: DialectName) -> bool:
    """Return whether the message is a reply of the model."""
    try:
        return DIALECTS[dialect].read_message(raw).role == "assistant"
    except InvalidRequest:
        return False


def _read_messages(value: object) -> list[Any]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    messages = value if isinstance(value, list) else []
    if not all(isinstance(each, Mapping) for each in messages):
        raise BadTranscript("a message that is not an object")
    return [_bare(each) for each in messages]


def _bare(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without annotations, its own and those of its blocks."""
    bare = {key: value for key, value in message.items() if not _is_note(key)}
    for key in ("content", "parts"):
        if isinstance(blocks := bare.get(key), list):
            bare[key] = [_bare_block(block) for block in blocks]
    return bare


def _bare_block(block: object) -> object:
    return {k: v for k, v in block.items() if not _is_note(k)} if isinstance(block, Mapping) else block


def _is_note(key: str) -> bool:
    return key.startswith(ANNOTATION)


@dataclass(frozen=True, slots=True)
class _RequestMaker:
    """Makes the request for the reply that follows ``messages``."""

    form: ConversationForm
    rest: Mapping[str, Any]
    messages: Sequence[bytes]

    def __call__(self, form: ReplyForm) -> ReplayRequest:
        return self.form.request(self.rest, self.messages, form)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationForm:
    """The form of a conversation in a dialect.

    ``key``: the member with the messages. ``items`` splits it into raw messages, each with the number of parts that it
    was made of. ``reply`` turns a raw message into a reply of that dialect. ``request`` makes a request of the other
    members, the messages and the form of the reply.
    """

    key: str
    items: Callable[[list[Any]], list[tuple[bytes, int]]]
    reply: Callable[[bytes], Mapping[str, Any]]
    request: Callable[[Mapping[str, Any], Sequence[bytes], ReplyForm], ReplayRequest]


def _each(messages: Iterable[Any]) -> list[tuple[bytes, int]]:
    return [(raw_json.dump(each), 1) for each in messages]


def _contents(messages: list[Any]) -> list[tuple[bytes, int]]:
    """Return the contents; neighbouring ones of the model are one reply, which came in several chunks."""
    joined = []
    for run in _chunks(messages):
        parts = {"parts": [part for content in run for part in content["parts"]]} if len(run) > 1 else {}
        joined.append((raw_json.dump({**run[0], **parts}), len(run)))
    return joined


def _chunks(messages: Iterable[Any]) -> list[list[dict[str, Any]]]:
    """Return the contents, those of one reply together."""
    runs: list[list[dict[str, Any]]] = []
    for content in messages:
        is_more = runs and content.get("role") == runs[-1][-1].get("role") == "model"
        if is_more and isinstance(content.get("parts"), list) and isinstance(runs[-1][-1].get("parts"), list):
            runs[-1].append(content)
        else:
            runs.append([content])
    return runs


def _item_groups(messages: Iterable[Any]) -> list[tuple[bytes, int]]:
    return [(raw, len(items_of(raw))) for raw in group([raw_json.dump(each) for each in messages])]


def _loaded(raw: bytes) -> Mapping[str, Any]:
    message: Mapping[str, Any] = raw_json.load(raw)
    return message


def _output(raw: bytes) -> Mapping[str, Any]:
    return _loaded(as_run(items_of(raw)))


def _array(raws: Iterable[bytes]) -> bytes:
    return raw_json.join_array(list(raws))


def _members(rest: Mapping[str, Any]) -> dict[str, bytes]:
    return {key: raw_json.dump(value) for key, value in rest.items()}


def _streamed(form: ReplyForm, **more: bytes) -> dict[str, bytes]:
    return {"stream": b"true", **more} if form.is_streamed else {}


def _ask_chat(rest: Mapping[str, Any], messages: Sequence[bytes], form: ReplyForm) -> ReplayRequest:
    asks_usage = form.is_streamed and form.has_option
    options = {"stream_options": b'{"include_usage":true}'} if asks_usage else {}
    body = {"model": raw_json.dump(form.model), **_members(rest), "messages": _array(messages)}
    return ReplayRequest(
        dialect="openai_chat",
        target="/v1/chat/completions",
        body=raw_json.join_object({**body, **_streamed(form, **options)}),
        headers={},
        is_streamed=form.is_streamed,
        asks_usage=asks_usage,
    )


def _ask_anthropic(rest: Mapping[str, Any], messages: Sequence[bytes], form: ReplyForm) -> ReplayRequest:
    body = {"model": raw_json.dump(form.model), **_members({"max_tokens": MAX_TOKENS, **rest})}
    return ReplayRequest(
        dialect="anthropic",
        target="/v1/messages",
        body=raw_json.join_object({**body, "messages": _array(messages), **_streamed(form)}),
        headers={"anthropic-version": "2023-06-01"},
        is_streamed=form.is_streamed,
    )


def _ask_responses(rest: Mapping[str, Any], messages: Sequence[bytes], form: ReplyForm) -> ReplayRequest:
    items = _array(item for raw in messages for item in items_of(raw))
    body = {"model": raw_json.dump(form.model), **_members(rest), "input": items}
    return ReplayRequest(
        dialect="openai_responses",
        target="/v1/responses",
        body=raw_json.join_object({**body, **_streamed(form)}),
        headers={},
        is_streamed=form.is_streamed,
    )


def _method(form: ReplyForm) -> str:
    if not form.is_streamed:
        return "generateContent"
    return "streamGenerateContent" + ("" if form.has_option else "?alt=sse")


def _ask_gemini(rest: Mapping[str, Any], messages: Sequence[bytes], form: ReplyForm) -> ReplayRequest:
    return ReplayRequest(
        dialect="gemini",
        target=f"/v1beta/models/{form.model}:{_method(form)}",
        body=raw_json.join_object({**_members(rest), "contents": _array(messages)}),
        headers={},
        is_streamed=form.is_streamed,
    )


def _ask_gca(rest: Mapping[str, Any], messages: Sequence[bytes], form: ReplyForm) -> ReplayRequest:
    inner = {**_members(_envelope(rest, "gemini_gca")), "contents": _array(messages)}
    body = {"model": raw_json.dump(form.model), **_members(rest), "request": raw_json.join_object(inner)}
    return ReplayRequest(
        dialect="gemini_gca",
        target=f"/v1internal:{_method(form)}",
        body=raw_json.join_object(body),
        headers={},
        is_streamed=form.is_streamed,
    )


FORMS: Mapping[DialectName, ConversationForm] = {
    "openai_chat": ConversationForm(key="messages", items=_each, reply=_loaded, request=_ask_chat),
    "anthropic": ConversationForm(key="messages", items=_each, reply=_loaded, request=_ask_anthropic),
    "gemini": ConversationForm(key="contents", items=_contents, reply=_loaded, request=_ask_gemini),
    "gemini_gca": ConversationForm(key="contents", items=_contents, reply=_loaded, request=_ask_gca),
    "openai_responses": ConversationForm(key="input", items=_item_groups, reply=_output, request=_ask_responses),
}
