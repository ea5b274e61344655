"""`python -m bench.recall [DIRECTORY]`: how much of what a question needs is found, on annotated conversations.

Looks for the conversations in DIRECTORY, else in `TERSELY_RETRIEVAL_DATA`, else beside the checkout in
`../shared/data/retrieval`. Ranks with the very functions of the search mode `relevant`; the baselines are plain BM25
over the same terms and the same questions. Questions without evidence are left out. Rankings by embeddings are those of
a small model that PyPI has, installed into an environment of its own (`.venv/embeddings`). Writes `bench/recall.md`.
"""

import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from bench.tool_environments import ensure_installed
from tersely.dialects.registry import DIALECTS
from tersely.domain.history.history import Entry
from tersely.domain.history.turns import group_turns, number_turns
from tersely.domain.messages import Text, searchable_text
from tersely.domain.search import overview
from tersely.domain.search.cues import is_about_whole
from tersely.domain.search.excerpts import ExcerptRow, render_row
from tersely.domain.search.relevance import (
    Ranked,
    build_corpus,
    build_query,
    document_terms,
    document_text,
    find_relevant,
    fuse,
    rank_turns,
    search_corpus,
    tokenize,
)
from tersely.service.common.tokens import count_text

ROOT: Final = Path(__file__).parent.parent
TABLE: Final = ROOT / "bench" / "recall.md"
SETS: Final = {"LoCoMo": "locomo", "BEAM-100k": "beam_100k"}
# The parameters were chosen on these conversations; first sweeps, of length and neighbours, had seen all of them.
TUNED_ON: Final = frozenset({"locomo-conv-26", "locomo-conv-41", "beam_100k-1", "beam_100k-10", "beam_100k-11"})
DEPTHS: Final = (5, 10, 25, 50)
CONTEXT: Final = 4_000
AT: Final = datetime(2026, 1, 1, tzinfo=UTC)
# As published with the data, over the whole sets, of which these conversations are a part.
PUBLISHED: Final = (
    ("Postgres any word, `ts_rank` default", ".432 / .505 / .597 / .662", ".121 / .210 / .336 / .464"),
    ("Postgres any word, `ts_rank` normalisation 8", ".123 / .198 / .356 / .513", ".467 / .566 / .681 / .744"),
    ("BM25 k1 1.2 b .75", ".533 / .606 / .695 / .748", ".308 / .405 / .518 / .629"),
    ("BM25 k1 1.5 b .95", ".495 / .586 / .682 / .740", ".397 / .471 / .585 / .668"),
    ("BM25 with the speaker's name in the text", ".555 / .633 / .717 / .769", ""),
    ("DRAGON (dense)", ".567 / .662 / .767 / .827", ""),
)

# A static model of 16 MB, whose weights are in the wheel.
EMBEDDINGS: Final = "wordllama==0.4.0.post1"

Rank = Callable[[str], Sequence[int]]
Nearest = Mapping[str, Sequence[Ranked]]
"""The messages of a conversation nearest to each question, by cosines of embeddings."""


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    evidence: frozenset[int]


