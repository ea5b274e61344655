"""Texts that arrive in pieces: what is shown of each, and when."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tersely.dialects.wire.pieces import Piece, PieceFilter
from tersely.domain.text.tags import TagKinds, TagStripper

BOTH = TagKinds(terse=True, state=True)


@given(
    st.lists(
        st.sampled_from(["<", "<terse>", "</terse>", "terse>", "a", "\n", "\n\n", "### STATE\n", "```", " "]),
        max_size=12,
    ),
    st.lists(st.integers(0, 60), max_size=8),
)
def test_the_pieces_shown_are_the_text_shown(words: list[str], ends: list[int]):
    text = "".join(words)
    places = sorted({0, len(text), *(end for end in ends if end < len(text))})
    pieces = [Piece(text[start:end]) for start, end in pairwise(places)]
    sieve = PieceFilter(BOTH)
    shown = [sieve.feed(piece) for piece in pieces]
    shown.append(sieve.close())
    whole = TagStripper(BOTH)
    assert "".join(piece.shown for piece in pieces) == "".join(shown) == whole.feed(text) + whole.close()
    assert not any(piece.waiting for piece in pieces)


def test_piece_waits_while_it_may_begin_a_tag():
    first, second = Piece("a <ter"), Piece("n> b")
    sieve = PieceFilter(BOTH)
    sieve.feed(first)
    assert (first.shown, first.waiting) == ("a ", 4)
    sieve.feed(second)
    assert (first.shown, first.waiting, second.shown) == ("a <ter", 0, "n> b")
