"""How the texts of single messages are shortened, up to which sequence number: part of what an epoch decides.

Values only, fit to be stored as JSON; `app.strategies.shortening` chooses and applies them.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Literal

from app.domain.tool_output import ToolOutputLimits

# `output`: tool results as `limits` say. `results`: tool results to `chars`. `user_text`: a user's words to `chars`.
# `archive`: tool results make way for a line that names their summary (`app.strategies.archiving`).
Subject = Literal["output", "results", "user_text", "archive"]
# `head`: the beginning, with a notice after it. `ends`: beginning and end, with a notice between them.
Style = Literal["head", "ends"]
# The tools by which the model gets a whole text back: any text, or a spilled output. Empty: it has none, and is told of
# none.
Way = Literal[
    "", "query_db", "context_search", "read_artifact", "read_artifact, query_db", "read_artifact, context_search"
]

WAYS = frozenset({"query_db", "context_search", "read_artifact"})


def way_by(tools: Container[str]) -> Way:
    """The way that a model has with these tools."""
    ways: tuple[Way, Way, Way] = ("", "context_search", "query_db")
    if "read_artifact" in tools:
        ways = ("read_artifact", "read_artifact, context_search", "read_artifact, query_db")
    return ways[2] if "query_db" in tools else ways[1] if "context_search" in tools else ways[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Holds for messages up to sequence number ``until``, inclusive (None: for all that are still to come).

    Of several tiers for one subject the first that covers a message is the one that holds.
    """

    subject: Subject
    until: int | None = None
    chars: int = 0
    style: Style = "head"
    way: Way = ""
    limits: ToolOutputLimits | None = None

    def covers(self, seq: int) -> bool:
        """Whether this tier holds for the message ``seq``, if none before it does."""
        return self.until is None or seq <= self.until
