"""Find what a reply uses of the context that it answers: the names that its tool calls repeat, and the texts that they
edit.

Both can be judged afterwards, without a model: a name or a text that the reply uses either stands in a context or does
not. What an identifier is, is decided here, apart from the reference index, which is measured by it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from tersely.domain.messages import Message, Text, ToolCall, ToolResult

MIN_LENGTH = 4
MIN_CODE = 5
POINTED_LENGTH = 200
# Arguments of edit tools that hold the text to be replaced: of Claude Code, pi, Codex's and OpenHands' editors, Cline.
REPLACED = frozenset({"old_string", "oldString", "oldText", "old_text", "old_str"})

_RUN = re.compile(r"[A-Za-z0-9_./:@~-]{4,}")
_ESCAPE = re.compile(r'\\[nrt"]')
_JOINED = re.compile(r"\w[_/]\w|[A-Za-z]\w*\.\w+")
# As `cat -n` and agents' read tools number lines.
_LINE_NUMBER = re.compile(r"^[ \t]*\d+(?:→|\t)", re.MULTILINE)


class Losses(msgspec.Struct, frozen=True, kw_only=True):
    """Tool calls with references to earlier names, and those of them that lost one; for all names, and for those that
    are **pointed at**: in short argument values, without the names that occur in the source code of a written file.
    """

    referring: int = 0
    lost: int = 0
    pointing: int = 0
    lost_pointing: int = 0

    def __add__(self, other: Losses) -> Losses:
        return Losses(
            referring=self.referring + other.referring,
            lost=self.lost + other.lost,
            pointing=self.pointing + other.pointing,
            lost_pointing=self.lost_pointing + other.lost_pointing,
        )


class References(msgspec.Struct, frozen=True, kw_only=True):
    """The names in the arguments of one tool call that occurred before it, and those of them that are pointed at."""

    known: tuple[str, ...]
    pointed: tuple[str, ...]

    def losses(self, is_shown: Callable[[str], bool]) -> Losses:
        """Return what the call has lost in a context that shows the names for which ``is_shown`` is true."""
        missing = {name for name in self.known if not is_shown(name)}
        return Losses(
            referring=bool(self.known),
            lost=bool(missing),
            pointing=bool(self.pointed),
            lost_pointing=not missing.isdisjoint(self.pointed),
        )


def references(arguments: str, is_known: Callable[[str], bool]) -> References:
    """Return the names in a call's arguments that occurred before: those for which ``is_known`` is true."""
    known = tuple(name for name in identifiers(arguments) if is_known(name))
    short = short_values(arguments)
    return References(known=known, pointed=tuple(name for name in known if name in short))


class Edits(msgspec.Struct, frozen=True, kw_only=True):
    """Calls that replace a text, and those of them that were ready: the context contained the text."""

    calls: int = 0
    ready: int = 0

    def __add__(self, other: Edits) -> Edits:
        return Edits(calls=self.calls + other.calls, ready=self.ready + other.ready)

    @property
    def readiness(self) -> float | None:
        """Return the share that was ready; None without any edit."""
        return self.ready / self.calls if self.calls else None


def edits_of(reply: Message) -> list[list[str]]:
    """Return the texts that each edit of a reply replaces."""
    return [texts for call in calls_of(reply) if (texts := replaced_texts(call))]


def judge_edits(edits: Sequence[Sequence[str]], context: Sequence[str]) -> Edits:
    """Return how many of ``edits`` are ready in a context, whose messages are given by `readable_text`."""
    return Edits(calls=len(edits), ready=sum(all(stands_in(text, context) for text in texts) for texts in edits))


def identifiers(arguments: str) -> list[str]:
    """Return the paths, ids, dotted and underscored names and codes in a call's arguments, each once."""
    runs = (run.strip("./:-~@") for run in _RUN.findall(_ESCAPE.sub(" ", arguments)))
    return [name for name in dict.fromkeys(runs) if len(name) >= MIN_LENGTH and _is_identifier(name)]


def short_values(arguments: str) -> str:
    """Return the argument values of at most `POINTED_LENGTH` characters: a path to open, an id to look up."""
    values = _decode(arguments)
    texts = map(str, values.values()) if isinstance(values, dict) else ()
    return "\n".join(text for text in texts if len(text) <= POINTED_LENGTH)


def replaced_texts(call: ToolCall) -> list[str]:
    """Return the texts that a call wants to replace; empty for calls that edit nothing."""
    return [text for key, text in _strings(_decode(call.arguments)) if key in REPLACED and text.strip()]


def readable_text(message: Message) -> str:
    """Return everything that a message says, with arguments of calls decoded and without the numbers of lines."""
    texts: list[str] = []
    for part in message.parts:
        if isinstance(part, Text | ToolResult):
            texts.append(part.text)
        elif isinstance(part, ToolCall):
            values = _decode(part.arguments)
            texts += [part.arguments] if values is None else [text for _, text in _strings(values)]
    return _LINE_NUMBER.sub("", "\n".join(texts))


def stands_in(text: str, context: Sequence[str]) -> bool:
    """Return whether one of the messages of a context, as `readable_text` gives them, says ``text``."""
    bare = _LINE_NUMBER.sub("", text)
    return any(bare in text for text in context)


def calls_of(message: Message) -> Iterable[ToolCall]:
    """Return the tool calls of a reply."""
    return (part for part in message.parts if isinstance(part, ToolCall))


def _decode(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return None


def _strings(value: Any) -> Iterator[tuple[str, str]]:
    """Yield all texts in arguments, each with the name of the member that holds it."""
    waiting: list[tuple[str, Any]] = [("", value)]
    while waiting:
        key, each = waiting.pop()
        if isinstance(each, str):
            yield key, each
        elif isinstance(each, dict):
            waiting += ((str(name), inner) for name, inner in each.items())
        elif isinstance(each, list):
            waiting += ((key, inner) for inner in each)


def _is_identifier(name: str) -> bool:
    if not any(map(str.isalpha, name)):
        return False
    return _JOINED.search(name) is not None or (any(map(str.isdigit, name)) and len(name) >= MIN_CODE)
