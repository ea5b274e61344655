"""Memory levels and priority scores (Fifth, "Hierarchical Memory" and "Priority Scoring").

| level | holds | budget |
|---|---|---|
| permanent | pinned messages | 2000 |
| session | what past turns came to, one entry each | 4000 |
| working | the newest turns, verbatim | 8000 |
| volatile | older turns, brought back whole while there is room | the rest of 16000 |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from tersely.domain.history.context import FIXED_LAYERS, Context
from tersely.domain.history.history import IMPORTANT, Entry, HeadMessage
from tersely.domain.history.turns import Turn
from tersely.strategies.epochs.cutting import pinned_seqs
from tersely.strategies.summaries.references import extract_identifiers, message_text

LevelName = Literal["permanent", "session", "working", "volatile"]

RECENCY_WEIGHT, REFERENCES_WEIGHT, RELEVANCE_WEIGHT, EXPLICIT_WEIGHT = 0.3, 0.2, 0.4, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelSize:
    """The size of a level in a context. Instructions and pinned messages belong to the permanent level."""

    name: LevelName
    messages: int
    tokens: int


def measure_levels(context: Context) -> tuple[LevelSize, ...]:
    """Return the levels of a context, in the order of the table."""
    head = [message for message in context.messages if isinstance(message, HeadMessage)]
    entries = [message for message in context.messages if isinstance(message, Entry)]
    back = set(context.epoch.retrieved)
    pinned = pinned_seqs(entries)
    others = [entry for entry in entries if entry.seq not in pinned]
    groups: dict[LevelName, Sequence[HeadMessage | Entry]] = {
        "permanent": [entry for entry in entries if entry.seq in pinned],
        "session": head,
        "working": [entry for entry in others if entry.seq >= context.epoch.cut or entry.turn not in back],
        "volatile": [entry for entry in others if entry.seq < context.epoch.cut and entry.turn in back],
    }
    fixed = sum(layer.tokens for layer in context.report.layers if layer.name in FIXED_LAYERS)
    return tuple(
        LevelSize(
            name=name,
            messages=len(messages),
            tokens=sum(message.tokens for message in messages) + (fixed if name == "permanent" else 0),
        )
        for name, messages in groups.items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The four terms of a priority, each from 0 to 1."""

    recency: float
    references: float
    relevance: float
    explicit: float

    @property
    def total(self) -> float:
        """``0.3*recency + 0.2*references + 0.4*relevance + 0.1*explicit``."""
        return (
            RECENCY_WEIGHT * self.recency
            + REFERENCES_WEIGHT * self.references
            + RELEVANCE_WEIGHT * self.relevance
            + EXPLICIT_WEIGHT * self.explicit
        )


def score_turns(turns: Sequence[Turn], relevance: Mapping[int, float], now: datetime) -> dict[int, Score]:
    """Return the priority of each of ``turns`` (in order). ``relevance``: turn number -> 0 to 1; missing
    turns have 0.
    """
    mentions = [_mentions(turn.entries) for turn in turns]
    total: Counter[str] = Counter()
    for named in mentions:
        total.update(named)
    earlier: Counter[str] = Counter()
    scores: dict[int, Score] = {}
    for turn, named in zip(turns, mentions, strict=True):
        earlier.update(named)
        scores[turn.number] = Score(
            recency=recency(turn.entries[-1].created_at, now),
            references=reference_share(named, total, earlier),
            relevance=min(1.0, max(0.0, relevance.get(turn.number, 0.0))),
            explicit=float(any(entry.pinned or entry.priority >= IMPORTANT for entry in turn.entries)),
        )
    return scores


def recency(created_at: datetime, now: datetime) -> float:
    """``1 / (1 + minutes since created)``; a clock that runs ahead counts as now."""
    minutes = max(0.0, (now - created_at).total_seconds() / 60)
    return 1 / (1 + minutes)


def reference_share(named: Iterable[str], total: Mapping[str, int], earlier: Mapping[str, int]) -> float:
    """``times mentioned later / total mentions`` over the names in a turn.

    ``total`` counts mentions in all turns, ``earlier`` those up to and including this one.
    """
    names = set(named)
    everywhere = sum(total[name] for name in names)
    later = everywhere - sum(earlier[name] for name in names)
    return later / everywhere if everywhere else 0.0


def _mentions(entries: Iterable[Entry]) -> Counter[str]:
    return Counter(
        name for entry in entries for text in message_text(entry.message) for name in extract_identifiers(text)
    )


def is_older(turn: Turn, seconds: float, now: datetime) -> bool:
    """Return whether the turn's last message is older than ``seconds``."""
    return (now - turn.entries[-1].created_at).total_seconds() > seconds
