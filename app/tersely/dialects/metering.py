"""Measure model calls that are no conversations: completions, embeddings, images, sound, batches, and unknown ones.

Hosts report usage in one of few forms, whatever the call. Where they report none, texts are measured by their length.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from tersely.dialects.anthropic import read as anthropic
from tersely.dialects.dialect import Usage
from tersely.dialects.gemini import read as gemini
from tersely.dialects.openai_chat import read as openai_chat
from tersely.dialects.openai_responses import read as openai_responses
from tersely.dialects.wire import raw_json
from tersely.dialects.wire.sse import EventTooLarge, SseDecoder, SseEvent
from tersely.domain.tokens import FILE_TOKENS, IMAGE_UNKNOWN, estimate

# Members of requests that may hold encoded bytes; others hold text.
_ENCODED = frozenset(
    {
        *("data", "b64_json", "bytesBase64Encoded", "file_data"),
        *("url", "image_url", "image", "images", "mask", "audio", "video"),
    }
)
_BASE64 = re.compile(r"(?:data:[\w./+-]*;base64,)?[A-Za-z0-9+/_=-]{256,}")
# Members of requests that may hold tokens as numbers.
_TOKENS = frozenset({"prompt", "input"})
# Members of replies that hold text of a model.
_WRITTEN = frozenset(
    {
        *("text", "content", "completion", "delta", "arguments", "thinking", "partial_json", "reasoning"),
        *("reasoning_content", "refusal", "transcript", "generated_text"),
    }
)
# Objects of replies that usage may stand in.
_AROUND = ("response", "message", "result")
# Members of replies that are read in any case.
_READ = frozenset({"error", "usage", "usageMetadata", "model", "modelVersion", *_AROUND})


class MeteredRequest(msgspec.Struct, frozen=True, gc=False):
    """A request's model (empty: the address names it), and about how many tokens it has."""

    model: str
    tokens: int


