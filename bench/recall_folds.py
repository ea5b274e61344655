"""`python -m bench.recall_folds [DIRECTORY]`: recall with parameters that were chosen without the conversation judged.

For each annotated conversation (`bench.recall`), each parameter of the ranking and of the overview gets the value that
is best on all other conversations, the rest as they are; then the conversation is judged with all of these values
together, and with the one change alone that helps the others most. The sets count alike. Writes
`bench/recall_folds.md`.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from bench.recall import SETS, TUNED_ON, AnnotatedConversation, find_data, load, share_found
from tersely.domain.search import overview, relevance
from tersely.domain.search.cues import is_about_whole

TABLE: Final = Path(__file__).parent / "recall_folds.md"

# For each parameter the values to choose from, beside the present one.
CHOICES: Final[tuple[tuple[ModuleType, str, tuple[Any, ...]], ...]] = (
    (relevance, "K1", (0.9, 1.6)),
    (relevance, "B", (0.2, 0.6)),
    (relevance, "NEAR", ((0.2, 0.1), (0.45, 0.2))),
    (relevance, "FEEDBACK_WEIGHT", (0.2, 0.6)),
    (relevance, "FEEDBACK_TERMS", (5, 20)),
    (relevance, "PREFERENCE_WEIGHT", (1.5, 4.0)),
    (relevance, "PREFERENCE_FLOOR", (0.2, 0.5)),
    (relevance, "ANSWER_SHARE", (0.15, 0.5)),
    (relevance, "OWN_WEIGHT", (1.2, 1.5)),
    (relevance, "TALK_WEIGHT", (0.2, 0.7)),
    (relevance, "SPEAKER_WEIGHT", (1.1, 1.6)),
    (relevance, "PHRASE_WEIGHT", (1.0, 3.0)),
    (overview, "REPEATED_TOPIC", (0.9, 1.0)),
    (overview, "USER_LINE", (150, 250)),
    (overview, "OTHER_LINE", (75, 150)),
)

Setting = Mapping[int, Any]
"""The values of some choices, by their index."""
Figures = tuple[float, float, float]
"""Recall among the first 5 and 10, and the share of the evidence in the answer."""


@contextmanager
def applied(setting: Setting) -> Iterator[None]:
    """Set parameters for a while."""
    before = {index: getattr(module, name) for index, (module, name, _) in enumerate(CHOICES)}
    try:
        for index, value in setting.items():
            setattr(CHOICES[index][0], CHOICES[index][1], value)
        yield
    finally:
        for index, value in before.items():
            setattr(CHOICES[index][0], CHOICES[index][1], value)


def judge(conversation: AnnotatedConversation, setting: Setting) -> Figures:
    """Return the figures of a conversation, as means over its questions."""
    with applied(setting):
        rank, cover = conversation.tersely(), conversation.overview()
        rows = []
        for question in conversation.questions:
            ranking = rank(question.text)
            shown = cover(question.text)[0] if is_about_whole(question.text) else conversation.fill(ranking)
            rows.append([share_found(question, found) for found in (ranking[:5], ranking[:10], shown)])
    first, second, third = (sum(column) / len(rows) for column in zip(*rows, strict=True))
    return first, second, third


def mean(figures: Sequence[Figures], conversations: Sequence[AnnotatedConversation]) -> Figures:
    """Return the means over all questions of ``conversations``."""
    counts = [len(each.questions) for each in conversations]
    one, two, three = (
        sum(value * count for value, count in zip(column, counts, strict=True)) / sum(counts)
        for column in zip(*figures, strict=True)
    )
    return one, two, three


def render(directory: Path) -> str:
    """The whole report."""
    sets = {title: load(directory, name) for title, name in SETS.items()}
    conversations = [each for members in sets.values() for each in members]
    settings: list[Setting] = [{}]
    settings += [{index: value} for index, (_, _, values) in enumerate(CHOICES) for value in values]
    found = {}
    for number, setting in enumerate(settings):
        for each in conversations:
            found[each.id, number] = judge(each, setting)
        print(f"{number + 1} of {len(settings)} settings judged", file=sys.stderr, flush=True)

    def quality(number: int, without: AnnotatedConversation) -> float:
        means = []
        for members in sets.values():
            others = [each for each in members if each is not without]
            means.append(sum(mean([found[each.id, number] for each in others], others)))
        return sum(means)

    chosen: dict[str, dict[int, Any]] = {}
    for each in conversations:
        chosen[each.id] = {}
        for index in range(len(CHOICES)):
            numbers = [0, *(n for n, setting in enumerate(settings) if index in setting)]
            best = max(numbers, key=lambda number: (quality(number, each), -number))
            chosen[each.id] |= settings[best]
    together = {each.id: judge(each, chosen[each.id]) for each in conversations}
    changes: dict[str, int] = {}
    for each in conversations:
        ranked = [(quality(number, each), -number) for number in range(len(settings))]
        changes[each.id] = ranked.index(max(ranked))
    alone = {each.id: found[each.id, changes[each.id]] for each in conversations}
    present = {each.id: found[each.id, 0] for each in conversations}

    lines = [
        "# Recall with parameters chosen on other conversations",
        "",
        "Made by `python -m bench.recall_folds`. Each conversation is judged with values of "
        f"{len(CHOICES)} parameters of the",
        "ranking and the overview that are best, one by one, on all other conversations (all changes), and with the",
        "one value alone that is best there (one change). Cells: R@5 / R@10 / answer, see [recall](recall.md).",
        "",
        "| conversations | questions | as it is | one change, chosen without it | all changes, chosen without it |",
        "|---|---|---|---|---|",
    ]
    for title, members in sets.items():
        held = [each for each in members if each.id not in TUNED_ON]
        for part, some in ((f"**{title}, all**", members), (f"{title}, held out", held)):
            lines.append(_row(part, some, present, alone, together))
        lines += [_row(f"`{each.id}`", [each], present, alone, together) for each in members]
    lines += ["", "The one change:", ""]
    for number, setting in enumerate(settings):
        count = sum(change == number for change in changes.values())
        words = [f"`{CHOICES[index][1]}` {value}" for index, value in setting.items()] or ["none"]
        lines += [f"- {words[0]}: in {count} of the conversations"] if count else []
    lines += ["", "All values that were chosen, in how many of the conversations:", ""]
    for index, (module, name, values) in enumerate(CHOICES):
        counts = [(getattr(module, name), sum(index not in each for each in chosen.values()))]
        counts += [(value, sum(each.get(index) == value for each in chosen.values())) for value in values]
        lines.append(f"- `{name}`: " + ", ".join(f"{value} in {count}" for value, count in counts if count))
    return "\n".join(lines) + "\n"


def _row(name: str, some: Sequence[AnnotatedConversation], *columns: Mapping[str, Figures]) -> str:
    means = [mean([column[each.id] for each in some], some) for column in columns]
    cells = [" / ".join(f"{value:.3f}".lstrip("0") for value in figures) for figures in means]
    return f"| {name} | {sum(len(each.questions) for each in some)} | {' | '.join(cells)} |"


def main() -> None:
    report = render(find_data(sys.argv[1] if len(sys.argv) > 1 else None))
    print(report)
    TABLE.write_text(report)


if __name__ == "__main__":
    main()
