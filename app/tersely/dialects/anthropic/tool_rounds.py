"""Join rounds of one reply in Anthropic's format: see `tersely.dialects.tool_rounds`.

The start of a block names the called tool, so nothing waits. The client sees the beginning of the first round, the
blocks of all rounds, renumbered, and the end of the last round with the usage of all.
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from tersely.dialects.anthropic.content import content_of, string_member
from tersely.dialects.anthropic.stream import DELTAS
from tersely.dialects.tool_rounds import EventRounds, FinishedRounds, Rounds, add_usage
from tersely.dialects.undescribed import UNDESCRIBED
from tersely.dialects.wire import raw_json
from tersely.dialects.wire.sse import SseDecoder, SseEvent, with_data

_NULL = b"null"
_ONCE = ("id", "model")


def without_calls(message: bytes, names: frozenset[str]) -> bytes:
    """Return a reply's message without its calls to tools of these names."""
    blocks = content_of(message)
    left = [block for block in blocks if not _is_call_of(raw_json.split_object(block), names)]
    if len(left) == len(blocks):
        return message
    return raw_json.join_object({**raw_json.split_object(message), "content": raw_json.join_array(left)})


def merge_messages(messages: Sequence[bytes]) -> bytes:
    """Return the last message, with the blocks of all."""
    blocks = [block for message in messages for block in content_of(message)]
    if blocks == content_of(messages[-1]):
        return messages[-1]
    return raw_json.join_object({**raw_json.split_object(messages[-1]), "content": raw_json.join_array(blocks)})


def write_body(first: bytes, last: bytes, message: bytes, usage: bytes) -> bytes:
    """Return the ``last`` body with the ids of the ``first``, and with that message and usage."""
    head, members = raw_json.split_object(first), raw_json.split_object(last)
    members |= {key: head[key] for key in _ONCE if key in head}
    members["content"] = raw_json.join_array(content_of(message))
    if not _has_calls(content_of(message)):
        members = _ended(members)
    return raw_json.join_object({**members, "usage": usage} if usage else members)


class MessageRounds(EventRounds):
    """The streams of several rounds as one."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__()
        self._names = names
        self._is_first = True
        self._usage = b""
        self._round_usage = b""
        self._numbers: dict[int, int] = {}
        self._hidden: set[int] = set()
        self._next = 0
        self._has_calls = False
        self._has_hidden = False
        self._keeps_numbers = True  # the client sees every block of the first round under its own number
        self._end: list[SseEvent] = []

    def next_round(self, finished: FinishedRounds) -> bytes:
        """Forget the round's end."""
        self._decoder, self._keeps_numbers = SseDecoder(), False
        self._is_first, self._usage, self._round_usage = False, finished.usage, b""
        self._numbers, self._hidden, self._end, self._has_hidden = {}, set(), [], False
        return b""

    def close(self) -> bytes:
        """Return what was held back, and the end of the stream."""
        rest = b"".join(map(self._pass, self._decoder.close()))
        return rest + b"".join(map(self._write_end, self._end))

    @override
    def _passes(self, block: bytes) -> bool:
        return self._keeps_numbers and DELTAS.fullmatch(block) is not None

    @override
    def _pass(self, event: SseEvent) -> bytes:
        if not event.data:
            return event.raw
        try:
            members = raw_json.split_object(event.data)
            return self._pass_event(event, members, string_member(members, "type"))
        except UNDESCRIBED:
            return event.raw

    def _pass_event(self, event: SseEvent, members: dict[str, bytes], kind: str) -> bytes:
        if kind in {"message_delta", "message_stop"}:
            self._end.append(event)
            return b""
        if kind == "message_start":
            self._round_usage = raw_json.split_object(members["message"]).get("usage", b"")
            return event.raw if self._is_first else b""
        if not kind.startswith("content_block_"):
            return event.raw
        index = int(members["index"])
        if kind == "content_block_start" and not self._starts(index, raw_json.split_object(members["content_block"])):
            return b""
        number = self._numbers.get(index)
        if index in self._hidden:
            return b""
        if number is None or number == index:
            return event.raw
        return _with_members(event, {**members, "index": b"%d" % number})

    def _starts(self, index: int, block: dict[str, bytes]) -> bool:
        """Return whether a block is the client's; it gets its number then."""
        if _is_call_of(block, self._names):
            self._numbers.pop(index, None)
            self._hidden.add(index)
            self._has_hidden, self._keeps_numbers = True, False
            return False
        self._has_calls = self._has_calls or string_member(block, "type") == "tool_use"
        self._hidden.discard(index)
        self._numbers[index] = self._next
        self._keeps_numbers = self._keeps_numbers and index == self._next
        self._next += 1
        return True

    def _write_end(self, event: SseEvent) -> bytes:
        """Write an event that ends the last round. Where Tersely answered every tool call, the event names none."""
        try:
            return self._changed_end(event)
        except UNDESCRIBED:
            return event.raw

    def _changed_end(self, event: SseEvent) -> bytes:
        members = raw_json.split_object(event.data or b"{}")
        if string_member(members, "type") != "message_delta":
            return event.raw
        changed = dict(members)
        if self._has_hidden and not self._has_calls and members.get("delta", _NULL) != _NULL:
            changed["delta"] = raw_json.join_object(_ended(raw_json.split_object(members["delta"])))
        if self._usage:
            # The client did not get the start of this round, which has the usage.
            own = raw_json.load(self._round_usage or b"{}") | raw_json.load(members.get("usage", b"{}"))
            changed["usage"] = add_usage(self._usage, raw_json.dump(own))
        return event.raw if changed == members else _with_members(event, changed)


def _is_call_of(block: dict[str, bytes], names: frozenset[str]) -> bool:
    return string_member(block, "type") == "tool_use" and string_member(block, "name") in names


def _has_calls(blocks: Sequence[bytes]) -> bool:
    return any(string_member(raw_json.split_object(block), "type") == "tool_use" for block in blocks)


def _ended(members: dict[str, bytes]) -> dict[str, bytes]:
    """Return a turn that ended without a call."""
    return {**members, "stop_reason": b'"end_turn"'} if string_member(members, "stop_reason") == "tool_use" else members


def _with_members(event: SseEvent, members: dict[str, bytes]) -> bytes:
    return with_data(event, raw_json.join_object(members))


ROUNDS = Rounds(without_calls=without_calls, merge_messages=merge_messages, write_body=write_body, open=MessageRounds)
