"""Reconcile an incoming history with the stored one.

A stateless client resends its whole history. `reconcile` aligns it with the stored rows: which messages are known,
which are new and where they belong, and which stored messages the client has left behind. Messages are equal when their
canonical parts are (`tersely.domain.history.chain`); nothing is fuzzy.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice, takewhile
from typing import Literal

import msgspec

from tersely.domain.history.history import Status
from tersely.domain.messages import INSTRUCTION_ROLES, Role

Kind = Literal["new", "continue", "retry", "edited", "delta"]

# Statuses of messages that no context contains, though clients may still send them.
HIDDEN: frozenset[Status] = frozenset({"dropped", "undone", "removed"})
# Rows looked at for one repeated message ("Ok."): keeps the alignment quick on hostile histories.
MAX_CANDIDATES = 16
# New messages get places between known ones as long as these stay so far apart.
MIN_GAP = 1e-6
# A delta that equals an earlier one repeats it within this time, while the first call runs or if the client marks a
# retry ...
RETRY_WITHIN = timedelta(minutes=10)
# ... and within this time after the first call failed or broke off. Later, equal text is a new message.
CUT_OFF_WITHIN = timedelta(seconds=30)


class StoredLink(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A stored message without its content. Instruction rows (system text, injected context) have turn 0.

    ``follows`` is the sequence number of the link that precedes the message (0: none; None: unknown).
    """

    seq: int
    position: float
    turn: int
    tokens: int
    role: Role
    status: Status
    digest: bytes
    relayed: bool
    call: int
    follows: int | None = None

    @property
    def is_link(self) -> bool:
        """Return whether the message is part of the history proper."""
        return self.turn > 0

    @property
    def is_instruction(self) -> bool:
        """Return whether the message is system or developer text. A message of injected blocks alone is not."""
        return self.role in INSTRUCTION_ROLES


