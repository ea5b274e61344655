"""A body in pieces grows without losing a byte, and its number of pieces is bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tersely.service.proxy.live_sessions.pieces import MAX_PIECES, with_piece


@given(st.lists(st.binary(max_size=3), min_size=1, max_size=5 * MAX_PIECES))
def test_a_body_grows_by_every_piece(added: list[bytes]) -> None:
    pieces: tuple[bytes, ...] = (b"first",)
    for number, piece in enumerate(added, 1):
        before = pieces
        pieces = with_piece(pieces, piece)
        assert b"".join(pieces) == b"first" + b"".join(added[:number])
        assert len(pieces) <= MAX_PIECES
        assert pieces[0] is before[0]
