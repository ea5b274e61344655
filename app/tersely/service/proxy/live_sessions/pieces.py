"""Hold a request body as consecutive pieces. Adding a message, or sending the body, copies no earlier piece."""

from __future__ import annotations

Pieces = tuple[bytes, ...]

# At this number of pieces, all but the first are joined: a system call takes only so many buffers.
MAX_PIECES = 16


def with_piece(pieces: Pieces, piece: bytes) -> Pieces:
    """Return ``pieces`` with ``piece`` at the end, at most `MAX_PIECES` in all."""
    if len(pieces) < MAX_PIECES:
        return (*pieces, piece)
    first, *others = pieces
    return first, b"".join((*others, piece))