class MessageIdentity(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The identity of a request's message, and the facts that reconciliation needs.

    ``seq`` is the number of the stored message that it equals; 0 if only the content can show that.
    """

    digest: bytes
    is_link: bool
    starts_turn: bool
    role: Role
    seq: int = 0

    @property
    def is_instruction(self) -> bool:
        """Return whether the message is system or developer text."""
        return self.role in INSTRUCTION_ROLES


def as_incoming(row: StoredLink) -> MessageIdentity:
    """Return a stored message as if it had been sent again."""
    starts_turn = row.is_link and row.role == "user"
    return MessageIdentity(digest=row.digest, is_link=row.is_link, starts_turn=starts_turn, role=row.role, seq=row.seq)


class PlacedMessage(msgspec.Struct, frozen=True, kw_only=True, gc=False, rename={"position": "place"}):
    """An incoming message at its place. ``is_new`` ones are to be stored under ``seq``."""

    seq: int
    turn: int
    position: float
    is_new: bool
    status: Status = "live"


# The number of a link before the loaded rows: it is stored, and its position is not needed.
_BEFORE = PlacedMessage(seq=0, turn=1, position=0.0, is_new=False)


# The names of the fields in spooled exchanges, which earlier releases read and write too.
_SPOOLED_NAMES = {"restored": "revived", "follows_seq": "after", "replies_at_end": "answers_last"}


class Reconciliation(msgspec.Struct, frozen=True, kw_only=True, rename=_SPOOLED_NAMES):
    """What a request changes in its session.

    ``placed`` has one entry per incoming message. ``superseded`` rows leave the history, ``restored`` ones return to
    it. ``last_seq`` and ``turns`` are the session's counters afterwards. ``follows_seq`` is the stored link that the
    first incoming one follows (0: none; None: unknown). ``replies_at_end``: the reply goes to the end of the session,
    unless something else is stored first.
    """

    kind: Kind
    placed: tuple[PlacedMessage, ...]
    superseded: tuple[int, ...]
    restored: tuple[int, ...]
    last_seq: int
    turns: int
    follows_seq: int | None = 0
    replies_at_end: bool = True

    @property
    def answered(self) -> PlacedMessage | None:
        """The message that the reply will answer: the last link of the history."""
        return next((placed for placed in reversed(self.placed) if placed.turn > 0), None)

    @property
    def last_known(self) -> int:
        """The number of the last link that was stored before; 0 if there is none."""
        return next((placed.seq for placed in reversed(self.placed) if placed.turn > 0 and not placed.is_new), 0)


def reconcile(
    rows: Sequence[StoredLink],
    incoming: Sequence[MessageIdentity],
    *,
    last_seq: int,
    turns: int,
    first_link: int = 0,
    allow_restore: bool = False,
    question_index: int | None = None,
    staying: Collection[int] = (),
) -> Reconciliation:
    """Reconcile a full incoming history with the stored one.

    ``rows`` are the session's current rows in order. If they are only its later part, ``first_link`` counts the links
    before them, which are known to match. With ``allow_restore``, ``rows`` include superseded messages, which the
    client may have returned to. Messages from index ``question_index`` on (default: the last message that starts a
    turn) are the question: hidden stored messages (dropped, undone, removed) do not match it, so that asking again
    starts a new turn. ``staying`` are sequence numbers that are never superseded.
    """
    if question_index is None:
        question_index = _last_start(incoming)
    return _follow(rows, incoming, last_seq, turns, first_link, question_index) or align(
        rows,
        incoming,
        last_seq=last_seq,
        turns=turns,
        first_link=first_link,
        allow_restore=allow_restore,
        question_index=question_index,
        staying=staying,
    )


def _last_start(incoming: Sequence[MessageIdentity]) -> int:
    """Return the index of the last message that starts a turn; the length if none does."""
    return next((index for index in range(len(incoming) - 1, -1, -1) if incoming[index].starts_turn), len(incoming))


def _follow(
    rows: Sequence[StoredLink],
    incoming: Sequence[MessageIdentity],
    last_seq: int,
    turns: int,
    first_link: int,
    question_index: int,
) -> Reconciliation | None:
    """Return the decision for a history that continues the stored one unchanged, as nearly every request does; else
    None.
    """
    placed: list[PlacedMessage] = []
    links = at = 0
    last: StoredLink | None = None
    for message in incoming:
        if message.is_link and links < first_link:
            links += 1
            placed.append(_BEFORE)
            continue
        if at == len(rows):
            break
        row = rows[at]
        if message.seq not in (0, row.seq) or row.is_link != message.is_link:
            return None
        if row.digest != message.digest or row.status == "superseded":
            return None
        if row.status in HIDDEN and len(placed) >= question_index:
            return None
        at += 1
        if message.is_link:
            last = row
        placed.append(PlacedMessage(seq=row.seq, turn=row.turn, position=row.position, is_new=False, status=row.status))
    if at < len(rows) or (last is None and (rows or first_link)):
        return None
    if last is None:
        numbering = _Numbering(turns=turns)
    else:
        numbering = _Numbering(turns=turns, turn=last.turn, has_user=_has_user(rows, last.turn, first_link))
    kind: Kind = "retry" if rows else "new"
    for message in incoming[len(placed) :]:
        last_seq += 1
        placed.append(PlacedMessage(seq=last_seq, turn=numbering.next(message), position=float(last_seq), is_new=True))
        if message.is_link and rows:
            kind = "continue"
    return Reconciliation(
        kind=kind, placed=tuple(placed), superseded=(), restored=(), last_seq=last_seq, turns=numbering.turns
    )


def _has_user(rows: Sequence[StoredLink], turn: int, first_link: int) -> bool:
    """Return whether the user spoke in a stored turn: only the first may be an assistant's greeting so far."""
    if first_link:
        return True
    first = next(row.turn for row in rows if row.turn > 0)
    return turn != first or any(row.turn == first and row.role == "user" for row in rows)


def go_on(last: StoredLink, incoming: Sequence[MessageIdentity], *, last_seq: int, turns: int) -> Reconciliation:
    """Place new messages after ``last``, the last message of a session with an open turn.

    ``incoming`` begins with ``last`` itself; all others are links. The decision equals that of `reconcile` for the
    whole history, except that ``placed`` has one entry per message of ``incoming``.
    """
    placed = [PlacedMessage(seq=last.seq, turn=last.turn, position=last.position, is_new=False, status=last.status)]
    numbering = _Numbering(turns=turns, turn=last.turn, has_user=True)
    for message in incoming[1:]:
        last_seq += 1
        placed.append(PlacedMessage(seq=last_seq, turn=numbering.next(message), position=float(last_seq), is_new=True))
    return Reconciliation(
        kind="continue",
        placed=tuple(placed),
        superseded=(),
        restored=(),
        last_seq=last_seq,
        turns=numbering.turns,
    )


def align(
    rows: Sequence[StoredLink],
    incoming: Sequence[MessageIdentity],
    *,
    last_seq: int,
    turns: int,
    first_link: int = 0,
    allow_restore: bool = False,
    question_index: int | None = None,
    staying: Collection[int] = (),
) -> Reconciliation:
    """Reconcile by alignment, for any change of the history. Hidden messages stay hidden."""
    known = _match(rows, incoming, first_link, _last_start(incoming) if question_index is None else question_index)
    if not _goes_on(known, first_link):
        known = _with_room(incoming, known)
    matched = {row.seq for row in known.values()}
    left = [row for row in rows if row.status == "live" and row.seq not in matched and row.seq not in staying]
    back = [row for row in rows if row.status == "superseded" and row.seq in matched] if allow_restore else []
    is_new = not known and all(row.status == "superseded" for row in rows)
    placed, last_seq, turns = _place(rows, incoming, known, first_link, last_seq, turns)
    return Reconciliation(
        kind=_kind(incoming, placed, left, back, is_new=is_new),
        placed=placed,
        superseded=tuple(row.seq for row in left),
        restored=tuple(row.seq for row in back),
        last_seq=last_seq,
        turns=turns,
    )


def _kind(
    incoming: Sequence[MessageIdentity],
    placed: Sequence[PlacedMessage],
    left: Sequence[StoredLink],
    back: Sequence[StoredLink],
    *,
    is_new: bool,
) -> Kind:
    """Return the kind of change in the history proper. Changed instructions do not count."""
    if is_new:
        return "new"
    links = [p for p, message in zip(placed, incoming, strict=True) if message.is_link]
    left = [row for row in left if row.is_link]
    back = [row for row in back if row.is_link]
    if not _joins_prefill(left, back) and (left or back or _inserts(links)):
        return "retry" if _only_reply_left(left, links) else "edited"
    return "continue" if any(p.is_new for p in links) else "retry"


def append_messages(
    incoming: Sequence[MessageIdentity], *, last_seq: int, turns: int, turn: int, superseded: Iterable[int] = ()
) -> Reconciliation:
    """Append every incoming message to a session whose last turn is ``turn`` (0: it is empty).

    ``superseded``: the stored instructions that the incoming ones replace.
    """
    placed: list[PlacedMessage] = []
    numbering = _Numbering(turns=turns, turn=turn, has_user=turn > 0)
    for message in incoming:
        last_seq += 1
        turn = numbering.next(message)
        placed.append(PlacedMessage(seq=last_seq, turn=turn, position=float(last_seq), is_new=True))
    return Reconciliation(
        kind="delta",
        placed=tuple(placed),
        superseded=tuple(superseded),
        restored=(),
        last_seq=last_seq,
        turns=numbering.turns,
        follows_seq=None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierQuestion:
    """Live stored messages that equal the links of a delta, one by one.

    ``replies`` are the live replies to them. ``is_last``: no other message follows.
    """

    rows: tuple[StoredLink, ...]
    replies: tuple[StoredLink, ...]
    is_last: bool

    @property
    def answered(self) -> StoredLink:
        """The message that a reply to them follows."""
        return self.rows[-1]


def find_earlier_question(rows: Sequence[StoredLink], incoming: Sequence[MessageIdentity]) -> EarlierQuestion | None:
    """Find the newest live messages that equal the links of ``incoming``. ``rows`` are in order. O(rows)."""
    question = [message.digest for message in incoming if message.is_link]
    if not question:
        return None
    links = [row for row in rows if row.is_link and row.status == "live"]
    for end in range(len(links), len(question) - 1, -1):
        if (
            links[end - 1].digest == question[-1]
            and [row.digest for row in links[end - len(question) : end]] == question
        ):
            replies = tuple(takewhile(lambda row: row.role == "assistant", links[end:]))
            return EarlierQuestion(
                rows=tuple(links[end - len(question) : end]), replies=replies, is_last=end + len(replies) == len(links)
            )
    return None


def is_repetition(
    before: EarlierQuestion,
    *,
    is_retry: bool,
    age: timedelta,
    client_left: bool = False,
    ended: timedelta | None = None,
) -> bool:
    """Return whether a delta repeats the question ``before`` instead of asking the same words once more.

    ``is_retry``: the client marks the request as a retry. ``age`` is the time since the messages were stored, ``ended``
    the time since their call ended (None: it is under way). ``client_left``: the client
    went away before the end of their reply. A reply that the host broke off was shown, and so was the error: the same
    words ("continue") go on from there.
    """
    if is_retry and (before.is_last or age <= RETRY_WITHIN):
        return True
    if before.replies:
        return client_left and ended is not None and ended <= CUT_OFF_WITHIN
    if before.is_last:
        return True
    return age <= RETRY_WITHIN if ended is None else ended <= CUT_OFF_WITHIN


def reconcile_repetition(
    repeated: Sequence[StoredLink],
    instructions: Sequence[StoredLink],
    incoming: Sequence[MessageIdentity],
    *,
    last_seq: int,
    turns: int,
) -> Reconciliation:
    """Decide what a repeated delta changes: only the instructions, if it brings others.

    ``repeated`` are the stored messages that equal the links of ``incoming``; ``instructions`` are the session's live
    instructions. The replies to ``repeated`` stay until a new reply replaces them, so that a failed repetition hides
    nothing.
    """
    free: defaultdict[bytes, deque[StoredLink]] = defaultdict(deque)
    for row in instructions:
        free[row.digest].append(row)
    links = deque(repeated)
    placed: list[PlacedMessage] = []
    brings_others = False
    for message in incoming:
        known = links if message.is_link else free[message.digest]
        if known:
            row = known.popleft()
            placed.append(
                PlacedMessage(seq=row.seq, turn=row.turn, position=row.position, is_new=False, status=row.status)
            )
        else:
            brings_others = brings_others or message.is_instruction
            last_seq += 1
            placed.append(PlacedMessage(seq=last_seq, turn=0, position=float(last_seq), is_new=True))
    return Reconciliation(
        kind="retry",
        placed=tuple(placed),
        superseded=tuple(row.seq for left in free.values() for row in left if row.is_instruction and brings_others),
        restored=(),
        last_seq=last_seq,
        turns=turns,
        follows_seq=None,
        replies_at_end=False,
    )


def links_without_reply(rows: Sequence[StoredLink]) -> list[int]:
    """Return the sequence numbers of live links that may have no reply. ``rows`` are in order.

    These are the links after the last reply, or before another request. A request with several messages looks the same.
    """
    found: list[int] = []
    block: list[StoredLink] = []
    for row in rows:
        if not row.is_link or row.status != "live":
            continue
        if row.role != "assistant":
            block.append(row)
            continue
        if any(each.role == "user" for each in block[1:]):
            found += [each.seq for each in block]
        block = []
    return [*found, *(row.seq for row in block)]


def failed_links(rows: Sequence[StoredLink], ended: Collection[int]) -> frozenset[int]:
    """Return the sequence numbers of the live links of requests whose call has ended without a reply.

    ``rows`` are in order; ``ended`` are those of `links_without_reply` that were the last message of a call which has
    ended.
    """
    links = [row for row in rows if row.is_link and row.status == "live"]
    failed: set[int] = set()
    request: list[int] = []
    for index, row in enumerate(links):
        if row.role == "assistant":
            request = []
            continue
        request = [*request, row.seq] if request and row.follows == request[-1] else [row.seq]
        following = links[index + 1 : index + 2]
        if row.seq in ended and not (following and following[0].role == "assistant"):
            failed.update(request)
    return frozenset(failed)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyNeighbours:
    """The state around a stored question when a reply to it arrives.

    ``status`` is the question's (None: its row is gone), ``next_position`` the position of the next message (None:
    there is none). ``rival`` is the number of the call that gave the current reply (0: the client's own message, None:
    there is no reply). ``rival_broke_off``: that reply is incomplete.
    """

    status: Status | None
    next_position: float | None = None
    rival: int | None = None
    rival_broke_off: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyPlacement:
    """The position and status of a reply.

    ``before_position``: the position of the message that follows (None: the end of the session). ``replaces``: the
    number of the call whose reply is superseded (0: none).
    """

    status: Status = "live"
    before_position: float | None = None
    replaces: int = 0


def place_reply(neighbours: ReplyNeighbours, *, call: int, broke_off: bool) -> ReplyPlacement:
    """Place the reply of ``call`` after its question, whatever was stored in the meantime.

    A reply shares the status of its question (superseded, dropped, undone, removed). Of two replies to one question a
    complete one wins over an incomplete one; otherwise the later call wins.
    """
    if neighbours.status != "live":
        return ReplyPlacement(status=neighbours.status or "superseded", before_position=neighbours.next_position)
    if not neighbours.rival:
        return ReplyPlacement(before_position=neighbours.next_position)
    if broke_off != bool(neighbours.rival_broke_off):
        stays = bool(neighbours.rival_broke_off)
    else:
        stays = call > neighbours.rival
    if not stays:
        return ReplyPlacement(status="superseded", before_position=neighbours.next_position)
    return ReplyPlacement(before_position=neighbours.next_position, replaces=neighbours.rival)


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

    def next(self, message: MessageIdentity) -> int:
        """Return the turn of a new message; 0 for instructions."""
        if not message.is_link:
            return 0
        if self.turn == 0 or (message.starts_turn and self.has_user):
            self.turns += 1
            self.turn, self.has_user = self.turns, False
        self.has_user |= message.starts_turn
        return self.turn


def _match(
    rows: Sequence[StoredLink], incoming: Sequence[MessageIdentity], first_link: int, question_index: int
) -> dict[int, StoredLink]:
    """Map incoming indexes to stored rows, in strictly increasing positions.

    The live history is matched first, then the branch that the last reply ended. Only the remaining messages are looked
    up among hidden and superseded rows.
    """
    links = [index for index, message in enumerate(incoming) if message.is_link][first_link:]
    stored = [row for row in rows if row.is_link]
    known = _by_number(stored, incoming, links)
    if not known:
        live = [row for row in stored if row.status == "live"]
        known = dict(_common_prefix(live, incoming, links))
        if any(incoming[index].role == "assistant" for index in links[len(known) :]):
            known = _find_branch(stored, incoming, links, question_index) or known
    rest = links[len(known) :]
    if rest:
        last = known[links[len(known) - 1]].position if known else float("-inf")
        aligned = _align([row for row in stored if row.position > last], incoming, rest, question_index)
        known |= _without_strays(incoming, links, known, aligned, is_beginning=first_link == 0)
    return _with_instructions(rows, incoming, known)


def _without_strays(
    incoming: Sequence[MessageIdentity],
    links: Sequence[int],
    prefix: Mapping[int, StoredLink],
    aligned: Mapping[int, StoredLink],
    *,
    is_beginning: bool,
) -> dict[int, StoredLink]:
    """Remove from ``aligned`` the stored questions that belong to another beginning than the request's.

    Two replies may follow one question only if the same history leads to both. The messages before a superseded reply
    are found by their ``follows``. ``prefix`` are the links in front. ``is_beginning``: the first of ``links`` is the
    first of the history.
    """
    known = {**prefix, **aligned}
    if links and links[-1] not in known:
        return dict(aligned)  # what is asked is new: the reply to it follows none of them
    replied = max((index for index in known if incoming[index].role == "assistant"), default=None)
    question = [index for index in links if replied is None or index > replied]
    before = known[replied].seq if replied is not None else 0 if is_beginning else None
    for index in question:
        row = known.get(index)
        if row is None or not (index in prefix or before is None or row.follows in (None, before)):
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
    stored: Sequence[StoredLink], incoming: Sequence[MessageIdentity], links: Sequence[int], question_index: int
) -> dict[int, StoredLink]:
    """Return ``links`` up to the last reply with the stored rows that led to it; empty if they differ.

    Other branches may contain equal text. The ``follows`` of each stored message identifies its branch.
    """
    end = next((at for at in range(len(links) - 1, -1, -1) if incoming[links[at]].role == "assistant"), -1)
    if end < 0:
        return {}
    rows = {row.seq: row for row in stored}
    last = [row for row in stored if row.digest == incoming[links[end]].digest]
    last.sort(key=lambda row: (row.status == "live", row.seq), reverse=True)
    for row in last[:MAX_CANDIDATES]:
        branch = _follow_back(row, rows, incoming, links[: end + 1], question_index)
        if branch:
            return branch
    return {}


def _follow_back(
    last: StoredLink,
    rows: Mapping[int, StoredLink],
    incoming: Sequence[MessageIdentity],
    links: Sequence[int],
    question_index: int,
) -> dict[int, StoredLink]:
    """Return ``links`` with ``last`` and its predecessors by ``follows``; empty if one of them differs."""
    known: dict[int, StoredLink] = {}
    row: StoredLink | None = last
    for index in reversed(links):
        if row is None or row.digest != incoming[index].digest:
            return {}
        if row.status in HIDDEN and index >= question_index:
            return {}
        known[index] = row
        before = rows.get(row.follows) if row.follows else None
        if before is not None and before.position >= row.position:
            return {}
        row = before
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
    places = {row.seq: position for position, row in enumerate(stored)}
    order = {index: number for number, index in enumerate(links)}
    replies = _unique_replies(stored, incoming, links)
    fixed = _longest_common(replies, incoming, links, question_index)
    known = dict(fixed)
    row_at = link_at = 0
    bounds = [(order[index], places[row.seq]) for index, row in fixed]
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
    place = float("-inf")
    kept: dict[int, StoredLink] = {}
    for index in sorted(known):
        if known[index].position > place:
            kept[index] = known[index]
            place = known[index].position
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
    # The weight of a position is greater than that of all positions before it.
    ends: list[int] = []
    weights: list[int] = []
    chains: list[_Step] = []
    for index in links:
        for position in candidates.get(incoming[index].digest, ()):
            status = stored[position].status
            if index >= question_index and status in HIDDEN:
                continue
            at = bisect_left(ends, position)
            weight = len(links) + 1 + (status == "live") + (weights[at - 1] if at else 0)
            if at < len(ends) and ends[at] == position and weights[at] >= weight:
                continue
            step = _Step(index, position, chains[at - 1] if at else None)
            heavier = bisect_right(weights, weight, at)
            ends[at:heavier], weights[at:heavier], chains[at:heavier] = [position], [weight], [step]
    found: list[tuple[int, StoredLink]] = []
    last = chains[-1] if chains else None
    while last is not None:
        found.append((last.index, stored[last.position]))
        last = last.previous
    return found[::-1]


@dataclass(frozen=True, slots=True)
class _Step:
    """A pair of a common subsequence, and the pair before it."""

    index: int
    position: int
    previous: _Step | None


def _candidates(stored: Sequence[StoredLink]) -> dict[bytes, list[int]]:
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
    place = float("-inf")
    for index in instructions:
        at = bisect_left(links, index)
        if at:
            place = max(place, known[links[at - 1]].position)
        upper = known[links[at]].position if at < len(links) else None
        fitting = by_number.get(incoming[index].seq) or _fitting(free[incoming[index].digest], place, upper)
        if fitting is not None:
            found[index] = fitting
            place = fitting.position
    return found


def _fitting(rows: deque[StoredLink], lower: float, upper: float | None) -> StoredLink | None:
    """Return a row between these positions, preferably a live one. Rows at or before ``lower`` are dropped."""
    while rows and rows[0].position <= lower:
        rows.popleft()
    between = takewhile(lambda row: upper is None or row.position < upper, islice(rows, MAX_CANDIDATES))
    return min(between, key=lambda row: (row.status == "superseded", row.position), default=None)


def _goes_on(known: Mapping[int, StoredLink], first_link: int) -> bool:
    """Return whether everything known stands before everything new, as in nearly every request."""
    return max(known, default=-1) + 1 == len(known) + (first_link if known else 0)


def _with_room(incoming: Sequence[MessageIdentity], known: dict[int, StoredLink]) -> dict[int, StoredLink]:
    """Return ``known`` as long as there is room for new messages between its positions. Later ones are stored again."""
    following = _following_places(incoming, known)
    place, new = 0.0, 0
    for index in range(len(incoming)):
        row = known.get(index)
        if row is None:
            new += following[index] is not None
            continue
        if new and (row.position - place) / (new + 1) < MIN_GAP:
            return {each: known[each] for each in known if each < index}
        place, new = row.position, 0
    return known


def _place(
    rows: Sequence[StoredLink],
    incoming: Sequence[MessageIdentity],
    known: Mapping[int, StoredLink],
    first_link: int,
    last_seq: int,
    turns: int,
) -> tuple[tuple[PlacedMessage, ...], int, int]:
    """Give every incoming message a sequence number, a turn and a position between its neighbours.

    Links before the loaded rows get sequence number 0: they are stored, and their position is not needed.
    """
    goes_on = _goes_on(known, first_link)
    places = {} if goes_on else _new_places(incoming, known)
    adopted = {} if goes_on else _adopted_turns(incoming, known)
    numbering = _Numbering(turns=turns, opened=_opened_turns(rows, first_link))
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
            placed.append(_BEFORE)
        else:
            last_seq += 1
            place = places.get(index, float(last_seq))
            if index in adopted:
                turn = numbering.adopt(adopted[index], starts_turn=message.starts_turn)
            else:
                turn = numbering.next(message)
            placed.append(PlacedMessage(seq=last_seq, turn=turn, position=place, is_new=True))
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


def _new_places(incoming: Sequence[MessageIdentity], known: Mapping[int, StoredLink]) -> dict[int, float]:
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
        step = (row.position - lower) / (len(waiting) + 1)
        places |= {each: lower + step * number for number, each in enumerate(waiting, start=1)}
        lower, waiting = row.position, []
    return places


def _adopted_turns(incoming: Sequence[MessageIdentity], known: Mapping[int, StoredLink]) -> dict[int, int]:
    """Return the turns of new messages that belong to a stored turn because of the messages after them.

    A rewritten user message in front of the stored answer opens the same turn as before. Messages before the first user
    message belong to its turn.
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


def _following_places(incoming: Sequence[MessageIdentity], known: Mapping[int, StoredLink]) -> list[float | None]:
    """Return for each incoming message the position of the next known one; None at the end of the history."""
    following: list[float | None] = [None] * len(incoming)
    upper: float | None = None
    for index in range(len(incoming) - 1, -1, -1):
        following[index] = upper
        row = known.get(index)
        if row is not None:
            upper = row.position
    return following


def _inserts(links: Sequence[PlacedMessage]) -> bool:
    """Return whether something new stands before something known."""
    seen_new = False
    for placed in links:
        if placed.is_new:
            seen_new = True
        elif seen_new:
            return True
    return False


def _joins_prefill(left: Sequence[StoredLink], back: Sequence[StoredLink]) -> bool:
    """Return whether the client joined its prefill and the reply into one message with the same text.

    A reply that continues a prefill is stored by itself, and as an alternative of the same call with the prefill.
    """
    if len(left) < 2 or len(back) != 1:
        return False
    *prefill, reply = left
    joined = back[0]
    is_same_reply = reply.relayed and joined.relayed and reply.call == joined.call
    return is_same_reply and all(
        row.role == "assistant" and not row.relayed and row.turn == joined.turn for row in prefill
    )


def _only_reply_left(left: Sequence[StoredLink], links: Sequence[PlacedMessage]) -> bool:
    """Return whether the request drops only the reply to its last message: then it asks for another reply."""
    if not links or any(placed.is_new for placed in links):
        return False
    return all(row.role == "assistant" and row.position > links[-1].position for row in left)
