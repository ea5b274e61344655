"""Strip tags from a reply on its way to the client, and collect the reply. No I/O.

One reader handles all framings: server-sent events, a JSON array, and the one object of a reply that is not streamed.
Without tags to strip, bytes pass unchanged. Otherwise whole events wait while their text may be the beginning of a tag.
Then they go out unchanged, or with other text in the affected parts and every other member's bytes unchanged. No event
is inserted: Gemini's clients accept no comment, no ``event:`` line and no empty reply.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tersely.dialects.dialect import ClientView, Reply, ReplyChoice
from tersely.dialects.gemini.read import items, visible_text
from tersely.dialects.gemini.write import patch_texts
from tersely.dialects.undescribed import UNDESCRIBED, UnreadPayloads
from tersely.dialects.wire import raw_json
from tersely.dialects.wire.json_array import ArrayDecoder, Element
from tersely.dialects.wire.sse import MAX_EVENT, EventTooLarge, SseDecoder, SseEvent, with_data
from tersely.domain.text.tags import TagKinds, TagStripper

_ENVELOPE = frozenset({"candidates", "usageMetadata", "modelVersion", "responseId", "createTime", "traceId"})
_CANDIDATE_ENVELOPE = frozenset({"content", "index", "safetyRatings"})
"""Members without content: an event with only these and no text left in it is dropped. The next event repeats the
usage.
"""
_KNOWN = frozenset({"candidates", "promptFeedback", "usageMetadata", "error", "modelVersion", "responseId"})
"""Members that an event has once."""
_KNOWN_OF_CANDIDATE = frozenset({"content", "finishReason", "index", "safetyRatings", "groundingMetadata"})
"""Members that a candidate has once."""
_PLAIN = frozenset({"text", "thought"})
_EMPTY_TEXT = b'{"text":""}'
_SILENT = frozenset({b"null", b"{}", b"[]", b'""'})

_Frame = SseEvent | Element


@dataclass(slots=True, kw_only=True)
class _Piece:
    """A text part. ``shown``: the text visible to the client; None while a tag may be incomplete."""

    text: str
    shown: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Content:
    """One event's content of one candidate: members, parts with their values, and texts by index."""

    members: Mapping[str, bytes]
    raw: bytes
    parts: Sequence[bytes]
    values: Sequence[Any]
    pieces: Mapping[int, _Piece]

    @property
    def is_shown(self) -> bool:
        """Return whether it is known what the client sees of it."""
        return all(piece.shown is not None for piece in self.pieces.values())

    @property
    def edits(self) -> dict[int, str]:
        """Return the replacement texts by index."""
        return {index: piece.shown or "" for index, piece in self.pieces.items() if piece.shown != piece.text}

    @property
    def client_parts(self) -> list[bytes]:
        """Return the parts as the client sees them."""
        edits = self.edits
        return patch_texts(self.parts, edits) or [_EMPTY_TEXT] if edits else list(self.parts)

    @property
    def client_raw(self) -> bytes:
        """Return the content as the client sees it; the same bytes if nothing is stripped."""
        if not self.edits:
            return self.raw
        return raw_json.join_object({**self.members, "parts": raw_json.join_array(self.client_parts)})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Event:
    """A frame that waits to go out, with its contents by the candidate's place."""

    frame: _Frame
    contents: Mapping[int, _Content]

    @property
    def is_ready(self) -> bool:
        """Return whether everything in it may go out."""
        return all(content.is_shown for content in self.contents.values())


