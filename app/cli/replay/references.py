"""Lost references: what the model went on to name although the request no longer showed it.

Of the tool calls whose arguments repeat an identifier (a path, an id, a dotted or underscored name, a code) that was
seen earlier in the conversation, the share where at least one such identifier was nowhere in the request: neither in
its instructions, nor in the head, nor in the tail. An upper bound on the harm of a cut, for the model may not have
needed to see it, or might have searched. What an identifier is, is decided here, apart from the index under test.

Beside it stands the same share for the names that were **pointed at**: those in short argument values (a path to open,
an id to look up), without the members and methods that occur in the source code of a file that is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from app.cli.replay.transcripts import Conversation

MIN_LENGTH = 4
MIN_CODE = 5
POINTED_LENGTH = 200

_RUN = re.compile(r"[A-Za-z0-9_./:@~-]{4,}")
_ESCAPE = re.compile(r'\\[nrt"]')
_JOINED = re.compile(r"\w[_/]\w|[A-Za-z]\w*\.\w+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Tool calls that refer back, and those of them that lost a name; of all names, and of those pointed at."""

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


class Past:
    """Where each identifier of a conversation was first seen. One pass per name, whatever the number of replays."""

    def __init__(self, conversation: Conversation) -> None:
        """Of the whole conversation."""
        raws = [said.raw for said in conversation.said]
        self._text = b"\n".join(raws)
        self._starts = [0, *accumulate(len(raw) + 1 for raw in raws)]
        self._first: dict[str, int] = {}

    def losses(self, message: Mapping[str, Any], index: int, shown: bytes) -> Losses:
        """Of the calls in ``message``, number ``index`` of the conversation, after a request that showed ``shown``."""
        total = Losses()
        for arguments in _arguments(message):
            known = [name for name in identifiers(arguments) if self._is_known(name, index)]
            short = _short_values(arguments)
            pointed = [name for name in known if name in short]
            total += Losses(
                referring=bool(known),
                lost=any(name.encode() not in shown for name in known),
                pointing=bool(pointed),
                lost_pointing=any(name.encode() not in shown for name in pointed),
            )
        return total

    def _is_known(self, name: str, index: int) -> bool:
        first = self._first.get(name)
        if first is None:
            first = self._first[name] = self._text.find(name.encode())
        return 0 <= first < self._starts[index]


def _arguments(message: Mapping[str, Any]) -> Iterable[str]:
    for call in message.get("tool_calls") or ():
        arguments = (call.get("function") or {}).get("arguments")
        if isinstance(arguments, str):
            yield arguments


def _short_values(arguments: str) -> str:
    try:
        values = json.loads(arguments)
    except (ValueError, RecursionError):
        return ""
    texts = map(str, values.values()) if isinstance(values, dict) else ()
    return "\n".join(text for text in texts if len(text) <= POINTED_LENGTH)


def identifiers(arguments: str) -> list[str]:
    """The identifiers in a call's arguments, each once."""
    runs = (run.strip("./:-~@") for run in _RUN.findall(_ESCAPE.sub(" ", arguments)))
    return [name for name in dict.fromkeys(runs) if len(name) >= MIN_LENGTH and _is_identifier(name)]


def _is_identifier(name: str) -> bool:
    if not any(map(str.isalpha, name)):
        return False
    return _JOINED.search(name) is not None or (any(map(str.isdigit, name)) and len(name) >= MIN_CODE)
