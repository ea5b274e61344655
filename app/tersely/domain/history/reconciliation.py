"""Reconcile an incoming history with the stored one.

A stateless client resends its whole history. `reconcile` aligns it with the stored rows (`alignment`): which messages
are known, which are new and where they belong (`placement`), and which stored messages the client has left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal

import msgspec

from tersely.domain.history.alignment import match_rows
from tersely.domain.history.links import BEFORE_LOADED, HIDDEN, MessageIdentity, PlacedMessage, StoredLink
from tersely.domain.history.placement import (
    TurnNumbering,
    has_user,
    is_continuation,
    keep_room,
    no_summary,
    place_messages,
)

ReconciliationKind = Literal["new", "continue", "retry", "edited", "delta"]
# The names of the fields in spooled exchanges, which earlier releases read and write too.
_SPOOLED_NAMES = {"restored": "revived", "follows_seq": "after", "replies_at_end": "answers_last"}


class Reconciliation(msgspec.Struct, frozen=True, kw_only=True, rename=_SPOOLED_NAMES):
    """The changes that a request makes in its session.

    ``placed`` has one entry per incoming message. ``superseded`` rows leave the history, ``restored`` ones return to
    it. ``last_seq`` and ``turns`` are the session's counters afterwards. ``follows_seq`` is the stored link that the
    first incoming one follows (0: none; None: unknown). ``replies_at_end``: the reply goes to the end of the session,
    unless something else is stored first.
    """

    kind: ReconciliationKind
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
    is_summary: Callable[[int], bool] = no_summary,
) -> Reconciliation:
    """Reconcile a full incoming history with the stored one.

    ``rows`` are the session's current rows in order. If they are only its later part, ``first_link`` counts the links
    before them, which are known to match. With ``allow_restore``, ``rows`` include superseded messages, which the
    client may have returned to. Messages from index ``question_index`` on (default: the last message that starts a
    turn) are the question: hidden stored messages (dropped, undone, removed) do not match it, so that asking again
    starts a new turn. ``staying`` are sequence numbers that are never superseded. ``is_summary`` says of an index
    whether the client summarises there what came before.
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
        is_summary=is_summary,
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
            placed.append(BEFORE_LOADED)
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
        numbering = TurnNumbering(turns=turns)
    else:
        numbering = TurnNumbering(turns=turns, turn=last.turn, has_user=has_user(rows, last.turn, first_link))
    kind: ReconciliationKind = "retry" if rows else "new"
    for message in incoming[len(placed) :]:
        last_seq += 1
        placed.append(PlacedMessage(seq=last_seq, turn=numbering.next(message), position=float(last_seq), is_new=True))
        if message.is_link and rows:
            kind = "continue"
    return Reconciliation(
        kind=kind, placed=tuple(placed), superseded=(), restored=(), last_seq=last_seq, turns=numbering.turns
    )


def append_to_open_turn(
    last: StoredLink, incoming: Sequence[MessageIdentity], *, last_seq: int, turns: int
) -> Reconciliation:
    """Place new messages after ``last``, the last message of a session with an open turn.

    ``incoming`` begins with ``last`` itself; all others are links. The decision equals that of `reconcile` for the
    whole history, except that ``placed`` has one entry per message of ``incoming``.
    """
    placed = [PlacedMessage(seq=last.seq, turn=last.turn, position=last.position, is_new=False, status=last.status)]
    numbering = TurnNumbering(turns=turns, turn=last.turn, has_user=True)
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
    is_summary: Callable[[int], bool] = no_summary,
) -> Reconciliation:
    """Reconcile by alignment, for any change of the history. Hidden messages stay hidden."""
    known = match_rows(rows, incoming, first_link, _last_start(incoming) if question_index is None else question_index)
    if not is_continuation(known, first_link):
        known = keep_room(incoming, known)
    matched = {row.seq for row in known.values()}
    left = [row for row in rows if row.status == "live" and row.seq not in matched and row.seq not in staying]
    back = [row for row in rows if row.status == "superseded" and row.seq in matched] if allow_restore else []
    is_new = not known and all(row.status == "superseded" for row in rows)
    placed, last_seq, turns = place_messages(rows, incoming, known, first_link, last_seq, turns, is_summary=is_summary)
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
) -> ReconciliationKind:
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
    incoming: Sequence[MessageIdentity],
    *,
    last_seq: int,
    turns: int,
    turn: int,
    follows_seq: int | None = None,
    superseded: Iterable[int] = (),
    repeated: Sequence[StoredLink] = (),
) -> Reconciliation:
    """Append every incoming message to a session whose last turn is ``turn`` (0: it is empty).

    ``follows_seq``: the link that the first incoming one follows (None: unknown). ``superseded``: the stored
    instructions that the incoming ones replace. ``repeated`` are the session's last links, with which the incoming ones
    begin.
    """
    placed: list[PlacedMessage] = []
    numbering = TurnNumbering(turns=turns, turn=turn, has_user=turn > 0)
    stored = iter(repeated)
    for message in incoming:
        if message.is_link and (row := next(stored, None)) is not None:
            placed.append(
                PlacedMessage(seq=row.seq, turn=row.turn, position=row.position, is_new=False, status=row.status)
            )
            continue
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
        follows_seq=follows_seq,
    )


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
