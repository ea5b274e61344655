"""Requests of which only the new messages arrive: is this question the same one again, or a new one?"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from datetime import timedelta
from itertools import takewhile

import msgspec

from tersely.domain.history.links import MessageIdentity, PlacedMessage, StoredLink
from tersely.domain.history.reconciliation import Reconciliation

# A delta that equals an earlier one repeats it within this time, while the first call runs or if the client marks a
# retry ...
RETRY_WITHIN = timedelta(minutes=10)
# ... and within this time after the first call failed or broke off. Later, equal text is a new message.
CUT_OFF_WITHIN = timedelta(seconds=30)


class EarlierQuestion(msgspec.Struct, frozen=True, kw_only=True):
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


def find_unanswered(rows: Sequence[StoredLink], incoming: Sequence[MessageIdentity]) -> tuple[StoredLink, ...]:
    """Return the live messages behind the last reply with which ``incoming`` begins: no reply came to them, and the
    client sends them again in front of further ones. ``rows`` are in order.
    """
    question = [message.digest for message in incoming if message.is_link]
    if len(question) < 2:
        return ()
    links = [row for row in rows if row.is_link and row.status == "live"]
    waiting = list(takewhile(lambda row: row.role != "assistant", reversed(links)))[: len(question) - 1][::-1]
    for first, row in enumerate(waiting):
        rest = waiting[first:]
        if row.digest == question[0] and [each.digest for each in rest] == question[: len(rest)]:
            return tuple(rest)
    return ()


def find_before_last_reply(rows: Sequence[StoredLink], incoming: Sequence[MessageIdentity]) -> EarlierQuestion | None:
    """Find the messages in front of the last reply with which ``incoming`` begins, as `find_unanswered` does."""
    links = [row for row in rows if row.is_link and row.status == "live"]
    replies = tuple(takewhile(lambda row: row.role == "assistant", reversed(links)))[::-1]
    question = find_unanswered(links[: len(links) - len(replies)], incoming) if replies else ()
    return EarlierQuestion(rows=question, replies=replies, is_last=True) if question else None


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
