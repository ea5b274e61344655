"""Replies on their way to the client: what may go out now, and what was said in all. No I/O.

Events go out in order, each as soon as it is certain what of its text is shown: as it came where that is all of it,
with other text where that is a part, not at all where that is nothing. A block of text waits for its first word,
because one that turns out to have none is left out, and the blocks behind it move up.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec
from typing_extensions import override

from app.dialects import raw_json
from app.dialects.anthropic.block import GrowingBlock, StringDelta
from app.dialects.anthropic.content import string_member
from app.dialects.bodies import try_decode
from app.dialects.dialect import Reply, ReplyChoice
from app.dialects.event_filter import EventFilter
from app.dialects.pieces import Piece
from app.dialects.sse import MAX_EVENT, SseEvent, with_data
from app.domain.extraction import Extract

_ENDS = frozenset({"message_delta", "message_stop", "error"})
"""Before these, everything that was held back goes out, also where a block was not ended."""


class _DeltaEvent(msgspec.Struct, forbid_unknown_fields=True):
    index: int
    delta: StringDelta
    type: str = ""


_delta_decoder = msgspec.json.Decoder(_DeltaEvent)


@dataclass(slots=True, kw_only=True)
class _Item:
    """An event that may have to wait for its ``piece`` of a text."""

    event: SseEvent
    kind: str
    piece: Piece
    block: GrowingBlock | None = None

    @property
    def is_ready(self) -> bool:
        return not self.piece.waiting and (self.block is None or self.block.is_visible)


class ReplyStream(EventFilter):
    """One streamed reply. With nothing to take out, ``feed`` returns what it is given.

    ``strip_usage`` changes nothing: usage is always part of the stream.
    """

    def __init__(
        self, *, extract: Extract, strip_usage: bool = False, sent: bytes = b"", max_event: int = MAX_EVENT
    ) -> None:
        del strip_usage, sent
        super().__init__(is_changing=bool(extract), max_event=max_event)
        self._said = _Said(extract)
        self._queue: deque[_Item] = deque()
        self._dropped = 0

    @property
    def reply(self) -> Reply:
        """What was said so far; whole after ``close``."""
        return self._said.reply

    @override
    def _forward(self, event: SseEvent) -> bytes:
        kind, block, text = self._said.add(event.data)
        if not self._is_changing:
            return b""
        released = self._release() if kind in _ENDS or (not kind and event.data and not event.is_whole) else b""
        piece = Piece(text)
        self._queue.append(_Item(event=event, kind=kind, block=block, piece=piece))
        if block is not None and text:
            self._feed_text(block, piece)
        if block is not None and not block.is_open:
            self._settle(block)
        return released + self._drain()

    def _feed_text(self, block: GrowingBlock, piece: Piece) -> None:
        if block.sieve is None or block.is_settled:
            piece.shown = piece.text
            block.show(piece.text)
        else:
            block.show(block.sieve.feed(piece))

    def _settle(self, block: GrowingBlock) -> None:
        """The block's text is over: nothing of it waits any more, and it is known whether it is shown at all."""
        if block.sieve is not None and not block.is_settled:
            block.show(block.sieve.close())
            block.settle()

    @override
    def _release(self) -> bytes:
        for item in self._queue:
            if item.block is not None:
                self._settle(item.block)
        return self._drain()

    def _drain(self) -> bytes:
        out: list[bytes] = []
        while self._queue and self._queue[0].is_ready:
            out.append(self._write(self._queue.popleft()))
        return b"".join(out)

    def _write(self, item: _Item) -> bytes:
        """The event as the client gets it."""
        if item.block is not None and item.block.is_left_out:
            self._dropped += item.kind == "content_block_start"
            return b""
        shown = item.piece.shown
        if shown == item.piece.text and not self._dropped:
            return item.event.raw
        members = _object(item.event.data)
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


