"""Join rounds of one reply in OpenAI's chat format: see `tersely.dialects.tool_rounds`.

The first delta of a call nearly always contains its name. A call is held back until it is known whose tool it calls;
text goes out at once. The client sees the ids of the first round, the text of all rounds, and calls and end of the last
round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from tersely.dialects.openai_chat.read import read_reply
from tersely.dialects.openai_chat.stream_events import read_described
from tersely.dialects.tool_rounds import EventRounds, FinishedRounds, Rounds, add_usage
from tersely.dialects.undescribed import UNDESCRIBED
from tersely.dialects.wire import raw_json
from tersely.dialects.wire.sse import SseDecoder, SseEvent, parse_event, with_data

_DATA = b"data: "
_DONE = b"[DONE]"
_NULL = b"null"
_ONCE = ("id", "created", "model", "system_fingerprint")
"""Members that are the same in all events of a stream."""
_BETWEEN = "\n\n"
"""Stands between the words of two rounds."""


def without_calls(message: bytes, names: frozenset[str]) -> bytes:
    """Return a reply's message without its calls to tools of these names."""
    members = raw_json.split_object(message)
    calls = _calls(members)
    left = [raw for raw, call in calls if _name(call) not in names]
    if len(left) == len(calls):
        return message
    if left:
        members["tool_calls"] = raw_json.join_array(left)
    else:
        del members["tool_calls"]
        if members.get("content", _NULL) == _NULL:
            members["content"] = b'""'
    return raw_json.join_object(members)


def merge_messages(messages: Sequence[bytes]) -> bytes:
    """Return the last message, with the words of all."""
    texts = [read_reply(message).text_without_refusal for message in messages]
    if not any(texts[:-1]):
        return messages[-1]
    members = raw_json.split_object(messages[-1])
    members["content"] = raw_json.dump(_BETWEEN.join(filter(None, texts)))
    return raw_json.join_object(members)


def write_body(first: bytes, last: bytes, message: bytes, usage: bytes) -> bytes:
    """Return the ``last`` body with the ids of the ``first``, and with that message and usage."""
    has_started, members = raw_json.split_object(first), raw_json.split_object(last)
    members |= {key: has_started[key] for key in _ONCE if key in has_started}
    choice = raw_json.split_object(raw_json.split_array(members["choices"])[0])
    choice["message"] = message
    if _value_of(choice.get("finish_reason")) == "tool_calls" and not _calls(raw_json.split_object(message)):
        choice["finish_reason"] = b'"stop"'
    members["choices"] = raw_json.join_array([raw_json.join_object(choice)])
    if usage:
        members["usage"] = usage
    return raw_json.join_object(members)


@dataclass(slots=True, kw_only=True)
class _StreamedCall:
    """A call on its way. ``is_ours`` None: not known yet, its deltas are held. ``index`` is that in the round (None:
    without one), ``number`` that for the client.
    """

    index: int | None
    id: str = ""
    name: str = ""
    is_ours: bool | None = None
    held: list[bytes] = field(default_factory=list)
    number: int = -1


