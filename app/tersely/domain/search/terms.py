"""Split texts into search terms. Texts and queries are split in the same way.

A word gives its stem. An identifier (``src/parser.js``, ``maxRetries``, ``v0.6.2``) gives itself as a whole and the
stems of its pieces. Scripts without blanks give pairs of neighbouring characters. Stop words give nothing: grammatical
ones, and those that keep a conversation going ("continue", "go on"), which occur everywhere.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from functools import lru_cache

import Stemmer

MAX_TERM = 64
"""Characters of a term; what is longer (a key, a hash, encoded bytes) counts by its beginning."""

_STOP_WORDS = """
a about above after again against ain all also am an and any are aren as at be because been before being below between
both but by can cannot could couldn did didn do does doesn doing don done down during each either else ever few for
from further get gets getting give gives given got had hadn has hasn have haven having he her here hers herself him
himself his how however i if in into is isn it its itself just ll m me might mightn mine more most much must mustn my
myself need needn neither no nor not now of off often on once only or other our ours ourselves out over own per quite
rather re s same shall shan she should shouldn since so some such t than that the their theirs them themselves then
there these they this those though through thus to too under until up upon us ve very was wasn we were weren what
whatever when where whether which while who whom whose why will with within without won would wouldn yet you your
yours yourself yourselves anyway bye continue fine go goes going good great hello hey hi hmm keep let lets like maybe
nah next nice nope ok okay oh please proceed resume right see so sorry still sure thank thanks then uh um want wants
wanted well wow yeah yep yes
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())

# Words about any activity. Such a word alone is no keyword.
_EVERYDAY_WORDS = """
actually add always answer ask back bad best better big bit broken bug call change check close code come complete
correct create data day describe different do done easy end error evening everything example explain fail file find
finish first fix follow give happen hard help issue item kind know last learn left line list little long look lot main
make man many mean min morning move name need never new night nothing number old one open page part people perhaps place
plan point possible probably problem project put question quick read ready really remove replace result run save say
second see set show simple small someone something start state step stop stuff system take talk task tell test text
thing think time today together tomorrow try turn two type understand update use user value version wait way week word
work world write wrong year yesterday
"""
# What names of files and addresses have in common.
_PARTS_OF_NAMES = frozenset(
    {"app", "com", "css", "html", "http", "https", "js", "json", "lib", "md", "py", "sh", "src", "toml", "ts", "tsx"}
    | {"txt", "www", "yaml", "yml"}
)

# Letters, digits and combining marks; underscores join them, as in identifiers.
_LETTERS = r"[\w\u0300-\u036f\u0591-\u05c7\u064b-\u0655\u0900-\u0963\u0966-\u0dff\u0e31-\u0e4e]"
_WORD = re.compile(rf"{_LETTERS}+(?:[./:@#+\-\\'’]+{_LETTERS}+)*")
_PIECE = re.compile(rf"(?:(?!_){_LETTERS})+")
_CASE_CHANGE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_UNSPACED = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]+"
)
_APOSTROPHES = re.compile(r"['’]\w*")

_NUMBER = re.compile(r"[\d_]+(?:[^\w]+[\d_]+)?")
_stemmer = Stemmer.Stemmer("english")
EVERYDAY = frozenset(_stemmer.stemWord(word) for word in _EVERYDAY_WORDS.split())


def tokenize(text: str) -> list[str]:
    """Return the terms of a text, in order, with repetitions; empty for a text of stop words."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    found: list[str] = []
    for word in _WORD.findall(text):
        found += _terms(word) if len(word) <= MAX_TERM else _split(word)
    return found


@lru_cache(maxsize=1 << 16)
def _terms(word: str) -> tuple[str, ...]:
    """Return the terms of one word. Remembered: a conversation has few different words."""
    return tuple(_split(word))


def is_content_word(terms: Iterable[str]) -> bool:
    """Return whether a few terms name a subject. One everyday word does not, nor do numbers and fragments of names."""
    words = [term for term in terms if not _NUMBER.fullmatch(term) and term not in _PARTS_OF_NAMES]
    return len(words) > 1 or any(word not in EVERYDAY for word in words)


def _split(word: str) -> list[str]:
    bare = _APOSTROPHES.sub("", word)
    pieces = [part for piece in _PIECE.findall(bare) for part in _CASE_CHANGE.split(piece)]
    whole = [bare.strip("_").casefold()[:MAX_TERM]] if len(pieces) > 1 else []
    return whole + [term for piece in pieces for term in _stems(piece.casefold()[:MAX_TERM])]


def _stems(word: str) -> list[str]:
    if word in STOP_WORDS:
        return []
    if _UNSPACED.fullmatch(word) and len(word) > 1:
        return [word[at : at + 2] for at in range(len(word) - 1)]
    return [_stemmer.stemWord(word)]
