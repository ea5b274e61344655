"""Replies on their way to the client: what may go out now, and what was said in all. No I/O.

With nothing to take out, bytes go through untouched. Otherwise the smallest possible part of an event is
replaced, and every other member keeps its bytes. Most events need nothing: a block of them in which nothing
can begin that is taken out goes out as it came and is read later, many at a time, because reading costs more
than everything else here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from app.dialects import raw_json
from app.dialects.dialect import Reply, ReplyChoice
from app.dialects.openai_content import replace_text
from app.dialects.sse import MAX_EVENT, EventTooLarge, SseDecoder, SseEvent, parse_event, with_data
from app.domain.extraction import NOTHING, Extract, Extraction

_MAX_UNREAD = 64 * 1024
_DONE = b"[DONE]"

_ENVELOPE = frozenset(
    {
        "id", "object", "created", "model", "choices", "system_fingerprint", "service_tier", "obfuscation",
        "provider", "p", "stream_options", "native_finish_reason",
    }
)  # fmt: skip
"""Members that say nothing by themselves: an event with only these and no words left in it is dropped."""

# What a tag, and what a block or the line ends in front of it, cannot begin without, as JSON may write it.
_TERSE_MARKS = (b"<", b"\\u003")
_STATE_MARKS = (b"\\n", b"\\r", b"#", b"\\u00")


class _FunctionDelta(msgspec.Struct):
    name: str | None = None
    arguments: Any = None


class _CustomDelta(msgspec.Struct):
    name: str | None = None
    input: str | None = None


class _CallDelta(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    type: str | None = None
    function: _FunctionDelta | None = None
    custom: _CustomDelta | None = None
    extra_content: Any = None


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | list[Any] | None = None
    refusal: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    reasoning_details: Any = None
    tool_calls: list[_CallDelta] | None = None
    function_call: _FunctionDelta | None = None
    audio: Any = None
    annotations: Any = None


class _Choice(msgspec.Struct):
    position: int | None = msgspec.field(name="index", default=None)
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def index(self) -> int:
        return self.position or 0


_ABSENT = msgspec.Raw()


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    id: str | None = None
    model: str | None = None
    usage: msgspec.Raw = _ABSENT
    error: msgspec.Raw = _ABSENT


_chunk_decoder = msgspec.json.Decoder(_Chunk)
_chunks_decoder = msgspec.json.Decoder(list[_Chunk])


class ReplyStream:
    """One streamed reply.

    ``extract`` says what is taken out of the content of every choice (`app.domain.terse` and `app.domain.state`
    have the rules); text that is held back as its possible beginning goes out in front of what follows, at the
    latest before the choice's finish chunk, an error or the end. ``strip_usage`` takes out what is only there
    because we asked for it: the usage-only chunk and ``"usage": null`` in the others. With both off, ``feed`` returns
    what it is given.
    """

    def __init__(self, *, extract: Extract, strip_usage: bool, sent: bytes = b"", max_event: int = MAX_EVENT) -> None:
        del sent  # these replies repeat nothing of it
        self._max_event = max_event
        self._extract = extract
        self._marks = (_TERSE_MARKS if extract.terse else ()) + (_STATE_MARKS if extract.state else ())
        self._strip_usage = strip_usage
        self._decoder: SseDecoder | None = None
        self._tail = b""
        self._unread: list[bytes] = []
        self._unread_size = 0
        self._read_at = _MAX_UNREAD
        self._choices: dict[int, _ChoiceState] = {}
        self._is_holding = False
        self._envelope = b"{}"
        self._newline = b"\n"
        self._id = ""
        self._model = ""
        self._usage = b""
        self._error = b""
        self._is_done = False

    def feed(self, chunk: bytes) -> bytes:
        """What goes to the client now. After an event over ``max_event`` bytes nothing is taken out any more."""
        if not (self._extract or self._strip_usage):
            self._defer(chunk)
            return chunk
        try:
            if self._decoder is None and b"\r" not in chunk:
                return self._feed_plain_lines(chunk)
            return b"".join(map(self._forward, self._decode(chunk)))
        except EventTooLarge:
            return self._give_up()

    def _give_up(self) -> bytes:
        rest = self._release_held()
        if self._decoder is not None:
            rest += b"".join(event.raw for event in self._decoder.close())
        self._catch_up()
        self._extract, self._strip_usage = NOTHING, False
        return rest

    def close(self) -> bytes:
        """The stream is over: held text and an unfinished last event."""
        if not (self._extract or self._strip_usage):
            self._read_unread(is_last=True)
            return b""
        events = self._decode(b"")
        if self._decoder is not None:
            events += self._decoder.close()
        self._read_unread(is_last=True)
        rest = b"".join(map(self._forward, events))
        released = self._release_held()
        if not (released and rest) or rest.endswith((b"\n\n", b"\r\n\r\n")):
            return rest + released
        if _is_whole(events[-1]):
            return rest + self._newline * 2 + released
        return released + rest

    @property
    def reply(self) -> Reply:
        """What was said so far; whole after ``close``."""
        self._read_unread(is_last=False)
        return Reply(
            id=self._id,
            model=self._model,
            choices=tuple(self._choices[index].to_choice(index) for index in sorted(self._choices)),
            usage=self._usage,
            error=self._error,
            is_done=self._is_done,
        )

    # Which bytes go out

    def _feed_plain_lines(self, chunk: bytes) -> bytes:
        """The quick way, while no CR was seen: events are what lies between blank lines."""
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
            self._defer(block)
            return block.replace(b'],"usage":null', b"]") if self._strip_usage else block
        return b"".join([self._forward(parse_event(raw + b"\n\n")) for raw in block.split(b"\n\n")[:-1]])

    def _decode(self, chunk: bytes) -> list[SseEvent]:
        if self._decoder is None:
            self._decoder = SseDecoder(limit=self._max_event)
            chunk, self._tail = self._tail + chunk, b""
        return self._decoder.feed(chunk)

    def _is_plain(self, block: bytes) -> bool:
        """Whether nothing in a block of whole events can need a change, but for ``"usage":null`` after the
        choices.
        """
        if self._is_holding:
            return False
        for mark in self._marks:
            if mark in block:
                return False
        return not self._strip_usage or block.count(b'"usage"') == block.count(b'],"usage":null')

    def _forward(self, event: SseEvent) -> bytes:
        if b"\r" in event.raw:
            self._newline = b"\r\n"
        if self._is_plain(event.raw) and not (self._strip_usage and b'"usage"' in event.raw):
            self._defer(event.raw)
            return event.raw
        self._catch_up()
        data = (event.data or b"").strip()
        if not data or data == _DONE:
            if data:
                self._is_done = True
                return self._release_held() + event.raw
            return event.raw
        chunk = _read_chunk(data)
        return event.raw if chunk is None else self._forward_chunk(event, data, chunk)

    def _forward_chunk(self, event: SseEvent, data: bytes, chunk: _Chunk) -> bytes:
        self._record(chunk)
        if chunk.choices is not None:
            self._envelope = data
        has_error = bytes(chunk.error) not in {b"", b"null"}
        before = self._release_held() if has_error else b""
        usage = bytes(chunk.usage) if self._strip_usage else b""
        if usage and usage != b"null" and not chunk.choices and not has_error:
            return before
        edits: dict[int, str] = {}
        if self._extract:
            edits, own_chunks = self._edit_choices(chunk)
            before += own_chunks
        edited, unedited = event.raw, event.raw
        if edits or usage == b"null":
            members = raw_json.split_object(data)
            if usage == b"null":
                del members["usage"]
                edited = unedited = with_data(event, raw_json.join_object(members))
            if edits:
                is_empty = self._patch_choices(members, edits)
                edited = b"" if is_empty else with_data(event, raw_json.join_object(members))
        for choice in chunk.choices or ():
            self._choices[choice.index].note_held(unedited if not edited and len(edits) == 1 else b"")
        return before + edited

    def _edit_choices(self, chunk: _Chunk) -> tuple[dict[int, str], bytes]:
        """What the content has to be instead, by place in the chunk; and chunks of our own that go in
        front.
        """
        edits: dict[int, str] = {}
        before = b""
        for place, choice in enumerate(chunk.choices or ()):
            state = self._choices[choice.index]
            said = state.unfed_text
            shown = state.feed()
            if choice.finish_reason is not None and state.is_holding:
                shown += state.close()
            if shown:
                text, events, shown = state.release_events(shown)
                if shown and not said:
                    text, shown = text + shown, ""
                before += (self._text_chunk(choice.index, text) if text else b"") + events
            if shown != said:
                edits[place] = shown
        self._is_holding = any(state.is_holding for state in self._choices.values())
        return edits, before

    def _patch_choices(self, members: dict[str, bytes], edits: dict[int, str]) -> bool:
        """Put the ``edits`` into ``members``; whether nothing is left that is worth an event."""
        choices = raw_json.split_array(members["choices"])
        for place, text in edits.items():
            choices[place] = _with_content(choices[place], text)
        members["choices"] = raw_json.join_array(choices)
        is_empty = len(edits) == len(choices) and not any(edits.values())
        return (
            is_empty
            and all(map(_carries_nothing, choices))
            and not any(_says(members[key]) for key in members.keys() - _ENVELOPE)
        )

    def _release_held(self) -> bytes:
        released = b""
        for index, state in sorted(self._choices.items()):
            if state.is_holding:
                text, events, rest = state.release_events(state.close())
                if text or rest:
                    released += self._text_chunk(index, text + rest)
                released += events
        self._is_holding = False
        return released

    def _text_chunk(self, index: int, text: str) -> bytes:
        """A chunk of our own, in the envelope of the provider's last one."""
        delta = b'{"index":%d,"delta":{"content":%b},"finish_reason":null}' % (index, raw_json.dump(text))
        members = raw_json.split_object(self._envelope)
        envelope = {key: members[key] for key in members if key in _ENVELOPE - {"obfuscation", "p"}}
        data = raw_json.join_object({**envelope, "choices": b"[" + delta + b"]"})
        return b"data: " + data + self._newline * 2

    # What was said

    def _catch_up(self) -> None:
        """Bring every choice up to date with what went out the quick way."""
        self._read_unread(is_last=False)
        if self._extract:
            for state in self._choices.values():
                if state.has_unfed:
                    state.feed()

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
        if not (self._extract or self._strip_usage):
            block = self._keep_unfinished(block, is_last=is_last)
        for chunk in self._read_chunks(block):
            self._record(chunk)
            if self._extract:
                for choice in chunk.choices or ():
                    if choice.finish_reason is not None:
                        self._choices[choice.index].settle()

    def _keep_unfinished(self, block: bytes, *, is_last: bool) -> bytes:
        """Untouched bytes are cut anywhere: the part after the last blank line waits for the rest."""
        if is_last:
            return block
        end = max(block.rfind(b"\n\n") + 2, block.rfind(b"\n\r\n") + 3)
        if end < 3:
            end = 0
        self._unread, self._unread_size = [block[end:]], len(block) - end
        return block[:end]

    def _read_chunks(self, block: bytes) -> Iterable[_Chunk]:
        payloads = self._payloads(block)
        try:
            chunks = _chunks_decoder.decode(b"[" + b",".join(payloads) + b"]")
            if len(chunks) == len(payloads):
                return chunks
        except (msgspec.DecodeError, RecursionError):
            pass
        return [chunk for payload in payloads if (chunk := _read_chunk(payload)) is not None]

    def _payloads(self, block: bytes) -> list[bytes]:
        payloads: list[bytes] = []
        if b"\r" in block:
            decoder = SseDecoder(limit=len(block) + 1)
            events = [each.raw for each in (*decoder.feed(block), *decoder.close())]
        else:
            events = block.split(b"\n\n")
        for raw in events:
            data: bytes | None
            if raw[:6] == b"data: " and b"\n" not in raw:
                data = raw[6:]
            else:
                data = parse_event(raw).data
            if data == _DONE or (data and data.strip() == _DONE):
                self._is_done = True
            elif data and not data.isspace():
                payloads.append(data)
        return payloads

    def _record(self, chunk: _Chunk) -> None:
        if not self._id:
            self._id = chunk.id or ""
        if not self._model:
            self._model = chunk.model or ""
        if chunk.usage is not _ABSENT and (usage := bytes(chunk.usage)) != b"null":
            self._usage = usage
        if chunk.error is not _ABSENT and (error := bytes(chunk.error)) != b"null":
            self._error = error
        for choice in chunk.choices or ():
            index = choice.position or 0
            state = self._choices.get(index)
            if state is None:
                state = self._choices[index] = _ChoiceState(self._extract)
            state.add(choice)


