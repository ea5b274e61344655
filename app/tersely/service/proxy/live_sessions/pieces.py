"""A body in pieces that follow each other: it grows by messages, and is sent, without a copy of what is there."""

from __future__ import annotations

Pieces = tuple[bytes, ...]

# The pieces behind the first, which holds nearly all of a body, are joined when there are more.
MAX_PIECES = 16


def with_piece(pieces: Pieces, piece: bytes) -> Pieces:
    """Return ``pieces`` with one more behind them."""
    if len(pieces) < MAX_PIECES:
        return (*pieces, piece)
    first, *others = pieces
    return first, b"".join((*others, piece))
