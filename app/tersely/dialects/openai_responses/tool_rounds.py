"""Join rounds of one reply in OpenAI's responses format: see `tersely.dialects.tool_rounds`.

The start of an item names the called tool, so texts never wait. The client sees the beginning of the first round, the
items of all rounds, renumbered, and the end of the last round with the usage of all.

The provider refuses thoughts without the item that they led to, and a client sends back what it was shown. So thoughts
wait for the item after them, and are hidden or shown with it.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from tersely.dialects.openai_responses.accumulator import ENDS, index, output_items, string
from tersely.dialects.openai_responses.content import as_run, item_type, items_of
from tersely.dialects.openai_responses.stream import DELTAS
from tersely.dialects.openai_responses.tools import tools_outside_list
from tersely.dialects.openai_responses.whole import replace_output
from tersely.dialects.tool_rounds import EventRounds, FinishedRounds, Rounds, add_usage
from tersely.dialects.undescribed import UNDESCRIBED
from tersely.dialects.wire import raw_json
from tersely.dialects.wire.sse import SseDecoder, SseEvent, with_data

_ONCE = ("id", "created_at")
"""Members of the response as a whole."""
_BEGINNINGS = frozenset({"response.created", "response.queued", "response.in_progress"})
_ITEMS = ("response.output_item.added", "response.output_item.done")
_NUMBER = "sequence_number"
_OUTPUT_INDEX = "output_index"
_CALLS = frozenset({"function_call", "custom_tool_call"})
# Inside a JSON string the quotation marks would be escaped.
_INDEX = re.compile(rb'"output_index"\s*+:\s*+(\d{1,9}+)')


def without_calls(message: bytes, names: frozenset[str]) -> bytes:
    """Return a reply's items without calls to tools of these names, and without thoughts that led only to
    such calls.
    """
    items = items_of(message)
    left = _theirs(items, names)
    return message if left == items else as_run(left)


def merge_messages(messages: Sequence[bytes]) -> bytes:
    """Return the items of all."""
    items = [item for message in messages for item in items_of(message)]
    return messages[-1] if items == items_of(messages[-1]) else as_run(items)


def write_body(first: bytes, last: bytes, message: bytes, usage: bytes) -> bytes:
    """Return the ``last`` body with the id of the ``first``, and with those items and usage."""
    head, members = raw_json.split_object(first), raw_json.split_object(last)
    members |= {key: head[key] for key in _ONCE if key in head}
    members = replace_output(members, items_of(message))
    return raw_json.join_object({**members, "usage": usage} if usage else members)


class _ItemVisibility:
    """Records which items of a round are shown. An item has several keys; ``is_shown`` is None while it is
    undecided.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._shown: dict[int, bool | None] = {}
        self._thoughts: list[int] = []
        self._is_claimed = False

    def is_shown(self, key: int) -> bool | None:
        """Return whether the client sees an item."""
        return self._shown.get(key, True)

    def add(self, key: int, item: dict[str, Any], *, is_whole: bool = True) -> None:
        """The next item, if it is not known yet; a call is not as long as it has no name and has not ended."""
        if self._shown.get(key) is not None or key in self._thoughts:
            return
        kind, name = item_type(item), item.get("name")
        if kind == "reasoning":
            if self._is_claimed:
                self._decide_thoughts(is_shown=False)
            self._shown[key] = None
            self._thoughts.append(key)
        elif kind in _CALLS and not name and not is_whole:
            self._shown[key] = None
        elif kind in _CALLS and isinstance(name, str) and name in self._names and not item.get("namespace"):
            self._shown[key] = False
            self._is_claimed = True
        else:
            self._shown[key] = True
            self._decide_thoughts(is_shown=True)

    def close(self) -> None:
        """No item comes any more."""
        self._decide_thoughts(is_shown=not self._is_claimed)
        self._shown |= {key: True for key, is_shown in self._shown.items() if is_shown is None}

    def _decide_thoughts(self, *, is_shown: bool) -> None:
        self._shown |= dict.fromkeys(self._thoughts, is_shown)
        self._thoughts, self._is_claimed = [], False


