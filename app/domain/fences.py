"""Markdown code fences in a text that arrives in pieces (CommonMark: three or more backticks or tildes)."""

from __future__ import annotations

import re

_LINE = re.compile(r"[^\r\n]*")


class Fences:
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
