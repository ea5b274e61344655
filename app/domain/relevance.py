"""Relevance: which documents a text is about. One ranking for search, memos and retrieval; no model, no chance.

BM25 with exact document frequencies over the collection, and two corrections that conversations need (measured on
annotated ones, `bench/recall.md`): beyond some length a message is less likely to be what was asked for, however
often it says the words; and what stands beside a message says what it is about, as an answer rarely repeats
the words of its question.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log

from app.domain.messages import searchable_text
from app.domain.terms import tokenize
from app.domain.turns import Turn

__all__ = ["Corpus", "Ranked", "RankedTurn", "collect", "rank", "rank_documents", "rank_turns", "tokenize", "weigh"]

K1 = 0.9
B = 0.4
# Terms of a message up to which its length counts for nothing but in BM25, and how fast longer ones fall behind.
SHORT = 60
FALL = 0.5
# What a neighbour adds of its own score.
NEIGHBOUR = 0.3

MEMOS = 5
FLOOR = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """What a ranking has to know about documents, which are numbered from 0 on.

    ``lengths`` are their terms each, 0 for what is no part of the collection; ``postings`` say for a term which
    documents have it, and how often. Only the terms of the query are needed.
    """

    lengths: Sequence[int]
    postings: Mapping[str, Mapping[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A document by its number, with a score: greater is better, comparable within one ranking only."""

    number: int
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedTurn:
    """A turn, with how much of the text it is about: 0 to 1."""

    turn: Turn
    relevance: float


def collect(documents: Iterable[Sequence[str]], terms: Iterable[str] | None = None) -> Corpus:
    """The corpus of documents given as terms; with ``terms``, only the postings of these."""
    wanted = None if terms is None else frozenset(terms)
    lengths: list[int] = []
    postings: dict[str, dict[int, int]] = {}
    for number, document in enumerate(documents):
        lengths.append(len(document))
        for term, times in Counter(document).items():
            if wanted is None or term in wanted:
                postings.setdefault(term, {})[number] = times
    return Corpus(lengths=lengths, postings=postings)


def weigh(terms: Iterable[str], corpus: Corpus) -> dict[str, float]:
    """What each different term counts for: much if few documents have it. Never negative."""
    total = sum(1 for length in corpus.lengths if length)
    weights: dict[str, float] = {}
    for term in terms:
        having = len(corpus.postings.get(term, ()))
        weights[term] = log(1 + (total - having + 0.5) / (having + 0.5))
    return weights


def rank(terms: Iterable[str], corpus: Corpus, *, neighbour: float = NEIGHBOUR) -> list[Ranked]:
    """The documents that have any of ``terms`` or stand beside one that has, the best first; ties: the later first.

    Empty for a query of stop words.
    """
    scores = _bm25(weigh(terms, corpus), corpus)
    lengths = corpus.lengths
    near = {at for number in scores for at in (number - 1, number, number + 1) if 0 <= at < len(lengths)}
    found = [
        Ranked(
            number=at,
            score=(scores.get(at, 0.0) + neighbour * (scores.get(at - 1, 0.0) + scores.get(at + 1, 0.0)))
            / max(1.0, lengths[at] / SHORT) ** FALL,
        )
        for at in (near if neighbour else scores)
        if lengths[at]
    ]
    found.sort(key=lambda each: (-each.score, -each.number))
    return found


def rank_turns(turns: Sequence[Turn], text: str, *, budget: int | None = None) -> tuple[RankedTurn, ...]:
    """Whole turns that are about ``text`` (the current task), the most relevant first; ties: the later first.

    ``budget`` (tokens): a turn that does not fit into what is left is passed over, and a smaller one may follow.
    Turns that share nothing with ``text`` are left out, so a text of stop words ("continue", "go on") brings nothing:
    what the caller does with the room is its own affair.
    """
    terms = tokenize(text)
    documents = [tokenize(_words(turn)) for turn in turns]
    corpus = collect(documents, terms)
    best = sum(weigh(terms, corpus).values()) * (K1 + 1)
    chosen: list[RankedTurn] = []
    room = budget
    for each in rank(terms, corpus, neighbour=0):
        turn = turns[each.number]
        if room is not None:
            if turn.tokens > room:
                continue
            room -= turn.tokens
        chosen.append(RankedTurn(turn=turn, relevance=min(1.0, each.score / best)))
    return tuple(chosen)


def rank_documents(
    documents: Sequence[str], text: str, *, most: int = MEMOS, floor: float = FLOOR
) -> tuple[Ranked, ...]:
    """Of short documents (memos, with their tags), at most ``most`` that ``text`` is about, the best first.

    A document's score is the share, 0 to 1, that the terms common to it and ``text`` have in the weight of the one that
    says less; below ``floor`` it does not come. Ties: the later first. A text of stop words brings none.
    """
    terms = set(tokenize(text))
    contents = [set(tokenize(document)) for document in documents]
    corpus = collect([tuple(content) for content in contents])
    weights = weigh(terms.union(*contents), corpus)
    asked = sum(weights[term] for term in terms)
    found: list[Ranked] = []
    for number, content in enumerate(contents):
        common = sum(weights[term] for term in content & terms)
        if common:
            share = common / min(asked, sum(weights[term] for term in content))
            if share >= floor:
                found.append(Ranked(number=number, score=share))
    found.sort(key=lambda each: (-each.score, -each.number))
    return tuple(found[:most])


def _bm25(weights: Mapping[str, float], corpus: Corpus) -> dict[int, float]:
    lengths = corpus.lengths
    count = sum(1 for length in lengths if length)
    mean = sum(lengths) / count if count else 1.0
    scores: dict[int, float] = {}
    for term, weight in weights.items():
        for number, times in corpus.postings.get(term, {}).items():
            norm = K1 * (1 - B + B * lengths[number] / mean)
            scores[number] = scores.get(number, 0.0) + weight * times * (K1 + 1) / (times + norm)
    return scores


def _words(turn: Turn) -> str:
    return "\n".join(searchable_text(entry.message) for entry in turn.entries)
