"""What Tersely takes out of a model's text before the client sees it: terse tags, state blocks, both or nothing."""

from __future__ import annotations

from dataclasses import dataclass

from app.domain.state import StateStream
from app.domain.terse import TerseStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Extract:
    """What is to be taken out. False where that is nothing."""

    terse: bool = False
    state: bool = False

    def __bool__(self) -> bool:
        """Whether anything is to be taken out."""
        return self.terse or self.state


NOTHING = Extract()


class Extraction:
    """Takes out what ``extract`` names of one text that arrives in pieces.

    Tags go first: a state block is looked for in what they leave.
    """

    __slots__ = ("_state", "_terse")

    def __init__(self, extract: Extract) -> None:
        self._terse = TerseStream() if extract.terse else None
        self._state = StateStream() if extract.state else None

    @property
    def terse(self) -> tuple[str, ...]:
        """The contents of the tags found so far."""
        return self._terse.entries if self._terse else ()

    @property
    def state(self) -> str | None:
        """The last state found so far that says something."""
        entries = self._state.entries if self._state else ()
        return entries[-1] if entries else None

    @property
    def held(self) -> str:
        """The text that is being held back, in its order."""
        return (self._state.held if self._state else "") + (self._terse.held if self._terse else "")

    def feed(self, piece: str) -> str:
        """What may be shown now."""
        if self._terse:
            piece = self._terse.feed(piece)
        return self._state.feed(piece) if self._state else piece

    def close(self) -> str:
        """The text is over: what was held back and is text after all."""
        rest = self._terse.close() if self._terse else ""
        if self._state:
            rest = self._state.feed(rest) + self._state.close()
        return rest
