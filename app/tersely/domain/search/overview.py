"""Answer questions about a whole conversation: in which order things came up, how something developed, a summary.

What such a question needs is spread over the session, so the few best messages miss most of it. The answer is an even
cover in time order: the session is divided where its subject changes, and the turns are chosen best first, those of a
topic that was chosen before counting less, as long as there is room. Each turn is shown by its question, its best
message and its end, long ones by their beginning.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import accumulate, pairwise

from tersely.domain.search.relevance import Corpus, Ranked, idf_weights
from tersely.domain.search.term_index import SHIFT

# Characters of an answer, about 4,000 tokens; of a user's message in it, and of any other.
ROOM = 15_000
USER_LINE, OTHER_LINE = 200, 100
# What the printed form adds to a line: role, turn, dots.
LINE_COST = 24
# So many messages are ranked, and so many turns are looked at.
CANDIDATES = 1_000
MOST_TURNS = 120
# What a turn counts for after each turn of the same topic: the others come sooner.
REPEATED_TOPIC = 0.95

# A term that returns after more messages than this starts anew: it binds nothing in between.
REACH = 12
# Terms in more than this share of the messages tell no topic from another.
COMMON = 0.5
# A topic has at least so many messages.
SHORTEST = 6


def topic_starts(corpus: Corpus) -> list[int]:
    """Return the numbers of the messages at which a new topic starts, in order, the first one included.

    A topic ends where few terms of the messages before occur again soon after.
    """
    total = len(corpus.lengths)
    depths = _depths(_bonds(corpus))
    if not depths:
        return [0][:total]
    mean = sum(depths) / len(depths)
    spread = (sum((depth - mean) ** 2 for depth in depths) / len(depths)) ** 0.5
    starts = [0]
    for number, depth in enumerate(depths, start=1):
        is_long = number - starts[-1] >= SHORTEST and total - number >= SHORTEST
        if is_long and depth > mean + spread / 2:
            starts.append(number)
    return starts


def _bonds(corpus: Corpus) -> list[float]:
    """Return for each pair of neighbouring messages the weight of the terms that occur before and soon after it."""
    total = len(corpus.lengths)
    most = max(2, COMMON * total)
    rare = {term: found for term, found in corpus.postings.items() if 1 < len(found) <= most}
    changes = [0.0] * (total + 1)
    for term, weight in idf_weights(rare, Corpus(lengths=corpus.lengths, postings=rare)).items():
        for one, other in pairwise(posting >> SHIFT for posting in rare[term]):
            if other - one <= REACH:
                changes[one + 1] += weight
                changes[other + 1] -= weight
    return list(accumulate(changes[:total]))[1:]


def _depths(bonds: Sequence[float]) -> list[float]:
    """Return how much weaker each bond is than the tops of the slopes on both sides."""
    left, right = _tops(bonds), _tops(bonds[::-1])[::-1]
    return [before + after - 2 * bond for before, bond, after in zip(left, bonds, right, strict=True)]


def _tops(bonds: Sequence[float]) -> list[float]:
    """Return for each bond the height that one reaches by going back as long as it rises."""
    tops: list[float] = []
    for number, bond in enumerate(bonds):
        tops.append(tops[-1] if number and bonds[number - 1] >= bond else bond)
    return tops


def order_turns(found: Sequence[Ranked], turns: Mapping[int, int], starts: Sequence[int]) -> dict[int, int]:
    """Return the turns of the messages ``found`` (best first), each with its best message. The best turns come first; a
    turn counts less after each turn of the same topic.

    ``turns`` maps a message to its turn; messages without one are left out. ``starts``: see `topic_starts`.
    """
    best: dict[int, Ranked] = {}
    for each in found:
        if each.number in turns:
            best.setdefault(turns[each.number], each)
    topics: dict[int, list[int]] = {}
    for turn, each in best.items():
        topics.setdefault(bisect_right(starts, each.number), []).append(turn)
    # The next turn of each topic; of equal ones the topic that comes first in the session.
    waiting = [(-best[of_topic[0]].score, topic, 0) for topic, of_topic in topics.items()]
    heapify(waiting)
    ordered: dict[int, int] = {}
    while waiting:
        _, topic, place = waiting[0]
        turn = topics[topic][place]
        ordered[turn] = best[turn].number
        if place + 1 == len(topics[topic]):
            heappop(waiting)
        else:
            following = best[topics[topic][place + 1]].score * REPEATED_TOPIC ** (place + 1)
            heapreplace(waiting, (-following, topic, place + 1))
    return ordered


def shorten_line(text: str, *, is_users: bool) -> str:
    """Return a message's text as one line, by its beginning if it is long."""
    limit = USER_LINE if is_users else OTHER_LINE
    # What is far beyond the line is never looked at.
    line = " ".join(text[: 4 * limit].split())
    if len(line) <= limit and len(text) <= 4 * limit:
        return line
    return f"{line[:limit].rstrip()} ..."


def fit_turns(lines: Mapping[int, Sequence[str]], *, room: int = ROOM) -> list[int]:
    """Return the turns whose lines fit into ``room`` characters, in time order. ``lines``: the turns, best first."""
    chosen: list[int] = []
    for turn, texts in lines.items():
        cost = sum(len(text) + LINE_COST for text in texts)
        if cost <= room:
            room -= cost
            chosen.append(turn)
    return sorted(chosen)
