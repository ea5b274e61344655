"""Recordings: the requests that a client made, one on each line, as a proxy in front of the provider sees them.

A line is a request with its way to the server (``{"method", "path", "query", "headers", "body"}``), or its body alone;
then the next lines resend what it says. Or it names files beside it, of a request's body and of the answer to it as it
came (``{"method", "url", "request_file", "file", "stream"}``). Other replies come from the line itself (``"reply"`` or
``"response"``), from ``responses.jsonl`` beside ``requests.jsonl`` (``{"n", "reply"}``), or from the history of a later
request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode, urlsplit

from tersely.dialects.registry import DIALECTS
from tersely.dialects.wire import raw_json
from tersely.domain.errors import InvalidRequest
from tersely.domain.history.chain import canonical
from tersely.domain.messages import Dialect as DialectName
from tersely.domain.messages import Message
from tersely.transcripts.answers import read_answer
from tersely.transcripts.conversations import BadTranscript, Conversation, RecordedCall, ReplayRequest, ReplyForm
from tersely.transcripts.replies import read_reply
from tersely.transcripts.wire_forms import FORMS, recognise

MODEL = "recorded"
PREVIOUS = "previous_response_id"
ENDINGS: Mapping[str, DialectName] = {
    "/chat/completions": "openai_chat",
    "/responses": "openai_responses",
    "/messages": "anthropic",
}
METHODS = ("generateContent", "streamGenerateContent")
_WAYS: Mapping[DialectName, str] = {
    "openai_chat": "/v1/chat/completions",
    "openai_responses": "/v1/responses",
    "anthropic": "/v1/messages",
    "gemini": "/v1beta/models/",
    "gemini_gca": "/",
}

_NOT_FORWARDED = frozenset(
    {"host", "content-length", "connection", "accept-encoding", "transfer-encoding", "content-encoding", "expect"}
)
_OURS = "x-tersely-"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedExchange:
    """A recorded model call."""

    index: int
    request: ReplayRequest
    reply: Mapping[str, Any] | None


def is_call(line: Mapping[str, Any]) -> bool:
    """Return whether a line is a request with its address. Requests without a body are no model calls."""
    return not line.keys().isdisjoint({"body", "request_file", "method"}) and ("path" in line or "url" in line)


def with_files(line: Mapping[str, Any], read: Callable[[str], bytes]) -> Mapping[str, Any]:
    """Return a line with the content of the files that it names. Raises ValueError where a body is no JSON."""
    if not isinstance(line.get("request_file"), str):
        return line
    whole = {**line, "body": raw_json.load(read(line["request_file"]))}
    dialect = _by_path(line)
    if dialect is None or not isinstance(line.get("file"), str):
        return whole
    try:
        is_streamed = bool(line.get("stream"))
        reply, _ = read_answer(dialect, read(line["file"]), is_streamed=is_streamed)
    except (ValueError, KeyError, TypeError):
        return whole  # an error, or a stream that broke off: the whole reply is unknown
    return {**whole, "reply": reply}


def is_resent(line: Mapping[str, Any], later: Mapping[str, Any]) -> bool:
    """Return whether one request body begins with the whole history of the one before it."""
    for form in FORMS.values():
        history, more = (_history(each, form.key) for each in (line, later))
        if history and more and len(more) > len(history) and more[: len(history)] == history:
            return True
    return False


def _history(line: Mapping[str, Any], key: str) -> list[Any] | None:
    inner = line.get("request")
    held = inner if isinstance(inner, Mapping) and key in inner else line
    value = held.get(key)
    return value if isinstance(value, list) else None


def read_recording(
    name: str,
    lines: Sequence[tuple[int, Mapping[str, Any]]],
    replies: Mapping[object, Any],
    dialect: DialectName | None,
) -> Conversation:
    """Return all model calls of a recording as one conversation; other requests, probes among them, are left out.

    ``lines`` have their numbers. ``replies`` are keyed by the number of their request. Raises `BadTranscript`.
    """
    calls = [call for number, line in lines if (call := _read_call(number, line, replies, dialect)) is not None]
    return Conversation(id=name, number=1, steps=tuple(_with_replies(calls)), is_recording=True)


def _read_call(
    number: int, line: Mapping[str, Any], replies: Mapping[object, Any], dialect: DialectName | None
) -> RecordedExchange | None:
    if not is_call(line):
        found = recognise(line, dialect)
        request = _bare_request(found, line)
    else:
        body, found_by_path = _body(line, number), _by_path(line)
        if body is None or found_by_path is None or not _names_model(found_by_path, body):
            return None
        found = found_by_path
        request = ReplayRequest(
            dialect=found,
            target=_target(found, line),
            body=body,
            headers=_headers(line.get("headers")),
            is_streamed=_is_streamed(found, line, body),
            asks_usage=_asks_usage(found, body),
        )
    reply = next((line[key] for key in ("reply", "response") if key in line), None)
    reply = replies.get(line.get("n", number)) if reply is None else reply
    index = line["n"] if isinstance(line.get("n"), int) else number
    return RecordedExchange(
        index=index, request=request, reply=None if reply is None else read_reply(reply, found, number)
    )


def _body(line: Mapping[str, Any], number: int) -> bytes | None:
    """Return the body of a request to a model; None for requests that have none."""
    body = line.get("body")
    if isinstance(body, str):
        if not body:
            return None
        body = body.encode("utf-8", "surrogatepass")
        try:
            raw_json.split_object(body)
        except ValueError as error:
            raise BadTranscript(f"line {number}: the body is not a JSON object") from error
        return body
    return raw_json.dump(body) if isinstance(body, Mapping) and body else None


def _names_model(dialect: DialectName, body: bytes) -> bool:
    """Return whether a request names its model. Hosts that take it from the address have an unknown format."""
    return dialect == "gemini" or "model" in raw_json.split_object(body)


def _by_path(line: Mapping[str, Any]) -> DialectName | None:
    path = _path(line)
    if line.get("method", "POST") != "POST":
        return None
    method = path.rpartition(":")[2]
    if method in METHODS:
        return "gemini_gca" if "v1internal" in path else "gemini"
    return next((name for ending, name in ENDINGS.items() if path.endswith(ending)), None)


def _path(line: Mapping[str, Any]) -> str:
    return urlsplit(str(line.get("path") or line.get("url"))).path


def _target(dialect: DialectName, line: Mapping[str, Any]) -> str:
    """Return the path that the dialect uses itself. Hosts may have a prefix in front of it."""
    parts = urlsplit(str(line.get("path") or line.get("url")))
    query = line.get("query")
    more = urlencode(query, doseq=True) if isinstance(query, Mapping) else str(query or "")
    query_string = "&".join(filter(None, (parts.query, more)))
    last = parts.path.rpartition("/")[2]
    return _WAYS[dialect] + (last if _WAYS[dialect][-1] == "/" else "") + (f"?{query_string}" if query_string else "")


def _headers(value: object) -> dict[str, str]:
    """Return a client's own headers, without hop-by-hop headers and those for Tersely."""
    pairs: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, Mapping) else ()
    named = {str(name).lower(): str(words) for name, words in pairs}
    return {name: words for name, words in named.items() if name not in _NOT_FORWARDED and not name.startswith(_OURS)}