class AnnotatedConversation:
    """A conversation as a session would hold it, with its questions; messages are numbered from 0 on."""

    def __init__(self, record: dict[str, Any], questions: Iterable[dict[str, Any]]) -> None:
        self.id: str = record["id"]
        read = DIALECTS["openai_chat"].read_message
        messages = [read(_wire(message)) for message in record["messages"]]
        self.messages = messages
        self.texts = [document_text(message) for message in messages]
        self.terms = [document_terms(message) for message in messages]
        self.named = [tokenize(text) for text in self.texts]
        self.nameless = [tokenize(searchable_text(message)) for message in messages]
        self.tokens = [count_text(text, "o200k_base") for text in self.texts]
        turns = number_turns(messages)
        self.turns = group_turns(
            Entry(seq=number, turn=turn, message=message, tokens=tokens, created_at=AT)
            for number, (turn, message, tokens) in enumerate(zip(turns, messages, self.tokens, strict=True))
        )
        at = {message["x_id"]: number for number, message in enumerate(record["messages"])}
        found = (Question(q["question"], frozenset(at[e] for e in q["evidence"] if e in at)) for q in questions)
        self.questions = [question for question in found if question.evidence]
        self.nearest: Nearest = {}

    def by_meaning(self) -> Rank:
        return lambda text: [each.number for each in self.nearest[text]]

    def by_words_and_meaning(self) -> Rank:
        corpus = build_corpus(self.terms)
        return lambda text: fuse(find_relevant(text, self.terms, corpus), self.nearest[text])

    def tersely(self) -> Rank:
        corpus = build_corpus(self.terms)

        def rank(text: str) -> Sequence[int]:
            return [each.number for each in find_relevant(text, self.terms, corpus)]

        return rank

    def overview(self) -> Callable[[str], tuple[frozenset[int], frozenset[int]]]:
        """Return the function that answers a question about the whole conversation: the messages that the answer shows
        by a line, and those of them that the line shows whole. The answer has at most `CONTEXT` tokens.
        """
        corpus = build_corpus(self.terms)
        starts = overview.topic_starts(corpus)
        turn_of = {entry.seq: turn.number for turn in self.turns for entry in turn.entries}
        ends = {turn.number: (turn.entries[0].seq, turn.entries[-1].seq) for turn in self.turns}

        def answer(text: str) -> tuple[frozenset[int], frozenset[int]]:
            first = build_query(text, corpus)
            documents = [self.terms[each.number] for each in first.best]
            found = search_corpus(first, corpus, documents, limit=overview.CANDIDATES)
            best = overview.order_turns(found, turn_of, starts)
            seqs = {turn: sorted({*ends[turn], best[turn]}) for turn in [*best][: overview.MOST_TURNS]}
            lines = {turn: [self._line(seq) for seq in numbers] for turn, numbers in seqs.items()}
            shown = [seq for turn in overview.fit_turns(lines) for seq in seqs[turn]]
            printed = "\n".join(render_row(self._row(seq)) for seq in shown)
            assert count_text(printed, "o200k_base") <= CONTEXT
            whole = (seq for seq in shown if self._line(seq) == " ".join(searchable_text(self.messages[seq]).split()))
            return frozenset(shown), frozenset(whole)

        return answer

    def _line(self, number: int) -> str:
        message = self.messages[number]
        return overview.shorten_line(searchable_text(message), is_users=message.role == "user")

    def _row(self, number: int) -> ExcerptRow:
        message = replace(self.messages[number], parts=(Text(text=self._line(number)),))
        return ExcerptRow(number=number + 1, turn=1, message=message)

    def bm25(self, k1: float, b: float, *, names: bool) -> Rank:
        documents = [Counter(terms) for terms in (self.named if names else self.nameless)]
        lengths = [document.total() for document in documents]
        mean = sum(lengths) / len(lengths)
        having = Counter(term for document in documents for term in document)

        def score(term: str, number: int) -> float:
            times = documents[number][term]
            weight = math.log(1 + (len(documents) - having[term] + 0.5) / (having[term] + 0.5))
            return weight * times * (k1 + 1) / (times + k1 * (1 - b + b * lengths[number] / mean))

        def rank(text: str) -> Sequence[int]:
            terms = set(tokenize(text))
            scores = [sum(score(term, n) for term in terms if term in documents[n]) for n in range(len(documents))]
            return sorted((n for n, found in enumerate(scores) if found), key=lambda n: (-scores[n], -n))

        return rank

    def newest(self) -> Rank:
        return lambda _: range(len(self.texts) - 1, -1, -1)

    def fill(self, ranking: Iterable[int]) -> frozenset[int]:
        """The messages that fit into the context, the best first; what does not fit is passed over."""
        room, chosen = CONTEXT, set()
        for number in ranking:
            if self.tokens[number] <= room:
                room -= self.tokens[number]
                chosen.add(number)
        return frozenset(chosen)

    def fill_turns(self, text: str) -> frozenset[int]:
        """The messages of the whole turns that fit."""
        chosen = rank_turns(self.turns, text, budget=CONTEXT)
        return frozenset(entry.seq for each in chosen for entry in each.turn.entries)