class _ChoiceState:
    """What one choice has said so far."""

    __slots__ = (
        "_calls", "_calls_by_index", "_content", "_extraction", "_finish", "_has_content", "_held_events", "_held_text",
        "_last_said", "_loose", "_other", "_shown", "_unfed",
    )  # fmt: skip

    def __init__(self, extract: Extract) -> None:
        self._content: list[str | dict[str, Any]] = []
        self._has_content = False
        self._unfed: list[str] = []
        self._shown: list[str] = []
        self._extraction = Extraction(extract)
        self._calls: list[dict[str, Any]] = []
        self._calls_by_index: dict[int, dict[str, Any]] = {}
        self._other: dict[str, Any] = {}
        self._finish = ""
        self._last_said = ""
        self._loose = ""
        self._held_text = ""
        self._held_events: list[bytes] = []

    def add(self, choice: _Choice) -> None:
        if choice.finish_reason is not None:
            self._finish = choice.finish_reason
        delta = choice.delta
        if delta is None:
            return
        content = delta.content
        if type(content) is str:
            self._has_content = True
            if content:
                self._content.append(content)
                self._unfed.append(content)
        elif isinstance(content, list):
            self._add_parts(content)
        if delta.tool_calls:
            for call in delta.tool_calls:
                self._add_call(call)
        if delta.reasoning_content or delta.reasoning or delta.refusal:
            self._add_strings(delta)
        if delta.reasoning_details or delta.audio or delta.annotations or delta.function_call:
            self._add_rare(delta)

    def _add_strings(self, delta: _Delta) -> None:
        for name, value in (
            ("refusal", delta.refusal),
            ("reasoning_content", delta.reasoning_content),
            ("reasoning", delta.reasoning),
        ):
            if value and isinstance(value, str):
                self._other[name] = self._other.get(name, "") + value

    def _add_rare(self, delta: _Delta) -> None:
        if isinstance(delta.reasoning_details, list):
            _merge_details(self._other.setdefault("reasoning_details", []), delta.reasoning_details)
        if isinstance(delta.annotations, list):
            self._other.setdefault("annotations", []).extend(delta.annotations)
        if isinstance(delta.audio, dict):
            _merge_audio(self._other.setdefault("audio", {}), delta.audio)
        if delta.function_call is not None:
            call = self._other.setdefault("function_call", {"name": "", "arguments": ""})
            _merge_function(call, delta.function_call)

    @property
    def is_holding(self) -> bool:
        return bool(self._extraction.held)

    @property
    def has_unfed(self) -> bool:
        return bool(self._unfed)

    @property
    def unfed_text(self) -> str:
        return "".join(self._unfed)

    def feed(self) -> str:
        """What of the newest text may be shown."""
        self._last_said = self.unfed_text
        shown = self._extraction.feed(self._last_said)
        self._unfed.clear()
        self._shown.append(shown)
        return shown

    def close(self) -> str:
        rest = self._extraction.close()
        self._shown.append(rest)
        return rest

    def note_held(self, event: bytes) -> None:
        """Remember how the text that is held back came.

        An ``event`` that carries nothing but held text is kept whole, to go out as it came should the text
        prove to be no tag; text that came with something else is ``loose`` and will be put in front of what
        follows.
        """
        held = self._extraction.held
        before = self._loose + self._held_text
        if event and len(held) > len(before) and held.startswith(before) and self._last_said == held[len(before) :]:
            self._held_events.append(event)
            self._held_text = held[len(self._loose) :]
        elif held != before:
            self._loose, self._held_text = held, ""
            self._held_events.clear()

    def release_events(self, shown: str) -> tuple[str, bytes, str]:
        """Held text that proved to be text: what was loose, whole events, and what of ``shown`` is left
        after them.
        """
        loose, pending = self._loose, self._loose + self._held_text
        events = b"".join(self._held_events)
        is_whole = bool(events) and shown.startswith(pending)
        self._loose = self._held_text = ""
        self._held_events.clear()
        return (loose, events, shown[len(pending) :]) if is_whole else ("", b"", shown)

    def settle(self) -> None:
        """The choice is finished: nothing more is held back."""
        if self._unfed:
            self.feed()
        if self._extraction.held:
            self.close()

    def to_choice(self, index: int) -> ReplyChoice:
        model = raw_json.dump(self._message(self._model_content()))
        client = model
        if self._is_cut:
            client = raw_json.dump(self._message(self._client_content()))
        return ReplyChoice(
            index=index,
            model_message=model,
            client_message=client,
            terse=self._extraction.terse,
            state=self._extraction.state,
            finish_reason=self._finish,
        )

    @property
    def _is_cut(self) -> bool:
        """Something was taken out, or the stream broke off while text was held back."""
        return bool(self._shown) and "".join((*self._shown, *self._unfed)) != "".join(
            _text_of(item) for item in self._content
        )

    def _message(self, content: str | list[Any] | None) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": content, **self._other}
        if self._calls:
            message["tool_calls"] = self._calls
        return message

    def _model_content(self) -> str | list[Any] | None:
        if any(isinstance(item, dict) for item in self._content):
            return _merge_parts(self._content)
        text = "".join(item for item in self._content if isinstance(item, str))
        return text if text or (self._has_content and not self._calls) else None

    def _client_content(self) -> str | list[Any] | None:
        shown = "".join((*self._shown, *self._unfed))
        content = self._model_content()
        if not isinstance(content, list):
            return shown
        parts = [raw_json.dump(part) for part in content]
        return [raw_json.load(part) for part in replace_text(parts, shown)]

    def _add_parts(self, parts: list[Any]) -> None:
        """Mistral's thinking models stream their content as a list of parts."""
        for part in parts:
            if isinstance(part, dict):
                self._content.append(part)
                if text := _text_of(part):
                    self._unfed.append(text)

    def _add_call(self, delta: _CallDelta) -> None:
        call = self._find_call(delta)
        if delta.id:
            call["id"] = delta.id
        if delta.type:
            call["type"] = delta.type
        if delta.extra_content is not None:
            call["extra_content"] = delta.extra_content
        if delta.function is not None:
            _merge_function(call.setdefault("function", {"name": "", "arguments": ""}), delta.function)
        if delta.custom is not None:
            custom = call.setdefault("custom", {"name": "", "input": ""})
            custom["name"] += delta.custom.name or ""
            custom["input"] += delta.custom.input or ""

    def _find_call(self, delta: _CallDelta) -> dict[str, Any]:
        """By index; but some providers send one index, or none, for several calls: a new id is a new call."""
        if delta.index is None:
            call = self._calls[-1] if self._calls else None
        else:
            call = self._calls_by_index.get(delta.index)
        if call is None or (delta.id and call["id"] and delta.id != call["id"]):
            call = {"id": "", "type": "function"}
            self._calls.append(call)
        if delta.index is not None:
            self._calls_by_index[delta.index] = call
        return call


