"""Decide when to compress and when to retrieve (Fifth, "When to Compress vs. Retrieve"): the table as rules.

| situation | action |
|---|---|
| context over 80 % full | compress the oldest working memory |
| an old task is referred to | retrieve its summary |
| an error repeats | retrieve what was done about it |
| a new task starts | compress the previous one, clear volatile memory |
| a past topic is mentioned | retrieve and expand that topic |

`composition.needs_of` has the first rule, `layers.insert_session_memory` the second, `new_tasks` detects a new task.
The others are here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tersely.domain.history.history import Entry, PastTurn
from tersely.domain.messages import Message, Text, ToolResult

# Relevance from which on a past turn counts as the subject of the user's message.
PAST_TOPIC = 0.4

_ERROR = re.compile(r"(?:Error|Exception)\b|error:|fatal:|panic:|\bfailed\b|not found|denied", re.IGNORECASE)
_VARIABLE = re.compile(r"0x[0-9a-f]+|\d+|'[^']*'|\"[^\"]*\"", re.IGNORECASE)
# An error stands in few lines near the beginning or the end of an output.
_LOOK_AT = 10_000
_MAX_LINES = 20
_LINE_LENGTH = 200


def past_topics(past: Sequence[PastTurn]) -> tuple[int, ...]:
    """Turns to expand whole: what the user speaks of again."""
    return tuple(each.turn for each in past if each.relevance >= PAST_TOPIC)


def repeated_errors(running: Sequence[Entry], past: Sequence[PastTurn]) -> tuple[int, ...]:
    """Return past turns with an error that the running turn's results show as well."""
    current = {signature for entry in running for signature in error_signatures(entry.message)}
    if not current:
        return ()
    return tuple(
        each.turn
        for each in past
        if any(current.intersection(error_signatures(entry.message)) for entry in each.entries)
    )


def error_signatures(message: Message) -> frozenset[str]:
    """Return the error lines of a message's results and text without their numbers and quoted values."""
    texts = [part.text for part in message.parts if isinstance(part, Text | ToolResult)]
    lines = [line.strip()[:_LINE_LENGTH] for text in texts for line in _ends(text).splitlines()]
    error_lines = [line for line in lines if _ERROR.search(line)]
    return frozenset(_VARIABLE.sub("?", line) for line in error_lines[-_MAX_LINES:])


def _ends(text: str) -> str:
    return text if len(text) <= 2 * _LOOK_AT else f"{text[:_LOOK_AT]}\n{text[-_LOOK_AT:]}"
