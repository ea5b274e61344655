"""What a reply uses of the context that it answers: the names that its tool calls repeat, and the texts that they edit.

Both can be judged afterwards, without a model: a name or a text that the reply uses either stands in a context or does
not. What an identifier is, is decided here, apart from the reference index, which is measured by it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

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
