"""``<terse>`` summaries in a model's text: finding them and taking them out.

The rule (reference 000, "How It Works", made exact):

- A tag is ``<terse>`` up to the first ``</terse>`` that follows, at most ``MAX_TAG`` characters in all.
  Exactly the tag is removed and nothing else, no blank and no line end: a text with a tag planted in it comes
  out as if the tag had never been there.
- What has no end, or is longer, is text.
- A tag inside a Markdown code fence (CommonMark: three or more backticks or tildes after at most three
blanks,
  closed by a line of at least as many of the same and nothing else) is text, and so is one on the line that
  opens a fence. The fences are those of the model's *full* text, tags included: a fence mark inside a removed
  tag counts, and a mark with a tag in front of it on its line is no mark.

Whether a ``<terse>`` is a tag depends only on what stands before it and on the ``MAX_TAG`` characters from
it on, so a stream never holds back more than a possible tag.
"""

from __future__ import annotations

from app.domain.fences import Fences

OPEN = "<terse>"
CLOSE = "</terse>"
MAX_TAG = 4000
"""Characters of the longest tag, its two marks included."""


def strip_terse(text: str) -> tuple[str, tuple[str, ...]]:
    """``text`` without its tags, and their contents: one line each, blanks collapsed, empty ones left out."""
    if OPEN not in text:
        return text, ()
    stream = TerseStream()
    shown = stream.feed(text) + stream.close()
    return shown, stream.entries


class TerseStream:
    """``strip_terse`` for a text that arrives in pieces; the result does not depend on where they were cut."""

    __slots__ = ("_entries", "_fences", "_held")

    def __init__(self) -> None:
        self._entries: list[str] = []
        self._fences = Fences()
        self._held = ""

    @property
    def entries(self) -> tuple[str, ...]:
        """The contents of the tags found so far."""
        return tuple(self._entries)

    @property
    def held(self) -> str:
        """The text that is being held back because it may be the beginning of a tag."""
        return self._held

    def feed(self, piece: str) -> str:
        """What may be shown now: everything but the tags and the beginning of a possible tag at the end."""
        if not self._held and "<" not in piece:
            self._fences.advance(piece)
            return piece
        text = self._held + piece
        self._held = ""
        shown: list[str] = []
        position = 0
        while (start := text.find("<", position)) >= 0:
            self._show(text[position:start], shown)
            position = self._read_bracket(text, start, shown)
            if position < 0:
                self._held = text[start:]
                return "".join(shown)
        self._show(text[position:], shown)
        return "".join(shown)

    def close(self) -> str:
        """The text is over: what was held back was text after all."""
        held, self._held = self._held, ""
        self._fences.advance(held)
        return held

    def _show(self, text: str, shown: list[str]) -> None:
        if text:
            self._fences.advance(text)
            shown.append(text)

    def _read_bracket(self, text: str, start: int, shown: list[str]) -> int:
        """Deal with the ``<`` at ``start``; where to go on, or -1 when more text is needed to tell."""
        if self._fences.is_inside:
            self._show("<", shown)
            return start + 1
        if not text.startswith(OPEN, start):
            if len(text) - start < len(OPEN) and OPEN.startswith(text[start:]):
                return -1
            self._show("<", shown)
            return start + 1
        end = text.find(CLOSE, start + len(OPEN), start + MAX_TAG)
        if end >= 0:
            self._take(text[start : end + len(CLOSE)])
            return end + len(CLOSE)
        if len(text) - start < MAX_TAG:
            return -1
        self._show(OPEN, shown)
        return start + len(OPEN)

    def _take(self, tag: str) -> None:
        self._fences.advance(tag)
        entry = " ".join(tag[len(OPEN) : -len(CLOSE)].split())
        if entry:
            self._entries.append(entry)
