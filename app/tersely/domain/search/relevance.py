"""Rank documents by their relevance to a text. Search, memos and retrieval share it. It is deterministic and uses no
model.

It is BM25 with exact document frequencies over the collection, and three corrections for conversations, measured on
annotated ones (`bench/recall.md`). Very long messages lose weight, however often they contain the words. The neighbours
of a message add to its score, since an answer rarely repeats the words of its question. The words of the best documents
find others with the same subject and other words. Words that stand side by side in the text should do so in a document.
Marks among the terms of a message (`tersely.domain.search.cues`)
count too: standing instructions, short questions, the speaker, and whether the user wrote it.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest, nsmallest
from itertools import chain, pairwise
from math import log

import msgspec

from tersely.domain.history.turns import Turn
from tersely.domain.messages import Message, searchable_text
from tersely.domain.search.cues import (
    PREFERENCE,
    QUESTION,
    TALK,
    USERS,
    is_about_own,
    is_about_replies,
    is_about_whole,
    is_mark,
    looks_back,
    marks_of,
    speaker_mark,
)
from tersely.domain.search.term_index import MAX_TIMES, SHIFT, TermIndex, make_page
from tersely.domain.search.terms import is_content_word, tokenize

__all__ = [
    "Corpus",
    "Ranked",
    "RankedTurn",
    "SearchQuery",
    "build_corpus",
    "build_query",
    "document_terms",
    "document_text",
    "expand",
    "find_relevant",
    "fuse",
    "idf_weights",
    "prefer_phrases",
    "query_terms",
    "rank_by_terms",
    "rank_documents",
    "rank_turns",
    "search_corpus",
    "tokenize",
]

K1 = 1.2
B = 0.4
# Number of terms up to which length only counts in BM25, and how fast longer messages lose weight.
SHORT = 60
FALL = 0.5
LONGEST = 4096
# The share of their own scores that documents one and two positions away add.
NEAR = (0.3, 0.15)
# Of the best documents so many terms are added to a query, the strongest with this share of a term's weight.
FEEDBACK_DOCUMENTS = 5
FEEDBACK_TERMS = 10
FEEDBACK_WEIGHT = 0.4
FEEDBACK_TIMES = 3
FEEDBACK_LENGTH = 10

# A standing instruction or preference of the user counts so much more, unless the question looks back.
PREFERENCE_WEIGHT = 2.5
# It holds for requests that share no word with it, so it has at least this share of the best score. Questions about the
# whole conversation are no such requests.
PREFERENCE_FLOOR = 0.35
# What the message after a short question gets of the question's score.
ANSWER_SHARE = 0.3
# How much more the user's messages count for a question in the first person.
OWN_WEIGHT = 2.0
# What a word about the conversation itself counts for in a question.
TALK_WEIGHT = 0.4
# How much more the messages of a speaker count whom the question names.
SPEAKER_WEIGHT = 1.3

PHRASED = 25
"""Of the documents that a search finds so many are looked at again, for phrases of the text."""
# What two words that stand side by side in the text add if they do so in a document: so many times the weight of the
# more frequent one.
PHRASE_WEIGHT = 2.0

# The weight of similarity in meaning relative to the words, when both rankings are fused. The documents that words find
# best, at most so many, stay in front of all others, whichever words they share; both rankings order them. So what
# merely sounds alike comes after them.
MEANING_WEIGHT = 0.1
FRONT = 10

MEMOS = 5
FLOOR = 0.25

# Of length 0 is what is no part of the collection.
_DAMPING = (0.0, *(1 / max(1.0, length / SHORT) ** FALL for length in range(1, LONGEST + 1)))


class _NamedArguments(msgspec.Struct):
    name: str | None = None


_named_decoder = msgspec.json.Decoder(_NamedArguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The statistics that a ranking needs. Documents are numbered from 0.

    ``lengths`` are the documents' term counts, 0 for a document outside the collection. ``postings`` map a term to its
    documents and counts (`tersely.domain.search.term_index`). Only the query's terms are needed.
    """

    lengths: Sequence[int]
    postings: Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A document by its number, with a score: greater is better, comparable within one ranking only."""

    number: int
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchQuery:
    """A first ranking for a text: its term weights, every document's own score, and the few ``best`` documents."""

    text: str
    weights: Mapping[str, float]
    hidden: frozenset[int]
    scores: Sequence[float]
    best: tuple[Ranked, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedTurn:
    """A turn, with how much of the text it is about: 0 to 1."""

    turn: Turn
    relevance: float


def document_text(message: Message) -> str:
    """Return the searched text of a message: its speaker's name, if it has one, and its text."""
    text, name = searchable_text(message), _speaker(message)
    return f"{name}: {text}" if name else text


def document_terms(message: Message, *, limit: int | None = None) -> list[str]:
    """Return the terms and marks of the first ``limit`` characters of a message."""
    text = document_text(message)[:limit]
    terms = tokenize(text)
    return terms + marks_of(text, len(terms), is_users=message.role == "user", speaker=_speaker(message))


def query_terms(text: str) -> list[str]:
    """Return the terms and marks that a ranking for ``text`` looks at."""
    terms = tokenize(text)
    return [*terms, *_marks_for(terms)]


def _marks_for(terms: Iterable[str]) -> list[str]:
    return [PREFERENCE, QUESTION, USERS, *map(speaker_mark, terms)]


def _speaker(message: Message) -> str:
    """Return the name of a message's author; empty if it has none."""
    if b'"name"' not in message.raw or message.role not in {"user", "assistant"}:
        return ""
    try:
        return _named_decoder.decode(message.raw).name or ""
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""


def build_corpus(documents: Iterable[Sequence[str]]) -> Corpus:
    """Return the corpus of documents given as terms."""
    index = TermIndex()
    index.add(make_page(0, documents))
    return Corpus(lengths=index.lengths, postings=index.postings)


def idf_weights(terms: Iterable[str], corpus: Corpus) -> dict[str, float]:
    """Return the weight of each distinct term: high if few documents have it. Never negative."""
    total = len(corpus.lengths) - corpus.lengths.count(0)
    weights: dict[str, float] = {}
    for term in terms:
        weights[term] = _weight(len(corpus.postings.get(term, ())), total)
    return weights


def _weight(having: int, total: int) -> float:
    return log(1 + (total - having + 0.5) / (having + 0.5))


def expand(query: Mapping[str, float], best: Iterable[tuple[float, Sequence[str]]], corpus: Corpus) -> dict[str, float]:
    """Return ``weights`` with the terms that mark the ``best`` documents, given as (score, terms)."""
    shares: defaultdict[str, float] = defaultdict(float)
    for score, document in best:
        for term, times in Counter(document).items():
            if is_mark(term):
                continue
            shares[term] += score * min(times, FEEDBACK_TIMES) / max(FEEDBACK_LENGTH, len(document))
    weights = idf_weights(shares, corpus)
    marks = sorted((-share * weights[term], term) for term, share in shares.items() if term not in query)
    marks = marks[:FEEDBACK_TERMS]
    return dict(query) | {term: FEEDBACK_WEIGHT * mark / marks[0][0] for mark, term in marks if mark < 0}


def build_query(text: str, corpus: Corpus, *, hidden: frozenset[int] = frozenset()) -> SearchQuery:
    """Return the first query for ``text``. The ``hidden`` documents are neither found nor counted."""
    query = {term: TALK_WEIGHT if term in TALK else 1.0 for term in tokenize(text)}
    seen = _without(corpus, hidden, query_terms(text))
    scores = _with_marks(_bm25(query, seen), text, seen)
    best = _order(scores, seen.lengths, FEEDBACK_DOCUMENTS)
    return SearchQuery(text=text, weights=query, hidden=hidden, scores=scores, best=tuple(best))


def search_corpus(
    first: SearchQuery, corpus: Corpus, documents: Iterable[Sequence[str]] = (), *, limit: int | None = None
) -> list[Ranked]:
    """Return the documents that match a text or are neighbours of matches, best first; ties: later first.

    ``documents`` are the terms of the best documents of a first query, in that order; empty: they are not used. The
    result is empty for a text of stop words.
    """
    best = [(each.score, document) for each, document in zip(first.best, documents, strict=False)]
    read = {term for _, document in best for term in document}
    seen = _without(corpus, first.hidden, read.union(_marks_for(first.weights)))
    scores = first.scores
    if best:
        added = {
            term: weight for term, weight in expand(first.weights, best, seen).items() if term not in first.weights
        }
        others = _with_marks(_bm25(added, seen), first.text, seen)
        scores = [one + other for one, other in zip(scores, others, strict=True)]
    found = _order(scores, seen.lengths, limit)
    return _with_replies(found, seen)[:limit] if is_about_replies(first.text) else found


def find_relevant(
    text: str, documents: Sequence[Sequence[str]], corpus: Corpus, *, limit: int | None = None
) -> list[Ranked]:
    """Return the documents, given as terms, that ``text`` is about: as `search_corpus`, then `prefer_phrases`."""
    first = build_query(text, corpus)
    most = None if limit is None else max(limit, PHRASED)
    found = search_corpus(first, corpus, [documents[each.number] for each in first.best], limit=most)
    return prefer_phrases(first, found, [documents[each.number] for each in found[:PHRASED]], corpus)[:limit]


def prefer_phrases(
    first: SearchQuery, found: Sequence[Ranked], documents: Iterable[Sequence[str]], corpus: Corpus
) -> list[Ranked]:
    """Put the ``found`` documents in front that have words side by side as the text has them.

    ``documents`` are the terms of the first ones, in that order; at most `PHRASED` count. Ties stay as they are.
    """
    terms = tokenize(first.text)
    pairs = set(pairwise(terms))
    weights = idf_weights(first.weights, _without(corpus, first.hidden, first.weights))
    scored: list[Ranked] = []
    for each, document in zip(found[:PHRASED], documents, strict=False):
        common = sorted(pairs.intersection(pairwise(document)))
        added = sum([min(weights[one], weights[other]) for one, other in common])
        damping = _DAMPING[min(corpus.lengths[each.number], LONGEST)]
        scored.append(Ranked(number=each.number, score=each.score + PHRASE_WEIGHT * added * damping))
    scored.sort(key=lambda each: -each.score)
    return [*scored, *found[len(scored) :]]


def _with_replies(found: Iterable[Ranked], corpus: Corpus) -> list[Ranked]:
    """Put the reply to each of the user's messages right behind it, unless it stands before it."""
    users = {posting >> SHIFT for posting in corpus.postings.get(USERS, ())}
    placed: dict[int, Ranked] = {}
    for each in found:
        placed.setdefault(each.number, each)
        reply = each.number + 1
        is_there = reply < len(corpus.lengths) and corpus.lengths[reply] > 0
        if is_there and each.number in users and reply not in users:
            placed.setdefault(reply, Ranked(number=reply, score=each.score))
    return list(placed.values())


def _with_marks(scores: Sequence[float], text: str, corpus: Corpus) -> list[float]:
    """Weigh scores by the marks of the documents, and pass a share of each short question's on to its answer."""
    weighed = [*scores]
    preferences = () if looks_back(text) else corpus.postings.get(PREFERENCE, ())
    _multiply(weighed, preferences, PREFERENCE_WEIGHT)
    if is_about_own(text):
        _multiply(weighed, corpus.postings.get(USERS, ()), OWN_WEIGHT)
    for term in set(tokenize(text)):
        _multiply(weighed, corpus.postings.get(speaker_mark(term), ()), SPEAKER_WEIGHT)
    if preferences and not is_about_whole(text):
        _raise(weighed, preferences, PREFERENCE_FLOOR * max(weighed))
    passed = [
        (number + 1, ANSWER_SHARE * weighed[number])
        for posting in corpus.postings.get(QUESTION, ())
        if (number := posting >> SHIFT) + 1 < len(weighed) and weighed[number]
    ]
    for number, share in passed:
        weighed[number] += share
    return weighed


def _raise(scores: list[float], postings: Iterable[int], least: float) -> None:
    for posting in postings:
        number = posting >> SHIFT
        scores[number] = max(scores[number], least)


def _multiply(scores: list[float], postings: Iterable[int], factor: float) -> None:
    for posting in postings:
        scores[posting >> SHIFT] *= factor


def fuse(by_words: Sequence[Ranked], by_meaning: Sequence[Ranked]) -> list[int]:
    """Fuse the rankings by words and by meaning (cosines), best first; ties: greater number first.

    Scores are fused, not positions: word scores as shares of the best one, cosines scaled to their own range. A
    document that only one ranking contains has 0 in the other. The `FRONT` best by words stay in front of all others.
    """
    best = max((each.score for each in by_words), default=0.0) or 1.0
    scores = {each.number: each.score / best for each in by_words}
    low = min((each.score for each in by_meaning), default=0.0)
    spread = max((each.score for each in by_meaning), default=0.0) - low
    for each in by_meaning:
        nearness = (each.score - low) / spread if spread else 1.0
        scores[each.number] = scores.get(each.number, 0.0) + MEANING_WEIGHT * nearness
    front = {each.number for each in by_words[:FRONT]}
    return sorted(scores, key=lambda number: (number not in front, -scores[number], -number))


def rank_turns(turns: Sequence[Turn], text: str, *, budget: int | None = None) -> tuple[RankedTurn, ...]:
    """Rank whole turns by their relevance to ``text`` (the current task), best first; ties: the later first.

    A turn that exceeds the rest of ``budget`` (tokens) is skipped, and a smaller one may follow. Turns that share no
    term with ``text`` are left out, so a text of stop words ("continue", "go on") finds none. A turn's relevance is the
    greater of its best message's and of the share of the task's terms that all its messages cover.
    """
    entries = [entry for turn in turns for entry in turn.entries]
    documents = [document_terms(entry.message) for entry in entries]
    corpus = build_corpus(documents)
    first = build_query(text, corpus)
    found = search_corpus(first, corpus, [documents[each.number] for each in first.best])
    scores = {entries[each.number].seq: each.score for each in found}
    terms = frozenset(first.weights)
    sharing = {entry.seq for entry, document in zip(entries, documents, strict=True) if not terms.isdisjoint(document)}
    weights = idf_weights(first.weights, corpus)
    best = sum(weights.values()) * (K1 + 1)
    by_seq = dict(zip((entry.seq for entry in entries), documents, strict=True))
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
        covered = _coverage(weights, corpus, {term for entry in turn.entries for term in by_seq[entry.seq]})
        chosen.append(RankedTurn(turn=turn, relevance=min(1.0, max(-score / best, covered))))
    return tuple(chosen)


def _coverage(weights: Mapping[str, float], corpus: Corpus, terms: Collection[str]) -> float:
    """Return the share, 0 to 1, of the query's weight that ``terms`` cover. Only terms of the corpus count.

    0 if the common terms are everyday words without a topic.
    """
    known = {term: weight for term, weight in weights.items() if corpus.postings.get(term)}
    common = [term for term in known if term in terms]
    return sum(known[term] for term in common) / sum(known.values()) if is_content_word(common) else 0.0


def rank_documents(
    documents: Sequence[Sequence[str]], terms: Collection[str], *, limit: int = MEMOS, is_asked: bool = False
) -> tuple[Ranked, ...]:
    """Return at most ``limit`` short documents (memos and their tags, as sorted distinct terms) about a text's
    ``terms``, best first.

    A document's score is the share, 0 to 1, that the common terms have in the weight of the shorter of the two; a term
    that no document contains has no weight. Unless ``is_asked``, a document must share a keyword or two everyday words
    with the text, and score at least `FLOOR`. Ties: later first. Stop words find none.
    """
    having = Counter(chain.from_iterable(documents))
    weight = {count: _weight(count, len(documents)) for count in set(having.values())}
    wanted = having.keys() & set(terms)
    query_weight = sum(weight[having[term]] for term in sorted(wanted))
    found: list[Ranked] = []
    for number, document in enumerate(documents):
        common = [term for term in document if term in wanted]
        if common and (is_asked or is_content_word(common)):
            document_terms = sum([weight[having[term]] for term in document])
            share = sum([weight[having[term]] for term in common]) / min(query_weight, document_terms)
            if is_asked or share >= FLOOR:
                found.append(Ranked(number=number, score=share))
    found.sort(key=lambda each: (-each.score, -each.number))
    return tuple(found[:limit])


def rank_by_terms(lengths: Sequence[int], term_counts: Mapping[str, Sequence[int]], *, limit: int) -> list[int]:
    """Return the numbers of the ``limit`` documents that match a text's terms best; ties: the first.

    ``lengths`` are the documents' lengths in any unit; ``term_counts`` has, for each term of the text, the documents
    that contain it. Neighbouring documents do not count.
    """
    postings = {term: [number << SHIFT | 1 for number in numbers] for term, numbers in term_counts.items()}
    scores = _bm25(dict.fromkeys(term_counts, 1.0), Corpus(lengths=lengths, postings=postings))
    return nsmallest(
        limit, (n for n, score in enumerate(scores) if score), key=lambda number: (-scores[number], number)
    )


def _bm25(query: Mapping[str, float], corpus: Corpus) -> list[float]:
    """Return the score of every document."""
    lengths = corpus.lengths
    if not query:
        return [0.0] * len(lengths)
    mean = sum(lengths) / max(1, len(lengths) - lengths.count(0)) or 1.0
    scores = [0.0] * len(lengths)
    fixed, slope = K1 * (1 - B), K1 * B / mean
    # This loop takes most of the time of a search in a long session, so all names in it are local.
    norms = [fixed + slope * length for length in lengths]
    shift, mask = SHIFT, MAX_TIMES
    for term, weight in idf_weights(query, corpus).items():
        full = weight * query[term] * (K1 + 1)
        for posting in corpus.postings.get(term, ()):
            number, times = posting >> shift, posting & mask
            scores[number] += full * times / (times + norms[number])
    return scores


def _order(scores: Sequence[float], lengths: Sequence[int], limit: int | None) -> list[Ranked]:
    """Sort documents by their own scores, those of their neighbours, and their lengths."""
    near, far = NEAR
    own = [0.0, 0.0, *scores, 0.0, 0.0]
    damping = [_DAMPING[length] if length < LONGEST else _DAMPING[LONGEST] for length in lengths]
    neighbourhoods = zip(own, own[1:], scores, own[3:], own[4:], damping, strict=False)
    values = [(score + near * (b + c) + far * (a + d)) * damp for a, b, score, c, d, damp in neighbourhoods]
    least = min(nlargest(limit, values), default=0.0) if limit is not None else 0.0
    found = sorted((-value, -number) for number, value in enumerate(values) if value and value >= least)
    return [Ranked(number=-number, score=-value) for value, number in found[:limit]]


def _without(corpus: Corpus, hidden: frozenset[int], terms: Iterable[str]) -> Corpus:
    """Return the corpus of ``terms`` as if the ``hidden`` documents were not there."""
    if not hidden:
        return corpus
    lengths = array("I", corpus.lengths)
    for number in hidden:
        lengths[number] = 0
    postings = {
        term: [posting for posting in corpus.postings.get(term, ()) if posting >> SHIFT not in hidden] for term in terms
    }
    return Corpus(lengths=lengths, postings=postings)
