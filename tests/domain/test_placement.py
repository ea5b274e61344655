"""Numbers, turns and positions of new messages between stored ones."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tersely.domain.history.links import MessageIdentity, StoredLink
from tersely.domain.history.placement import MIN_GAP, TurnNumbering, is_continuation, keep_room, place_messages

USER = MessageIdentity(digest=b"u", is_link=True, starts_turn=True, role="user")
REPLY = MessageIdentity(digest=b"a", is_link=True, starts_turn=False, role="assistant")
RULES = MessageIdentity(digest=b"s", is_link=False, starts_turn=False, role="system")


def row(seq: int, position: float, *, turn: int = 1) -> StoredLink:
    return StoredLink(
        seq=seq, position=position, turn=turn, tokens=1, role="user", status="live", digest=b"u", relayed=False, call=0
    )


def test_each_user_message_starts_a_turn_and_instructions_have_none() -> None:
    numbering = TurnNumbering(turns=0)
    assert [numbering.next(each) for each in (RULES, USER, REPLY, RULES, USER, REPLY)] == [0, 1, 1, 0, 2, 2]
    assert numbering.turns == 2


def test_greeting_of_the_assistant_belongs_to_the_first_users_turn() -> None:
    numbering = TurnNumbering(turns=0)
    assert [numbering.next(each) for each in (REPLY, USER, USER)] == [1, 1, 2]


def test_reply_after_a_known_message_stays_in_its_turn() -> None:
    numbering = TurnNumbering(turns=4, opened=frozenset({2}))
    numbering.follow(2, starts_turn=True)
    assert (numbering.next(REPLY), numbering.next(USER), numbering.turns) == (2, 5, 5)


@given(st.lists(st.booleans(), min_size=1, max_size=20))
def test_new_messages_get_ascending_positions_between_known_ones(is_known: list[bool]) -> None:
    known = {index: row(index + 1, float(index + 1)) for index, each in enumerate(is_known) if each}
    incoming = [USER] * len(is_known)

    placed, last_seq, _ = place_messages([*known.values()], incoming, known, 0, 100, 1)

    assert [each.is_new for each in placed] == [not each for each in is_known]
    assert all(before.position < after.position for before, after in itertools.pairwise(placed))
    assert [each.seq for each in placed if each.is_new] == [*range(101, last_seq + 1)]


def test_new_messages_before_a_known_one_adopt_its_turn() -> None:
    known = {1: row(7, 7.0, turn=3)}
    placed, _, turns = place_messages([known[1]], [USER, USER], known, 0, 10, 3)
    assert [each.turn for each in placed] == [4, 3]
    assert turns == 4
    placed, _, turns = place_messages([known[1]], [REPLY, USER], known, 0, 10, 3)
    assert [each.turn for each in placed] == [3, 3]
    assert turns == 3


def test_known_messages_without_room_before_them_are_stored_again() -> None:
    near = {0: row(1, 1.0), 2: row(2, 1.0 + MIN_GAP)}
    assert keep_room([USER] * 3, near) == {0: near[0]}
    far = {0: row(1, 1.0), 2: row(2, 2.0)}
    assert keep_room([USER] * 3, far) == far


def test_history_is_a_continuation_if_known_messages_come_first() -> None:
    assert is_continuation({}, 0)
    assert is_continuation({0: row(1, 1.0), 1: row(2, 2.0)}, 0)
    assert is_continuation({2: row(3, 3.0)}, first_link=2)
    assert not is_continuation({1: row(2, 2.0)}, 0)