def _wire(message: dict[str, Any]) -> bytes:
    named = {"name": message["x_speaker"]} if message.get("x_speaker") else {}
    return json.dumps({"role": message["role"], "content": message["content"], **named}).encode()


METHODS: Final[dict[str, Callable[[AnnotatedConversation], Rank]]] = {
    "newest messages": AnnotatedConversation.newest,
    "BM25 k1 1.2 b .75": lambda c: c.bm25(1.2, 0.75, names=False),
    "BM25 k1 1.5 b .95": lambda c: c.bm25(1.5, 0.95, names=False),
    "BM25 k1 1.2 b .75, names": lambda c: c.bm25(1.2, 0.75, names=True),
    "BM25 k1 1.5 b .95, names": lambda c: c.bm25(1.5, 0.95, names=True),
    "**Tersely, `relevant`**": AnnotatedConversation.tersely,
}
WITH_MEANING: Final[dict[str, Callable[[AnnotatedConversation], Rank]]] = {
    "embeddings alone": AnnotatedConversation.by_meaning,
    "**Tersely, `relevant` with embeddings**": AnnotatedConversation.by_words_and_meaning,
}
TURNS: Final = "**Tersely, whole turns**"
ANSWER: Final = "**Tersely, answer of `relevant`**"
WHOLE: Final = "the same, messages shown whole"

Measured = list[tuple[bool, list[float]]]


def measure(conversations: Sequence[AnnotatedConversation]) -> dict[str, Measured]:
    """For each method and question: whether its conversation was tuned on, recall at the depths, share in a context."""
    methods = METHODS | WITH_MEANING if all(each.nearest for each in conversations) else METHODS
    results: dict[str, Measured] = {name: [] for name in (*methods, TURNS, ANSWER, WHOLE)}
    for conversation in conversations:
        is_tuned = conversation.id in TUNED_ON
        for name, make in methods.items():
            rank = make(conversation)
            for question in conversation.questions:
                ranking = rank(question.text)
                shares = [share_found(question, ranking[:depth]) for depth in DEPTHS]
                results[name].append((is_tuned, [*shares, share_found(question, conversation.fill(ranking))]))
        rank, cover = conversation.tersely(), conversation.overview()
        for question in conversation.questions:
            filled = conversation.fill(rank(question.text))
            shown, whole = cover(question.text) if is_about_whole(question.text) else (filled, filled)
            for name, found in (
                (TURNS, conversation.fill_turns(question.text)),
                (ANSWER, shown),
                (WHOLE, whole),
            ):
                results[name].append((is_tuned, [math.nan] * len(DEPTHS) + [share_found(question, found)]))
    return results


def share_found(question: Question, found: Iterable[int]) -> float:
    return len(question.evidence.intersection(found)) / len(question.evidence)


def load(directory: Path, name: str) -> list[AnnotatedConversation]:
    """The conversations of a set."""
    questions = [json.loads(line) for line in (directory / f"{name}_questions.jsonl").read_text().splitlines()]
    records = [json.loads(line) for line in (directory / f"{name}.jsonl").read_text().splitlines()]
    return [AnnotatedConversation(r, (q for q in questions if q["conv_id"] == r["id"])) for r in records]


