"""Join rounds of one reply in Gemini's format: see `tersely.dialects.tool_rounds`.

A call arrives complete, in a part of its own. The client sees the id of the first round, the parts of all rounds and
the end of the last round with the usage of all. No event is inserted. The last event of a round waits until it is known
whether another round follows; if it becomes empty, it is dropped.

The provider signs the first of several calls, and expects that the first call in the next request is signed. So the
signature of a hidden call moves to the first visible one. The model gets its own reply back.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from typing_extensions import override

from tersely.dialects.gemini.read import items
from tersely.dialects.tool_rounds import EventRounds, FinishedRounds, Rounds, add_usage
from tersely.dialects.undescribed import UNDESCRIBED
from tersely.dialects.wire import raw_json
from tersely.dialects.wire.sse import SseDecoder, SseEvent, with_data

_NULL = b"null"
_BETWEEN = "\n\n"
"""Stands between the words of two rounds."""
_EMPTY_TEXT = b'{"text":""}'
_SIGNATURES = ("thoughtSignature", "thought_signature")

# The member of a part that holds a signature; empty without one.
_Signature = dict[str, bytes]
_UNSIGNED: _Signature = {}


def without_calls(message: bytes, names: frozenset[str]) -> bytes:
    """Return a reply's content without its calls to functions of these names."""
    members = raw_json.split_object(message)
    parts = items(members.get("parts", _NULL))
    left, _ = _shown(parts, names, _UNSIGNED)
    if len(left) == len(parts):
        return message
    return raw_json.join_object({**members, "parts": raw_json.join_array(left)})


def merge_messages(messages: Sequence[bytes]) -> bytes:
    """Return the last content, with the parts of all."""
    joined: list[bytes] = []
    for message in messages:
        parts = items(raw_json.split_object(message).get("parts", _NULL))
        joined += _spaced(parts)[0] if any(map(_words, joined)) else parts
    last = raw_json.split_object(messages[-1])
    if joined == items(last.get("parts", _NULL)):
        return messages[-1]
    return raw_json.join_object({**last, "parts": raw_json.join_array(joined)})


def write_body(first: bytes, last: bytes, message: bytes, usage: bytes, *, wrapper: str = "") -> bytes:
    """Return the ``last`` body with the id of the ``first``, and with that content and usage."""
    head, members = raw_json.split_object(first), raw_json.split_object(last)
    if wrapper and wrapper in members:
        inner = write_body(head.get(wrapper, b"{}"), members[wrapper], message, usage)
        return raw_json.join_object({**members, wrapper: inner})
    if "responseId" in head:
        members["responseId"] = head["responseId"]
    if usage:
        members["usageMetadata"] = usage
    candidate = raw_json.split_object(items(members["candidates"])[0])
    members["candidates"] = _one({**candidate, "content": message})
    return raw_json.join_object(members)