class MeteredReply(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A reply's reported usage and model, and about how many tokens a model has written. ``is_error``: it is none."""

    usage: Usage
    model: str = ""
    written: int = 0
    is_error: bool = False


def measure_requests(body: bytes, content_type: str) -> list[MeteredRequest]:
    """Return the requests in a body: of a batch what stands beside them, and each. O(size of the body)."""
    boundary = re.search(r'multipart/.*boundary="?([^";,]+)', content_type, re.IGNORECASE)
    dashes = b"--" + boundary[1].strip().encode("latin-1", "replace") if boundary is not None else b""
    if dashes and body.lstrip().startswith(dashes):
        return [_measure_form(body.split(dashes))]
    try:
        request = raw_json.load(body)
    except ValueError:
        return [MeteredRequest("", estimate(len(body)))]
    batch = request.get("requests") if isinstance(request, dict) else None
    if not isinstance(batch, list):
        return [MeteredRequest(_model_of(request), _measure(request))]
    beside = {name: value for name, value in request.items() if name != "requests"}
    parts = [each.get("params", each) if isinstance(each, dict) else each for each in batch]
    return [MeteredRequest(_model_of(each), _measure(each)) for each in (beside, *parts)]


def _model_of(request: object) -> str:
    model = request.get("model") if isinstance(request, dict) else None
    return model if isinstance(model, str) else ""


def _measure(request: object) -> int:
    """Return about how many tokens a parsed request has."""
    characters = fixed = 0
    for name, value in _leaves(request):
        if isinstance(value, str):
            if name in _ENCODED and _BASE64.fullmatch(value):
                fixed += IMAGE_UNKNOWN
            else:
                characters += len(value)
        elif type(value) is int and name in _TOKENS:
            fixed += 1
    return estimate(characters) + fixed


def _leaves(value: object) -> Iterator[tuple[str, object]]:
    """Yield the values that are neither objects nor arrays, each with the name of the member that it stands in."""
    waiting: list[tuple[str, object]] = [("", value)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            waiting.extend(value.items())
        elif isinstance(value, list):
            waiting.extend([(name, each) for each in value])
        else:
            yield name, value


def _measure_form(parts: Sequence[bytes]) -> MeteredRequest:
    """Measure the parts of a form (RFC 7578): texts by their length, each file by a fixed figure."""
    model, tokens = "", 0
    for part in parts:
        head, between, content = part.partition(b"\r\n\r\n")
        if not between:
            tokens += estimate(len(part.strip(b"-\r\n")))
        elif re.search(rb"\bfilename\*?=", head):
            tokens += FILE_TOKENS
        elif re.search(rb'\bname="?model"?\s*(?:;|\r|$)', head):
            model = content.strip().decode("utf-8", "replace")
        else:
            tokens += estimate(len(content))
    return MeteredRequest(model, tokens)


class ReplyMeter:
    """Measures a reply as it passes. ``limit`` bounds the bytes that are kept of one that is not streamed."""

    def __init__(self, content_type: str, limit: int) -> None:
        self._is_text = content_type.startswith("text/")
        self._events = SseDecoder(limit) if content_type == "text/event-stream" else None
        self._limit = limit
        self._pieces: list[bytes] = []
        self._usage = Usage()
        self._model = ""
        self._characters = 0
        self._has_error = False
        self.size = 0

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes."""
        self.size += len(chunk)
        if self._events is not None:
            try:
                self._read_events(self._events.feed(chunk))
            except EventTooLarge:
                self._characters += self._limit
                self._events = SseDecoder(self._limit)
        elif self.size <= self._limit:
            self._pieces.append(chunk)
        else:
            self._pieces.clear()

    def close(self) -> MeteredReply:
        """End the reply, and return its usage, its model and the tokens that were written.

        O(size of the reply), unless it is streamed: events are read as they pass.
        """
        if self._events is not None:
            self._read_events(self._events.close())
        elif self._pieces:
            self._read_whole(b"".join(self._pieces))
        elif self._is_text:
            self._characters = self.size
        return MeteredReply(
            usage=self._usage,
            model=self._model,
            written=estimate(self._characters),
            is_error=self._has_error and not self._characters and self._usage == Usage(),
        )

    def _read_events(self, events: list[SseEvent]) -> None:
        for event in events:
            try:
                value = raw_json.load(event.data or b"null")
            except ValueError:
                continue
            if isinstance(value, dict):
                self._add(value)
            self._characters += _count_written(value)

    def _read_whole(self, body: bytes) -> None:
        """Read a JSON reply. Its texts are only looked at where it reports no usage. JSON that breaks off counts by its
        length, and so does plain text.
        """
        try:
            members = raw_json.split_object(body) if body.lstrip().startswith(b"{") else {}
            self._add({name: raw_json.load(members[name]) for name in _READ & members.keys()})
            value = None if self._usage.input is not None else raw_json.load(body)
        except ValueError:
            is_json = body.lstrip()[:1] in (b"{", b"[")
            self._characters = len(body) if is_json or self._is_text else 0
            return
        for each in value if isinstance(value, list) else ():
            if isinstance(each, dict):
                self._add(each)
        self._characters = _count_written(value)

    def _add(self, value: Mapping[str, Any]) -> None:
        self._has_error = self._has_error or bool(value.get("error"))
        for each in (value, *(inner for name in _AROUND if isinstance(inner := value.get(name), dict))):
            if not self._model and isinstance(model := each.get("model") or each.get("modelVersion"), str):
                self._model = model
            for usage in (each.get("usage"), each.get("usageMetadata")):
                if isinstance(usage, dict):
                    self._usage = _most(self._usage, read_usage(usage))


def _count_written(value: object) -> int:
    """Return the characters of a reply that a model has written."""
    return sum([len(text) for name, text in _leaves(value) if name in _WRITTEN and isinstance(text, str)])


def read_usage(usage: Mapping[str, Any]) -> Usage:
    """Read a usage object of any host's. Where it names one sum alone, that is the input."""
    raw = raw_json.dump(usage)
    found = Usage()
    if "promptTokenCount" in usage:
        found = gemini.read_usage(raw)
    elif "prompt_tokens" in usage:
        found = openai_chat.read_usage(raw)
    elif "cache_read_input_tokens" in usage or "cache_creation_input_tokens" in usage:
        found = anthropic.read_usage(raw)
    elif "input_tokens" in usage or "output_tokens" in usage:
        found = openai_responses.read_usage(raw)
    elif "total_input_tokens" in usage:  # Gemini's interactions
        found = Usage(
            input=_sum(usage, "total_input_tokens", "total_tool_use_tokens"),
            cached=_sum(usage, "total_cached_tokens"),
            output=_sum(usage, "total_output_tokens", "total_thought_tokens"),
        )
    if found.input is None and found.output is None:
        total = usage.get("total_tokens", usage.get("totalTokenCount"))
        return Usage(input=total) if type(total) is int else found
    return found


def _sum(usage: Mapping[str, Any], *names: str) -> int:
    return sum([value for name in names if type(value := usage.get(name)) is int])


def _most(one: Usage, other: Usage) -> Usage:
    """Return the larger of each count: streams report usage again as it grows."""
    pairs = ((getattr(one, name), getattr(other, name)) for name in ("input", "cached", "output", "written"))
    most = [max((each for each in pair if each is not None), default=None) for pair in pairs]
    return Usage(input=most[0], cached=most[1], output=most[2], written=most[3])
