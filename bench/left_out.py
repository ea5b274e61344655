"""Rules for new tasks chosen without one set of conversations, and measured on it (part of `bench.new_tasks`).

For each kind of evidence the loosest numbers are chosen that take no follow-up of the other sets wrongly; of equally
good ones the strictest. The patterns themselves are the same for all: they are not chosen by numbers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, get_args

from tersely.domain.history.turns import Turn
from tersely.strategies.epochs.new_tasks import (
    LOOK_AT,
    RULES,
    ClueKind,
    Evidence,
    TaskClues,
    allowed_ties,
    announces_new_task,
    count_ties,
    read_opening,
)

KEYWORDS: Final = (3, 4, 5, 6, 8, 10, 12, 14, 18)
SHARED: Final = (0.0, 0.05, 0.1, 0.15, 0.25, 0.35, 0.5)
EVERY: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A message of the set ``name``. ``ties``: the keywords that it shares; None: an identifier as well.

    ``is_moved``: it is the first message of another conversation.
    """

    name: str
    is_new: bool
    is_moved: bool
    is_announced: bool
    opening: TaskClues | None
    ties: int | None

    def is_taken(self, rules: Mapping[ClueKind, Evidence]) -> bool:
        """Return whether the rules take it for a new task."""
        if self.is_announced or self.opening is None or self.ties is None:
            return self.is_announced
        most = allowed_ties(self.opening, rules)
        return most is not None and self.ties <= most


def sample(name: str, text: str, turns: Sequence[Turn], *, is_new: bool, is_moved: bool) -> Sample:
    """Read a message that comes after ``turns``."""
    opening = read_opening(text[:LOOK_AT])
    # Without a kind of evidence no rule takes it.
    ties = count_ties(opening, turns, most=EVERY) if opening is not None and opening.kinds else None
    is_announced = announces_new_task(text)
    return Sample(name=name, is_new=is_new, is_moved=is_moved, is_announced=is_announced, opening=opening, ties=ties)


def choose(samples: Sequence[Sample]) -> dict[ClueKind, Evidence]:
    """Return the rules that take the most new tasks and no follow-up; a kind without a safe rule is left out."""
    chosen: dict[ClueKind, Evidence] = {}
    for kind in get_args(ClueKind):
        best: tuple[int, int, float] | None = None
        for keywords in KEYWORDS:
            for shared in SHARED:
                taken = [each for each in samples if each.is_taken({kind: Evidence(keywords, shared)})]
                taken = [each for each in taken if not each.is_announced]
                if all(each.is_new for each in taken) and taken:
                    best = max(best or (0, 0, 0.0), (len(taken), keywords, -shared))
        if best is not None:
            chosen[kind] = Evidence(best[1], -best[2])
    return chosen


def render(samples: Sequence[Sample], names: Iterable[str]) -> list[str]:
    """The table: one row for each set that is left out."""
    lines = [
        "| left out | rules (keywords, shared) | follow-ups | new | taken | of these new | moved | of these taken |",
        "|---|---|---|---|---|---|---|---|",
        _row("none, the rules in use", RULES, samples),
    ]
    for name in names:
        rules = choose([each for each in samples if each.name != name])
        lines.append(_row(f"`{name}`", rules, [each for each in samples if each.name == name]))
    return lines


def _row(title: str, rules: Mapping[ClueKind, Evidence], samples: Sequence[Sample]) -> str:
    stayed = [each for each in samples if not each.is_moved]
    taken = [each for each in stayed if each.is_taken(rules)]
    moved = [each for each in samples if each.is_moved]
    named = ", ".join(f"{kind} {rule.keywords}, {rule.shared:.2f}" for kind, rule in rules.items())
    right, new = sum(each.is_new for each in taken), sum(each.is_new for each in stayed)
    moved_taken = sum(each.is_taken(rules) for each in moved)
    figures = (title, named, len(stayed), new, len(taken), right, len(moved), moved_taken)
    return "| " + " | ".join(map(str, figures)) + " |"
