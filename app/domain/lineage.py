"""Where an incoming history meets a stored one.

A stateless client resends its whole history. `reconcile` lays it beside the stored rows and says which of its
messages are known, which are new and where they belong, and which stored messages it has left behind.
Nothing here is fuzzy: messages are the same when their canonical parts are (`app.domain.chain`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Literal

import msgspec

from app.domain.history import Status
from app.domain.messages import Role

Kind = Literal["new", "continue", "retry", "edited", "delta"]

# Rows looked at for one repeated message ("Ok."): keeps the alignment quick on hostile histories.
MAX_CANDIDATES = 16
# New messages get places between known ones as long as these stay so far apart.
MIN_GAP = 1e-6


class Row(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A stored message without its content. Instruction rows (system text, injected context) have turn 0."""

    seq: int
    place: float
    turn: int
    tokens: int
    role: Role
    status: Status
    digest: bytes
    relayed: bool
    call: int

    @property
    def is_link(self) -> bool:
        """Whether the message is part of the history proper."""
        return self.turn > 0


class Incoming(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A message of a request: its identity, and what placing it needs."""

    digest: bytes
    is_link: bool
    starts_turn: bool
    role: Role


def known_again(row: Row) -> Incoming:
    """A stored message as if it had been sent again."""
    return Incoming(
        digest=row.digest, is_link=row.is_link, starts_turn=row.is_link and row.role == "user", role=row.role
    )


class Placed(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An incoming message at its place. ``is_new`` ones are to be stored under ``seq``."""

    seq: int
    turn: int
    place: float
    is_new: bool
    status: Status = "live"


# A link that comes before the rows at hand: it is stored, and nobody asks for its place.
_BEFORE = Placed(seq=0, turn=1, place=0.0, is_new=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a request means for its session.

    ``placed`` has one entry per incoming message. ``superseded`` rows leave the history, ``revived`` ones
    return to it. ``last_seq`` and ``turns`` are the session's counters afterwards. ``after`` is the stored link that
    the first incoming one follows (0: none; None: nobody has looked).
    """

    kind: Kind
    placed: tuple[Placed, ...]
    superseded: tuple[int, ...]
    revived: tuple[int, ...]
    last_seq: int
    turns: int
    after: int | None = 0

    @property
    def answered(self) -> Placed | None:
        """The message that the reply will answer: the last one of the history proper."""
        links = [placed for placed in self.placed if placed.turn > 0]
        return links[-1] if links else None


def reconcile(
    rows: Sequence[Row],
    incoming: Sequence[Incoming],
    *,
    last_seq: int,
    turns: int,
    first_link: int = 0,
    revivable: bool = False,
) -> Decision:
    """Lay a full incoming history beside the stored one.

    ``rows`` are the session's current rows in order; when they are only its later part, ``first_link`` says how many
    links of the history come before them (those are known to match). With ``revivable``, ``rows`` hold
    superseded messages too, which the client may have returned to.
    """
    return _follow(rows, incoming, last_seq, turns, first_link) or align(
        rows, incoming, last_seq=last_seq, turns=turns, first_link=first_link, revivable=revivable
    )


def _follow(
    rows: Sequence[Row], incoming: Sequence[Incoming], last_seq: int, turns: int, first_link: int
) -> Decision | None:
    """The decision where what is stored comes first, as it is, and then what is new: nearly every request is so."""
    placed: list[Placed] = []
    links = at = 0
    last: Row | None = None
    for message in incoming:
        if message.is_link and links < first_link:
            links += 1
            placed.append(_BEFORE)
            continue
        if at == len(rows):
            break
        row = rows[at]
        if row.digest != message.digest or row.is_link != message.is_link or row.status == "superseded":
            return None
        at += 1
        if message.is_link:
            last = row
        placed.append(Placed(seq=row.seq, turn=row.turn, place=row.place, is_new=False, status=row.status))
    if at < len(rows) or (last is None and (rows or first_link)):
        return None
    if last is None:
        numbering = _Numbering(turns=turns)
    else:
        numbering = _Numbering(turns=turns, turn=last.turn, has_user=_has_user(rows, last.turn, first_link))
    kind: Kind = "retry" if rows else "new"
    for message in incoming[len(placed) :]:
        last_seq += 1
        placed.append(Placed(seq=last_seq, turn=numbering.next(message), place=float(last_seq), is_new=True))
        if message.is_link and rows:
            kind = "continue"
    return Decision(
        kind=kind, placed=tuple(placed), superseded=(), revived=(), last_seq=last_seq, turns=numbering.turns
    )


def _has_user(rows: Sequence[Row], turn: int, first_link: int) -> bool:
    """Whether the user spoke in a stored turn: only the first may be an assistant's greeting so far."""
    if first_link:
        return True
    first = next(row.turn for row in rows if row.turn > 0)
    return turn != first or any(row.turn == first and row.role == "user" for row in rows)


def align(
    rows: Sequence[Row],
    incoming: Sequence[Incoming],
    *,
    last_seq: int,
    turns: int,
    first_link: int = 0,
    revivable: bool = False,
) -> Decision:
    """`reconcile`, whatever became of the history."""
    known = _match(rows, incoming, first_link)
    if not _goes_on(known, first_link):
        known = _with_room(incoming, known)
    current = {row.seq for row in rows if row.status != "superseded"}
    matched = {row.seq for row in known.values()}
    left = [row for row in rows if row.seq in current and row.seq not in matched]
    back = [row for row in rows if row.seq in matched and row.seq not in current] if revivable else []
    placed, last_seq, turns = _place(rows, incoming, known, first_link, last_seq, turns)
    return Decision(
        kind=_kind(incoming, placed, left, back, is_new=not current and not known),
        placed=placed,
        superseded=tuple(row.seq for row in left),
        revived=tuple(row.seq for row in back),
        last_seq=last_seq,
        turns=turns,
    )


def _kind(
    incoming: Sequence[Incoming], placed: Sequence[Placed], left: Sequence[Row], back: Sequence[Row], *, is_new: bool
) -> Kind:
    """What the history proper says; instructions that change say nothing."""
    if is_new:
        return "new"
    links = [p for p, message in zip(placed, incoming, strict=True) if message.is_link]
    left = [row for row in left if row.is_link]
    if left or any(row.is_link for row in back) or _inserts(links):
        return "retry" if _only_reply_left(left, links) else "edited"
    return "continue" if any(p.is_new for p in links) else "retry"


def append(
    incoming: Sequence[Incoming], *, last_seq: int, turns: int, turn: int, superseded: Iterable[int] = ()
) -> Decision:
    """Put every incoming message at the end of a session whose last turn is ``turn`` (0: it is empty).

    ``superseded``: the stored instructions that the incoming ones replace.
    """
    placed: list[Placed] = []
    numbering = _Numbering(turns=turns, turn=turn, has_user=turn > 0)
    for message in incoming:
        last_seq += 1
        turn = numbering.next(message)
        placed.append(Placed(seq=last_seq, turn=turn, place=float(last_seq), is_new=True))
    return Decision(
        kind="delta",
        placed=tuple(placed),
        superseded=tuple(superseded),
        revived=(),
        last_seq=last_seq,
        turns=numbering.turns,
        after=None,
    )


def repeat(
    rows: Sequence[Row], incoming: Sequence[Incoming], *, last_seq: int, turns: int, is_answered: bool
) -> Decision | None:
    """The decision where an `append` is asked for again: its messages are the last ones already; else None.

    ``rows`` are the session's, in order. With ``is_answered``, replies may stand behind those messages:
    they are superseded then, and what is before stays as it is.
    """
    said = [message.digest for message in incoming if message.is_link]
    rows = [row for row in rows if row.status != "superseded"]
    links = [row for row in rows if row.is_link and row.status == "live"]
    while is_answered and links and links[-1].role == "assistant":
        links.pop()
    again = links[-len(said) :] if said else []
    if not said or [row.digest for row in again] != said:
        return None
    has_instructions = len(said) < len(incoming)
    later = [row for row in rows if (row.place >= again[0].place if row.is_link else has_instructions)]
    return reconcile(later, incoming, last_seq=last_seq, turns=turns)


@dataclass(slots=True, kw_only=True)
class _Numbering:
    """Gives new messages their turns. An opening assistant message belongs to the first user's turn.

    ``opened`` are the stored turns that had a user message.
    """

    turns: int
    turn: int = 0
    has_user: bool = False
    opened: frozenset[int] = frozenset()

    def follow(self, turn: int, *, starts_turn: bool) -> None:
        """A known message of ``turn`` came by."""
        if turn != self.turn:
            self.turn, self.has_user = turn, turn in self.opened
        self.has_user |= starts_turn

    def adopt(self, turn: int, *, starts_turn: bool) -> int:
        """A new message takes its place in the stored ``turn``."""
        self.turn, self.has_user = turn, starts_turn
        return turn

    def next(self, message: Incoming) -> int:
        """The turn of a new message; 0 for instructions."""
        if not message.is_link:
            return 0
        if self.turn == 0 or (message.starts_turn and self.has_user):
            self.turns += 1
            self.turn, self.has_user = self.turns, False
        self.has_user |= message.starts_turn
        return self.turn


def _match(rows: Sequence[Row], incoming: Sequence[Incoming], first_link: int) -> dict[int, Row]:
    """Incoming index -> stored row, in strictly increasing places.

    The current history comes first; only what it does not explain is looked for among what was left behind.
    """
    links = [index for index, message in enumerate(incoming) if message.is_link][first_link:]
    stored = [row for row in rows if row.is_link]
    current = [row for row in stored if row.status != "superseded"]
    known = dict(_common_prefix(current, incoming, links))
    rest = links[len(known) :]
    if rest:
        last = current[len(known) - 1].place if known else float("-inf")
        known |= _align([row for row in stored if row.place > last], incoming, rest)
    return _with_instructions(rows, incoming, known)


def _common_prefix(
    stored: Sequence[Row], incoming: Sequence[Incoming], links: Sequence[int]
) -> Iterable[tuple[int, Row]]:
    for row, index in zip(stored, links, strict=False):
        if row.digest != incoming[index].digest:
            return
        yield index, row


def _align(stored: Sequence[Row], incoming: Sequence[Incoming], links: Sequence[int]) -> dict[int, Row]:
    """What a rebuilt or edited history kept, in order.

    Relayed replies that stand once on either side are fixed first, since they carry a turn's identity; between them
    goes the longest common subsequence.
    """
    places = {row.seq: position for position, row in enumerate(stored)}
    order = {index: number for number, index in enumerate(links)}
    replies = _unique_replies(stored, incoming, links)
    fixed = _longest_common(replies, incoming, links)
    known = dict(fixed)
    row_at = link_at = 0
    bounds = [(order[index], places[row.seq]) for index, row in fixed]
    for link_end, row_end in [*bounds, (len(links), len(stored))]:
        known |= dict(_longest_common(stored[row_at:row_end], incoming, links[link_at:link_end]))
        row_at, link_at = row_end + 1, link_end + 1
    return _increasing(known)


def _unique_replies(stored: Sequence[Row], incoming: Sequence[Incoming], links: Sequence[int]) -> list[Row]:
    said = Counter(incoming[index].digest for index in links)
    relayed = Counter(row.digest for row in stored if row.relayed)
    return [row for row in stored if row.relayed and relayed[row.digest] == 1 and said[row.digest] == 1]


def _increasing(known: Mapping[int, Row]) -> dict[int, Row]:
    """``known`` without what would stand at the place of the one before it."""
    place = float("-inf")
    kept: dict[int, Row] = {}
    for index in sorted(known):
        if known[index].place > place:
            kept[index] = known[index]
            place = known[index].place
    return kept


def _longest_common(stored: Sequence[Row], incoming: Sequence[Incoming], links: Sequence[int]) -> list[tuple[int, Row]]:
    """The longest common subsequence (Hunt and Szymanski)."""
    if not stored or not links:
        return []
    candidates = _candidates(stored)
    ends: list[int] = []
    chains: list[_Step] = []
    for index in links:
        for position in candidates.get(incoming[index].digest, ()):
            length = bisect_left(ends, position)
            step = _Step(index, position, chains[length - 1] if length else None)
            if length == len(ends):
                ends.append(position)
                chains.append(step)
            else:
                ends[length] = position
                chains[length] = step
    found: list[tuple[int, Row]] = []
    last = chains[-1] if chains else None
    while last is not None:
        found.append((last.index, stored[last.position]))
        last = last.previous
    return found[::-1]


@dataclass(frozen=True, slots=True)
class _Step:
    """A pair of a common subsequence, and the one before it."""

    index: int
    position: int
    previous: _Step | None


def _candidates(stored: Sequence[Row]) -> dict[bytes, list[int]]:
    """Digest -> positions, the last one first; current rows where there are any."""
    current: defaultdict[bytes, list[int]] = defaultdict(list)
    others: defaultdict[bytes, list[int]] = defaultdict(list)
    for position, row in enumerate(stored):
        (others if row.status == "superseded" else current)[row.digest].append(position)
    half = MAX_CANDIDATES // 2
    return {
        digest: [*positions[:half], *positions[max(half, len(positions) - half) :]][::-1]
        for digest, positions in {**others, **current}.items()
    }


def _with_instructions(rows: Sequence[Row], incoming: Sequence[Incoming], known: dict[int, Row]) -> dict[int, Row]:
    """``known`` links, and the instructions that stand between the same neighbours as before."""
    instructions = [index for index, message in enumerate(incoming) if not message.is_link]
    if not instructions:
        return known
    free: defaultdict[bytes, deque[Row]] = defaultdict(deque)
    for row in rows:
        if not row.is_link:
            free[row.digest].append(row)
    links = sorted(known)
    found = dict(known)
    place = float("-inf")
    for index in instructions:
        at = bisect_left(links, index)
        if at:
            place = max(place, known[links[at - 1]].place)
        upper = known[links[at]].place if at < len(links) else None
        fitting = _fitting(free[incoming[index].digest], place, upper)
        if fitting is not None:
            found[index] = fitting
            place = fitting.place
    return found


def _fitting(rows: deque[Row], lower: float, upper: float | None) -> Row | None:
    """The row between these places, a current one if there is one. What is at or before ``lower`` is thrown away."""
    while rows and rows[0].place <= lower:
        rows.popleft()
    between = takewhile(lambda row: upper is None or row.place < upper, islice(rows, MAX_CANDIDATES))
    return min(between, key=lambda row: (row.status == "superseded", row.place), default=None)


def _goes_on(known: Mapping[int, Row], first_link: int) -> bool:
    """Whether everything known stands before everything new, as in nearly every request."""
    return max(known, default=-1) + 1 == len(known) + (first_link if known else 0)


def _with_room(incoming: Sequence[Incoming], known: dict[int, Row]) -> dict[int, Row]:
    """``known`` as far as there is room between its places for what is new; what comes after is stored anew."""
    following = _following_places(incoming, known)
    place, new = 0.0, 0
    for index in range(len(incoming)):
        row = known.get(index)
        if row is None:
            new += following[index] is not None
            continue
        if new and (row.place - place) / (new + 1) < MIN_GAP:
            return {each: known[each] for each in known if each < index}
        place, new = row.place, 0
    return known


def _place(
    rows: Sequence[Row],
    incoming: Sequence[Incoming],
    known: Mapping[int, Row],
    first_link: int,
    last_seq: int,
    turns: int,
) -> tuple[tuple[Placed, ...], int, int]:
    """Give every incoming message a sequence number, a turn and a place between its neighbours.

    Links that come before the rows at hand get sequence number 0: they are stored, and nobody asks for their place.
    """
    goes_on = _goes_on(known, first_link)
    places = {} if goes_on else _new_places(incoming, known)
    adopted = {} if goes_on else _adopted_turns(incoming, known)
    numbering = _Numbering(turns=turns, opened=_opened_turns(rows, first_link))
    placed: list[Placed] = []
    links = 0
    for index, message in enumerate(incoming):
        links += message.is_link
        row = known.get(index)
        if row is not None:
            if row.is_link:
                numbering.follow(row.turn, starts_turn=message.starts_turn)
            status: Status = "live" if row.status == "superseded" else row.status
            placed.append(Placed(seq=row.seq, turn=row.turn, place=row.place, is_new=False, status=status))
        elif message.is_link and links <= first_link:
            numbering.follow(1, starts_turn=True)
            placed.append(_BEFORE)
        else:
            last_seq += 1
            place = places.get(index, float(last_seq))
            if index in adopted:
                turn = numbering.adopt(adopted[index], starts_turn=message.starts_turn)
            else:
                turn = numbering.next(message)
            placed.append(Placed(seq=last_seq, turn=turn, place=place, is_new=True))
    return tuple(placed), last_seq, numbering.turns


def _opened_turns(rows: Sequence[Row], first_link: int) -> frozenset[int]:
    """The stored turns that had a user message: all, but for a first one that so far is an assistant's greeting."""
    opened = {row.turn for row in rows if row.turn > 0}
    if first_link or not opened:
        return frozenset(opened)
    first = next(row.turn for row in rows if row.turn > 0)
    if not any(row.turn == first and row.role == "user" for row in rows):
        opened.discard(first)
    return frozenset(opened)


def _new_places(incoming: Sequence[Incoming], known: Mapping[int, Row]) -> dict[int, float]:
    """Places for new messages that stand before known ones, evenly between their neighbours.

    Evenly, because halving the rest again and again runs out of digits after some fifty messages.
    """
    places: dict[int, float] = {}
    waiting: list[int] = []
    lower = 0.0
    for index in range(len(incoming)):
        row = known.get(index)
        if row is None:
            waiting.append(index)
            continue
        step = (row.place - lower) / (len(waiting) + 1)
        places |= {each: lower + step * number for number, each in enumerate(waiting, start=1)}
        lower, waiting = row.place, []
    return places


def _adopted_turns(incoming: Sequence[Incoming], known: Mapping[int, Row]) -> dict[int, int]:
    """New messages that belong to a stored turn because of what follows them.

    A rewritten user message in front of what answered it opens the same turn as before; whatever stands before
    the first user message belongs to that one's turn.
    """
    opened = {row.turn for index, row in known.items() if incoming[index].starts_turn}
    links = [index for index, message in enumerate(incoming) if message.is_link]
    first_user = next((index for index in links if incoming[index].starts_turn), None)
    adopted: dict[int, int] = {}
    turn = 0
    for index in reversed(links):
        row, starts_turn = known.get(index), incoming[index].starts_turn
        if row is not None:
            turn = row.turn
        elif starts_turn and turn and turn not in opened:
            adopted[index] = turn
            opened.add(turn)
        elif starts_turn:
            turn = 0
        if starts_turn and index != first_user:
            turn = 0
    if turn and links[0] not in known:
        adopted[links[0]] = turn
    return adopted


def _following_places(incoming: Sequence[Incoming], known: Mapping[int, Row]) -> list[float | None]:
    """For each incoming message, the place of the next known one, or None at the end of the history."""
    following: list[float | None] = [None] * len(incoming)
    upper: float | None = None
    for index in range(len(incoming) - 1, -1, -1):
        following[index] = upper
        row = known.get(index)
        if row is not None:
            upper = row.place
    return following


def _inserts(links: Sequence[Placed]) -> bool:
    """Whether something new stands before something known."""
    seen_new = False
    for placed in links:
        if placed.is_new:
            seen_new = True
        elif seen_new:
            return True
    return False


def _only_reply_left(left: Sequence[Row], links: Sequence[Placed]) -> bool:
    """Whether all that the client leaves behind is the reply to its last message: it asks for another one."""
    if not links or any(placed.is_new for placed in links):
        return False
    return all(row.role == "assistant" and row.place > links[-1].place for row in left)
