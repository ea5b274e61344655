"""Strip tags from a streamed reply on its way to the client, and collect the reply. No I/O.

Without tags to strip, bytes pass unchanged. Otherwise the smallest possible part of an event is replaced, and every
other member keeps its bytes. Most events need no change: a block of them in which no tag can begin goes out unchanged
and is parsed later, many at a time, because parsing is the most expensive step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from tersely.dialects.dialect import ClientView, Reply
from tersely.dialects.openai_chat.accumulator import ChoiceState
from tersely.dialects.openai_chat.stream_events import ABSENT, ENVELOPE, Chunk, has_words_only, read_chunk, read_chunks
from tersely.dialects.openai_content import replace_text
from tersely.dialects.undescribed import UNDESCRIBED, UnreadPayloads
from tersely.dialects.wire import raw_json
from tersely.dialects.wire.pieces import Piece, marks_of
from tersely.dialects.wire.sse import MAX_EVENT, EventTooLarge, SseDecoder, SseEvent, parse_event, with_data
from tersely.domain.text.tags import NOTHING

_MAX_UNREAD = 64 * 1024
_DONE = b"[DONE]"
_USAGE = b'"usage"'


class ReplyStream:
    """One streamed reply.

    The view's tags are stripped from the content of every choice (rules in `tersely.domain.text.terse` and
    `tersely.domain.text.state`). An event with a possible beginning of a tag waits, with the events after it, at the
    latest until the choice's finish chunk, an error or the end. ``strip_usage`` removes what was only sent because
    Tersely asked for usage: the usage chunk, and ``"usage": null`` in the others. Without both, ``feed`` returns its
    input.
    """

    def __init__(self, view: ClientView, *, max_event: int = MAX_EVENT) -> None:
        tags = view.tags
        self._max_event = max_event
        self._tags = tags
        self._marks = marks_of(tags)
        self._strip_usage = view.strip_usage
        self._decoder: SseDecoder | None = None
        self._tail = b""
        self._unread: list[bytes] = []
        self._unread_size = 0
        self._read_at = _MAX_UNREAD
        self._choices: dict[int, ChoiceState] = {}
        self._queue: deque[_HeldEvent] = deque()
        self._id = ""
        self._model = ""
        self._usage = b""
        self._error = b""
        self._is_done = False
        self._not_understood = UnreadPayloads()

    def feed(self, chunk: bytes) -> bytes:
        """Return the bytes that go to the client now. After an event over ``max_event`` bytes nothing is stripped."""
        if not (self._tags or self._strip_usage):
            self._defer(chunk)
            return chunk
        try:
            if self._decoder is None and b"\r" not in chunk:
                return self._feed_plain_lines(chunk)
            return b"".join(map(self._forward, self._decode(chunk)))
        except EventTooLarge:
            return self._give_up()

    def _give_up(self) -> bytes:
        rest = self._release()
        if self._decoder is not None:
            rest += b"".join(event.raw for event in self._decoder.close())
        self._catch_up()
        self._tags, self._strip_usage = NOTHING, False
        return rest

    def close(self) -> bytes:
        """The stream is over: what waited, and an unfinished last event."""
        if not (self._tags or self._strip_usage):
            self._read_unread(is_last=True)
            return b""
        events = self._decode(b"")
        if self._decoder is not None:
            events += self._decoder.close()
        self._read_unread(is_last=True)
        return b"".join(map(self._forward, events)) + self._release()

    @property
    def reply(self) -> Reply:
        """Return the reply so far; it is complete after ``close``."""
        self._read_unread(is_last=False)
        return Reply(
            id=self._id,
            model=self._model,
            choices=tuple(self._choices[index].to_choice(index) for index in sorted(self._choices)),
            usage=self._usage,
            error=self._error,
            is_done=self._is_done,
            unread=tuple(self._not_understood.payloads),
        )

    # Which bytes go out

    def _feed_plain_lines(self, chunk: bytes) -> bytes:
        """Return the quick way, while no CR was seen: events are what lies between blank lines."""
        block = self._tail + chunk
        end = block.rfind(b"\n\n") + 2
        if end < 2:
            self._tail = block
            if len(block) > _MAX_UNREAD:
                self._decode(b"")  # a huge event: go on with the decoder, which bounds it and does not rescan
            return b""
        if end == len(block):
            self._tail = b""
        else:
            self._tail, block = block[end:], block[:end]
        if self._is_plain(block):
            return self._forward_plain(block)
        return b"".join(self._forward_in_parts(block))

    def _forward_in_parts(self, block: bytes) -> Iterator[bytes]:
        """Forward plain events as they are, and others one by one."""
        places = dict.fromkeys((*self._marks, _USAGE) if self._strip_usage else self._marks, -1)
        position = 0
        while position < len(block):
            if not self._queue:
                mark = _next_mark(block, position, places)
                start = block.rfind(b"\n\n", position, mark) + 2 if mark < len(block) else mark
                if start > position + 1:
                    yield self._forward_plain(block[position:start])
                    position = start
                    continue
            # While an event waits none is plain. Behind the last one there may be one more line end.
            end = block.find(b"\n\n", position) + 2
            if end < 2:
                end = len(block)
            yield self._forward(parse_event(block[position:end]))
            position = end

    def _forward_plain(self, block: bytes) -> bytes:
        self._defer(block)
        return block.replace(b'],"usage":null', b"]") if self._strip_usage else block

    def _decode(self, chunk: bytes) -> list[SseEvent]:
        if self._decoder is None:
            self._decoder = SseDecoder(limit=self._max_event)
            chunk, self._tail = self._tail + chunk, b""
        return self._decoder.feed(chunk)

    def _is_plain(self, block: bytes) -> bool:
        """Return whether nothing in a block of whole events can need a change, but for ``"usage":null`` after the
        choices.
        """
        if self._queue:
            return False
        if b'"content"' in block:  # nothing else has tags
            for mark in self._marks:
                if mark in block:
                    return False
        return not self._strip_usage or block.count(b'"usage"') == block.count(b'],"usage":null')

    def _forward(self, event: SseEvent) -> bytes:
        if self._is_plain(event.raw) and not (self._strip_usage and b'"usage"' in event.raw):
            self._defer(event.raw)
            return event.raw
        self._catch_up()
        data = (event.data or b"").strip()
        if data == _DONE:
            self._is_done = True
            return self._release() + event.raw
        waiting = _HeldEvent(event=event, data=data)
        before = b""
        if not data:
            self._not_understood.add_if_no_event(event.raw)
        elif (chunk := self._read_chunk(event, data)) is not None:
            self._record(chunk)
            has_error = bytes(chunk.error) not in {b"", b"null"}
            before = self._release() if has_error else b""
            usage = bytes(chunk.usage) if self._strip_usage else b""
            if usage and usage != b"null" and not chunk.choices and not has_error and _has_usage_only(data):
                return before
            waiting.drops_usage = usage == b"null"
            if self._tags:
                waiting.pieces = self._take_pieces(chunk)
        self._queue.append(waiting)
        return before + self._drain()

    def _read_chunk(self, event: SseEvent, data: bytes) -> Chunk | None:
        # Half an event, at which a stream broke off, does not count as unknown.
        return read_chunk(data, self._not_understood if event.is_whole else UnreadPayloads())

    def _take_pieces(self, chunk: Chunk) -> dict[int, Piece]:
        """Return the words of a chunk, by place in it."""
        pieces: dict[int, Piece] = {}
        for index, choice in enumerate(chunk.choices or ()):
            state = self._choices[choice.index]
            if (piece := state.take()).text:
                pieces[index] = piece
            if choice.finish_reason is not None or (choice.delta is not None and choice.delta.tool_calls):
                state.end_text()
        return pieces

    def _release(self) -> bytes:
        """Stop waiting, and return the waiting events."""
        for state in self._choices.values():
            state.end_text()
        return self._drain()

    def _drain(self) -> bytes:
        out: list[bytes] = []
        while self._queue and not any(piece.waiting for piece in self._queue[0].pieces.values()):
            waiting = self._queue.popleft()
            try:
                out.append(waiting.write())
            except UNDESCRIBED:
                out.append(waiting.event.raw)
        return b"".join(out)

    # The reply so far

    def _catch_up(self) -> None:
        """Bring every choice up to date with what went out the quick way."""
        self._read_unread(is_last=False)
        self._take_unfed()

    def _take_unfed(self) -> None:
        if self._tags:
            for state in self._choices.values():
                if state.has_unfed:
                    state.take()

    def _defer(self, block: bytes) -> None:
        self._unread.append(block)
        self._unread_size += len(block)
        if self._unread_size > self._read_at:
            self._read_unread(is_last=False)
            self._read_at = _MAX_UNREAD + 2 * self._unread_size  # a huge event is not joined again and again

    def _read_unread(self, *, is_last: bool) -> None:
        if not self._unread:
            return
        block = b"".join(self._unread)
        self._unread, self._unread_size = [], 0
        if not (self._tags or self._strip_usage):
            block = self._keep_unfinished(block, is_last=is_last)
        has_tags = bool(self._tags)
        for chunk in read_chunks(self._payloads(block), self._not_understood):
            self._record(chunk)
            for choice in chunk.choices or () if has_tags else ():
                if choice.finish_reason is not None:
                    self._choices[choice.index].finish()
        # Not only at the end: that would be a long text at once.
        self._take_unfed()

    def _keep_unfinished(self, block: bytes, *, is_last: bool) -> bytes:
        """Untouched bytes are cut anywhere: the part after the last blank line waits for the rest."""
        if is_last:
            return block
        end = max(block.rfind(b"\n\n") + 2, block.rfind(b"\n\r\n") + 3)
        if end < 3:
            end = 0
        self._unread, self._unread_size = [block[end:]], len(block) - end
        return block[:end]

    def _payloads(self, block: bytes) -> list[bytes]:
        has_end = block.endswith(b"\n\ndata: [DONE]\n\n")
        events = block.count(b"\n\ndata: {") + 1
        # Nearly always each event is one line with an object.
        if (
            block.startswith(b"data: {")
            and block.endswith(b"\n\n")
            and block.count(b"\n") == 2 * (events + has_end)
            and b"\r" not in block
        ):
            self._is_done |= has_end
            payloads = block[6:-2].split(b"\n\ndata: ")
            return payloads[:events]
        payloads = []
        for raw in _split_events(block):
            data: bytes | None
            if raw[:6] == b"data: " and b"\n" not in raw:
                data = raw[6:]
            else:
                data = parse_event(raw).data
                if data is None and raw:
                    self._not_understood.add_if_no_event(raw)
            if data == _DONE or (data and data.strip() == _DONE):
                self._is_done = True
            elif data and not data.isspace():
                payloads.append(data)
        return payloads

    def _record(self, chunk: Chunk) -> None:
        if not self._id:
            self._id = chunk.id or ""
        if not self._model:
            self._model = chunk.model or ""
        if chunk.usage is not ABSENT and (usage := bytes(chunk.usage)) != b"null":
            self._usage = usage
        if chunk.error is not ABSENT and (error := bytes(chunk.error)) != b"null":
            self._error = error
        for choice in chunk.choices or ():
            index = choice.position or 0
            state = self._choices.get(index)
            if state is None:
                state = self._choices[index] = ChoiceState(self._tags)
            state.add(choice)


@dataclass(slots=True, kw_only=True)
class _HeldEvent:
    """An event that waits until the visible part of its text is known. ``drops_usage``: remove its empty usage."""

    event: SseEvent
    data: bytes
    pieces: dict[int, Piece] = field(default_factory=dict)
    drops_usage: bool = False

    def write(self) -> bytes:
        """Return the event as the client gets it."""
        edits = {index: piece for index, piece in self.pieces.items() if piece.shown != piece.text}
        if not (edits or self.drops_usage):
            return self.event.raw
        if edits and not any(piece.shown for piece in edits.values()) and has_words_only(self.data):
            return b""
        members = raw_json.split_object(self.data)
        if self.drops_usage:
            del members["usage"]
        choices = raw_json.split_array(members["choices"]) if edits else []
        for index, piece in edits.items():
            choices[index] = _with_content(choices[index], piece.shown)
        if edits:
            members["choices"] = raw_json.join_array(choices)
            if len(edits) == len(choices) and _is_empty(members, choices, edits):
                return b""
        return with_data(self.event, raw_json.join_object(members))


def _next_mark(block: bytes, position: int, places: dict[bytes, int]) -> int:
    """Return where an event from ``position`` on may need a change; the end if nowhere.

    ``places``: where each mark was found last. A mark is searched for again only behind that place.
    """
    for mark, place in places.items():
        if place < position:
            at = _find_usage(block, position) if mark is _USAGE else block.find(mark, position)
            places[mark] = at if at >= 0 else len(block)
    return min(places.values(), default=len(block))


def _find_usage(block: bytes, start: int) -> int:
    """Return where ``"usage"`` stands, but for ``"usage":null`` after the choices; -1 if nowhere."""
    at = block.find(_USAGE, start)
    while at >= 0 and block.startswith(b'],"usage":null', at - 2):
        at = block.find(_USAGE, at + 1)
    return at


def _split_events(block: bytes) -> list[bytes]:
    if b"\r" not in block:
        return block.split(b"\n\n")
    decoder = SseDecoder(limit=len(block) + 1)
    return [each.raw for each in (*decoder.feed(block), *decoder.close())]


def _has_usage_only(data: bytes) -> bool:
    """Return whether a chunk with usage has no choices, not even of an unknown shape, nor members in place of them."""
    try:
        members = raw_json.split_object(data)
    except UNDESCRIBED:  # reading the usage has passed over a name that is no text
        return False
    if "choices" in members:
        return not _has_value(members["choices"])
    return not any(_has_value(members[key]) for key in members.keys() - ENVELOPE - {"usage"})


def _is_empty(members: dict[str, bytes], choices: list[bytes], edits: dict[int, Piece]) -> bool:
    """Return whether nothing is left that needs an event."""
    return (
        not any(piece.shown for piece in edits.values())
        and all(map(_carries_nothing, choices))
        and not any(_has_value(members[key]) for key in members.keys() - ENVELOPE)
    )


def _with_content(raw_choice: bytes, text: str) -> bytes:
    choice = raw_json.split_object(raw_choice)
    delta = raw_json.split_object(choice["delta"])
    if raw_json.load(delta.get("content", b"null")).__class__ is list:
        parts = replace_text(raw_json.split_array(delta["content"]), text)
        delta["content"] = raw_json.join_array(parts)
    else:
        delta["content"] = raw_json.dump(text)
    return raw_json.join_object({**choice, "delta": raw_json.join_object(delta)})


def _carries_nothing(raw_choice: bytes) -> bool:
    choice = raw_json.split_object(raw_choice)
    delta = raw_json.split_object(choice["delta"])
    others = [value for key, value in choice.items() if key not in {"index", "delta"}]
    others += [value for key, value in delta.items() if key != "content"]
    content = delta.get("content", b"null")
    return not any(map(_has_value, others)) and content in {b'""', b"null", b"[]"}


def _has_value(value: bytes) -> bool:
    return value not in {b"null", b"[]", b"{}", b'""'}
