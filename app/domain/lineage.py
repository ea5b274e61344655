"""Where an incoming history meets a stored one.

A stateless client resends its whole history. `reconcile` lays it beside the stored rows and says which of its
messages are known, which are new and where they belong, and which stored messages it has left behind.
Nothing here is fuzzy: messages are the same when their canonical parts are (`app.domain.chain`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from app.domain.history import Status
from app.domain.messages import Role

Kind = Literal["new", "continue", "retry", "edited", "delta"]

# Candidates looked at for one repeated message ("Ok."): keeps the alignment quick on hostile histories.
MAX_CANDIDATES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """A message of a request: its identity, and what placing it needs."""

    digest: bytes
    is_link: bool
    starts_turn: bool
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """An incoming message at its place. ``is_new`` ones are to be stored under ``seq``."""

    seq: int
    turn: int
    place: float
    is_new: bool
    status: Status = "live"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a request means for its session.

    ``placed`` has one entry per incoming message. ``superseded`` rows leave the history, ``revived`` ones
    return to it. ``last_seq`` and ``turns`` are the session's counters afterwards.
    """

    kind: Kind
    placed: tuple[Placed, ...]
    superseded: tuple[int, ...]
    revived: tuple[int, ...]
    last_seq: int
    turns: int

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
    known = _match(rows, incoming, first_link)
    current = {row.seq for row in rows if row.status != "superseded"}
    matched = {row.seq for row in known.values()}
    superseded = tuple(row.seq for row in rows if row.seq in current and row.seq not in matched)
    revived = tuple(row.seq for row in rows if row.seq in matched and row.seq not in current) if revivable else ()
    placed, last_seq, turns = _place(incoming, known, first_link, last_seq, turns)
    links = [p for p, message in zip(placed, incoming, strict=True) if message.is_link]
    left_behind = {row.seq for row in rows if row.is_link} & set(superseded)
    if not current and not known:
        kind: Kind = "new"
    elif left_behind or revived or _inserts(links):
        kind = "retry" if _only_reply_left(rows, left_behind, links) else "edited"
    elif links and not links[-1].is_new:
        kind = "retry"
    else:
        kind = "continue"
    return Decision(kind=kind, placed=placed, superseded=superseded, revived=revived, last_seq=last_seq, turns=turns)


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
    )


@dataclass(slots=True, kw_only=True)
class _Numbering:
    """Gives new messages their turns. An opening assistant message belongs to the first user's turn."""

    turns: int
    turn: int = 0
    has_user: bool = False

    def follow(self, turn: int, *, starts_turn: bool) -> None:
        """A known message of ``turn`` came by."""
        if turn != self.turn:
            self.turn, self.has_user = turn, False
        self.has_user |= starts_turn

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
    """Incoming index -> stored row. Links keep their order; instructions are matched by content alone."""
    links = [index for index, message in enumerate(incoming) if message.is_link][first_link:]
    stored = [row for row in rows if row.is_link]
    known = dict(_common_prefix(stored, incoming, links))
    rest = links[len(known) :]
    if rest and len(known) < len(stored):
        known |= _longest_common(stored[len(known) :], incoming, rest)
    free: defaultdict[bytes, list[Row]] = defaultdict(list)
    for row in rows:
        if not row.is_link:
            free[row.digest].append(row)
    for index, message in enumerate(incoming):
        if not message.is_link and free[message.digest]:
            known[index] = free[message.digest].pop(0)
    return known


def _common_prefix(
    stored: Sequence[Row], incoming: Sequence[Incoming], links: Sequence[int]
) -> Iterable[tuple[int, Row]]:
    for row, index in zip(stored, links, strict=False):
        if row.digest != incoming[index].digest:
            return
        yield index, row


def _longest_common(stored: Sequence[Row], incoming: Sequence[Incoming], links: Sequence[int]) -> dict[int, Row]:
    """The longest common subsequence (Hunt and Szymanski), so that a rebuilt history keeps what it can."""
    positions: defaultdict[bytes, list[int]] = defaultdict(list)
    for position, row in enumerate(stored):
        positions[row.digest].append(position)
    ends: list[int] = []
    chains: list[tuple[int, int, object]] = []
    for index in links:
        for position in reversed(positions.get(incoming[index].digest, [])[:MAX_CANDIDATES]):
            length = bisect_left(ends, position)
            previous = chains[length - 1] if length else None
            step = (index, position, previous)
            if length == len(ends):
                ends.append(position)
                chains.append(step)
            else:
                ends[length] = position
                chains[length] = step
    known: dict[int, Row] = {}
    step_or_none: object = chains[-1] if chains else None
    while isinstance(step_or_none, tuple):
        index, position, step_or_none = step_or_none
        known[index] = stored[position]
    return known


def _place(
    incoming: Sequence[Incoming], known: dict[int, Row], first_link: int, last_seq: int, turns: int
) -> tuple[tuple[Placed, ...], int, int]:
    """Give every incoming message a sequence number, a turn and a place between its neighbours.

    Links that come before the rows at hand get sequence number 0: they are stored, and nobody asks for their place.
    """
    following = _following_places(incoming, known)
    placed: list[Placed] = []
    numbering = _Numbering(turns=turns)
    links = 0
    place = 0.0
    for index, message in enumerate(incoming):
        links += message.is_link
        row = known.get(index)
        if row is not None:
            place = max(place, row.place)
            if row.is_link:
                numbering.follow(row.turn, starts_turn=message.starts_turn)
            status: Status = "live" if row.status == "superseded" else row.status
            placed.append(Placed(seq=row.seq, turn=row.turn, place=row.place, is_new=False, status=status))
        elif message.is_link and links <= first_link:
            numbering.follow(1, starts_turn=True)
            placed.append(Placed(seq=0, turn=1, place=0.0, is_new=False))
        else:
            last_seq += 1
            upper = following[index]
            place = float(last_seq) if upper is None else (place + upper) / 2
            turn = numbering.next(message)
            placed.append(Placed(seq=last_seq, turn=turn, place=place, is_new=True))
    return tuple(placed), last_seq, numbering.turns


def _following_places(incoming: Sequence[Incoming], known: dict[int, Row]) -> list[float | None]:
    """For each incoming message, the place of the next known one, or None at the end of the history."""
    following: list[float | None] = [None] * len(incoming)
    upper: float | None = None
    for index in range(len(incoming) - 1, -1, -1):
        following[index] = upper
        row = known.get(index)
        if row is not None:
            upper = row.place if upper is None else min(upper, row.place)
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


def _only_reply_left(rows: Sequence[Row], left_behind: set[int], links: Sequence[Placed]) -> bool:
    """Whether all that the client leaves behind is the reply to its last message: it asks for another one."""
    if not links or any(placed.is_new for placed in links):
        return False
    return all(row.role == "assistant" for row in rows if row.seq in left_behind)