def split_reply(body: bytes, extract: Extract, *, sent: bytes = b"") -> tuple[bytes, Reply]:
    """The body for the client of a reply that is not streamed, and the reply.

    The very same bytes when nothing is taken out; else only the content of the messages concerned is
    replaced. What is no reply (an error under status 200, no JSON at all) goes through, and its reply has
    no choices.
    """
    try:
        members = raw_json.split_object(body)
        raw_choices = raw_json.split_array(members["choices"])
    except (ValueError, KeyError):
        return body, Reply(error=_error_of(body))
    choices: list[ReplyChoice] = []
    for place, raw in enumerate(raw_choices):
        try:
            raw_choices[place], choice = _split_choice(raw, place, extract)
        except (ValueError, KeyError):
            continue
        choices.append(choice)
    usage, error = members.get("usage", b"null"), members.get("error", b"null")
    reply = Reply(
        id=_string(members.get("id")),
        model=_string(members.get("model")),
        choices=tuple(choices),
        usage=b"" if usage == b"null" else usage,
        error=b"" if error == b"null" else error,
        is_done=True,
    )
    if not any(choice.client_message is not choice.model_message for choice in choices):
        return body, reply
    return raw_json.join_object({**members, "choices": raw_json.join_array(raw_choices)}), reply


def _split_choice(raw: bytes, place: int, extract: Extract) -> tuple[bytes, ReplyChoice]:
    members = raw_json.split_object(raw)
    said = members["message"]
    extraction = Extraction(extract)
    shown = _take_out(said, extraction) if extract else said
    index = raw_json.load(members.get("index", b"null"))
    choice = ReplyChoice(
        index=index if isinstance(index, int) else place,
        model_message=said,
        client_message=shown,
        terse=extraction.terse,
        state=extraction.state,
        finish_reason=_string(members.get("finish_reason")),
    )
    return (raw if shown is said else raw_json.join_object({**members, "message": shown})), choice