class ReplyStream:
    """One reply. ``wrapper``: the member of each event that contains Gemini's own format, if there is one.

    The view's tags are stripped from the text of every candidate (`tersely.domain.text.tags`). Nothing is held back
    beyond the candidate's end, an error or the end of the stream.
    """

    def __init__(self, view: ClientView, *, wrapper: str = "", max_event: int = MAX_EVENT) -> None:
        self._tags = view.tags
        self._wrapper = wrapper
        self._max_event = max_event
        self._start = b""
        self._decoder: SseDecoder | ArrayDecoder | None = None
        self._is_blind = False
        self._waiting: deque[_Event] = deque()
        self._candidates: dict[int, _Candidate] = {}
        self._id = ""
        self._model = ""
        self._usage = b""
        self._error = b""
        self._is_blocked = False
        self._unread = UnreadPayloads()

    def feed(self, chunk: bytes) -> bytes:
        """Return the bytes that go to the client now. After an event over ``max_event`` bytes nothing is stripped."""
        if self._is_blind:
            return chunk
        try:
            sent = b"".join([self._forward(frame) for frame in self._frames(chunk)])
        except EventTooLarge:
            sent = self._release_all() + self._rest()
            self._is_blind = True
        return sent if self._tags else chunk

    def close(self) -> bytes:
        """The stream is over: held text and an unfinished last event."""
        frames = self._decoder.close() if self._decoder else []
        sent = b"".join([self._forward(frame) for frame in frames if frame.data])
        for frame in frames:
            if not frame.data and isinstance(frame, SseEvent):
                self._unread.add_if_no_event(frame.raw)
        sent += self._release_all() + b"".join(frame.raw for frame in frames if not frame.data)
        if self._decoder is None:
            sent, self._start = sent + self._start, b""
        return sent if self._tags else b""

    @property
    def reply(self) -> Reply:
        """Return the reply so far; it is complete after ``close``."""
        candidates = self._candidates
        has_ended = bool(candidates) and all(candidate.finish for candidate in candidates.values())
        return Reply(
            id=self._id,
            model=self._model,
            choices=tuple(candidates[index].to_choice(index) for index in sorted(candidates)),
            usage=self._usage,
            error=self._error,
            is_done=(has_ended or self._is_blocked) and not self._error,
            unread=tuple(self._unread.payloads),
        )

    # Which bytes go out

    def _frames(self, chunk: bytes) -> Iterable[_Frame]:
        if self._decoder is None:
            chunk, self._start = self._start + chunk, b""
            beginning = chunk.lstrip()[:1]
            if not beginning:
                self._start = chunk
                return ()
            self._decoder = (ArrayDecoder if beginning in b"[{" else SseDecoder)(self._max_event)
        return self._decoder.feed(chunk)

    def _rest(self) -> bytes:
        return b"".join(frame.raw for frame in self._decoder.close()) if self._decoder else b""

    def _forward(self, frame: _Frame) -> bytes:
        contents: Mapping[int, _Content] = {}
        if frame.data:
            try:
                contents = self._read(frame.data)
            except UNDESCRIBED:
                if isinstance(frame, Element) or frame.is_whole:
                    self._unread.add(frame.data)
        elif isinstance(frame, SseEvent):
            self._unread.add_if_no_event(frame.raw)
        if not self._tags:
            return b""
        before = self._release_all() if self._error else b""
        self._waiting.append(_Event(frame=frame, contents=contents))
        return before + self._release()

    def _release(self) -> bytes:
        sent: list[bytes] = []
        while self._waiting and self._waiting[0].is_ready:
            event = self._waiting.popleft()
            try:
                sent.append(self._write(event))
            except UNDESCRIBED:
                sent.append(event.frame.raw)
        return b"".join(sent)

    def _release_all(self) -> bytes:
        for candidate in self._candidates.values():
            candidate.close()
        return self._release()

    def _write(self, event: _Event) -> bytes:
        frame = event.frame
        if frame.data is None or not any(content.edits for content in event.contents.values()):
            return frame.raw
        members = raw_json.split_object(frame.data)
        if isinstance(frame, Element):
            return frame.with_data(raw_json.join_object(self._patch(members, event.contents)))
        is_empty = self._is_empty(members, event.contents)
        return b"" if is_empty else with_data(frame, raw_json.join_object(self._patch(members, event.contents)))

    def _patch(self, members: dict[str, bytes], contents: Mapping[int, _Content]) -> dict[str, bytes]:
        payload = self._unwrap(members)
        candidates = items(payload["candidates"])
        for index, content in contents.items():
            if content.edits:
                candidate = raw_json.split_object(candidates[index])
                candidates[index] = raw_json.join_object({**candidate, "content": content.client_raw})
        payload = {**payload, "candidates": raw_json.join_array(candidates)}
        return {**members, self._wrapper: raw_json.join_object(payload)} if self._is_wrapped(members) else payload

    def _is_empty(self, members: dict[str, bytes], contents: Mapping[int, _Content]) -> bool:
        """Return whether an event is empty after its text was stripped."""
        payload = self._unwrap(members)
        candidates = items(payload["candidates"])
        others = [value for key, value in payload.items() if key not in _ENVELOPE]
        others += [
            value
            for key, value in members.items()
            if self._is_wrapped(members) and key not in {self._wrapper, *_ENVELOPE}
        ]
        for index, raw in enumerate(candidates):
            content = contents.get(index)
            if content is None or content.client_parts != [_EMPTY_TEXT]:
                return False
            others += [value for key, value in raw_json.split_object(raw).items() if key not in _CANDIDATE_ENVELOPE]
        return all(value in _SILENT for value in others)

    # The text so far

    def _is_wrapped(self, members: Mapping[str, bytes]) -> bool:
        return bool(self._wrapper) and self._wrapper in members

    def _unwrap(self, members: dict[str, bytes]) -> dict[str, bytes]:
        return raw_json.split_object(members[self._wrapper]) if self._is_wrapped(members) else members

    def _read(self, data: bytes) -> dict[int, _Content]:
        members = raw_json.split_object(data)
        payload = self._unwrap(members)
        if not payload.keys() & _KNOWN and "error" not in members:
            raise ValueError("an event of an unknown form")
        self._id = self._id or _string(payload.get("responseId"))
        self._model = self._model or _string(payload.get("modelVersion"))
        self._usage = _given(payload, "usageMetadata") or self._usage
        self._error = _given(payload, "error") or _given(members, "error") or self._error
        if feedback := _given(payload, "promptFeedback"):
            self._is_blocked = "blockReason" in raw_json.split_object(feedback)
        contents: dict[int, _Content] = {}
        for position, raw in enumerate(items(payload.get("candidates", b"null"))):
            candidate = raw_json.split_object(raw)
            index = raw_json.load(candidate.get("index", b"null"))
            state = self._candidates.setdefault(index if isinstance(index, int) else position, _Candidate(self._tags))
            if candidate and not candidate.keys() & _KNOWN_OF_CANDIDATE:
                raise ValueError("a candidate of an unknown form")
            if content := _given(candidate, "content"):
                contents[position] = _read_content(content)
                state.add(contents[position])
            if finish := _string(candidate.get("finishReason")):
                state.finish = finish
                state.close()
        return contents