def _theirs(items: Sequence[bytes], names: frozenset[str]) -> list[bytes]:
    sorting = _ItemVisibility(names)
    for key, raw in enumerate(items):
        sorting.add(key, raw_json.load(raw))
    sorting.close()
    return [raw for key, raw in enumerate(items) if sorting.is_shown(key)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _RoundEvent:
    """An event in its order. ``output_index``: that of its item, if it has one."""

    event: SseEvent
    kind: str
    members: dict[str, bytes]
    output_index: int | None


class ResponseRounds(EventRounds):
    """The streams of several rounds as one.

    Events and items are numbered. Until something is removed, they keep their numbers and their bytes.
    """

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__()
        self._names = names
        self._once: dict[str, bytes] = {}
        self._usage = b""
        self._output: list[bytes] = []
        self._next: int | None = None  # number of the next event, once one was removed
        self._items = 0  # of the earlier rounds
        self._top = 0
        self._is_first = True
        self._begin()

    def _begin(self) -> None:
        self._decoder = SseDecoder()
        self._sorting = _ItemVisibility(self._names)
        self._queue: deque[_RoundEvent] = deque()
        self._shown_indexes: dict[int, int] = {}
        self._dropped: set[int] = set()
        self._end: list[SseEvent] = []

    def next_round(self, finished: FinishedRounds) -> bytes:
        """Forget the round's end, but for its items."""
        for event in self._end:
            members = _split(event)
            self._note_number(members)
            with suppress(*UNDESCRIBED):
                self._output += _theirs(_output(members), self._names)
        self._usage, self._items, self._is_first = finished.usage, self._top, False
        self._begin()
        return b""

    def close(self) -> bytes:
        """Return the events that were held back, and the end."""
        rest = b"".join(map(self._pass, self._decoder.close()))
        self._sorting.close()
        return rest + self._drain() + b"".join(map(self._write_end, self._end))

    @override
    def _passes(self, block: bytes) -> bool:
        """Return whether events go out as they are: parts of items that the client has seen under their own numbers."""
        if self._queue or self._end or self._next is not None or DELTAS.fullmatch(block) is None:
            return False
        return all(self._shown_indexes.get(number) == number for number in map(int, _INDEX.findall(block)))

    @override
    def _pass(self, event: SseEvent) -> bytes:
        if self._end:
            self._end.append(event)
            return b""
        if not event.data:
            return event.raw
        try:
            members = raw_json.split_object(event.data)
            kind = string(members.get("type"))
            output_index = index(members, _OUTPUT_INDEX) if _OUTPUT_INDEX in members else None
            self._note(kind, members, output_index)
        except UNDESCRIBED:
            return event.raw
        if kind in ENDS:
            self._end.append(event)
        else:
            self._queue.append(_RoundEvent(event=event, kind=kind, members=members, output_index=output_index))
        return self._drain()

    def _note(self, kind: str, members: dict[str, bytes], output_index: int | None) -> None:
        """Record an event's items and response."""
        if kind in ENDS:
            self._sorting.close()
        if not self._once and "response" in members:
            response = raw_json.split_object(members["response"])
            self._once = {key: response[key] for key in _ONCE if key in response}
        if output_index is not None and kind in _ITEMS and isinstance(item := raw_json.load(members["item"]), dict):
            self._sorting.add(output_index, item, is_whole=kind != _ITEMS[0])

    def _drain(self) -> bytes:
        out: list[bytes] = []
        while self._queue:
            output_index = self._queue[0].output_index
            is_shown = self._sorting.is_shown(output_index) if output_index is not None else True
            if is_shown is None:
                break
            waiting = self._queue.popleft()
            if is_shown and (self._is_first or waiting.kind not in _BEGINNINGS):
                try:
                    out.append(self._write(waiting))
                except UNDESCRIBED:
                    out.append(waiting.event.raw)
            else:
                self._note_number(waiting.members)
                self._dropped |= set() if output_index is None else {output_index}
        return b"".join(out)

    def _note_number(self, members: dict[str, bytes]) -> None:
        if self._next is None and _NUMBER in members:
            self._next = index(members, _NUMBER)

    def _write(self, waiting: _RoundEvent) -> bytes:
        """Return the event as the client gets it."""
        changed = self._numbered(waiting.members)
        if waiting.output_index is not None:
            number = self._shown_indexes.setdefault(
                waiting.output_index, self._items + waiting.output_index - len(self._dropped)
            )
            self._top = max(self._top, number + 1)
            if number != waiting.output_index:
                changed = {**changed, _OUTPUT_INDEX: b"%d" % number}
        return _with_members(waiting.event, waiting.members, changed)

    def _numbered(self, members: dict[str, bytes]) -> dict[str, bytes]:
        if self._next is None or _NUMBER not in members:
            return members
        self._next += 1
        return {**members, _NUMBER: b"%d" % (self._next - 1)}

    def _write_end(self, event: SseEvent) -> bytes:
        """Write an event of the last round's end. It repeats everything that the client was shown."""
        try:
            return self._changed_end(event)
        except UNDESCRIBED:
            return event.raw

    def _changed_end(self, event: SseEvent) -> bytes:
        members = _split(event)
        if not members.get("response", b"").startswith(b"{"):
            return event.raw
        response = raw_json.split_object(members["response"])
        own = _output(members)
        changed = {**response, **{key: value for key, value in self._once.items() if key in response}}
        output = [*self._output, *_theirs(own, self._names)]
        if output != own:
            changed = replace_output(changed, output)
        if self._usage and response.get("usage", b"null") != b"null":
            changed["usage"] = add_usage(self._usage, response["usage"])
        changed_members = members if changed == response else {**members, "response": raw_json.join_object(changed)}
        return _with_members(event, members, self._numbered(changed_members))


def _split(event: SseEvent) -> dict[str, bytes]:
    try:
        return raw_json.split_object(event.data or b"{}")
    except ValueError:
        return {}


def _output(members: dict[str, bytes]) -> list[bytes]:
    """Return the items of the response in an event."""
    try:
        return output_items(raw_json.split_object(members.get("response", b"{}")))
    except ValueError:
        return []


def _with_members(event: SseEvent, members: dict[str, bytes], changed: dict[str, bytes]) -> bytes:
    return event.raw if changed == members else with_data(event, raw_json.join_object(changed))


ROUNDS = Rounds(
    without_calls=without_calls,
    merge_messages=merge_messages,
    write_body=write_body,
    open=ResponseRounds,
    tools_outside_list=tools_outside_list,
)
