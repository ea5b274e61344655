"""Strip tags from a streamed reply on its way to the client, and collect the reply. No I/O.

Events go out in order, each as soon as the visible part of its text is known: unchanged if all of it is visible, with
other text if a part is, and not at all if none is. A block of text waits for its first word: an empty block is left
out, and the numbers of the blocks after it are decreased.

Most events are deltas in which no tag can begin: a run of them goes out unchanged and is parsed later, many at a time,
because parsing is the most expensive step.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
from typing_extensions import override

from tersely.dialects.anthropic.accumulator import (
    GrowingBlock,
    StringDelta,
    choice_of,
    container_of,
    object_of,
)
from tersely.dialects.anthropic.content import string_member
from tersely.dialects.dialect import ClientView, Reply, ReplyChoice
from tersely.dialects.event_filter import EventFilter
from tersely.dialects.undescribed import UNDESCRIBED
from tersely.dialects.wire import raw_json
from tersely.dialects.wire.bodies import try_decode
from tersely.dialects.wire.pieces import Piece, marks_of
from tersely.dialects.wire.sse import MAX_EVENT, SseEvent, with_data
from tersely.domain.text.tags import TagKinds

_ENDS = frozenset({"message_delta", "message_stop", "error"})
"""Before these, everything that was held back goes out, also where a block was not ended."""


_DELTA = b"event: content_block_delta\ndata: "
DELTAS = re.compile(rb'(?:%b\{"type": ?"content_block_delta",[^\n]*+\n\n)+' % _DELTA)


class _DeltaEvent(msgspec.Struct, forbid_unknown_fields=True):
    index: int
    delta: StringDelta
    type: str = ""


_delta_decoder = msgspec.json.Decoder(_DeltaEvent)
_deltas_decoder = msgspec.json.Decoder(list[_DeltaEvent])


@dataclass(slots=True, kw_only=True)
class _HeldEvent:
    """An event that may have to wait for its ``piece`` of a text."""

    event: SseEvent
    kind: str
    piece: Piece
    block: GrowingBlock | None = None

    @property
    def is_ready(self) -> bool:
        return not self.piece.waiting and (self.block is None or self.block.is_visible)


class ReplyStream(EventFilter):
    """One streamed reply. Without tags to strip, ``feed`` returns its input."""

    def __init__(self, view: ClientView, *, max_event: int = MAX_EVENT) -> None:
        super().__init__(is_changing=bool(view.tags), max_event=max_event)
        self._accumulator = _Accumulator(view.tags)
        self._queue: deque[_HeldEvent] = deque()
        self._dropped = 0
        self._marks = marks_of(view.tags)

    @override
    def _feed_mixed(self, block: bytes) -> bytes:
        return b"".join(self._forward_in_parts(block))

    @override
    def _is_plain(self, block: bytes) -> bool:
        """Return whether a block only has deltas in which no tag can begin."""
        if self._queue or self._dropped or DELTAS.fullmatch(block) is None:
            return False
        return not any(mark in block for mark in self._marks)

    @override
    def _reply(self) -> Reply:
        return self._accumulator.reply

    def _forward_in_parts(self, block: bytes) -> Iterator[bytes]:
        """Forward runs of deltas as they are, and other events one by one."""
        position = run_end = mark = 0
        while position < len(block):
            if position >= run_end:
                run = DELTAS.match(block, position)
                run_end = run.end() if run else position
                mark = self._find_mark(block, position, run_end)
            elif position > mark:
                mark = self._find_mark(block, position, run_end)
            end = run_end if mark == run_end else block.rfind(b"\n\n", position, mark) + 2
            if end > position + 1 and not (self._queue or self._dropped):
                yield block[position:end]
                self._defer(block[position:end])
            else:
                end = block.find(b"\n\n", position) + 2
                if end < 2:
                    end = len(block)
                yield self._feed(block[position:end])
            position = end

    def _find_mark(self, block: bytes, start: int, end: int) -> int:
        """Return where a tag may begin; ``end`` if nowhere."""
        for mark in self._marks:
            found = block.find(mark, start, end)
            end = found if found >= 0 else end
        return end

    @override
    def _read_plain(self, block: bytes) -> None:
        payloads = [raw[len(_DELTA) :] for raw in block.split(b"\n\n")[:-1]]
        texts: list[str] = []
        last: GrowingBlock | None = None
        for payload, event in zip(payloads, _read_deltas(payloads), strict=True):
            try:
                grown = None if event is None else self._accumulator.blocks.get(event.index)
                if event is None or grown is None:
                    _, grown, text = self._accumulator.add(payload)
                else:
                    text = grown.grow_by(event.delta)
            except UNDESCRIBED:
                self._unread.add(payload)
                continue
            if last is not None and grown is not last and texts:
                self._feed_text(last, Piece("".join(texts)))
                texts.clear()
            last = grown
            if text:
                texts.append(text)
        if last is not None and texts:
            self._feed_text(last, Piece("".join(texts)))

    @override
    def _forward(self, event: SseEvent) -> bytes:
        kind, block, text = self._accumulator.add(event.data)
        if not self._is_changing:
            return b""
        released = self._release() if kind in _ENDS or (not kind and event.data and not event.is_whole) else b""
        piece = Piece(text)
        self._queue.append(_HeldEvent(event=event, kind=kind, block=block, piece=piece))
        if block is not None and text:
            self._feed_text(block, piece)
        if block is not None and not block.is_open:
            self._finish_text(block)
        return released + self._drain()

    def _feed_text(self, block: GrowingBlock, piece: Piece) -> None:
        if block.sieve is None or block.is_finished:
            piece.shown = piece.text
            block.show(piece.text)
        else:
            block.show(block.sieve.feed(piece))

    def _finish_text(self, block: GrowingBlock) -> None:
        """Release the block at the end of its text, when it is known whether the block is shown."""
        if block.sieve is not None and not block.is_finished:
            block.show(block.sieve.close())
            block.finish()

    @override
    def _release(self) -> bytes:
        for item in self._queue:
            if item.block is not None:
                self._finish_text(item.block)
        return self._drain()

    def _drain(self) -> bytes:
        out: list[bytes] = []
        while self._queue and self._queue[0].is_ready:
            item = self._queue.popleft()
            try:
                out.append(self._write(item))
            except UNDESCRIBED:
                out.append(item.event.raw)
        return b"".join(out)

    def _write(self, item: _HeldEvent) -> bytes:
        """Return the event as the client gets it."""
        if item.block is not None and item.block.is_left_out:
            self._dropped += item.kind == "content_block_start"
            return b""
        shown = item.piece.shown
        if shown == item.piece.text and not self._dropped:
            return item.event.raw
        members = object_of(item.event.data)
        if shown != item.piece.text:
            name = "content_block" if item.kind == "content_block_start" else "delta"
            holder = raw_json.split_object(members[name])
            if not shown and holder.keys() == {"type", "text"} and name == "delta":
                return b""
            members[name] = raw_json.join_object({**holder, "text": raw_json.dump(shown)})
        elif item.block is None:
            return item.event.raw
        members["index"] = raw_json.dump(raw_json.load(members["index"]) - self._dropped)
        return with_data(item.event, raw_json.join_object(members))


class _Accumulator:
    """The reply that a stream has carried so far."""

    def __init__(self, tags: TagKinds) -> None:
        self._tags = tags
        self.blocks: dict[int, GrowingBlock] = {}
        self._message: dict[str, bytes] = {}
        self._usage: dict[str, bytes] = {}
        self._finish = ""
        self._container = ""
        self._error = b""
        self._is_done = False

    def add(self, data: bytes | None) -> tuple[str, GrowingBlock | None, str]:
        """Add an event: its type, its block, and the text that it adds to the block."""
        quick = _read_delta(data)
        if quick is not None and (block := self.blocks.get(quick.index)) is not None:
            return quick.type, block, block.grow_by(quick.delta)
        members = raw_json.split_object(data) if data else {}
        kind = string_member(members, "type")
        if members.get("error", b"null") != b"null":
            self._error = members["error"]
            return "error", None, ""
        match kind:
            case "message_start":
                self._message = raw_json.split_object(members["message"])
                self._add_usage(self._message.get("usage"))
                self._container = container_of(self._message)
            case "message_delta":
                delta = object_of(members.get("delta"))
                self._finish = string_member(delta, "stop_reason") or self._finish
                self._container = container_of(delta) or self._container
                self._add_usage(members.get("usage"))
            case "message_stop":
                self._is_done = True
            case "content_block_start" | "content_block_delta" | "content_block_stop":
                return kind, *self._add_to_block(kind, members)
            case "":
                if data:
                    raise ValueError("an event without a type")
            case _:
                pass
        return kind, None, ""

    def _add_to_block(self, kind: str, members: dict[str, bytes]) -> tuple[GrowingBlock | None, str]:
        index = raw_json.load(members.get("index", b"null"))
        if not isinstance(index, int):
            raise ValueError("a block without a number")  # noqa: TRY004 - it is the input that is bad
        if kind == "content_block_start":
            start = raw_json.split_object(members["content_block"])
            block = self.blocks[index] = GrowingBlock(start, self._tags)
            return block, string_member(start, "text")
        found = self.blocks.get(index)
        if found is None:
            raise ValueError("a delta of a block that was not started")
        if kind == "content_block_stop":
            found.is_open = False
            return found, ""
        delta = raw_json.split_object(members["delta"])
        found.grow(delta)
        return found, string_member(delta, "text")

    def _add_usage(self, raw: bytes | None) -> None:
        self._usage |= {key: value for key, value in object_of(raw).items() if value != b"null"}

    @property
    def reply(self) -> Reply:
        return Reply(
            id=string_member(self._message, "id"),
            model=string_member(self._message, "model"),
            choices=(self._choice(),) if self._message or self.blocks else (),
            usage=raw_json.join_object(self._usage) if self._usage else b"",
            error=self._error,
            is_done=self._is_done,
            container=self._container,
        )

    def _choice(self) -> ReplyChoice:
        blocks = [self.blocks[index] for index in sorted(self.blocks)]
        return choice_of(blocks, self._finish)


def _read_delta(data: bytes | None) -> _DeltaEvent | None:
    """Return a parsed delta event, the usual kind; None for any other."""
    if not data or b'"content_block_delta"' not in data:
        return None
    event = try_decode(_delta_decoder, data)
    return event if event and event.type == "content_block_delta" else None


def _read_deltas(payloads: list[bytes]) -> Sequence[_DeltaEvent | None]:
    """Parse delta events, all at once if possible; None for one of an unusual kind."""
    try:
        events = _deltas_decoder.decode(b"[" + b",".join(payloads) + b"]")
        if len(events) == len(payloads):
            return events
    except (ValueError, RecursionError):
        pass
    return [_read_delta(payload) for payload in payloads]
