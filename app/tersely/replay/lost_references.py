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

from tersely.dialects.registry import DIALECTS
from tersely.dialects.wire import raw_json
from tersely.domain.errors import InvalidRequest
from tersely.domain.history.context_use import Losses, References, references
from tersely.domain.messages import ToolCall
from tersely.transcripts.conversations import RecordedCall


class PastIdentifiers:
    """The identifiers that each call of a conversation repeats. Looked up once, whatever the number of replays."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[References, ...]] = {}

    def losses(self, step: RecordedCall, given: bytes, shown: bytes) -> Losses:
        """Return the losses of the calls of ``step``, after the client sent ``given`` and the model saw ``shown``."""
        names = self._names.get(step.index)
        if names is None:
            found = (references(each, lambda name: name.encode() in given) for each in _arguments(step))
            names = self._names[step.index] = tuple(found)
        total = Losses()
        for each in names:
            total += each.losses(lambda name: name.encode() in shown)
        return total


def _arguments(step: RecordedCall) -> Iterable[str]:
    if step.reply is None:
        return []
    try:
        message = DIALECTS[step.dialect].read_reply(raw_json.dump(step.reply))
    except InvalidRequest:
        return []
    return [part.arguments for part in message.parts if isinstance(part, ToolCall)]