def _is_streamed(dialect: DialectName, line: Mapping[str, Any], body: bytes) -> bool:
    if dialect in {"gemini", "gemini_gca"}:
        return _path(line).endswith(":streamGenerateContent")
    return raw_json.split_object(body).get("stream") == b"true"


def _asks_usage(dialect: DialectName, body: bytes) -> bool | None:
    if dialect != "openai_chat":
        return None
    members = raw_json.split_object(body)
    options = raw_json.load(members.get("stream_options", b"null"))
    return members.get("stream") == b"true" and isinstance(options, dict) and bool(options.get("include_usage"))


def _bare_request(dialect: DialectName, line: Mapping[str, Any]) -> ReplayRequest:
    """Return the recorded body on the path that its dialect uses itself."""
    model = str(line.get("model") or MODEL)
    form = ReplyForm(model=model, is_streamed=bool(line.get("stream")))
    made = FORMS[dialect].request({}, [], form)
    body = {"model": model, **line} if dialect not in {"gemini", "gemini_gca"} else dict(line)
    if dialect == "gemini":
        body.pop("model", None)
    raw = raw_json.dump({key: value for key, value in body.items() if key not in {"reply", "response", "n", "dialect"}})
    return ReplayRequest(
        dialect=dialect,
        target=made.target,
        body=raw,
        headers=made.headers,
        is_streamed=form.is_streamed,
        asks_usage=_asks_usage(dialect, raw),
    )


