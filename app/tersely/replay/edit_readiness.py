"""Edit readiness: of the calls that replace a text, the share whose text stood in the request.

An agent that does not see the text which it wants to change has to read it again. A text that was read, written or put
in by an earlier edit counts, as long as a message of the request contains the whole of it. Line numbers are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence

from tersely.dialects.registry import DIALECTS
from tersely.dialects.wire import raw_json
from tersely.domain.errors import InvalidRequest
from tersely.domain.history.context_use import Edits, edits_of, judge_edits, readable_text
from tersely.domain.messages import Dialect as DialectName
from tersely.transcripts.conversations import RecordedCall


class EditCounter:
    """Counts edits; each message is read once."""

    def __init__(self) -> None:
        self._texts: dict[tuple[DialectName, bytes], str] = {}

    def count(self, step: RecordedCall, shown: Sequence[bytes], dialect: DialectName) -> Edits:
        """Count the edits that ``step`` makes, after the model was shown the messages ``shown`` of ``dialect``."""
        wanted = _edits_of(step)
        return judge_edits(wanted, [self._text(raw, dialect) for raw in shown]) if wanted else Edits()

    def _text(self, raw: bytes, dialect: DialectName) -> str:
        known = self._texts.get((dialect, raw))
        if known is None:
            try:
                known = readable_text(DIALECTS[dialect].read_message(raw))
            except InvalidRequest:
                known = ""
            self._texts[dialect, raw] = known
        return known


def _edits_of(step: RecordedCall) -> list[list[str]]:
    if step.reply is None:
        return []
    try:
        message = DIALECTS[step.dialect].read_reply(raw_json.dump(step.reply))
    except InvalidRequest:
        return []
    return edits_of(message)
