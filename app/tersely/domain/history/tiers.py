"""Tiers: how the texts of single messages are shortened during an epoch, up to which sequence number.

The values are stored as JSON. `tersely.strategies.reduction.shortening` chooses and applies them.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Literal

import msgspec

from tersely.domain.text.tool_output import ToolOutputLimits

# `output`: tool results within `limits`. `results`: tool results to `chars`. `user_text`: a user's text to `chars`.
# `archive`: a tool result is replaced by a line that names its summary or its content
# (`tersely.strategies.reduction.archiving`).
TierContent = Literal["output", "results", "user_text", "archive"]
# `head`: the beginning, followed by a notice. `ends`: beginning and end, with a notice between them.
Style = Literal["head", "ends"]
# The tools by which the model can read a whole text: any text, or a spilled output. Empty: it has none.
ReadBack = Literal[
    "", "query_db", "context_search", "read_artifact", "read_artifact, query_db", "read_artifact, context_search"
]

READ_BACK_TOOLS = frozenset({"query_db", "context_search", "read_artifact"})


def read_back_tools(tools: Container[str]) -> ReadBack:
    """Return which of ``tools`` give the model the full text of a shortened message."""
    ways: tuple[ReadBack, ReadBack, ReadBack] = ("", "context_search", "query_db")
    if "read_artifact" in tools:
        ways = ("read_artifact", "read_artifact, context_search", "read_artifact, query_db")
    return ways[2] if "query_db" in tools else ways[1] if "context_search" in tools else ways[0]


class Tier(msgspec.Struct, frozen=True, kw_only=True, rename={"read_back": "way", "digest_seqs": "listed"}):
    """A rule that shortens messages up to sequence number ``until``, inclusive (None: all that are still to come).

    Of several tiers for one subject, the first one that covers a message applies. ``digest_seqs`` are the archived
    messages whose summaries are in the epoch's digest (None: all, as in older epochs).
    """

    subject: TierContent
    until: int | None = None
    chars: int = 0
    style: Style = "head"
    read_back: ReadBack = ""
    limits: ToolOutputLimits | None = None
    digest_seqs: tuple[int, ...] | None = None

    def covers(self, seq: int) -> bool:
        """Return whether the tier covers message ``seq``, if no earlier tier does."""
        return self.until is None or seq <= self.until
