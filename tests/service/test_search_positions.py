"""Positions against the plain definition: sort what is seen by place and number, and count."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tersely.domain.history.message_numbers import MessageNumbers, NumberingException

KINDS = ("regular", "hidden", "between", "hidden between")


@st.composite
def histories(draw):
    last_seq = draw(st.integers(0, 40))
    rows = []
    for seq in range(1, last_seq + 1):
        kind = draw(st.sampled_from(KINDS)) if draw(st.booleans()) else "regular"
        place = float(seq)
        if "between" in kind:
            place = draw(st.integers(0, 4 * seq)) / 4
        rows.append(NumberingException(seq=seq, position=place, is_hidden="hidden" in kind))
    return rows


@given(histories())
def test_positions_follow_from_the_exceptions(rows) -> None:
    exceptions = [row for row in rows if row.is_hidden or row.position != row.seq]
    order = MessageNumbers(len(rows), exceptions)
    seen = [row.seq for row in sorted(rows, key=lambda r: (r.position, r.seq)) if not row.is_hidden]
    assert order.total == len(seen)
    assert [order.seq_at(n) for n in range(1, len(seen) + 1)] == seen
    assert list(order.seqs(-3, len(seen) + 3)) == seen
    for row in rows:
        assert order.number_of(row.seq) == (seen.index(row.seq) + 1 if row.seq in seen else None)
        expected = sum((r.position, r.seq) <= (row.position, row.seq) for r in rows if not r.is_hidden)
        assert order.count_up_to(row.position, row.seq) == expected
    assert order.number_of(0) is None
    assert order.number_of(len(rows) + 1) is None
