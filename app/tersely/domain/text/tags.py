"""Strip Tersely's markup from a model's text before the client sees it: terse tags, state blocks, or both."""

from __future__ import annotations

import msgspec

from tersely.domain.text.state import HEADING, StateStream, strip_state
from tersely.domain.text.terse import OPEN, TerseStream, strip_terse


class TagKinds(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The kinds of tags to strip. False if there are none."""

    terse: bool = False
    state: bool = False

    def __bool__(self) -> bool:
        """Return whether anything is to be taken out."""
        return self.terse or self.state

    def __or__(self, other: TagKinds) -> TagKinds:
        """Return the kinds that either of both strips."""
        terse, state = self.terse or other.terse, self.state or other.state
        return self if terse is self.terse and state is self.state else TagKinds(terse=terse, state=state)


NOTHING = TagKinds()

# The kinds of tags, each with the text that begins its tags or blocks.
MARKERS = ((OPEN, TagKinds(terse=True)), (HEADING, TagKinds(state=True)))


class StrippedText(msgspec.Struct, frozen=True, gc=False):
    """A text without tags, the contents of its terse tags, and its last state that is not empty."""

    shown: str
    terse: tuple[str, ...] = ()
    state: str | None = None


def strip_tags(text: str, tags: TagKinds) -> StrippedText:
    """Strip the kinds in ``tags`` from a whole text, as `TagStripper` does."""
    terse: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    if tags.terse:
        text, terse = strip_terse(text)
    if tags.state:
        text, states = strip_state(text)
    return StrippedText(text, terse, states[-1] if states else None)


class TagStripper:
    """Strips the kinds in ``tags`` from one text that arrives in pieces.

    Tags are stripped first; state blocks are searched for in the remaining text.
    """

    __slots__ = ("_state", "_terse")

    def __init__(self, tags: TagKinds) -> None:
        self._terse = TerseStream() if tags.terse else None
        self._state = StateStream() if tags.state else None

    @property
    def terse(self) -> tuple[str, ...]:
        """Return the contents of the tags found so far."""
        return self._terse.entries if self._terse else ()

    @property
    def state(self) -> str | None:
        """The last state so far that is not empty."""
        entries = self._state.entries if self._state else ()
        return entries[-1] if entries else None

    @property
    def held(self) -> str:
        """Return the text that is being held back, in its order."""
        return (self._state.held if self._state else "") + (self._terse.held if self._terse else "")

    @property
    def held_size(self) -> int:
        """Return the length of ``held``."""
        return (self._state.held_size if self._state else 0) + (len(self._terse.held) if self._terse else 0)

    def feed(self, piece: str) -> str:
        """Return the text that may be shown now."""
        if self._terse:
            piece = self._terse.feed(piece)
        return self._state.feed(piece) if self._state else piece

    def close(self) -> str:
        """The text is over: what was held back and is text after all."""
        rest = self._terse.close() if self._terse else ""
        if self._state:
            rest = self._state.feed(rest) + self._state.close()
        return rest
