"""Accumulate one choice of a streamed reply, and decide which part of it may be shown."""

from __future__ import annotations

from typing import Any

from tersely.dialects.dialect import ReplyChoice
from tersely.dialects.openai_chat.stream_events import CallDelta, Choice, ChoiceDelta, FunctionDelta
from tersely.dialects.openai_content import replace_text
from tersely.dialects.wire import raw_json
from tersely.dialects.wire.pieces import Piece, PieceFilter
from tersely.domain.text.tags import TagKinds


class _GrowingText(list[str]):
    """A text in pieces: joining them once is cheaper than appending each to a long string."""

    @classmethod
    def of(cls, *pieces: str) -> _GrowingText:
        """Return a text that begins with ``pieces``."""
        return cls(piece for piece in pieces if piece)


def _joined(value: Any) -> Any:
    """Return ``value`` with every `_GrowingText` in it as a string."""
    if isinstance(value, _GrowingText):
        return "".join(value)
    if isinstance(value, dict):
        return {key: _joined(item) for key, item in value.items()}
    return [_joined(item) for item in value] if isinstance(value, list) else value


class ChoiceState:
    """The state of one choice."""

    __slots__ = (
        "_call_indexes",
        "_calls",
        "_calls_by_index",
        "_content",
        "_filters",
        "_finish",
        "_has_content",
        "_has_parts",
        "_other",
        "_shown",
        "_tags",
        "_unfed",
    )  # fmt: skip

    def __init__(self, tags: TagKinds) -> None:
        self._content: list[str | dict[str, Any]] = []
        self._has_content = False
        self._has_parts = False
        self._unfed: list[str] = []
        self._shown: list[str] = []
        self._tags = tags
        self._filters = [PieceFilter(tags)]
        self._calls: list[dict[str, Any]] = []
        self._calls_by_index: dict[int, dict[str, Any]] = {}
        self._call_indexes: list[int | None] = []
        self._other: dict[str, Any] = {}
        self._finish = ""

    def add(self, choice: Choice) -> None:
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

    def _add_strings(self, delta: ChoiceDelta) -> None:
        for name, value in (
            ("refusal", delta.refusal),
            ("reasoning_content", delta.reasoning_content),
            ("reasoning", delta.reasoning),
        ):
            if value and isinstance(value, str):
                self._other.setdefault(name, _GrowingText()).append(value)

    def _add_rare(self, delta: ChoiceDelta) -> None:
        if isinstance(delta.reasoning_details, list):
            _merge_details(self._other.setdefault("reasoning_details", []), delta.reasoning_details)
        if isinstance(delta.annotations, list):
            self._other.setdefault("annotations", []).extend(delta.annotations)
        if isinstance(delta.audio, dict):
            _merge_audio(self._other.setdefault("audio", {}), delta.audio)
        if delta.function_call is not None:
            call = self._other.setdefault("function_call", _new_function())
            _merge_function(call, delta.function_call)

    @property
    def is_holding(self) -> bool:
        return self._filters[-1].stripper.held_size > 0

    @property
    def has_unfed(self) -> bool:
        return bool(self._unfed)

    def take(self) -> Piece:
        """Return the newest text, and the visible part of it."""
        piece = Piece("".join(self._unfed))
        self._unfed.clear()
        if piece.text:
            self._shown.append(self._filters[-1].feed(piece))
        return piece

    def end_text(self) -> None:
        """End the held-back text, because a call begins or the reply ends. Later text is a new text."""
        if self.is_holding:
            self._shown.append(self._filters[-1].close())
            self._filters.append(PieceFilter(self._tags))

    def finish(self) -> None:
        """Release everything that is held back: the choice is finished."""
        if self._unfed:
            self.take()
        self.end_text()

    def to_choice(self, index: int) -> ReplyChoice:
        model = raw_json.dump(self._message(self._model_content()))
        client = model
        if self._is_cut:
            client = raw_json.dump(self._message(self._client_content()))
        return ReplyChoice(
            index=index,
            model_message=model,
            client_message=client,
            terse=tuple(entry for each in self._filters for entry in each.stripper.terse),
            state=next((state for each in reversed(self._filters) if (state := each.stripper.state) is not None), None),
            finish_reason=self._finish,
        )

    @property
    def _is_cut(self) -> bool:
        """Something was taken out, or the stream broke off while text was held back."""
        return bool(self._shown) and "".join((*self._shown, *self._unfed)) != self._text

    @property
    def _text(self) -> str:
        return "".join(map(text_of, self._content)) if self._has_parts else "".join(self._content)  # type: ignore[arg-type]

    def _message(self, content: str | list[Any] | None) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": content, **_joined(self._other)}
        if self._calls:
            message["tool_calls"] = _joined(self._ordered_calls())
        return message

    def _ordered_calls(self) -> list[dict[str, Any]]:
        """Return the calls in the order of their indexes, as official clients do; as they came where one has none."""
        indexes = [index for index in self._call_indexes if index is not None]
        if len(indexes) < len(self._calls) or indexes == sorted(indexes):
            return self._calls
        return [self._calls[n] for n in sorted(range(len(indexes)), key=indexes.__getitem__)]

    def _model_content(self) -> str | list[Any] | None:
        if self._has_parts:
            return _merge_parts(self._content)
        text = self._text
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
                self._has_parts = True
                self._content.append(part)
                if text := text_of(part):
                    self._unfed.append(text)

    def _add_call(self, delta: CallDelta) -> None:
        call = self._find_call(delta)
        if delta.id is not None and delta.id != "":
            call["id"] = str(delta.id)
        if delta.type:
            call["type"] = delta.type
        if delta.extra_content is not None:
            call["extra_content"] = delta.extra_content
        if delta.function is not None:
            _merge_function(call.setdefault("function", _new_function()), delta.function)
        if delta.custom is not None:
            custom = call.setdefault("custom", {"name": _GrowingText(), "input": _GrowingText()})
            custom["name"].append(delta.custom.name or "")
            custom["input"].append(delta.custom.input or "")

    def _find_call(self, delta: CallDelta) -> dict[str, Any]:
        """Find a call by index. Some providers send one index, or none, for several calls: then a new id is
        a new call.
        """
        if delta.index is None:
            call = self._calls[-1] if self._calls else None
        else:
            call = self._calls_by_index.get(delta.index)
        if call is None or (delta.id and call["id"] and str(delta.id) != call["id"]):
            call = {"id": "", "type": "function"}
            self._calls.append(call)
            self._call_indexes.append(delta.index)
        if delta.index is not None:
            self._calls_by_index[delta.index] = call
        return call