def _take_out(message: bytes, extraction: Extraction) -> bytes:
    """The message for the client; the very same bytes when nothing is taken out."""
    members = raw_json.split_object(message)
    content = raw_json.load(members.get("content", b"null"))
    texts = [content] if isinstance(content, str) else [_text_of(part) for part in content or ()]
    said = "".join(texts)
    shown = extraction.feed(said) + extraction.close()
    if shown == said:
        return message
    if isinstance(content, str):
        members["content"] = raw_json.dump(shown)
    else:
        parts = raw_json.split_array(members["content"])
        members["content"] = raw_json.join_array(replace_text(parts, shown))
    return raw_json.join_object(members)


def _read_chunk(data: bytes) -> _Chunk | None:
    try:
        return _chunk_decoder.decode(data)
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        members = raw_json.split_object(data)
    except ValueError:
        return None
    chunk = _Chunk(id=_string(members.get("id")), model=_string(members.get("model")))
    if "usage" in members:
        chunk.usage = msgspec.Raw(members["usage"])
    if "error" in members:
        chunk.error = msgspec.Raw(members["error"])
    try:
        chunk.choices = msgspec.convert(raw_json.load(members.get("choices", b"null")), list[_Choice] | None)
    except ValueError:  # a shape nobody has described: it goes through, and is not understood
        pass
    return chunk


