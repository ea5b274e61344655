"""``### STATE`` blocks in a model's text: finding them and taking them out.

The rule (reference 002, "Self-Managed State Tracking", made exact):

- A block begins with a line that is ``### STATE``, blanks at its end aside, and goes on to the next Markdown heading
  of level 1 to 3 (one to three ``#`` after at most three blanks, then a blank or the line's end) or to the end of the
  text. A second ``### STATE`` is such a heading: it ends one block and begins another.
- The line ends right in front of a block, with the blanks between them, go with it, so that a reply with a block at its
  end comes out as if the block had never been there. Where a heading follows, the line ends in front of that stay.
- What has not ended within ``MAX_BLOCK`` characters, the line ends in front included, is text.
- A line inside a Markdown code fence (`tersely.domain.text.code_fences`) is neither a block's beginning nor a heading.
The fences
  are those of the full text, blocks included.
- Of several blocks the last one is the state. An empty one is taken out and is none.

Whether a line begins a block depends only on what stands before it and on the ``MAX_BLOCK`` characters from the
block's beginning on, so a stream never holds back more than a possible block.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from tersely.domain.text.code_fences import Fences

HEADING = "### STATE"
MAX_BLOCK = 16_000
"""Characters of the longest block."""

# Who wrote a state: the model at the end of a reply, a client over REST, or the summarizer from the history.
StateSource = Literal["model", "client", "rebuilt"]

_PIECE = re.compile(r"[^\r\n]+|[\r\n]+")
_HEADING = re.compile(r" {0,3}#{1,3}(?:[ \t]|\Z)")
_MAY_BE_HEADING = re.compile(r" {0,3}#{0,3}\Z")
_OWN_HEADING = re.compile(rf"{HEADING}[ \t]*(?:[\r\n]|\Z)")
_EMPTY_LINES = re.compile(r"\A(?:[ \t]*[\r\n])+")
_BEGINNING = "".join(f"(?:\\Z|{re.escape(character)}" for character in HEADING) + ")" * len(HEADING)
# Blanks and line ends that may be hidden: in front of a line that may become our heading, or at the end of the text so
# far.
_BEFORE_BLOCK = re.compile(rf"[ \t\r\n]++(?:\Z|(?<=[\r\n]){_BEGINNING}[ \t]*+(?:[\r\n]|\Z))")
_NEXT_BEFORE_BLOCK = re.compile(r"(?<![ \t\r\n])" + _BEFORE_BLOCK.pattern)
_BLOCK_AHEAD = re.compile(rf"[ \t\r\n]*+(?:\Z|(?<![ \t]){_BEGINNING}[ \t]*+(?:[\r\n]|\Z))")
# Complete lines that are read at once: empty ones, those of a block that do not end it, and those inside a fence.
_BLANK_LINES = re.compile(r"(?:[ \t]*+[\r\n]++)+")
_BLOCK_LINES = re.compile(r"(?:(?! {0,3}#{1,3}[ \t\r\n])[^\r\n]*+[\r\n]++)+")
_FENCED_LINES = re.compile(r"(?:(?! {0,3}(?:```|~~~))[^\r\n]*+[\r\n]++)+")
_BLANK = " \t"
_WHITE = " \t\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBlock:
    """A stored state: its text without the heading, and the message that carried it.

    ``seq`` is 0 for a state that was written before the first message.
    """

    text: str
    seq: int
    source: StateSource
    created_at: datetime


def strip_state(text: str) -> tuple[str, tuple[str, ...]]:
    """Return ``text`` without its blocks, and their contents without the heading; the last one is the state."""
    if HEADING not in text:
        return text, ()
    stream = StateStream()
    shown = stream.feed(text) + stream.close()
    return shown, stream.entries


def state_text(text: str) -> str:
    """Return the text of a state without its heading and without empty lines around it."""
    text = _without_empty_lines(text)
    heading = _OWN_HEADING.match(text)
    return _without_empty_lines(text[heading.end() :]) if heading else text


def _without_empty_lines(text: str) -> str:
    return _EMPTY_LINES.sub("", text, count=1).rstrip(_WHITE)


class StateStream:
    """``strip_state`` for a text that arrives in pieces; the result does not depend on where they were cut."""

    __slots__ = ("_entries", "_fences", "_held", "_held_size", "_is_line_start", "_line", "_where")

    def __init__(self) -> None:
        self._entries: list[str] = []
        self._fences = Fences()
        # In pieces: a text that is extended again and again is copied each time.
        self._held: list[str] = []
        self._held_size = 0
        self._is_line_start = True
        # text: in a visible line; edge: at a line's start, or in a possible start of a block; block: in a block, which
        # is held back.
        self._where: Literal["text", "edge", "block"] = "edge"
        # The line so far, while it may be `### STATE` or, in a block, any heading.
        self._line: str | None = ""

    @property
    def entries(self) -> tuple[str, ...]:
        """Return the contents of the blocks found so far, empty ones left out."""
        return tuple(self._entries)

    @property
    def held(self) -> str:
        """The text that is held back because it may be the beginning of a block."""
        return "".join(self._held)

    @property
    def held_size(self) -> int:
        """The length of ``held``."""
        return self._held_size

    def feed(self, piece: str) -> str:
        """Return the text that may be shown now: all but the blocks and the beginning of a possible block at the end.

        O(length).
        """
        shown: list[str] = []
        position = 0
        while position < len(piece):
            if self._where == "edge" and self._is_line_start and not _BLOCK_AHEAD.match(piece, position):
                self._release(shown)
            if self._where == "text" and not _BEFORE_BLOCK.match(piece, position):
                stop = _NEXT_BEFORE_BLOCK.search(piece, position)
                plain = piece[position : stop.start() if stop else len(piece)]
                self._fences.advance(plain)
                shown.append(plain)
                position += len(plain)
                continue
            limit = position + MAX_BLOCK - self._held_size
            lines = self._complete_lines()
            match = lines.match(piece, position, limit) if lines else None
            if match:
                self._hold_lines(match[0])
            else:
                match = _PIECE.match(piece, position, limit)
                assert match is not None  # every character is matched by one of the two alternatives
                self._read(match[0], shown)
            position = match.end()
            self._is_line_start = piece[position - 1] in "\r\n"
            if self._held_size == MAX_BLOCK:
                self._release(shown)
                if self._is_line_start and not self._fences.is_inside:
                    self._where, self._line = "edge", ""
        return "".join(shown)

    def close(self) -> str:
        """The text is over: what was held back was a block, or text after all."""
        if self._where == "block" and self._line and _HEADING.match(self._line):
            self._end_block(self._line)
        is_block = self._where == "block" or (self._line or "").rstrip(_BLANK) == HEADING
        held = self._take_held()
        self._where, self._line = "text", None
        if not is_block:
            return held
        self._take(held)
        return ""

    def _complete_lines(self) -> re.Pattern[str] | None:
        """Return a pattern of lines that follow and neither end nor begin a block."""
        if not (self._is_line_start and self._held):
            return None
        if self._where == "edge":
            return _BLANK_LINES
        return _FENCED_LINES if self._fences.is_inside else _BLOCK_LINES

    def _hold_lines(self, lines: str) -> None:
        self._fences.advance(lines)
        self._hold(lines)
        if self._where == "block":
            self._line = None if self._fences.is_inside else ""

    def _hold(self, text: str) -> None:
        self._held.append(text)
        self._held_size += len(text)

    def _take_held(self) -> str:
        held = "".join(self._held)
        self._held, self._held_size = [], 0
        return held

    def _read(self, piece: str, shown: list[str]) -> None:
        """Go on by a piece of one line, or by line ends."""
        if piece[0] in "\r\n":
            self._end_line(piece, shown)
        else:
            self._extend_line(piece, shown)

    def _end_line(self, ends: str, shown: list[str]) -> None:
        if self._where == "block" and self._line and _HEADING.match(self._line):
            self._end_block(self._line)
        if self._where == "edge" and self._line and self._line.strip(_BLANK):
            if self._line.rstrip(_BLANK) == HEADING:
                self._where = "block"
            else:
                self._release(shown)
        self._fences.advance(ends)
        is_inside = self._fences.is_inside
        if self._where == "text" and not is_inside:
            self._where = "edge"
        if self._where == "text":
            shown.append(ends)
        else:
            self._hold(ends)
        self._line = None if is_inside else ""

    def _extend_line(self, piece: str, shown: list[str]) -> None:
        self._fences.advance(piece)
        if self._where == "text":
            shown.append(piece)
            return
        is_first = not self._held
        self._hold(piece)
        if self._line is None:
            return
        self._line += piece
        if self._where == "block" and not _MAY_BE_HEADING.match(self._line):
            if _HEADING.match(self._line):
                self._end_block(self._line)
            else:
                self._line = None
        if self._where == "edge" and not _may_be_ours(self._line or "", is_first=is_first):
            self._release(shown)

    def _end_block(self, line: str) -> None:
        """The block is over with the beginning of ``line``, a heading."""
        block = self._take_held().removesuffix(line)
        body = block.rstrip(_WHITE)
        self._take(body)
        self._hold(block[len(body) :].lstrip(_BLANK) + line)
        self._where = "edge"

    def _take(self, block: str) -> None:
        if entry := state_text(block):
            self._entries.append(entry)

    def _release(self, shown: list[str]) -> None:
        shown.append(self._take_held())
        self._where, self._line = "text", None


def _may_be_ours(line: str, *, is_first: bool) -> bool:
    """Return whether ``line`` may become the heading of a block, or an empty line in front of one."""
    if line.startswith(HEADING):
        return not line[len(HEADING) :].strip(_BLANK)
    return HEADING.startswith(line) or (not is_first and not line.strip(_BLANK))
