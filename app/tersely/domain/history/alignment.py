"""Align an incoming history with stored messages: which message is which row.

Messages are equal when their canonical parts are (`tersely.domain.history.chain`); nothing is fuzzy.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, takewhile

import msgspec

from tersely.domain.history.links import HIDDEN, MessageIdentity, StoredLink
from tersely.domain.history.predecessors import Predecessors

# Rows looked at for one repeated message ("Ok."): keeps the alignment quick on hostile histories.
MAX_CANDIDATES = 16


def match_rows(
    rows: Sequence[StoredLink], incoming: Sequence[MessageIdentity], first_link: int, question_index: int
) -> dict[int, StoredLink]:
    """Map incoming indexes to stored rows, in strictly increasing positions.

    The live history is matched first, then the branch that the last reply ended. Only the remaining messages are looked
    up among hidden and superseded rows.
    """
    links = [index for index, message in enumerate(incoming) if message.is_link][first_link:]
    stored = [row for row in rows if row.is_link]
    known = _by_number(stored, incoming, links)
    predecessors = Predecessors(stored, is_beginning=first_link == 0)
    if not known:
        live = [row for row in stored if row.status == "live"]
        known = dict(_common_prefix(live, incoming, links))
        if any(incoming[index].role == "assistant" for index in links[len(known) :]):
            known = _find_branch(stored, predecessors, incoming, links, question_index) or known
    rest = links[len(known) :]
    if rest:
        last = known[links[len(known) - 1]].position if known else float("-inf")
        aligned = _align([row for row in stored if row.position > last], incoming, rest, question_index)
        known |= _without_strays(predecessors, incoming, links, known, aligned, is_beginning=first_link == 0)
    return _with_instructions(rows, incoming, known)


def _without_strays(
    predecessors: Predecessors,
    incoming: Sequence[MessageIdentity],
    links: Sequence[int],
    prefix: Mapping[int, StoredLink],
    aligned: Mapping[int, StoredLink],
    *,
    is_beginning: bool,
) -> dict[int, StoredLink]:
    """Remove from ``aligned`` the stored questions that belong to another beginning than the request's.

    Two replies may follow one question only if the same history leads to both. ``prefix`` are the links in front.
    ``is_beginning``: the first of ``links`` is the first of the history.
    """
    known = {**prefix, **aligned}
    if links and links[-1] not in known:
        return dict(aligned)  # what is asked is new: the reply to it follows none of them
    replied = max((index for index in known if incoming[index].role == "assistant"), default=None)
    question = [index for index in links if replied is None or index > replied]
    before = known[replied].seq if replied is not None else 0 if is_beginning else None
    for index in question:
        row = known.get(index)
        if row is None or not (index in prefix or before is None or predecessors.lead(before, row)):
            return {each: aligned[each] for each in aligned if each < index}
        before = row.seq
    return dict(aligned)


def _by_number(
    stored: Sequence[StoredLink], incoming: Sequence[MessageIdentity], links: Sequence[int]
) -> dict[int, StoredLink]:
    """Return the leading ``links`` whose stored rows are named by number, with these rows."""
    if not links or not incoming[links[0]].seq:
        return {}
    rows = {row.seq: row for row in stored}
    return {index: rows[incoming[index].seq] for index in takewhile(lambda index: incoming[index].seq in rows, links)}


def _find_branch(
    stored: Sequence[StoredLink],
    predecessors: Predecessors,
    incoming: Sequence[MessageIdentity],
    links: Sequence[int],
    question_index: int,
) -> dict[int, StoredLink]:
    """Return ``links`` up to the last reply with the stored rows that led to it; empty if they differ.

    Other branches may contain equal text. The predecessors of each stored message identify its branch.
    """
    end = next((at for at in range(len(links) - 1, -1, -1) if incoming[links[at]].role == "assistant"), -1)
    if end < 0:
        return {}
    last = [row for row in stored if row.digest == incoming[links[end]].digest]
    last.sort(key=lambda row: (row.status == "live", row.seq), reverse=True)
    for row in last[:MAX_CANDIDATES]:
        branch = _follow_back(row, predecessors, incoming, links[: end + 1], question_index)
        if branch:
            return branch
    return {}


def _follow_back(
    last: StoredLink,
    predecessors: Predecessors,
    incoming: Sequence[MessageIdentity],
    links: Sequence[int],
    question_index: int,
) -> dict[int, StoredLink]:
    """Return ``links`` with ``last`` and the messages that led to it; empty if one of them differs."""
    known: dict[int, StoredLink] = {}
    candidates: Iterable[StoredLink] = [last]
    for index in reversed(links):
        row = next((row for row in candidates if row.digest == incoming[index].digest), None)
        if row is None or (row.status in HIDDEN and index >= question_index):
            return {}
        known[index] = row
        candidates = predecessors.rows_before(row)
    return dict(reversed(known.items()))


def _common_prefix(
    stored: Sequence[StoredLink], incoming: Sequence[MessageIdentity], links: Sequence[int]
) -> Iterable[tuple[int, StoredLink]]:
    for row, index in zip(stored, links, strict=False):
        if row.digest != incoming[index].digest:
            return
        yield index, row


def _align(
    stored: Sequence[StoredLink], incoming: Sequence[MessageIdentity], links: Sequence[int], question_index: int
) -> dict[int, StoredLink]:
    """Match what a rebuilt or edited history retains, in order.

    Relayed replies that are unique on both sides are matched first, since they identify a turn. Between them the
    longest common subsequence is matched; of equally long ones, the one with the most live messages.
    """
    row_indexes = {row.seq: row_index for row_index, row in enumerate(stored)}
    order = {index: number for number, index in enumerate(links)}
    replies = _unique_replies(stored, incoming, links)
    fixed = _longest_common(replies, incoming, links, question_index)
    known = dict(fixed)
    row_at = link_at = 0
    bounds = [(order[index], row_indexes[row.seq]) for index, row in fixed]
    for link_end, row_end in [*bounds, (len(links), len(stored))]:
        known |= dict(_longest_common(stored[row_at:row_end], incoming, links[link_at:link_end], question_index))
        row_at, link_at = row_end + 1, link_end + 1
    return _increasing(known)


def _unique_replies(
    stored: Sequence[StoredLink], incoming: Sequence[MessageIdentity], links: Sequence[int]
) -> list[StoredLink]:
    counts = Counter(incoming[index].digest for index in links)
    relayed = Counter(row.digest for row in stored if row.relayed)
    return [row for row in stored if row.relayed and relayed[row.digest] == 1 and counts[row.digest] == 1]


def _increasing(known: Mapping[int, StoredLink]) -> dict[int, StoredLink]:
    """Return ``known`` without entries whose position is not after that of the entry before."""
    position = float("-inf")
    kept: dict[int, StoredLink] = {}
    for index in sorted(known):
        if known[index].position > position:
            kept[index] = known[index]
            position = known[index].position
    return kept


def _longest_common(
    stored: Sequence[StoredLink], incoming: Sequence[MessageIdentity], links: Sequence[int], question_index: int
) -> list[tuple[int, StoredLink]]:
    """Return the longest common subsequence (Hunt and Szymanski), weighted: of equally long ones the one with the most
    live messages. Of several equal links the first one is matched, so that a question asked again ("Go on.") is new.
    Links from ``question_index`` on have nothing in common with hidden rows.
    """
    if not stored or not links:
        return []
    candidates = _candidates(stored)
    # The weight of a row is greater than that of all rows before it.
    ends: list[int] = []
    weights: list[int] = []
    chains: list[_Step] = []
    for index in links:
        for row_index in candidates.get(incoming[index].digest, ()):
            status = stored[row_index].status
            if index >= question_index and status in HIDDEN:
                continue
            at = bisect_left(ends, row_index)
            weight = len(links) + 1 + (status == "live") + (weights[at - 1] if at else 0)
            if at < len(ends) and ends[at] == row_index and weights[at] >= weight:
                continue
            step = _Step(index, row_index, chains[at - 1] if at else None)
            heavier = bisect_right(weights, weight, at)
            ends[at:heavier], weights[at:heavier], chains[at:heavier] = [row_index], [weight], [step]
    found: list[tuple[int, StoredLink]] = []
    last = chains[-1] if chains else None
    while last is not None:
        found.append((last.index, stored[last.row_index]))
        last = last.previous
    return found[::-1]


class _Step(msgspec.Struct, frozen=True):
    """A pair of a common subsequence, and the pair before it."""

    index: int
    row_index: int
    previous: _Step | None


def _candidates(stored: Sequence[StoredLink]) -> dict[bytes, list[int]]:
    """Digest -> indexes of rows, the last one first; current rows where there are any."""
    current: defaultdict[bytes, list[int]] = defaultdict(list)
    others: defaultdict[bytes, list[int]] = defaultdict(list)
    for row_index, row in enumerate(stored):
        (others if row.status == "superseded" else current)[row.digest].append(row_index)
    half = MAX_CANDIDATES // 2
    return {
        digest: [*row_indexes[:half], *row_indexes[max(half, len(row_indexes) - half) :]][::-1]
        for digest, row_indexes in {**others, **current}.items()
    }


def _with_instructions(
    rows: Sequence[StoredLink], incoming: Sequence[MessageIdentity], known: dict[int, StoredLink]
) -> dict[int, StoredLink]:
    """Return ``known`` links, and the instructions that have the same neighbours as before."""
    instructions = [index for index, message in enumerate(incoming) if not message.is_link]
    if not instructions:
        return known
    free: defaultdict[bytes, deque[StoredLink]] = defaultdict(deque)
    by_number: dict[int, StoredLink] = {}
    for row in rows:
        if not row.is_link:
            free[row.digest].append(row)
            by_number[row.seq] = row
    links = sorted(known)
    found = dict(known)
    position = float("-inf")
    for index in instructions:
        at = bisect_left(links, index)
        if at:
            position = max(position, known[links[at - 1]].position)
        upper = known[links[at]].position if at < len(links) else None
        fitting = by_number.get(incoming[index].seq) or _fitting(free[incoming[index].digest], position, upper)
        if fitting is not None:
            found[index] = fitting
            position = fitting.position
    return found


def _fitting(rows: deque[StoredLink], lower: float, upper: float | None) -> StoredLink | None:
    """Return a row between these positions, preferably a live one. Rows at or before ``lower`` are dropped."""
    while rows and rows[0].position <= lower:
        rows.popleft()
    between = takewhile(lambda row: upper is None or row.position < upper, islice(rows, MAX_CANDIDATES))
    return min(between, key=lambda row: (row.status == "superseded", row.position), default=None)