def _is_whole(event: SseEvent) -> bool:
    """Whether a last event without a blank line after it says something all the same."""
    data = (event.data or b"").strip()
    return data == _DONE or (bool(data) and _read_chunk(data) is not None)


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
    return not any(map(_says, others)) and content in {b'""', b"null", b"[]"}


def _says(value: bytes) -> bool:
    return value not in {b"null", b"[]", b"{}", b'""'}


def _string(raw: bytes | None) -> str:
    value = raw_json.load(raw) if raw else None
    return value if isinstance(value, str) else ""


def _error_of(body: bytes) -> bytes:
    try:
        error = raw_json.split_object(body).get("error", b"null")
    except ValueError:
        return b""
    return b"" if error == b"null" else error


def _text_of(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(text := part.get("text"), str):
        return text
    return ""


def _merge_function(into: dict[str, str], delta: _FunctionDelta) -> None:
    into["name"] += delta.name or ""
    arguments = delta.arguments
    if arguments is not None:
        into["arguments"] += arguments if isinstance(arguments, str) else raw_json.dump(arguments).decode()


def _merge_parts(items: list[str | dict[str, Any]]) -> list[Any]:
    """Neighbouring parts of a kind become one."""
    merged: list[dict[str, Any]] = []
    for item in items:
        part = {"type": "text", "text": item} if isinstance(item, str) else dict(item)
        last = merged[-1] if merged else None
        if last is None or last.get("type") != part.get("type"):
            merged.append(part)
        elif _text_of(part) or part.get("type") == "text":
            last["text"] = _text_of(last) + _text_of(part)
        elif isinstance(last.get("thinking"), list) and isinstance(part.get("thinking"), list):
            last["thinking"] = _merge_parts([*last["thinking"], *part["thinking"]])
        else:
            merged.append(part)
    return merged


def _merge_details(into: list[Any], details: list[Any]) -> None:
    """OpenRouter streams a detail in pieces of one index: texts grow, other members are set."""
    for detail in details:
        last = into[-1] if into else None
        if not (isinstance(detail, dict) and isinstance(last, dict)) or (
            (detail.get("index"), detail.get("type")) != (last.get("index"), last.get("type"))
        ):
            into.append(dict(detail) if isinstance(detail, dict) else detail)
            continue
        for key, value in detail.items():
            if key in {"text", "summary", "data"} and isinstance(value, str) and isinstance(last.get(key), str):
                last[key] += value
            elif value is not None:
                last[key] = value


def _merge_audio(into: dict[str, Any], delta: dict[str, Any]) -> None:
    for key, value in delta.items():
        if key in {"data", "transcript"} and isinstance(value, str):
            into[key] = into.get(key, "") + value
        else:
            into[key] = value
