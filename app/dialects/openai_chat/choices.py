"""What one choice of a streamed reply has said so far, and what of it may be shown."""

from __future__ import annotations

from typing import Any

from app.dialects import raw_json
from app.dialects.dialect import ReplyChoice
from app.dialects.openai_chat.chunks import CallDelta, Choice, Delta, FunctionDelta
from app.dialects.openai_content import replace_text
from app.dialects.pieces import Piece, PieceFilter
from app.domain.extraction import Extract


class ChoiceState:
    """What one choice has said so far."""

    __slots__ = (
        "_calls", "_calls_by_index", "_content", "_extract", "_filters", "_finish", "_has_content", "_other", "_shown",
        "_unfed",
    )  # fmt: skip

    def __init__(self, extract: Extract) -> None:
        self._content: list[str | dict[str, Any]] = []
        self._has_content = False
        self._unfed: list[str] = []
        self._shown: list[str] = []
        self._extract = extract
        self._filters = [PieceFilter(extract)]
        self._calls: list[dict[str, Any]] = []
        self._calls_by_index: dict[int, dict[str, Any]] = {}
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

    def _add_strings(self, delta: Delta) -> None:
        for name, value in (
            ("refusal", delta.refusal),
            ("reasoning_content", delta.reasoning_content),
            ("reasoning", delta.reasoning),
        ):
            if value and isinstance(value, str):
                self._other[name] = self._other.get(name, "") + value

    def _add_rare(self, delta: Delta) -> None:
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
        return bool(self._filters[-1].extraction.held)

    @property
    def has_unfed(self) -> bool:
        return bool(self._unfed)

    def take(self) -> Piece:
        """The newest text, and what of it may be shown."""
        piece = Piece("".join(self._unfed))
        self._unfed.clear()
        if piece.text:
            self._shown.append(self._filters[-1].feed(piece))
        return piece

    def end_text(self) -> None:
        """What is held back is over: a call begins, or the reply ends. Words that come later are another text."""
        if self.is_holding:
            self._shown.append(self._filters[-1].close())
            self._filters.append(PieceFilter(self._extract))

    def settle(self) -> None:
        """The choice is finished: nothing more is held back."""
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
            terse=tuple(entry for each in self._filters for entry in each.extraction.terse),
            state=next(
                (state for each in reversed(self._filters) if (state := each.extraction.state) is not None), None
            ),
            finish_reason=self._finish,
        )

    @property
    def _is_cut(self) -> bool:
        """Something was taken out, or the stream broke off while text was held back."""
        return bool(self._shown) and "".join((*self._shown, *self._unfed)) != "".join(
            text_of(item) for item in self._content
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
                if text := text_of(part):
                    self._unfed.append(text)

    def _add_call(self, delta: CallDelta) -> None:
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

    def _find_call(self, delta: CallDelta) -> dict[str, Any]:
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


def text_of(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(text := part.get("text"), str):
        return text
    return ""


def _merge_function(into: dict[str, str], delta: FunctionDelta) -> None:
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
        elif text_of(part) or part.get("type") == "text":
            last["text"] = text_of(last) + text_of(part)
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
