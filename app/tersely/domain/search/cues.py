"""Cues: words that show the purpose of a message or a question, besides its subject.

There is one file for each language in ``data/cues``, so that a language needs no code:

- ``preferences``: patterns of standing instructions and preferences ("always ... when I ask", "I prefer ...").
- ``looking_back``: patterns of questions about what was said or done, as opposed to requests for something new.
- ``whole``: patterns of questions about the whole conversation ("in which order", "summarize how we ...").
- ``talk``: words about the conversation itself ("order", "throughout", "summary").
- ``own``: patterns of questions in the first person, which the user's own messages answer ("did I ...", "my ...").
- ``replies``: patterns of questions about what the assistant said ("what did you recommend").

The patterns of all languages are used together. Case is ignored; ``preferences`` are written in lower case.
"""

from __future__ import annotations

import re
from importlib.resources import files

import msgspec

from tersely.domain.search.terms import tokenize

SHORT_QUESTION = 30
"""Terms that a question may have and still pass a share of its score to the message after it."""
PREFERENCE_LENGTH = 400
"""Terms that a message may have and still be a standing instruction: what is longer is a text of its own."""

# Marks stand among the terms of a message. No text has them as terms: a term begins with a letter or a digit.
PREFERENCE = "\x01standing"
QUESTION = "\x01question"
USERS = "\x01user"
_SPEAKER = "\x01by "


class _Cues(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    preferences: tuple[str, ...] = ()
    looking_back: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    talk: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    replies: tuple[str, ...] = ()


def _read_cues() -> list[_Cues]:
    decode = msgspec.json.Decoder(_Cues).decode
    found = sorted(files("tersely.data").joinpath("cues").iterdir(), key=lambda each: each.name)
    return [decode(each.read_bytes()) for each in found if each.name.endswith(".json")]


def _any_of(patterns: list[str]) -> re.Pattern[str]:
    return re.compile("|".join(patterns), re.IGNORECASE | re.DOTALL)


_CUES = _read_cues()
# For texts in lower case: a pattern that ignores case takes 3.5 times as long, and each message of a user is read.
_PREFERENCE = re.compile("|".join([pattern for cues in _CUES for pattern in cues.preferences]), re.DOTALL)
_LOOKING_BACK = _any_of([pattern for cues in _CUES for pattern in cues.looking_back])
_WHOLE = _any_of([pattern for cues in _CUES for pattern in cues.whole])
_OWN = _any_of([pattern for cues in _CUES for pattern in cues.own])
_REPLIES = _any_of([pattern for cues in _CUES for pattern in cues.replies])
TALK = frozenset(term for cues in _CUES for word in cues.talk for term in tokenize(word))
"""Terms about the conversation itself."""


def looks_back(question: str) -> bool:
    """Return whether a question is about what was said or done."""
    return _LOOKING_BACK.search(question) is not None


def is_about_whole(question: str) -> bool:
    """Return whether a question is about the whole conversation: an order of events, a development, a summary."""
    return _WHOLE.search(question) is not None


def is_about_replies(question: str) -> bool:
    """Return whether a question is about what the assistant said."""
    return _REPLIES.search(question) is not None


def is_about_own(question: str) -> bool:
    """Return whether a question is about what the user said: in the first person, and not about a reply."""
    return _OWN.search(question) is not None and not is_about_replies(question)


def marks_of(text: str, length: int, *, is_users: bool, speaker: str) -> list[str]:
    """Return the marks of a message of ``length`` terms. ``speaker`` is the name of its author, or empty."""
    marks = [f"{_SPEAKER}{term}" for term in tokenize(speaker)]
    if is_users and length < PREFERENCE_LENGTH and _PREFERENCE.search(text.lower()):
        marks.append(PREFERENCE)
    if length <= SHORT_QUESTION and text.rstrip().endswith(("?", "\uff1f", "\u061f")):
        marks.append(QUESTION)
    if is_users and not speaker:
        marks.append(USERS)
    return marks


def speaker_mark(term: str) -> str:
    """Return the term that marks messages whose speaker's name contains ``term``."""
    return f"{_SPEAKER}{term}"


def is_mark(term: str) -> bool:
    """Return whether ``term`` is a mark."""
    return term.startswith("\x01")
