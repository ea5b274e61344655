"""Decide whether a user's message starts a new task (Fifth, "When to Compress vs. Retrieve": "New task started").

A wrong "new" takes away what the model is working on; a wrong "continue" costs some tokens. So a new task needs
positive evidence, of one of four kinds:

- The user announces it at the beginning of the message: "New task: ...", "On a different topic, ...", "Let's change the
  subject".
- The message comes after a pause and begins with a greeting, as users do who start anew.
- The message comes after a pause and introduces its matter: "I've recently placed an order ...".
- The message comes after a pause, is long, and has no tie to the session.

After a pause no message counts that shares an identifier with the session or contains a back reference ("again",
"still", "the same", "as before"), and the weaker the evidence, the fewer keywords may be shared (`RULES`).

A short message without a common word ("continue", "yes", "Please fix that") is never evidence. `bench/new_tasks.md` has
the measurements on real conversations.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from tersely.domain.history.turns import Turn
from tersely.domain.search.terms import EVERYDAY, is_content_word, tokenize
from tersely.strategies.summaries.references import extract_identifiers, message_text

ClueKind = Literal["greeting", "introduction", "long"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """The least number of different keywords of a message, and the largest part of them that the session may have."""

    keywords: int
    shared: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskClues:
    """The evidence in one message after a pause: kinds of evidence, its keywords, and the identifiers in it."""

    kinds: frozenset[ClueKind]
    keywords: frozenset[str]
    names: frozenset[str]


# A message with fewer characters is too short to be judged.
MIN_TEXT = 40
LONG_TEXT = 80
RULES: Mapping[ClueKind, Evidence] = {
    "greeting": Evidence(4, 0.25),
    "introduction": Evidence(6, 0.1),
    "long": Evidence(14, 0.0),
}
# Characters at the beginning of a message that are searched for an announcement.
BEGINNING = 240
# So much of a message is compared; pasted logs and files go on for megabytes.
LOOK_AT = 20_000

_OPENERS = (
    r"(?:(?:ok(?:ay)?|alright|all right|right|great|good|nice|perfect|thanks?(?: you)?(?: (?:so|very) much)?|cool|done|"
    r"now|so|well|and|anyway|please|hi|hey|hello|yes|no|btw|by the way)\b[\s,.!:;–—-]*){0,5}"
)
_STOP = r"\s*(?:[:,.;!?–—\n-]|$|\bfor you\b|\bnow\b|\bplease\b|\bthis time\b)"
_WHOLLY = r"(?:(?:completely|totally|entirely|wholly|whole|very|brand)[\s-]+)?"
_LEAD = (
    r"(?:(?:here(?:'s| is| comes)|this is|that is|it's|i(?:'ve| have)(?: got)?|we have|let(?:'s| us) "
    r"(?:start|begin|do|turn to|move on to|go on to|switch to|talk about|discuss|work on)|"
    r"(?:moving |going )?on to|onto|on|for|about|now to|next up is)\s+)?(?:an?\s+|the\s+)?"
)
_ANNOUNCEMENT_PATTERNS = [
    rf"{_LEAD}{_WHOLLY}(?:new|different|another|separate|unrelated)\s+(?:task|topic|subject|job){_STOP}",
    rf"{_LEAD}(?:next)\s+(?:task|topic|subject)\s*[:.!–—-]",
    rf"{_LEAD}{_WHOLLY}(?:unrelated|separate)\s+(?:question|request|issue|matter|thing|note|problem|project){_STOP}",
    rf"{_LEAD}(?:completely|totally|entirely)[\s-]+(?:new|different)\s+"
    rf"(?:question|request|issue|matter|thing|note|problem|project){_STOP}",
    r"(?:(?:this|that|it)(?:'s| is)\s+)?(?:completely |totally |entirely )?unrelated(?:ly)?"
    r"(?:\s*[:,.;–—-]|\s+to\s+(?:the above|all (?:that|this)|(?:any of )?(?:this|that|the above|what we)))",
    rf"(?:let(?:'s| us)|can we|could we|i(?:'d| would) like to|i want to|time to|we should|please)\s+(?:now\s+)?"
    rf"(?:switch|change|shift)\s+(?:to\s+)?(?:the\s+|our\s+|an?(?:other|\s+new|\s+different)\s+)?"
    rf"(?:topics?|subjects?|gears|tasks?){_STOP}",
    r"(?:switching|changing|shifting)\s+(?:the\s+)?(?:topics?|subjects?|gears)\b",
    r"(?:a\s+)?change of (?:topic|subject)\b",
    rf"(?:let(?:'s| us)|can we|could we|i(?:'d| would) like to|i want to|time to)\s+(?:now\s+)?(?:do|discuss|start|"
    rf"talk about|turn to|move on to|go on to|switch to|work on)\s+something\s+{_WHOLLY}(?:else|different|new){_STOP}",
    r"(?:and )?now for something (?:completely |totally |entirely )?(?:else|different)\b",
    rf"(?:forget|disregard|ignore)\s+(?:about\s+)?(?:everything|all)\s+(?:(?:of|that|the)\s+)*"
    rf"(?:(?:above|before|so far|until now|up to now|from before)(?:\s+and\b|{_STOP})|(?:we|i|you)\b)",
    # Other languages, with the announcement at the beginning as well.
    rf"(?:(?:eine?|das|zu) )?(?:(?:ganz|völlig) )?"
    rf"(?:neue aufgabe|neues thema|ander(?:es|en) thema|themenwechsel){_STOP}",
    rf"(?:une? )?(?:nouvelle tâche|nouveau sujet|autre sujet|changeons de sujet|changement de sujet){_STOP}",
    rf"(?:una? )?(?:nueva tarea|nuevo tema|otro tema|otra tarea|cambi(?:emos|ando|o) de tema){_STOP}",
    rf"(?:uma? )?(?:nova tarefa|novo assunto|outro assunto|(?:vamos mudar|mudando) de assunto){_STOP}",
    rf"(?:un )?(?:nuovo compito|(?:altro|nuovo) argomento|cambi(?:amo|o) argomento){_STOP}",
    rf"(?:новая задача|другая тема|новая тема|сменим тему){_STOP}",
    r"(?:换个话题|换一个话题|新任务|新的任务|新话题|另一个话题)",
    r"(?:新しいタスク|別のタスク|別の話題|話は変わ|話題を変え)",
]
_ANNOUNCEMENT = re.compile(rf"\W*{_OPENERS}(?:{'|'.join(_ANNOUNCEMENT_PATTERNS)})", re.IGNORECASE)
_GREETING = re.compile(
    r"\W*(?:hi|hello|hey|greetings|good (?:morning|afternoon|evening|day)|hallo|guten (?:tag|morgen|abend)|bonjour|"
    r"bonsoir|salut|hola|buen(?:os|as) (?:días|dias|tardes|noches)|olá|bom dia|boa tarde|boa noite|ciao|buongiorno|"
    r"buonasera|привет|здравствуйте|добрый (?:день|вечер)|доброе утро)\b(?: (?:there|everyone|all|team))?[\s,.!–—-]*",
    re.IGNORECASE,
)
# A first clause in which the user speaks of something that nobody has spoken of before: "a", not "the".
_INTRODUCTION = re.compile(
    r"\W*i(?:'ve|'m|'d| have| am| had| was| would| need| want| recently| just)\b[^.?!\n]{0,80}?"
    r"\b(?:an?|some|several) \w",
    re.IGNORECASE,
)
# Words that refer to earlier messages.
_BACK = re.compile(
    r"\b(?:again|still|instead|continue|continu\w+|resume|earlier|previous(?:ly)?|above|before|back to|as we|as you|"
    r"you (?:said|did|made|wrote|told|mentioned|suggested|just|already)|we (?:said|did|made|discussed|agreed|just|"
    r"already|had)|same|the other|the rest|remaining|so far|not yet|anymore|any more|too|also|rather|actually|"
    r"the (?:first|second|last|former|latter) one|your|yours)\b",
    re.IGNORECASE,
)
# Beginnings by which a message continues the current task.
_GOES_ON = re.compile(
    r"\W*(?:and|but|so|or|then|also|because|yes|yeah|yep|no|nope|ok|okay|sure|thanks?|great|right|wait|hm+|oh|well|"
    r"now|next|finally|lastly|after|once|with|given|since|instead|it|its|it's|that|that's|this|these|those|they|"
    r"he|she|here|there|why|what about|how about|which|both|all|none|either|neither|the first|the second|option)\b",
    re.IGNORECASE,
)


def starts_new_task(running: Turn, before: Iterable[Turn], *, pause: float) -> bool:
    """Return whether the running turn starts a new task, judged by its opening alone and the turns ``before``.

    ``pause``: seconds that must lie between the last message before and the opening, where only the words speak for it.
    """
    turns = [turn for turn in before if turn.number != running.number]
    opening = running.opening
    if not turns or not opening:
        return False
    text = "\n".join(entry.message.text for entry in opening)
    if announces_new_task(text):
        return True
    last = max(entry.created_at for entry in turns[-1].entries)
    if (opening[0].created_at - last).total_seconds() < pause:
        return False
    return _is_unrelated(text[:LOOK_AT], turns)


def announces_new_task(text: str) -> bool:
    """Return whether the beginning of ``text`` announces a new task."""
    return _ANNOUNCEMENT.match(text.lstrip()[:BEGINNING].replace("\u2019", "'")) is not None


def read_opening(text: str) -> TaskClues | None:
    """Return what ``text`` shows by itself; None if it is too short, or continues or refers to something."""
    greeting = _GREETING.match(text)
    if len(text) < MIN_TEXT or _GOES_ON.match(text, greeting.end() if greeting else 0) or _BACK.search(text):
        return None
    kinds: set[ClueKind] = {"greeting"} if greeting else set()
    kinds |= {"introduction"} if _INTRODUCTION.match(text.replace("\u2019", "'")) else set()
    kinds |= {"long"} if len(text) >= LONG_TEXT else set()
    return TaskClues(kinds=frozenset(kinds), keywords=_keywords(text), names=frozenset(extract_identifiers(text)))


def allowed_ties(opening: TaskClues, rules: Mapping[ClueKind, Evidence] = RULES) -> int | None:
    """Return how many keywords a new task may share with the session; None if it is none in any case."""
    count = len(opening.keywords)
    kinds = [rules[kind] for kind in opening.kinds if kind in rules]
    return max((int(each.shared * count) for each in kinds if count >= each.keywords), default=None)


def count_ties(opening: TaskClues, turns: Iterable[Turn], *, most: int) -> int | None:
    """Return how many keywords ``opening`` shares with ``turns``; None if more than ``most``, or an identifier."""
    shared: set[str] = set()
    for turn in turns:
        for entry in turn.entries:
            for part in message_text(entry.message):
                shared |= opening.keywords.intersection(tokenize(part))
                if len(shared) > most or not opening.names.isdisjoint(extract_identifiers(part)):
                    return None
    return len(shared)


def _is_unrelated(text: str, turns: Iterable[Turn]) -> bool:
    """Return whether ``text``, which comes after a pause, shows a kind of evidence and no tie to ``turns``."""
    opening = read_opening(text)
    most = allowed_ties(opening) if opening is not None else None
    return opening is not None and most is not None and count_ties(opening, turns, most=most) is not None


def _keywords(text: str) -> frozenset[str]:
    """Return the terms of ``text`` that name its subject: no everyday words and no numbers."""
    return frozenset(term for term in tokenize(text) if term not in EVERYDAY and is_content_word([term]))