class _Said:
    """What a stream has said so far."""

    def __init__(self, extract: Extract) -> None:
        self._extract = extract
        self.blocks: dict[int, GrowingBlock] = {}
        self._message: dict[str, bytes] = {}
        self._usage: dict[str, bytes] = {}
        self._finish = ""
        self._error = b""
        self._is_done = False

    def add(self, data: bytes | None) -> tuple[str, GrowingBlock | None, str]:
        """Add an event: its type, the block that it belongs to, and the words that it adds to that."""
        quick = _read_delta(data)
        if quick is not None and (block := self.blocks.get(quick.index)) is not None:
            return quick.type, block, block.grow_by(quick.delta)
        members = _object(data)
        kind = string_member(members, "type")
        if members.get("error", b"null") != b"null":
            self._error = members["error"]
            return "error", None, ""
        match kind:
            case "message_start":
                self._message = _object(members.get("message"))
                self._add_usage(self._message.get("usage"))
            case "message_delta":
                self._finish = string_member(_object(members.get("delta")), "stop_reason") or self._finish
                self._add_usage(members.get("usage"))
            case "message_stop":
                self._is_done = True
            case "content_block_start" | "content_block_delta" | "content_block_stop":
                return kind, *self._add_to_block(kind, members)
            case _:
                pass
        return kind, None, ""

    def _add_to_block(self, kind: str, members: dict[str, bytes]) -> tuple[GrowingBlock | None, str]:
        index = raw_json.load(members.get("index", b"null"))
        if not isinstance(index, int):
            return None, ""
        if kind == "content_block_start":
            start = _object(members.get("content_block"))
            block = self.blocks[index] = GrowingBlock(start, self._extract)
            return block, string_member(start, "text")
        found = self.blocks.get(index)
        if found is None:
            return None, ""
        if kind == "content_block_stop":
            found.is_open = False
            return found, ""
        delta = _object(members.get("delta"))
        found.grow(delta)
        return found, string_member(delta, "text")

    def _add_usage(self, raw: bytes | None) -> None:
        self._usage |= {key: value for key, value in _object(raw).items() if value != b"null"}

    @property
    def reply(self) -> Reply:
        return Reply(
            id=string_member(self._message, "id"),
            model=string_member(self._message, "model"),
            choices=(self._choice(),) if self._message or self.blocks else (),
            usage=raw_json.join_object(self._usage) if self._usage else b"",
            error=self._error,
            is_done=self._is_done,
        )

    def _choice(self) -> ReplyChoice:
        blocks = [self.blocks[index] for index in sorted(self.blocks)]
        return _choice(self._message, blocks, [block.write() for block in blocks], self._finish)


def split_reply(body: bytes, extract: Extract, *, sent: bytes = b"") -> tuple[bytes, Reply]:
    """The body for the client of a reply that is not streamed, and the reply.

    The very same bytes when nothing is taken out; else only the texts concerned are replaced. What is no message (an
    error under status 200, no JSON at all) goes through, and its reply has no choices.
    """
    try:
        members = raw_json.split_object(body)
    except ValueError:
        return body, Reply()
    try:
        raws = raw_json.split_array(members["content"])
        blocks = [_whole_block(raw, extract) for raw in raws]
    except (ValueError, KeyError):
        error = members.get("error", b"null")
        return body, Reply(error=b"" if error == b"null" else error)
    choice = _choice(members, blocks, raws, string_member(members, "stop_reason"))
    usage = members.get("usage", b"null")
    reply = Reply(
        id=string_member(members, "id"),
        model=string_member(members, "model"),
        choices=(choice,),
        usage=b"" if usage == b"null" else usage,
        is_done=True,
    )
    if choice.client_message is choice.model_message:
        return body, reply
    shown = raw_json.split_object(choice.client_message)["content"]
    return raw_json.as_written(body, raw_json.join_object({**members, "content": shown})), reply


def _choice(message: dict[str, bytes], blocks: list[GrowingBlock], raws: list[bytes], finish: str) -> ReplyChoice:
    """The reply of ``blocks``, which the model said as ``raws``."""
    role = message.get("role", b'"assistant"')
    said = raw_json.join_object({"role": role, "content": raw_json.join_array(raws)})
    shown = said
    if any(block.is_cut for block in blocks):
        left = [
            block.write(block.shown) if block.is_cut else raw
            for block, raw in zip(blocks, raws, strict=True)
            if not block.is_gone
        ]
        shown = raw_json.join_object({"role": role, "content": raw_json.join_array(left)})
    extractions = [block.extraction for block in blocks if block.extraction is not None]
    states = [extraction.state for extraction in extractions if extraction.state is not None]
    return ReplyChoice(
        index=0,
        model_message=said,
        client_message=shown,
        terse=tuple(entry for extraction in extractions for entry in extraction.terse),
        state=states[-1] if states else None,
        finish_reason=finish,
    )


def _whole_block(raw: bytes, extract: Extract) -> GrowingBlock:
    block = GrowingBlock(raw_json.split_object(raw), extract)
    block.is_open = False
    if block.extraction is not None:
        block.show(block.extraction.feed(block.said) + block.extraction.close())
    return block


def _object(raw: bytes | None) -> dict[str, bytes]:
    """The members of a JSON object; nothing where it is none."""
    try:
        return raw_json.split_object(raw or b"{}")
    except ValueError:
        return {}


def _read_delta(data: bytes | None) -> _DeltaEvent | None:
    """An event of the kind that most are; None for every other."""
    if not data or b'"content_block_delta"' not in data:
        return None
    event = try_decode(_delta_decoder, data)
    return event if event and event.type == "content_block_delta" else None
