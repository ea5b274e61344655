"""Relevance: which documents a text is about. One ranking for search, memos and retrieval; no model, no chance.

BM25 with exact document frequencies over the collection, and three corrections that conversations need, measured on
annotated ones (`bench/recall.md`): beyond some length a message is less likely to be what was asked for, however often
it says the words; what stands beside a message says what it is about, as an answer rarely repeats the words of its
question; and the words of the best documents find others that put the same thing differently.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest, nsmallest
from itertools import chain
from math import log

import msgspec

from app.domain.messages import Message, searchable_text
from app.domain.term_index import MAX_TIMES, SHIFT, TermIndex, make_page
from app.domain.terms import tells_what, tokenize
from app.domain.turns import Turn

__all__ = [
    "Corpus",
    "Look",
    "Ranked",
    "RankedTurn",
    "collect",
    "document_text",
    "expand",
    "fuse",
    "look",
    "rank_by_terms",
    "rank_documents",
    "rank_turns",
    "search",
    "tokenize",
    "weigh",
]

K1 = 1.2
B = 0.4
# Terms of a message up to which its length counts for nothing but in BM25, and how fast longer ones fall behind.
SHORT = 60
FALL = 0.5
LONGEST = 4096
# What the documents one and two places away add of their own scores.
NEAR = (0.3, 0.15)
# Of the best documents so many terms are added to a query, the strongest with this share of a term's weight.
FEEDBACK_DOCUMENTS = 5
FEEDBACK_TERMS = 10
FEEDBACK_WEIGHT = 0.4
FEEDBACK_TIMES = 3
FEEDBACK_LENGTH = 10

# How little the first places of a ranking count for more than the next ones, when rankings are fused.
FUSION = 60

MEMOS = 5
FLOOR = 0.25

# Of length 0 is what is no part of the collection.
_DAMPING = (0.0, *(1 / max(1.0, length / SHORT) ** FALL for length in range(1, LONGEST + 1)))


class _Named(msgspec.Struct):
    name: str | None = None


_named_decoder = msgspec.json.Decoder(_Named)


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """What a ranking has to know about documents, which are numbered from 0 on.

    ``lengths`` are their terms each, 0 for what is no part of the collection; ``postings`` say for a term which
    documents have it, and how often (`app.domain.term_index`). Only the terms of the query are needed.
    """

    lengths: Sequence[int]
    postings: Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A document by its number, with a score: greater is better, comparable within one ranking only."""

    number: int
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A first look at what a text is about: its terms, every document's own score, and the few ``best``."""

    query: Mapping[str, float]
    hidden: frozenset[int]
    scores: Sequence[float]
    best: tuple[Ranked, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedTurn:
    """A turn, with how much of the text it is about: 0 to 1."""

    turn: Turn
    relevance: float


def document_text(message: Message) -> str:
    """What a message is found by: its speaker's name, where it has one, and its text."""
    text = searchable_text(message)
    if b'"name"' not in message.raw or message.role not in {"user", "assistant"}:
        return text
    try:
        name = _named_decoder.decode(message.raw).name
    except (msgspec.DecodeError, UnicodeDecodeError):
        return text
    return f"{name}: {text}" if name else text


def collect(documents: Iterable[Sequence[str]]) -> Corpus:
    """The corpus of documents given as terms."""
    index = TermIndex()
    index.add(make_page(0, documents))
    return Corpus(lengths=index.lengths, postings=index.postings)


def weigh(terms: Iterable[str], corpus: Corpus) -> dict[str, float]:
    """What each different term counts for: much if few documents have it. Never negative."""
    total = len(corpus.lengths) - corpus.lengths.count(0)
    weights: dict[str, float] = {}
    for term in terms:
        weights[term] = _weight(len(corpus.postings.get(term, ())), total)
    return weights


def _weight(having: int, total: int) -> float:
    return log(1 + (total - having + 0.5) / (having + 0.5))


def expand(query: Mapping[str, float], best: Iterable[tuple[float, Sequence[str]]], corpus: Corpus) -> dict[str, float]:
    """``query`` with the terms that mark the ``best`` documents, given as (score, terms)."""
    shares: Counter[str] = Counter()
    for score, document in best:
        for term, times in Counter(document).items():
            shares[term] += score * min(times, FEEDBACK_TIMES) / max(FEEDBACK_LENGTH, len(document))  # type: ignore[assignment]
    weights = weigh(shares, corpus)
    marks = sorted((-share * weights[term], term) for term, share in shares.items() if term not in query)
    marks = marks[:FEEDBACK_TERMS]
    return dict(query) | {term: FEEDBACK_WEIGHT * mark / marks[0][0] for mark, term in marks if mark < 0}


def look(text: str, corpus: Corpus, *, hidden: frozenset[int] = frozenset()) -> Look:
    """A first look at what ``text`` is about. The ``hidden`` documents are neither found nor counted."""
    query = dict.fromkeys(tokenize(text), 1.0)
    seen = _without(corpus, hidden, query)
    scores = _bm25(query, seen)
    best = _order(scores, seen.lengths, FEEDBACK_DOCUMENTS)
    return Look(query=query, hidden=hidden, scores=scores, best=tuple(best))


def search(
    first: Look, corpus: Corpus, documents: Iterable[Sequence[str]] = (), *, most: int | None = None
) -> list[Ranked]:
    """The documents that a text is about or that stand near such, the best first; ties: the later first.

    ``documents`` are the terms of the best ones of a first look, in that order; none: theirs are not looked at. Empty
    for a text of stop words.
    """
    best = [(each.score, document) for each, document in zip(first.best, documents, strict=False)]
    seen = _without(corpus, first.hidden, {term for _, document in best for term in document})
    scores = first.scores
    if best:
        added = {term: weight for term, weight in expand(first.query, best, seen).items() if term not in first.query}
        scores = [one + other for one, other in zip(scores, _bm25(added, seen), strict=True)]
    return _order(scores, seen.lengths, most)


def fuse(rankings: Iterable[Sequence[int]]) -> list[int]:
    """One ranking of several (reciprocal ranks), the best first; ties: the greater number first.

    What only one ranking knows comes in too, behind what all of them put as high.
    """
    scores: dict[int, float] = {}
    for ranking in rankings:
        for place, number in enumerate(ranking, 1):
            scores[number] = scores.get(number, 0.0) + 1 / (FUSION + place)
    return sorted(scores, key=lambda number: (-scores[number], -number))


def rank_turns(turns: Sequence[Turn], text: str, *, budget: int | None = None) -> tuple[RankedTurn, ...]:
    """Whole turns that are about ``text`` (the current task), the most relevant first; ties: the later first.

    ``budget`` (tokens): a turn that does not fit into what is left is passed over, and a smaller one may follow.
    Turns that share nothing with ``text`` are left out, so a text of stop words ("continue", "go on") brings nothing:
    what the caller does with the room is its own affair. A turn is as relevant as the best of its messages.
    """
    entries = [entry for turn in turns for entry in turn.entries]
    documents = [tokenize(document_text(entry.message)) for entry in entries]
    corpus = collect(documents)
    first = look(text, corpus)
    found = search(first, corpus, [documents[each.number] for each in first.best])
    scores = {entries[each.number].seq: each.score for each in found}
    sharing = {entry.seq for entry, score in zip(entries, first.scores, strict=True) if score}
    best = sum(weigh(first.query, corpus).values()) * (K1 + 1)
    order = sorted(
        (-max(scores.get(entry.seq, 0.0) for entry in turn.entries), -number)
        for number, turn in enumerate(turns)
        if not sharing.isdisjoint(entry.seq for entry in turn.entries)
    )
    chosen: list[RankedTurn] = []
    room = budget
    for score, number in order:
        turn = turns[-number]
        if room is not None:
            if turn.tokens > room:
                continue
            room -= turn.tokens
        chosen.append(RankedTurn(turn=turn, relevance=min(1.0, -score / best)))
    return tuple(chosen)


def rank_documents(
    documents: Sequence[Sequence[str]], terms: Collection[str], *, most: int = MEMOS, is_asked: bool = False
) -> tuple[Ranked, ...]:
    """Of short documents (memos with their tags, as different terms, sorted), at most ``most`` that a text of these
    ``terms`` is about, the best first.

    A document's score is the share, 0 to 1, that the terms common to both have in the weight of the one that says less;
    what no document says weighs nothing. Unless it ``is_asked`` for, a document must share a keyword or two everyday
    words with the text, and have a score of at least `FLOOR`. Ties: the later first. Stop words bring none.
    """
    having = Counter(chain.from_iterable(documents))
    weight = {count: _weight(count, len(documents)) for count in set(having.values())}
    wanted = having.keys() & set(terms)
    asked = sum(weight[having[term]] for term in sorted(wanted))
    found: list[Ranked] = []
    for number, document in enumerate(documents):
        common = [term for term in document if term in wanted]
        if common and (is_asked or tells_what(common)):
            said = sum([weight[having[term]] for term in document])
            share = sum([weight[having[term]] for term in common]) / min(asked, said)
            if is_asked or share >= FLOOR:
                found.append(Ranked(number=number, score=share))
    found.sort(key=lambda each: (-each.score, -each.number))
    return tuple(found[:most])


def rank_by_terms(lengths: Sequence[int], having: Mapping[str, Sequence[int]], *, most: int) -> list[int]:
    """The numbers of the ``most`` documents that a text of some terms is about, the best first; ties: the first.

    ``lengths`` are theirs, in whatever unit, ``having`` says for each term of the text which documents have it. Each
    stands for itself: nothing is found by what stands beside it.
    """
    postings = {term: [number << SHIFT | 1 for number in numbers] for term, numbers in having.items()}
    scores = _bm25(dict.fromkeys(having, 1.0), Corpus(lengths=lengths, postings=postings))
    return nsmallest(most, (n for n, score in enumerate(scores) if score), key=lambda number: (-scores[number], number))


def _bm25(query: Mapping[str, float], corpus: Corpus) -> list[float]:
    """The score of every document."""
    lengths = corpus.lengths
    if not query:
        return [0.0] * len(lengths)
    mean = sum(lengths) / max(1, len(lengths) - lengths.count(0)) or 1.0
    scores = [0.0] * len(lengths)
    fixed, slope = K1 * (1 - B), K1 * B / mean
    # In a long session this loop is what a search takes: everything in it is a local name.
    norms = [fixed + slope * length for length in lengths]
    shift, mask = SHIFT, MAX_TIMES
    for term, weight in weigh(query, corpus).items():
        full = weight * query[term] * (K1 + 1)
        for posting in corpus.postings.get(term, ()):
            number, times = posting >> shift, posting & mask
            scores[number] += full * times / (times + norms[number])
    return scores


def _order(scores: Sequence[float], lengths: Sequence[int], most: int | None) -> list[Ranked]:
    """Documents by their own scores, what stands near them, and their lengths."""
    near, far = NEAR
    own = [0.0, 0.0, *scores, 0.0, 0.0]
    damping = [_DAMPING[length] if length < LONGEST else _DAMPING[LONGEST] for length in lengths]
    places = zip(own, own[1:], scores, own[3:], own[4:], damping, strict=False)
    values = [(score + near * (b + c) + far * (a + d)) * damp for a, b, score, c, d, damp in places]
    least = min(nlargest(most, values), default=0.0) if most is not None else 0.0
    found = sorted((-value, -number) for number, value in enumerate(values) if value and value >= least)
    return [Ranked(number=-number, score=-value) for value, number in found[:most]]


def _without(corpus: Corpus, hidden: frozenset[int], terms: Iterable[str]) -> Corpus:
    """The corpus of ``terms`` as if the ``hidden`` documents were not there."""
    if not hidden:
        return corpus
    lengths = array("I", corpus.lengths)
    for number in hidden:
        lengths[number] = 0
    postings = {
        term: [posting for posting in corpus.postings.get(term, ()) if posting >> SHIFT not in hidden] for term in terms
    }
    return Corpus(lengths=lengths, postings=postings)