class GeminiRounds(EventRounds):
    """The streams of several rounds as one."""

    def __init__(self, names: frozenset[str], *, wrapper: str = "") -> None:
        super().__init__()
        self._names = names
        self._wrapper = wrapper
        self._is_first = True
        self._id = b""
        self._usage = b""
        self._waits_with_space = False
        self._signature: _Signature | None = _UNSIGNED
        self._end: list[SseEvent] = []

    def next_round(self, finished: FinishedRounds) -> bytes:
        """Drop the round's end, except its text."""
        rest = b"".join(self._write(event, is_end=False) for event in self._end)
        self._decoder, self._end, self._is_first = SseDecoder(), [], False
        self._usage, self._waits_with_space, self._signature = finished.usage, finished.has_text, _UNSIGNED
        return rest

    def close(self) -> bytes:
        """Return what was held back, and the end of the stream."""
        rest = b"".join(map(self._pass, self._decoder.close()))
        return rest + b"".join(self._write(event, is_end=True) for event in self._end)

    @override
    def _passes(self, block: bytes) -> bool:
        """Return whether events of the first round go out as they are, since they only have text."""
        return (
            self._is_first
            and not self._end
            and b"functionCall" not in block
            and b"finishReason" not in block
            and (bool(self._id) or b"responseId" not in block)
        )

    @override
    def _pass(self, event: SseEvent) -> bytes:
        if b'"finishReason"' in (event.data or b"") or self._end:
            self._end.append(event)
            return b""
        return self._write(event, is_end=False)

    def _write(self, event: SseEvent, *, is_end: bool) -> bytes:
        """Return the event for the client. ``is_end``: it may report the end of the reply."""
        if not event.data:
            return event.raw
        try:
            members = raw_json.split_object(event.data)
            is_wrapped = bool(self._wrapper) and self._wrapper in members
            payload = raw_json.split_object(members[self._wrapper]) if is_wrapped else members
            changed = self._change(payload, is_end=is_end)
        except UNDESCRIBED:
            return event.raw
        if changed is None:
            return b""
        if changed == payload:
            return event.raw
        if is_wrapped:
            changed = {**members, self._wrapper: raw_json.join_object(changed)}
        return with_data(event, raw_json.join_object(changed))

    def _change(self, payload: dict[str, bytes], *, is_end: bool) -> dict[str, bytes] | None:
        """Return the event's members for the client; None if it is empty."""
        self._id = self._id or payload.get("responseId", b"")
        if not is_end and self._end and not payload.get("candidates"):
            return None
        changed = dict(payload)
        if not self._is_first and "responseId" in payload and self._id:
            changed["responseId"] = self._id
        if self._usage and payload.get("usageMetadata", _NULL) != _NULL:
            changed["usageMetadata"] = add_usage(self._usage, payload["usageMetadata"])
        candidates = items(payload.get("candidates", _NULL))
        if not candidates:
            return changed
        candidate = raw_json.split_object(candidates[0])
        has_end = candidate.get("finishReason", _NULL) != _NULL
        content = raw_json.split_object(candidate["content"]) if candidate.get("content", _NULL) != _NULL else {}
        parts = items(content.get("parts", _NULL))
        left, self._signature = _shown(parts, self._names, self._signature)
        if self._waits_with_space:
            left, is_done = _spaced(left)
            self._waits_with_space = not is_done
        if has_end and not is_end:
            candidate = {key: value for key, value in candidate.items() if key != "finishReason"}
        if not any(part != _EMPTY_TEXT for part in left) and (left != parts or has_end) and not (has_end and is_end):
            return None
        if left != parts:
            content = {**content, "parts": raw_json.join_array(left or [_EMPTY_TEXT])}
            candidate = {**candidate, "content": raw_json.join_object(content)}
        written = _one(candidate)
        if candidate != raw_json.split_object(candidates[0]):
            changed["candidates"] = written
        return changed


def _shown(
    parts: Sequence[bytes], names: frozenset[str], signature: _Signature | None
) -> tuple[list[bytes], _Signature | None]:
    """Return ``parts`` without calls to these functions. The signature of the first hidden call is kept for the first
    visible one. None: a visible call has been sent.
    """
    left: list[bytes] = []
    for part in parts:
        name = _called(part)
        if name in names:
            signature = _signature_of(part) if signature == _UNSIGNED else signature
            continue
        if name is not None and signature is not None:
            is_moved = bool(signature) and not _signature_of(part)
            left.append(raw_json.join_object(raw_json.split_object(part) | signature) if is_moved else part)
            signature = None
        else:
            left.append(part)
    return left, signature


def _signature_of(part: bytes) -> _Signature:
    return {key: value for key, value in raw_json.split_object(part).items() if key in _SIGNATURES}


def _called(part: bytes) -> str | None:
    value = raw_json.load(part)
    call = value.get("functionCall") if isinstance(value, dict) else None
    name = call.get("name") if isinstance(call, dict) else None
    return name if isinstance(name, str) else None


def _words(part: bytes) -> str:
    value = raw_json.load(part)
    if not isinstance(value, dict) or value.get("thought"):
        return ""
    text = value.get("text")
    return text if isinstance(text, str) else ""


def _spaced(parts: list[bytes]) -> tuple[list[bytes], bool]:
    """Return ``parts`` with space in front of their first words, and whether there are any."""
    index = next((index for index, part in enumerate(parts) if _words(part)), None)
    if index is None:
        return parts, False
    text = raw_json.dump(_BETWEEN + _words(parts[index]))
    return [
        *parts[:index],
        raw_json.join_object({**raw_json.split_object(parts[index]), "text": text}),
        *parts[index + 1 :],
    ], True


def _one(candidate: dict[str, bytes]) -> bytes:
    return raw_json.join_array([raw_json.join_object(candidate)])


def rounds(wrapper: str = "") -> Rounds:
    """Return the rounds format. ``wrapper``: the member of each body that contains Gemini's own format, if there is
    one.
    """
    return Rounds(
        without_calls=without_calls,
        merge_messages=merge_messages,
        write_body=partial(write_body, wrapper=wrapper),
        open=partial(GeminiRounds, wrapper=wrapper),
    )
