"""Lost references: identifiers that the model used although the request no longer contained them.

Among the tool calls whose arguments repeat an identifier (a path, an id, a dotted or underscored name, a code) from
earlier in the conversation, this is the share of calls with at least one identifier that was nowhere in the request:
not in its instructions, its head or its tail. It is an upper bound on the harm of a cut, since the model may not have
needed to see it, or might have searched.

The same share is also computed for names that were **pointed at**: those in short argument values (a path to open, an
id to look up), without the names that occur in the source code of a written file.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tersely.dialects.registry import DIALECTS
from tersely.dialects.wire import raw_json
from tersely.domain.errors import InvalidRequest
from tersely.domain.history.context_use import identifiers, short_values
from tersely.domain.messages import ToolCall
from tersely.transcripts.conversations import RecordedCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Tool calls with references to earlier names, and those of them that lost one; for all names, and for those
    pointed at.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """The names in one call's arguments that occurred before, and those of them that are pointed at."""

    known: tuple[bytes, ...]
    pointed: tuple[bytes, ...]


class PastIdentifiers:
    """Which identifiers each call of a conversation repeats. Looked up once, whatever the number of replays."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[_Names, ...]] = {}

    def losses(self, step: RecordedCall, given: bytes, shown: bytes) -> Losses:
        """Of the calls that ``step`` makes, after the client had sent ``given`` and the model was shown ``shown``."""
        names = self._names.get(step.place)
        if names is None:
            names = self._names[step.place] = tuple(_names(each, given) for each in _arguments(step))
        total = Losses()
        for each in names:
            total += Losses(
                referring=bool(each.known),
                lost=any(name not in shown for name in each.known),
                pointing=bool(each.pointed),
                lost_pointing=any(name not in shown for name in each.pointed),
            )
        return total


def _names(arguments: str, given: bytes) -> _Names:
    found = ((name, name.encode()) for name in identifiers(arguments))
    known = [(name, raw) for name, raw in found if raw in given]
    short = short_values(arguments)
    return _Names(known=tuple(raw for _, raw in known), pointed=tuple(raw for name, raw in known if name in short))


def _arguments(step: RecordedCall) -> Iterable[str]:
    if step.reply is None:
        return []
    try:
        message = DIALECTS[step.dialect].read_reply(raw_json.dump(step.reply))
    except InvalidRequest:
        return []
    return [part.arguments for part in message.parts if isinstance(part, ToolCall)]