def _with_replies(calls: Sequence[RecordedExchange]) -> Iterator[RecordedCall]:
    """Yield the calls in order. A reply that was not recorded is taken from a later request, which resends it."""
    histories = [_links(call.request) for call in calls]
    given = {call.reply["id"]: call.index for call in calls if call.reply is not None and call.reply.get("id")}
    items = {item.get("id") for call in calls for item in (call.reply or {}).get("output") or ()}
    last: int | None = None
    for index, call in enumerate(calls):
        named = previous_reply(call.request)
        # Without a recorded id, a request continues from the last reply.
        follows = (given.get(named) if given else last) if named else None
        if (named and follows is None) or not _references(call.request) <= items:
            continue  # the reply that it continues was not recorded
        reply = call.reply
        if reply is None:
            later = (each for other, each in zip(calls[index + 1 :], histories[index + 1 :], strict=True)
                     if other.request.dialect == call.request.dialect)  # fmt: skip
            reply = _next_reply(histories[index], later, call.request.dialect)
        if call.request.dialect == "openai_responses":
            last = call.index
        yield RecordedCall(
            index=call.index, dialect=call.request.dialect, reply=reply, source=call.request, follows=follows
        )


def previous_reply(request: ReplayRequest) -> str | None:
    """Return the id of the reply that a request continues."""
    if request.dialect != "openai_responses":
        return None
    named = raw_json.load(raw_json.split_object(request.body).get(PREVIOUS, b"null"))
    return named if isinstance(named, str) else None


def _references(request: ReplayRequest) -> set[object]:
    """Return the ids of items that a request references without their content, which only the provider has."""
    items = _history(raw_json.load(request.body), "input") if request.dialect == "openai_responses" else None
    return {item.get("id") for item in items or () if isinstance(item, dict) and _is_reference(item)}


def _is_reference(item: Mapping[str, Any]) -> bool:
    kind = item.get("type")
    return kind == "item_reference" or (
        kind == "reasoning" and not item.get("encrypted_content") and bool(item.get("id"))
    )


def going_on_from(request: ReplayRequest, reply_id: str) -> ReplayRequest:
    """Return the request of a client that got the reply under ``reply_id`` instead of the recorded id."""
    members = raw_json.split_object(request.body)
    return replace(request, body=raw_json.join_object({**members, PREVIOUS: raw_json.dump(reply_id)}))


Link = tuple[bytes, Message]


def _links(request: ReplayRequest) -> list[Link]:
    try:
        messages = DIALECTS[request.dialect].read_request(request.body).messages
    except InvalidRequest:
        return []
    return [(identity, message) for message in messages if (identity := canonical(message))]


def _next_reply(
    history: Sequence[Link], later: Iterable[Sequence[Link]], dialect: DialectName
) -> Mapping[str, Any] | None:
    before = [identity for identity, _ in history]
    for history in later:
        is_more = len(history) > len(before) and [identity for identity, _ in history[: len(before)]] == before
        if is_more and history[len(before)][1].role == "assistant":
            return FORMS[dialect].reply(history[len(before)][1].raw)
    return None