def text_of(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(text := part.get("text"), str):
        return text
    return ""


def _new_function() -> dict[str, _GrowingText]:
    return {"name": _GrowingText(), "arguments": _GrowingText()}


def _merge_function(into: dict[str, _GrowingText], delta: FunctionDelta) -> None:
    into["name"].append(delta.name or "")
    arguments = delta.arguments
    if arguments is not None:
        into["arguments"].append(arguments if isinstance(arguments, str) else raw_json.dump(arguments).decode())


def _merge_parts(items: list[str | dict[str, Any]]) -> list[Any]:
    """Neighbouring parts of a kind become one."""
    merged: list[dict[str, Any]] = []
    thinking: list[list[Any]] = []  # of the newest parts that think, by part of the result
    for item in items:
        part = {"type": "text", "text": item} if isinstance(item, str) else dict(item)
        last = merged[-1] if merged else None
        if last is None or last.get("type") != part.get("type"):
            merged.append(part)
        elif text_of(part) or part.get("type") == "text":
            text = last.get("text")
            last["text"] = text = text if isinstance(text, _GrowingText) else _GrowingText.of(text_of(last))
            text.append(text_of(part))
        elif isinstance(last.get("thinking"), list) and isinstance(part.get("thinking"), list):
            if not (thinking and last["thinking"] is thinking[-1]):
                last["thinking"] = [*last["thinking"]]
                thinking.append(last["thinking"])
            last["thinking"] += part["thinking"]
        else:
            merged.append(part)
    for thoughts in thinking:
        thoughts[:] = _merge_parts(thoughts)
    return [_joined(part) for part in merged]


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
            if key in {"text", "summary", "data"} and isinstance(value, str):
                _extend(last, key, value)
            elif value is not None:
                last[key] = value


def _merge_audio(into: dict[str, Any], delta: dict[str, Any]) -> None:
    for key, value in delta.items():
        if key in {"data", "transcript"} and isinstance(value, str):
            _extend(into, key, value)
        else:
            into[key] = value


def _extend(into: dict[str, Any], key: str, text: str) -> None:
    """Add ``text`` to the text under ``key``; a value of another type is replaced."""
    present = into.get(key)
    if isinstance(present, _GrowingText):
        present.append(text)
    else:
        into[key] = _GrowingText.of(present, text) if isinstance(present, str) else _GrowingText.of(text)