def embed(conversations: Sequence[AnnotatedConversation]) -> None:
    """Set the messages nearest to each question by the embedding model, which is installed when it is missing."""
    python = ensure_installed(EMBEDDINGS, "embeddings") / "python"
    given = [{"texts": each.texts, "queries": [q.text for q in each.questions]} for each in conversations]
    script = Path(__file__).parent / "nearest_texts.py"
    done = subprocess.run([python, script], input=json.dumps(given), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"the embedding model failed; nothing was measured: {done.stderr[-2000:]}")
    for conversation, rankings in zip(conversations, json.loads(done.stdout), strict=True):
        conversation.nearest = {
            # As in a search, vectors that point away are unrelated.
            question.text: [Ranked(number=number, score=cosine) for number, cosine in ranking if cosine > 0]
            for question, ranking in zip(conversation.questions, rankings, strict=True)
        }


def _row(name: str, measured: Measured, *, tuned: bool | None) -> str:
    rows = [values for is_tuned, values in measured if tuned is None or is_tuned == tuned]
    means = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    return f"| {name} | " + " | ".join("" if math.isnan(mean) else f"{mean:.3f}".lstrip("0") for mean in means) + " |"


def render(directory: Path, *, with_embeddings: bool = False) -> str:
    """The whole report. ``with_embeddings``: with the rankings by an embedding model."""
    lines = [
        "# How much of what a question needs is found",
        "",
        "Made by `make bench-recall`, with the functions of the search mode `relevant`; no model, but for the two rows",
        f"with embeddings: those of `{EMBEDDINGS}` from PyPI (256 dimensions, the weights are in its wheel).",
        "R@n: share of a question's evidence messages among the first n, mean over questions. Context: share of the",
        f"evidence inside {CONTEXT:,} tokens filled with the best messages (or whole turns) that fit.",
        "Answer of `relevant`: questions about the whole conversation (order of events, summaries) are answered by",
        "lines of turns in time order, all others by the best messages. A message counts if the answer shows it, if",
        f"only by its beginning ({overview.USER_LINE} characters of a user's, {overview.OTHER_LINE} of another). The "
        "row below it counts only",
        "messages that are shown whole.",
        "One configuration for both sets. Its parameters were chosen on "
        + ", ".join(f"`{name}`" for name in sorted(TUNED_ON))
        + ",",
        "but for one: how much more the user's messages count for a question in the first person was chosen by",
        "cross-validation (`bench/recall_folds.md`), which gave the same value without each conversation.",
    ]
    for title, name in SETS.items():
        conversations = load(directory, name)
        if with_embeddings:
            embed(conversations)
        results = measure(conversations)
        parts = (("all", None), ("tuned on", True), ("held out", False))
        for part, tuned in parts:
            chosen = [c for c in conversations if tuned is None or (c.id in TUNED_ON) == tuned]
            count = sum(len(c.questions) for c in chosen)
            lines += ["", f"## {title}, {part}: {len(chosen)} conversations, {count} questions", ""]
            lines += ["| method | R@5 | R@10 | R@25 | R@50 | context |", "|---|---|---|---|---|---|"]
            lines += [_row(method, measured, tuned=tuned) for method, measured in results.items()]
    lines += ["", "## As published with the data, over the whole sets (R@5 / 10 / 25 / 50)", ""]
    lines += ["| method | LoCoMo | BEAM-100k |", "|---|---|---|"]
    lines += [f"| {method} | {one} | {other} |" for method, one, other in PUBLISHED]
    return "\n".join(lines) + "\n"


def find_data(given: str | None) -> Path:
    """Return the directory of the annotated conversations; ends the program if they are not there."""
    given = given or os.environ.get("TERSELY_RETRIEVAL_DATA")
    directory = Path(given) if given else ROOT.parent / "shared" / "data" / "retrieval"
    missing = [name for name in SETS.values() if not (directory / f"{name}_questions.jsonl").is_file()]
    if missing:
        sys.exit(
            f"no annotated conversations in {directory} ({', '.join(missing)}): name their directory as an argument "
            "or in TERSELY_RETRIEVAL_DATA; nothing was measured"
        )
    return directory


def main() -> None:
    report = render(find_data(sys.argv[1] if len(sys.argv) > 1 else None), with_embeddings=True)
    print(report)
    TABLE.write_text(report)


if __name__ == "__main__":
    main()