class ChatRounds(EventRounds):
    """The streams of several rounds as one."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__()
        self._names = names
        self._round = 1
        self._sample = b""
        self._once: dict[str, bytes] = {}
        self._usage = b""
        self._waits_with_space = False
        self._has_role = False
        self._shown = 0
        self._calls: list[_StreamedCall] = []
        self._by_index: dict[int, _StreamedCall] = {}
        self._end: list[SseEvent] = []
        self._has_waiting = False

    def next_round(self, finished: FinishedRounds) -> bytes:
        """Forget the round's end."""
        rest = self._release()
        if self._round == 1 and self._sample:
            members = _last_members(self._sample)
            self._once = {key: members[key] for key in _ONCE if key in members}
        self._round += 1
        self._usage = finished.usage
        self._waits_with_space = finished.has_text
        self._decoder = SseDecoder()
        self._calls, self._by_index, self._end = [], {}, []
        self._has_waiting = False
        return rest

    def close(self) -> bytes:
        """Return what was held back, and the end of the stream."""
        rest = b"".join(map(self._pass, self._decoder.close()))
        return rest + self._release() + b"".join(map(self._write_end, self._end))

    @override
    def _passes(self, block: bytes) -> bool:
        """Return whether events of the first round go out as they are; most do. They need not be taken apart then."""
        if self._round > 1 or self._end or _DONE in block:
            return False
        if self._is_plain(block):
            return True
        return all(
            event.startswith(_DATA)
            and b"\n" not in event
            and (self._is_plain(event) or self._continues_calls(event[len(_DATA) :]))
            for event in block.split(b"\n\n")[:-1]
        )

    @override
    def _pass(self, event: SseEvent) -> bytes:
        data = (event.data or b"").strip()
        if data == _DONE or (data and self._end):
            self._end.append(event)
            return b""
        if not data or (self._round == 1 and (self._is_plain(event.raw) or self._continues_calls(data))):
            return event.raw
        try:
            return self._pass_chunk(event, data)
        except UNDESCRIBED:
            return event.raw

    def _is_plain(self, block: bytes) -> bool:
        """Return whether events contain neither calls nor an end."""
        if b"data:" in block:
            self._sample = block
        if b'"role"' in block:
            self._has_role = True
        if b"tool_calls" in block:
            return False
        count = block.count(b"finish_reason")
        return count == block.count(b'"finish_reason":null') + block.count(b'"finish_reason": null')

    def _continues_calls(self, data: bytes) -> bool:
        """Return whether an event only has more of calls that the client sees under the numbers that they have."""
        chunk = read_described(data)
        if chunk is None or not chunk.choices:
            return False
        choice = chunk.choices[0]
        if choice.finish_reason is not None or choice.delta is None or not choice.delta.tool_calls:
            return False
        for delta in choice.delta.tool_calls:
            call = None if delta.index is None else self._by_index.get(delta.index)
            if call is None or call.number != delta.index:
                return False
            if delta.id and delta.id != call.id:
                return False
        return True

    def _pass_chunk(self, event: SseEvent, data: bytes) -> bytes:
        members = raw_json.split_object(data)
        if _has_value(members.get("error")):
            return event.raw
        choices = raw_json.split_array(members["choices"]) if _has_value(members.get("choices")) else []
        if not choices:
            self._end.append(event)
            return b""
        choice = raw_json.split_object(choices[0])
        delta = raw_json.split_object(choice["delta"]) if _has_value(choice.get("delta")) else {}
        changed = self._change_delta(delta)
        finish = choice.get("finish_reason", _NULL)
        if finish == _NULL and not changed and self._round == 1:
            return event.raw
        if finish != _NULL and not changed and self._round == 1 and all(call.is_ours is False for call in self._calls):
            self._end.append(event)  # no call of Tersely's can follow: this is the last round's end, unchanged
            return b""
        out = b""
        if any(_has_value(value) for value in delta.values()):
            shown = {**choice, "delta": raw_json.join_object(delta)}
            if finish != _NULL:
                shown["finish_reason"] = _NULL
            out = self._write(event, members, shown)
        if finish != _NULL:
            if out:
                event = _with_event_data(event, members | {"choices": _one({**choice, "delta": b"{}"})})
            self._end.append(event)
        return out

    def _change_delta(self, delta: dict[str, bytes]) -> bool:
        """Take out of ``delta`` what the client must not see; whether anything has changed."""
        changed = False
        if _has_value(delta.get("tool_calls")):
            deltas = raw_json.split_array(delta["tool_calls"])
            shown = self._sort(deltas)
            if shown != deltas:
                changed = True
                delta["tool_calls"] = raw_json.join_array(shown)
            if not shown:
                del delta["tool_calls"]
        if self._round > 1 and "role" in delta and self._has_role:
            del delta["role"]
            changed = True
        self._has_role = self._has_role or "role" in delta
        text = raw_json.load(delta.get("content", _NULL))
        if self._waits_with_space and isinstance(text, str) and text:
            delta["content"] = raw_json.dump(_BETWEEN + text)
            self._waits_with_space = False
            changed = True
        return changed

    def _sort(self, deltas: Sequence[bytes]) -> list[bytes]:
        """Return the deltas of the client's calls, including those that had to wait."""
        shown: list[bytes] = []
        for raw in deltas:
            delta = raw_json.load(raw)
            call, is_new = self._find(delta)
            if is_new:
                shown += self._release_complete(but=call)
            function = delta.get("function") or {}
            call.name += function.get("name") or ""
            call.held.append(raw)
            if call.is_ours is None:
                is_custom = delta.get("custom") is not None
                call.is_ours = (
                    False if is_custom else self._judge(call.name, has_started=bool(function.get("arguments")))
                )
            shown += self._take(call)
            shown += self._take_waiting()
        return shown

    def _find(self, delta: dict[str, Any]) -> tuple[_StreamedCall, bool]:
        """By index, as `tersely.dialects.openai_chat.stream` does; and whether it begins here."""
        index, call_id = delta.get("index"), delta.get("id") or ""
        call = (self._calls[-1] if self._calls else None) if index is None else self._by_index.get(index)
        is_new = call is None or bool(call_id and call.id and call_id != call.id)
        if call is None or is_new:
            call = _StreamedCall(index=index if type(index) is int else None)
            self._calls.append(call)
        call.id = call_id or call.id
        if index is not None:
            self._by_index[index] = call
        return call, is_new

    def _judge(self, name: str, *, has_started: bool) -> bool | None:
        """Return whether a call with this name so far is to a tool of Tersely's.

        None while the name may continue and be another tool's.
        """
        if has_started:
            return name in self._names
        return None if any(own.startswith(name) for own in self._names) else False

    def _take(self, call: _StreamedCall, *, is_last: bool = False) -> list[bytes]:
        """Return the held parts of a call once its owner is known; nothing for a call to Tersely's tools.

        A call waits for those with lower indexes, unless ``is_last``: nothing more comes. Clients order calls by index.
        """
        if call.is_ours is None:
            return []
        if call.is_ours:
            call.held = []
            return []
        if call.number < 0 and not is_last and not self._is_next(call):
            self._has_waiting = True
            return []
        held, call.held = call.held, []
        if call.number < 0:
            call.number = self._shown
            self._shown += 1
        return [_numbered(raw, call.number) for raw in held]

    def _is_next(self, call: _StreamedCall) -> bool:
        """Return whether every call with a lower index has its number, or is one to Tersely's tools."""
        before = (self._by_index.get(index) for index in range(call.index or 0))
        return all(each is not None and (each.is_ours or each.number >= 0) for each in before)

    def _take_waiting(self, *, is_last: bool = False) -> list[bytes]:
        """Return the held parts of calls that have waited for others with lower indexes."""
        if not self._has_waiting:
            return []
        self._has_waiting = False
        calls = sorted(self._calls, key=lambda call: call.index or 0)
        return [raw for call in calls if call.held for raw in self._take(call, is_last=is_last)]

    def _release_complete(self, *, but: _StreamedCall | None = None) -> list[bytes]:
        """Release the held deltas of the client's calls, except this one: they are complete."""
        shown: list[bytes] = []
        for call in self._calls:
            if call.is_ours is None and call is not but:
                call.is_ours = call.name in self._names
                shown += self._take(call)
        return shown

    def _release(self) -> bytes:
        """Return the held parts of the client's calls as an event, when the round ends."""
        shown = self._release_complete() + self._take_waiting(is_last=True)
        if not shown:
            return b""
        members = _last_members(self._sample)
        choice = {"index": b"0", "delta": b'{"tool_calls":' + raw_json.join_array(shown) + b"}", "finish_reason": _NULL}
        members.pop("usage", None)
        return b"data: " + raw_json.join_object({**members, **self._once, "choices": _one(choice)}) + b"\n\n"

    def _write(self, event: SseEvent, members: dict[str, bytes], choice: dict[str, bytes]) -> bytes:
        return with_data(event, raw_json.join_object(self._summed({**members, **self._once, "choices": _one(choice)})))

    def _write_end(self, event: SseEvent) -> bytes:
        """Write an event that ends the last round. Where Tersely answered every tool call, the event names none."""
        data = (event.data or b"").strip()
        if not data or data == _DONE:
            return event.raw
        try:
            return self._changed_end(event, data)
        except UNDESCRIBED:
            return event.raw

    def _changed_end(self, event: SseEvent, data: bytes) -> bytes:
        members = raw_json.split_object(data)
        choices = raw_json.split_array(members["choices"]) if _has_value(members.get("choices")) else []
        changed = {**members, **{key: value for key, value in self._once.items() if key in members}}
        if choices and not self._shown and any(call.is_ours for call in self._calls):
            choice = raw_json.split_object(choices[0])
            if _value_of(choice.get("finish_reason")) == "tool_calls":
                changed["choices"] = _one({**choice, "finish_reason": b'"stop"'})
        changed = self._summed(changed)
        return event.raw if changed == members else with_data(event, raw_json.join_object(changed))

    def _summed(self, members: dict[str, bytes]) -> dict[str, bytes]:
        """Return the members with the usage of all rounds so far."""
        if self._usage and _has_value(members.get("usage")):
            return {**members, "usage": add_usage(self._usage, members["usage"])}
        return members


