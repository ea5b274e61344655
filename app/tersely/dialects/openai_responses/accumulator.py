"""Accumulate the events of a streamed response in the model's view."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

from tersely.dialects.wire import raw_json
from tersely.dialects.wire.bodies import try_decode

TEXT_DELTA = "response.output_text.delta"

_GROWING = {
    TEXT_DELTA: ("content", "output_text", "text"),
    "response.refusal.delta": ("content", "refusal", "refusal"),
    "response.reasoning_text.delta": ("content", "reasoning_text", "text"),
    "response.reasoning_summary_text.delta": ("summary", "summary_text", "text"),
    "response.function_call_arguments.delta": ("arguments",),
    "response.custom_tool_call_input.delta": ("input",),
    "response.mcp_call_arguments.delta": ("arguments",),
    "response.code_interpreter_call_code.delta": ("code",),
}
"""Where the words of a delta go: a member of the item, or of one of its parts (list, type of the part, member)."""

ENDS = frozenset({"response.completed", "response.incomplete", "response.failed", "response.cancelled"})


class TextDelta(msgspec.Struct):
    """An event that adds words."""

    type: str
    delta: str
    output_index: int = 0
    content_index: int | None = None
    summary_index: int | None = None

    @property
    def position(self) -> tuple[int, int]:
        """The text that the delta belongs to, as output and content index."""
        return self.output_index, self.content_index or 0


_decoder = msgspec.json.Decoder(TextDelta)
_list_decoder = msgspec.json.Decoder(list[TextDelta])


def read_delta(data: bytes | None) -> TextDelta | None:
    """Return a parsed delta event, the usual kind; None for any other."""
    if not data or b'.delta"' not in data:
        return None
    delta = try_decode(_decoder, data)
    return delta if delta and delta.type in _GROWING else None


def read_deltas(payloads: Sequence[bytes]) -> Sequence[TextDelta | None]:
    """Return parsed delta events, all at once if possible; None for any other event."""
    try:
        deltas = _list_decoder.decode(b"[" + b",".join(payloads) + b"]")
        if len(deltas) == len(payloads) and all(delta.type in _GROWING for delta in deltas):
            return deltas
    except (ValueError, RecursionError):
        pass
    return [read_delta(payload) for payload in payloads]


class ItemAccumulator:
    """The items of a reply: finished ones as the provider repeats them, others as far as they arrived."""

    def __init__(self) -> None:
        self.id = ""
        self.model = ""
        self.usage = b""
        self.error = b""
        self.end = ""
        self._reason = ""
        self._output: list[bytes] = []
        self._items: dict[int, bytes] = {}
        self._ended: set[int] = set()
        self._partial: dict[int, dict[tuple[str, ...], dict[int, list[str]]]] = defaultdict(dict)

    def add_delta(self, delta: TextDelta) -> None:
        """Add words."""
        part = delta.content_index if delta.content_index is not None else delta.summary_index or 0
        parts = self._partial[delta.output_index].setdefault(_GROWING[delta.type], {})
        parts.setdefault(part, []).append(delta.delta)

    def text(self, position: tuple[int, int]) -> str:
        """Return the text that deltas have built at a place."""
        return "".join(self._partial.get(position[0], {}).get(_GROWING[TEXT_DELTA], {}).get(position[1], ()))

    def add(self, kind: str, members: dict[str, bytes]) -> None:
        """Add any other event. Raises ValueError for one of a shape nobody has described."""
        if kind in _GROWING:
            raise ValueError("a text delta of an unknown form")
        item = members.get("item", b"")
        if kind in {"response.output_item.added", "response.output_item.done"}:
            if not item.startswith(b"{"):
                raise ValueError("an item that is not an object")
            position = index(members, "output_index")
            self._items[position] = item
            if kind.endswith("done"):
                self._ended.add(position)
                self._partial.pop(position, None)
        elif kind == "error" or (not kind and members.get("error", b"null") != b"null"):
            error = members.get("error", b"null")
            self.error = raw_json.join_object(members) if error == b"null" else error
        elif "response" in members:
            self._add_response(kind, raw_json.split_object(members["response"]))
        elif not kind:
            raise ValueError("an event without a type")

    def _add_response(self, kind: str, response: dict[str, bytes]) -> None:
        self.id = self.id or string(response.get("id"))
        self.model = self.model or string(response.get("model"))
        if kind not in ENDS:
            return
        self.end = kind
        if response.get("usage", b"null") != b"null":
            self.usage = response["usage"]
        if response.get("error", b"null") != b"null":
            self.error = response["error"]
        elif kind == "response.failed":
            self.error = b"{}"
        self._reason = incomplete_reason(response)
        self._output = output_items(response)
        if len(self._output) < len(raw_json.split_array(response.get("output", b"[]"))):
            raise ValueError("an item that is not an object")

    @property
    def finish(self) -> str:
        """Why the reply ended; empty when it broke off."""
        return self._reason or ("" if self.error else self.end.removeprefix("response."))

    @property
    def is_done(self) -> bool:
        """Return whether the provider ended the reply as its protocol says."""
        return self.end in {"response.completed", "response.incomplete"}

    @property
    def items(self) -> list[bytes]:
        """Return the items in order."""
        indexes = sorted(self._items.keys() | self._partial.keys())
        if len(self._output) > len(indexes) or not self._ended.issuperset(indexes):
            return self._output or [self._item(position) for position in indexes]
        return [self._items[position] for position in indexes]

    def _item(self, position: int) -> bytes:
        grown = self._partial.get(position)
        known = self._items.get(position)
        if not grown:
            return known or b"{}"
        item: dict[str, Any] = raw_json.load(known) if known else {}
        item.setdefault("type", "message")
        if item["type"] == "message":
            item.setdefault("role", "assistant")
        item["status"] = "in_progress"
        for (name, *kind), parts in grown.items():
            if kind:
                item[name] = _grow_parts(item.get(name), kind, parts)
            else:
                item[name] = "".join(piece for pieces in parts.values() for piece in pieces)
        return raw_json.dump(item)


def output_items(response: dict[str, bytes]) -> list[bytes]:
    """Return the items of a response. Raises ValueError if it has no list of them."""
    return [raw for raw in raw_json.split_array(response.get("output", b"[]")) if raw.startswith(b"{")]


def incomplete_reason(response: dict[str, bytes]) -> str:
    """Why a response is incomplete, if it is."""
    details = raw_json.load(response.get("incomplete_details", b"null"))
    reason = details.get("reason") if isinstance(details, dict) else None
    return reason if isinstance(reason, str) else ""


def string(raw: bytes | None) -> str:
    """Return a string member; an empty string for anything else."""
    return raw_json.string(raw)


def index(members: dict[str, bytes], name: str) -> int:
    """Return a number member; 0 for anything else."""
    raw = members.get(name, b"0")
    value = raw_json.load(raw) if raw[:1] in b"-0123456789" else 0
    return value if type(value) is int else 0


def _grow_parts(known: object, kind: list[str], parts: dict[int, list[str]]) -> list[Any]:
    grown = list(known) if isinstance(known, list) else []
    for position, pieces in sorted(parts.items()):
        part: dict[str, Any] = {"type": kind[0], kind[1]: "".join(pieces)}
        if kind[0] == "output_text":
            part["annotations"] = []
        grown[position : position + 1] = [part]
    return grown
