"""Give new messages of a history their sequence numbers, turns and positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from tersely.domain.history.history import Status
from tersely.domain.history.links import BEFORE_LOADED, MessageIdentity, PlacedMessage, StoredLink


def no_summary(_: int) -> bool:
    """Say of every message that it is no summary."""
    return False


# New messages get positions between known ones as long as these stay so far apart.
MIN_GAP = 1e-6


class TurnNumbering(msgspec.Struct, kw_only=True):
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
        """A new message takes its position in the stored ``turn``."""
        self.turn, self.has_user = turn, starts_turn
        return turn

    def next(self, message: MessageIdentity) -> int:
        """Return the turn of a new message; 0 for instructions."""
        if not message.is_link:
            return 0
        if self.turn == 0 or (message.starts_turn and self.has_user):
            self.turns += 1
            self.turn, self.has_user = self.turns, False
        self.has_user |= message.starts_turn
        return self.turn


def has_user(rows: Sequence[StoredLink], turn: int, first_link: int) -> bool:
    """Return whether the user spoke in a stored turn: only the first may be an assistant's greeting so far."""
    if first_link:
        return True
    first = next(row.turn for row in rows if row.turn > 0)
    return turn != first or any(row.turn == first and row.role == "user" for row in rows)


def is_continuation(known: Mapping[int, StoredLink], first_link: int) -> bool:
    """Return whether everything known stands before everything new, as in nearly every request."""
    return max(known, default=-1) + 1 == len(known) + (first_link if known else 0)


def keep_room(incoming: Sequence[MessageIdentity], known: dict[int, StoredLink]) -> dict[int, StoredLink]:
    """Return ``known`` as long as there is room for new messages between its positions. Later ones are stored again."""
    following = _following_positions(incoming, known)
    position, new = 0.0, 0
    for index in range(len(incoming)):
        row = known.get(index)
        if row is None:
            new += following[index] is not None
            continue
        if new and (row.position - position) / (new + 1) < MIN_GAP:
            return {each: known[each] for each in known if each < index}
        position, new = row.position, 0
    return known


def place_messages(
    rows: Sequence[StoredLink],
    incoming: Sequence[MessageIdentity],
    known: Mapping[int, StoredLink],
    first_link: int,
    last_seq: int,
    turns: int,
    *,
    is_summary: Callable[[int], bool] = no_summary,
) -> tuple[tuple[PlacedMessage, ...], int, int]:
    """Give every incoming message a sequence number, a turn and a position between its neighbours.

    Links before the loaded rows get sequence number 0: they are stored, and their position is not needed. A client's
    own summary (``is_summary``, by index) has a turn of its own.
    """
    goes_on = is_continuation(known, first_link)
    positions = {} if goes_on else _new_positions(incoming, known)
    adopted = {} if goes_on else _adopted_turns(incoming, known, is_summary)
    numbering = TurnNumbering(turns=turns, opened=_opened_turns(rows, first_link))
    placed: list[PlacedMessage] = []
    links = 0
    for index, message in enumerate(incoming):
        links += message.is_link
        row = known.get(index)
        if row is not None:
            if row.is_link:
                numbering.follow(row.turn, starts_turn=message.starts_turn)
            status: Status = "live" if row.status == "superseded" else row.status
            placed.append(PlacedMessage(seq=row.seq, turn=row.turn, position=row.position, is_new=False, status=status))
        elif message.is_link and links <= first_link:
            numbering.follow(1, starts_turn=True)
            placed.append(BEFORE_LOADED)
        else:
            last_seq += 1
            position = positions.get(index, float(last_seq))
            if index in adopted:
                turn = numbering.adopt(adopted[index], starts_turn=message.starts_turn)
            else:
                turn = numbering.next(message)
            placed.append(PlacedMessage(seq=last_seq, turn=turn, position=position, is_new=True))
    return tuple(placed), last_seq, numbering.turns


def _opened_turns(rows: Sequence[StoredLink], first_link: int) -> frozenset[int]:
    """Return the stored turns that contain a user message.

    These are all turns, except a first one that contains only an assistant's greeting.
    """
    opened = {row.turn for row in rows if row.turn > 0}
    if first_link or not opened:
        return frozenset(opened)
    first = next(row.turn for row in rows if row.turn > 0)
    if not any(row.turn == first and row.role == "user" for row in rows):
        opened.discard(first)
    return frozenset(opened)


def _new_positions(incoming: Sequence[MessageIdentity], known: Mapping[int, StoredLink]) -> dict[int, float]:
    """Positions for new messages that stand before known ones, evenly between their neighbours.

    Evenly, because halving the rest again and again runs out of digits after some fifty messages.
    """
    positions: dict[int, float] = {}
    waiting: list[int] = []
    lower = 0.0
    for index in range(len(incoming)):
        row = known.get(index)
        if row is None:
            waiting.append(index)
            continue
        step = (row.position - lower) / (len(waiting) + 1)
        positions |= {each: lower + step * number for number, each in enumerate(waiting, start=1)}
        lower, waiting = row.position, []
    return positions


def _adopted_turns(
    incoming: Sequence[MessageIdentity], known: Mapping[int, StoredLink], is_summary: Callable[[int], bool]
) -> dict[int, int]:
    """Return the turns of new messages that belong to a stored turn because of the messages after them.

    A rewritten user message in front of the stored answer opens the same turn as before. Messages before the first user
    message belong to its turn.

    A client's own summary is no question of a reply that it kept, and must stay when the reply's turn is dropped. It is
    what ``is_summary`` says, or a reply in front of another one (opencode asks for it inside the history).
    """
    opened = {row.turn for index, row in known.items() if incoming[index].starts_turn}
    links = [index for index, message in enumerate(incoming) if message.is_link]
    first_user = next((index for index in links if incoming[index].starts_turn), None)
    adopted: dict[int, int] = {}
    turn, following = 0, ""
    for index in reversed(links):
        row, starts_turn = known.get(index), incoming[index].starts_turn
        if row is not None:
            turn = row.turn
        elif incoming[index].role == "assistant":
            if following == "assistant" and first_user is not None and first_user < index:
                turn = 0
        elif starts_turn and turn and turn not in opened and not is_summary(index):
            adopted[index] = turn
            opened.add(turn)
        elif starts_turn:
            turn = 0
        following = "" if row is None else row.role
        if starts_turn and index != first_user:
            turn = 0
    if turn and links[0] not in known:
        adopted[links[0]] = turn
    return adopted


def _following_positions(incoming: Sequence[MessageIdentity], known: Mapping[int, StoredLink]) -> list[float | None]:
    """Return for each incoming message the position of the next known one; None at the end of the history."""
    following: list[float | None] = [None] * len(incoming)
    upper: float | None = None
    for index in range(len(incoming) - 1, -1, -1):
        following[index] = upper
        row = known.get(index)
        if row is not None:
            upper = row.position
    return following