def _last_members(block: bytes) -> dict[str, bytes]:
    """Return the members of the last chunk in a block of events; an empty dict if there is none."""
    for raw in reversed(block.split(b"\n\n")):
        data = parse_event(raw).data
        if data:
            try:
                return raw_json.split_object(data)
            except ValueError:
                return {}
    return {}


def _with_event_data(event: SseEvent, members: dict[str, bytes]) -> SseEvent:
    data = raw_json.join_object(members)
    return SseEvent(raw=with_data(event, data), data=data, event=event.event)


def _one(choice: dict[str, bytes]) -> bytes:
    return raw_json.join_array([raw_json.join_object(choice)])


def _numbered(delta: bytes, number: int) -> bytes:
    members = raw_json.split_object(delta)
    if members.get("index") == b"%d" % number:
        return delta
    return raw_json.join_object({**members, "index": b"%d" % number})


def _calls(members: dict[str, bytes]) -> list[tuple[bytes, Any]]:
    raws = raw_json.split_array(members["tool_calls"]) if _has_value(members.get("tool_calls")) else []
    return [(raw, raw_json.load(raw)) for raw in raws]


def _name(call: object) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def _has_value(value: bytes | None) -> bool:
    return value is not None and value not in {_NULL, b"[]", b"{}"}


def _value_of(value: bytes | None) -> object:
    return raw_json.load(value) if value else None


ROUNDS = Rounds(without_calls=without_calls, merge_messages=merge_messages, write_body=write_body, open=ChatRounds)
