"""Filter a text that arrives in pieces: a piece waits while it may be part of a tag."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tersely.domain.text.tags import TagKinds, TagStripper

# Characters without which no tag, block or line end in front of a block can begin, as JSON may write them.
_TERSE_MARKS = (b"<", b"\\u003")
_STATE_MARKS = (b"\\n", b"\\r", b"#", b"\\u00")


def marks_of(tags: TagKinds) -> tuple[bytes, ...]:
    """Return the bytes one of which is in every JSON text in which one of ``tags`` can begin."""
    return (_TERSE_MARKS if tags.terse else ()) + (_STATE_MARKS if tags.state else ())


@dataclass(slots=True)
class Piece:
    """``shown`` is what the client sees of ``text``; ``waiting`` characters may yet prove to be no text."""

    text: str
    shown: str = ""
    waiting: int = 0


class PieceFilter:
    """Strips ``tags`` from one text."""

    __slots__ = ("_waiting", "stripper")

    def __init__(self, tags: TagKinds) -> None:
        self.stripper = TagStripper(tags)
        self._waiting: deque[Piece] = deque()

    def feed(self, piece: Piece) -> str:
        """Add a ``piece``. Return the text that may be shown now, which is also stored in its pieces."""
        before = self.stripper.held_size
        shown = self.stripper.feed(piece.text)
        held = self.stripper.held_size
        if len(shown) + held == before + len(piece.text):  # nothing was stripped
            rest = self._show(shown)
            piece.shown, piece.waiting = rest, len(piece.text) - len(rest)
        else:
            self._hide()
            piece.shown, piece.waiting = shown, held
        if piece.waiting:
            self._waiting.append(piece)
        return shown

    def close(self) -> str:
        """The text is over: nothing waits any more."""
        held = self.stripper.held
        shown = self.stripper.close()
        if shown == held:
            self._show(shown)
        elif self._waiting:
            last = self._waiting[-1]
            self._hide()
            last.shown += shown
        return shown

    def _show(self, shown: str) -> str:
        """Assign ``shown`` to the waiting pieces, in order, and return the rest."""
        position = 0
        while self._waiting and position < len(shown):
            piece = self._waiting[0]
            given = shown[position : position + piece.waiting]
            piece.shown += given
            piece.waiting -= len(given)
            position += len(given)
            if not piece.waiting:
                self._waiting.popleft()
        return shown[position:]

    def _hide(self) -> None:
        for piece in self._waiting:
            piece.waiting = 0
        self._waiting.clear()
