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

import re

OPEN = "<terse>"
CLOSE = "</terse>"
MAX_TAG = 4000
"""Characters of the longest tag, its two marks included."""

_LINE = re.compile(r"[^\r\n]*")


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
        self._fences = _Fences()
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


class _Fences:
    """Which part of a growing Markdown text is inside a code fence. Costs next to nothing for ordinary
    lines.
    """

    __slots__ = ("_in_line", "_indent", "_info_blank", "_info_tick", "_mark", "_open", "_run")

    def __init__(self) -> None:
        self._open: tuple[str, int] | None = None
        self._start_line()

    @property
    def is_inside(self) -> bool:
        """Whether what comes next is inside a fence, or on a line that opens one as far as it has come."""
        return self._open is not None or self._opens

    def advance(self, text: str) -> None:
        """Go on by ``text``."""
        position = 0
        while position < len(text):
            line = _LINE.match(text, position)
            assert line is not None  # the pattern matches the empty string
            if line.end() > position:
                self._extend_line(line[0])
            if line.end() < len(text):
                self._end_line()
            position = line.end() + 1

    @property
    def _opens(self) -> bool:
        return self._run >= 3 and not (self._mark == "`" and self._info_tick)

    @property
    def _closes(self) -> bool:
        return self._open is not None and (
            self._mark == self._open[0] and self._run >= self._open[1] and self._info_blank
        )

    def _start_line(self) -> None:
        self._in_line = "indent"  # then "run", then "info"; "text": a line that is no fence mark
        self._indent = 0
        self._mark = ""
        self._run = 0
        self._info_blank = True
        self._info_tick = False

    def _end_line(self) -> None:
        if self._open is None:
            if self._opens:
                self._open = (self._mark, self._run)
        elif self._closes:
            self._open = None
        self._start_line()

    def _extend_line(self, piece: str) -> None:
        if self._in_line == "indent":
            piece = self._extend_indent(piece)
        if self._in_line == "run":
            piece = self._extend_run(piece)
        if self._in_line == "info":
            self._info_blank = self._info_blank and not piece.strip(" \t")
            self._info_tick = self._info_tick or "`" in piece

    def _extend_indent(self, piece: str) -> str:
        rest = piece.lstrip(" ")
        self._indent += len(piece) - len(rest)
        if self._indent > 3 or (rest and rest[0] not in "`~"):
            self._in_line = "text"
        elif rest:
            self._in_line, self._mark = "run", rest[0]
        return rest

    def _extend_run(self, piece: str) -> str:
        rest = piece.lstrip(self._mark)
        self._run += len(piece) - len(rest)
        if not rest:
            return rest
        if self._run >= 3:
            self._in_line = "info"
        else:
            self._in_line, self._run = "text", 0
        return rest
