"""Join rounds of one reply: a model that calls Tersely's tools is called again, and its client sees one reply.

This module has the interface for dialects, and the parts that they share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tersely.dialects.wire import raw_json
from tersely.dialects.wire.sse import SseDecoder, SseEvent, parse_events


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRounds:
    """The rounds so far: the sum of their usage (verbatim JSON), and whether the client was shown text."""

    usage: bytes
    has_text: bool


class RoundsStream(Protocol):
    """The streams of several rounds as one stream for the client. Whole events go out."""

    def feed(self, block: bytes) -> bytes:
        """Return the part of a round's block that goes to the client now. The end of the round is held back."""

    def next_round(self, finished: FinishedRounds) -> bytes:
        """Start the next round: forget the end of this one. Return the held-back bytes that the client may see."""

    def close(self) -> bytes:
        """The last round is over: what was held back, and its end."""


class EventRounds(ABC):
    """The part of a `RoundsStream` that takes a stream apart, where it must: most events go out as they are."""

    def __init__(self) -> None:
        self._decoder = SseDecoder()

    def feed(self, block: bytes) -> bytes:
        """Return the part of a round's stream that goes to the client now."""
        whole = self._decoder.take_whole(block)
        if whole is not None and (not whole or self._passes(whole)):
            return whole
        events = self._decoder.feed(block) if whole is None else parse_events(whole)
        return b"".join(map(self._pass, events))

    @abstractmethod
    def _passes(self, block: bytes) -> bool:
        """Return whether a block of whole events surely goes out as it is, and nothing of it needs to be known."""

    @abstractmethod
    def _pass(self, event: SseEvent) -> bytes:
        """Process an event and return the bytes that go out now."""


def _nothing(_: bytes) -> frozenset[str]:
    return frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """The functions of a dialect for replies in rounds. Messages and bodies are in wire form."""

    without_calls: Callable[[bytes, frozenset[str]], bytes]
    """A reply's message without its calls to tools of these names; the very same bytes when there are none."""
    merge_messages: Callable[[Sequence[bytes]], bytes]
    """The messages of all rounds, as the client was shown them, as one: the words of all, all else the last one's."""
    write_body: Callable[[bytes, bytes, bytes, bytes], bytes]
    """(body of the first round, body of the last one, message, usage) -> the body for the client."""
    open: Callable[[frozenset[str]], RoundsStream]
    """The stream for a client, without the calls to tools of these names."""
    tools_outside_list: Callable[[bytes], frozenset[str]] = _nothing
    """The names of tools that a request's body has elsewhere than in its list of tools."""


def tool_names(tools: bytes) -> frozenset[str]:
    """Return the names of the tools in a request's list, in any dialect; empty for an invalid list."""
    try:
        return frozenset(_names(raw_json.load(tools))) if tools else frozenset()
    except ValueError:
        return frozenset()


def _names(tools: Any) -> list[str]:
    found: list[str] = []
    for tool in tools if isinstance(tools, list) else ():
        if not isinstance(tool, dict):
            continue
        found += [name] if isinstance(name := tool.get("name"), str) else []
        for key in ("function", "custom"):
            inner = tool.get(key)
            found += [name] if isinstance(inner, dict) and isinstance(name := inner.get("name"), str) else []
        for key in ("functionDeclarations", "function_declarations", "tools"):
            found += _names(tool.get(key))
    return found


def add_usage(one: bytes, other: bytes) -> bytes:
    """Add two usages: numbers are added; other values are taken from the later one."""
    if not one or not other:
        return other or one
    try:
        return raw_json.dump(_sum(raw_json.load(one), raw_json.load(other)))
    except ValueError:
        return other


def _sum(one: Any, other: Any) -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        return {**one, **{key: _sum(one[key], value) if key in one else value for key, value in other.items()}}
    if _is_number(one) and _is_number(other):
        return one + other
    return one if other is None else other


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