class _Message:
    """A reply's parts. Neighbouring texts of a kind are one part; a part with other members, such as a signature, stays
    unchanged.
    """

    __slots__ = ("_contents", "_parts", "_raw")

    def __init__(self) -> None:
        self._contents = 0
        self._raw = b""
        self._parts: list[bytes | tuple[bool, list[str]]] = []

    def copy(self) -> _Message:
        """Return a copy that grows by itself."""
        other = _Message()
        other._contents, other._raw = self._contents, self._raw
        other._parts = [each if isinstance(each, bytes) else (each[0], each[1][:]) for each in self._parts]
        return other

    def add(self, raw: bytes, parts: Sequence[bytes], values: Sequence[Any]) -> None:
        """Add the content of one event."""
        self._raw = raw if not self._contents else b""
        self._contents += 1
        for part, value in zip(parts, values, strict=True):
            text = value.get("text") if isinstance(value, dict) and value.keys() <= _PLAIN else None
            last = self._parts[-1] if self._parts else None
            if not isinstance(text, str):
                self._parts.append(part)
            elif isinstance(last, tuple) and last[0] == bool(value.get("thought")):
                last[1].append(text)
            elif text:
                self._parts.append((bool(value.get("thought")), [text]))

    def write(self) -> bytes:
        """Return the message on the wire; that of one event unchanged."""
        if self._contents == 1:
            return self._raw
        parts = [each if isinstance(each, bytes) else _write_texts(each[1], is_thought=each[0]) for each in self._parts]
        return raw_json.join_object({"parts": raw_json.join_array(parts), "role": b'"model"'})


