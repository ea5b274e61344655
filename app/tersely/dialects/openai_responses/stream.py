"""Strip tags from a streamed reply on its way to the client. No I/O.

Events go out in order, each as soon as the visible part of its text is known: unchanged if all of it is visible, with
other text if a part is, and not at all if none is; then the numbers of later events are decreased. At its end a text is
repeated, as are its part, its item and the response. The same tags are stripped there.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from dataclasses import dataclass

from typing_extensions import override

from tersely.dialects.dialect import ClientView, Reply
from tersely.dialects.event_filter import EventFilter
from tersely.dialects.openai_responses.accumulator import (
    ENDS,
    TEXT_DELTA,
    ItemAccumulator,
    index,
    read_delta,
    read_deltas,
    string,
)
from tersely.dialects.openai_responses.whole import ResponseTagStripper, keep_tokens, shift_annotation
from tersely.dialects.undescribed import UNDESCRIBED
from tersely.dialects.wire import raw_json
from tersely.dialects.wire.pieces import Piece, PieceFilter, marks_of
from tersely.dialects.wire.sse import MAX_EVENT, SseEvent, parse_event, with_data

_PartPosition = tuple[int, int]

DELTAS = re.compile(rb'(?:event: [^\n]++\ndata: \{"type": ?"response\.[a-z_.]+\.delta",[^\n]*+\n\n)+')
"""Events that add words, as nearly all hosts write them."""
_PAYLOADS = re.compile(rb"^data: ([^\n]*+)$", re.MULTILINE)


@dataclass(slots=True, kw_only=True)
class _HeldEvent:
    """An event that may have to wait for its ``piece`` of a text. ``members``: its changed members."""

    event: SseEvent
    piece: Piece | None = None
    members: dict[str, bytes] | None = None


class ReplyStream(EventFilter):
    """One streamed reply. Without tags to strip, ``feed`` returns its input.

    A response repeats its request. If Tersely added to the client's request, the client's own fields are restored.
    """

    def __init__(self, view: ClientView, *, max_event: int = MAX_EVENT) -> None:
        self._tags = view.tags
        self._marks = marks_of(view.tags)
        self._accumulator = ItemAccumulator()
        self._stripper = ResponseTagStripper(view)
        super().__init__(is_changing=bool(self._stripper), max_event=max_event)
        self._filters: dict[_PartPosition, PieceFilter] = {}
        self._queue: deque[_HeldEvent] = deque()
        self._dropped = 0

    @override
    def _reply(self) -> Reply:
        state = self._accumulator
        items = state.items
        return Reply(
            id=state.id,
            model=state.model,
            choices=(self._stripper.choice(items, state.finish),) if items or state.is_done else (),
            usage=state.usage,
            error=state.error,
            is_done=state.is_done,
        )

    @override
    def _is_plain(self, block: bytes) -> bool:
        """Return whether a block only has deltas in which no tag can begin."""
        if self._queue or self._dropped or DELTAS.fullmatch(block) is None:
            return False
        return not any(mark in block for mark in self._marks)

    @override
    def _read_plain(self, block: bytes) -> None:
        payloads = _PAYLOADS.findall(block)
        texts: dict[_PartPosition, list[str]] = defaultdict(list)
        for delta, payload in zip(read_deltas(payloads), payloads, strict=True):
            if delta is None:
                self._read_event(parse_event(b"data: " + payload + b"\n\n"))
                continue
            self._accumulator.add_delta(delta)
            if self._tags and delta.type == TEXT_DELTA:
                texts[delta.position].append(delta.delta)
        for position, parts in texts.items():
            self._filter(position).feed(Piece("".join(parts)))

    @override
    def _forward(self, event: SseEvent) -> bytes:
        delta = read_delta(event.data)
        waiting = _HeldEvent(event=event)
        released = b""
        if delta is not None:
            self._accumulator.add_delta(delta)
            if self._tags and delta.type == TEXT_DELTA:
                waiting.piece = Piece(delta.delta)
                self._filter(delta.position).feed(waiting.piece)
        elif event.data:
            waiting.members, is_known = self._read_event(event)
            # A shape nobody has described goes through. So does half an event at the end.
            released = b"" if is_known or event.is_whole else self._release()
        if not self._is_changing:
            return b""
        self._queue.append(waiting)
        return released + self._drain()

    def _read_event(self, event: SseEvent) -> tuple[dict[str, bytes] | None, bool]:
        """Process an event that is no known delta. Return its changed members, and whether its shape is known."""
        try:
            return self._read(raw_json.split_object(event.data or b"{}")), True
        except UNDESCRIBED:
            self._note_unread(event)
            return None, False

    def _read(self, members: dict[str, bytes]) -> dict[str, bytes] | None:
        """Process an event that is no delta. Return its changed members, or None if it is unchanged."""
        kind = string(members.get("type"))
        self._accumulator.add(kind, members)
        if not self._is_changing:
            return None
        self._close_at(kind, members)
        changed = self._without(kind, members)
        return None if changed == members else changed

    def _without(self, kind: str, members: dict[str, bytes]) -> dict[str, bytes]:
        """Return the members of an event without the tags in the texts that it repeats."""
        match kind:
            case "response.output_text.done":
                return self._stripper.words(members)
            case "response.output_text.annotation.added":
                offsets = self._stripper.offsets(self._accumulator.text(_part_position(members)))
                return {**members, "annotation": shift_annotation(members["annotation"], offsets)}
            case _:
                for name, take_out in (
                    ("part", self._stripper.part),
                    ("item", self._stripper.item),
                    ("response", self._stripper.response),
                ):
                    if members.get(name, b"").startswith(b"{"):
                        members = {**members, name: take_out(members[name])}
                return members

    # What waits

    def _filter(self, position: _PartPosition) -> PieceFilter:
        found = self._filters.get(position)
        if found is None:
            found = self._filters[position] = PieceFilter(self._tags)
        return found

    def _close_at(self, kind: str, members: dict[str, bytes]) -> None:
        """Release all waiting events of a text that has ended."""
        if kind in ENDS or not kind or kind == "error":
            ended = list(self._filters)
        elif kind == "response.output_item.done":
            ended = [position for position in self._filters if position[0] == _part_position(members)[0]]
        elif kind in {"response.output_text.done", "response.content_part.done"}:
            ended = [position for position in self._filters if position == _part_position(members)]
        else:
            return
        for position in ended:
            self._filters.pop(position).close()

    @override
    def _release(self) -> bytes:
        for each in self._filters.values():
            each.close()
        self._filters.clear()
        return self._drain()

    def _drain(self) -> bytes:
        out: list[bytes] = []
        while self._queue and not ((piece := self._queue[0].piece) and piece.waiting):
            waiting = self._queue.popleft()
            try:
                out.append(self._write(waiting))
            except UNDESCRIBED:
                out.append(waiting.event.raw)
        return b"".join(out)

    def _write(self, waiting: _HeldEvent) -> bytes:
        """Return the event as the client gets it."""
        event, piece, members = waiting.event, waiting.piece, waiting.members
        if piece is not None and piece.shown != piece.text:
            if not piece.shown:
                self._dropped += 1
                return b""
            members = _with_delta(raw_json.split_object(event.data or b"{}"), piece.shown)
        if self._dropped:
            members = self._renumber(event, members)
        return event.raw if members is None else with_data(event, raw_json.join_object(members))

    def _renumber(self, event: SseEvent, members: dict[str, bytes] | None) -> dict[str, bytes] | None:
        if b'"sequence_number"' not in (event.data or b""):
            return members
        try:
            members = members or raw_json.split_object(event.data or b"{}")
            number = raw_json.load(members["sequence_number"])
        except (ValueError, KeyError):
            return members
        if type(number) is not int:
            return members
        return {**members, "sequence_number": raw_json.dump(number - self._dropped)}


def _with_delta(members: dict[str, bytes], shown: str) -> dict[str, bytes]:
    changed = {**members, "delta": raw_json.dump(shown)}
    if members.get("logprobs", b"null").startswith(b"[{"):
        changed["logprobs"] = keep_tokens(members["logprobs"], shown)
    return changed


def _part_position(members: dict[str, bytes]) -> _PartPosition:
    return index(members, "output_index"), index(members, "content_index")
