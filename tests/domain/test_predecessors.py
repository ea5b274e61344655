"""The stored message directly before each one: branches, hidden messages, and replies that were stored late."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tersely.domain.history.links import HIDDEN, StoredLink
from tersely.domain.history.predecessors import MAX_HIDDEN, Predecessors


def link(seq: int, follows: int | None, **more: Any) -> StoredLink:
    role = "user" if seq % 2 else "assistant"
    given = {"position": float(seq), "status": "live", "role": role, **more}
    return StoredLink(seq=seq, follows=follows, turn=1, tokens=1, digest=b"%d" % seq, relayed=True, call=0, **given)


def numbers(known: Predecessors, row: StoredLink) -> list[int]:
    return [each.seq for each in known.rows_before(row)]


def test_each_message_of_a_plain_history_follows_the_one_before() -> None:
    rows = [link(seq, seq - 1) for seq in range(1, 6)]
    known = Predecessors(rows, is_beginning=True)
    leads = {(before, row.seq) for before in range(6) for row in rows if known.lead(before, row)}
    assert leads == {(seq - 1, seq) for seq in range(1, 6)}


def test_messages_of_two_branches_lead_only_to_their_own() -> None:
    asked, first, second = link(1, 0), link(2, 1, status="superseded"), link(3, 1)
    after_first, after_second = link(4, 2, status="superseded"), link(5, 3)
    known = Predecessors([asked, first, second, after_first, after_second], is_beginning=True)
    assert known.lead(2, after_first)
    assert not known.lead(3, after_first)
    assert known.lead(3, after_second)
    assert not known.lead(2, after_second)


def test_late_reply_leads_to_the_message_that_was_stored_before_it() -> None:
    asked, next_asked, late_reply = link(1, 0), link(2, 1, position=2.0), link(3, 1, position=1.5)
    known = Predecessors([asked, late_reply, next_asked], is_beginning=True)
    assert known.lead(1, next_asked)
    assert known.lead(3, next_asked)


def test_client_may_send_or_omit_a_hidden_message() -> None:
    rows = [link(1, 0), link(2, 1, status="dropped"), link(3, 2)]
    known = Predecessors(rows, is_beginning=True)
    assert known.lead(2, rows[2])
    assert known.lead(1, rows[2])
    assert not known.lead(0, rows[2])


def test_first_loaded_message_has_an_unknown_predecessor_behind_a_cut() -> None:
    first = link(7, None)
    assert not Predecessors([first], is_beginning=False).lead(0, first)
    assert Predecessors([first], is_beginning=True).lead(0, first)


def test_bounded_number_of_hidden_messages_is_tried() -> None:
    end = 3 * MAX_HIDDEN
    hidden = [link(seq, seq - 1, status="undone") for seq in range(2, end)]
    last = link(end, 1)
    known = Predecessors([link(1, 0), *hidden, last], is_beginning=True)
    tried = [seq for seq in numbers(known, last) if seq != 1]
    assert tried == [each.seq for each in reversed(hidden[-MAX_HIDDEN:])]


@st.composite
def histories(draw: st.DrawFn) -> list[StoredLink]:
    """Histories of any branches: each message was stored behind an earlier one, or behind one that is not known."""
    rows: list[StoredLink] = []
    for seq in range(1, draw(st.integers(2, 12))):
        follows = draw(st.none() | st.integers(0, seq - 1))
        status = draw(st.sampled_from(["live", "live", "superseded", "dropped", "undone"]))
        rows.append(link(seq, follows, status=status))
    return rows


@given(rows=histories(), is_beginning=st.booleans())
def test_predecessors_come_earlier_and_the_stored_one_first(rows: list[StoredLink], is_beginning: bool) -> None:
    known = Predecessors(rows, is_beginning=is_beginning)
    by_seq = {row.seq: row for row in rows}
    for row in rows:
        before = list(known.rows_before(row))
        assert all(each.position < row.position for each in before)
        if row.follows:
            assert before[0] is by_seq[row.follows]
            assert known.lead(row.follows, row)
        shown = [each for each in before if each.status not in HIDDEN]
        assert all(known.lead(each.seq, row) for each in shown)