@dataclass(slots=True)
class _Candidate:
    """The state of one candidate."""

    tags: TagKinds
    finish: str = ""
    _waiting: deque[_Content] = field(default_factory=deque)
    _model: _Message = field(default_factory=_Message)
    _client: _Message | None = None
    _pending: list[_Piece] = field(default_factory=list)
    _shown: str = ""
    _stripper: TagStripper = field(init=False)

    def __post_init__(self) -> None:
        self._stripper = TagStripper(self.tags)

    def add(self, content: _Content) -> None:
        self._waiting.append(content)
        for piece in content.pieces.values():
            self._pending.append(piece)
            self._shown += self._stripper.feed(piece.text)
            if not self._stripper.held_size:
                self._share_shown_text()
        self._take_shown()

    def close(self) -> None:
        """Release the text that is held back."""
        self._shown += self._stripper.close()
        self._share_shown_text()
        self._take_shown()

    def _share_shown_text(self) -> None:
        """Distribute the visible text among its pieces: each gets its own beginning, the last one the rest."""
        for piece in self._pending[:-1]:
            piece.shown = _common_beginning(piece.text, self._shown)
            self._shown = self._shown[len(piece.shown) :]
        if self._pending:
            self._pending[-1].shown, self._shown = self._shown, ""
            self._pending.clear()

    def _take_shown(self) -> None:
        """Add the contents that are known to the message. It is all that stays of them: a long reply has many."""
        while self._waiting and self._waiting[0].is_shown:
            content = self._waiting.popleft()
            if content.edits:
                self._client = self._client or self._model.copy()
                parts = content.client_parts
                self._client.add(content.client_raw, parts, [raw_json.load(part) for part in parts])
            elif self._client is not None:
                self._client.add(content.raw, content.parts, content.values)
            self._model.add(content.raw, content.parts, content.values)

    def to_choice(self, index: int) -> ReplyChoice:
        model, client = self._model, self._client
        if self._waiting:
            model = self._model.copy()
            client = client.copy() if client is not None else None
            for content in self._waiting:
                for each in filter(None, (model, client)):
                    each.add(content.raw, content.parts, content.values)
        written = model.write()
        return ReplyChoice(
            index=index,
            model_message=written,
            client_message=written if client is None else client.write(),
            terse=self._stripper.terse,
            state=self._stripper.state,
            finish_reason=self.finish,
        )


def _read_content(raw: bytes) -> _Content:
    members = raw_json.split_object(raw)
    parts = items(members.get("parts", b"null"))
    values = [raw_json.load(part) for part in parts]
    pieces: dict[int, _Piece] = {}
    for index, value in enumerate(values):
        text = visible_text(value) if isinstance(value, dict) else None
        if text is not None:
            pieces[index] = _Piece(text=text)
    return _Content(members=members, raw=raw, parts=parts, values=values, pieces=pieces)


def _common_beginning(one: str, other: str) -> str:
    length = next((index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    return one[: len(other)] if length is None else one[:length]


def _write_texts(texts: Sequence[str], *, is_thought: bool) -> bytes:
    return raw_json.dump({"text": "".join(texts), **({"thought": True} if is_thought else {})})


def _given(members: Mapping[str, bytes], key: str) -> bytes:
    value = members.get(key, b"null")
    return b"" if value == b"null" else value


def _string(raw: bytes | None) -> str:
    return raw_json.string(raw)
