"""Markdown code in a text that arrives in pieces (CommonMark): fences of backticks or tildes, and code spans."""

from __future__ import annotations

import re

_LINE = re.compile(r"[^\r\n]*")
_RUN = re.compile(r"`+")
# The end of a line before a line that begins like a fence mark.
_MARKED = re.compile(r"[\r\n](?= {0,3}[`~])")
# A run of backticks, line ends, or anything else.
_SPAN_PIECE = re.compile(r"`+|[\r\n]+|[^`\r\n]+")


class Fences:
    """Tracks which part of a growing Markdown text is inside a code fence. Ordinary lines cost almost nothing."""

    __slots__ = ("_in_line", "_indent", "_info_blank", "_info_tick", "_mark", "_open", "_run")

    def __init__(self) -> None:
        self._open: tuple[str, int] | None = None
        self._start_line()

    @property
    def is_inside(self) -> bool:
        """Return whether the next character is inside a fence, or on the incomplete line that opens one."""
        return self._open is not None or self._opens

    def advance(self, text: str) -> None:
        """Process ``text``. Between its first and last line only possible fence marks are parsed."""
        position = 0
        last = max(text.rfind("\n"), text.rfind("\r")) + 1
        while position < len(text):
            line = _LINE.match(text, position)
            assert line is not None  # the pattern matches the empty string
            end = line.end()
            if end > position:
                self._extend_line(line[0])
            if end == len(text):
                return
            self._end_line()
            marked = _MARKED.search(text, end, last)
            position = marked.end() if marked else last

    @property
    def is_at_closing_mark(self) -> bool:
        """Return whether the line so far closes the open fence, if it ends here."""
        return self._closes

    def close_fence(self) -> None:
        """End the open fence at its closing mark, whatever follows on the line."""
        self._open = None
        self._in_line, self._run = "text", 0

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


class CodeSpans:
    """Backtick runs of the current line that may begin a code span.

    A span that begins and ends on one line is code (CommonMark). A span over several lines is not recognised: a stray
    backtick then changes the reading of its own line alone.
    """

    __slots__ = ("_pending", "_run")

    def __init__(self) -> None:
        # Lengths of the runs that are still open, in order, and the run at the end of the text.
        self._pending: list[int] = []
        self._run = 0

    def advance(self, text: str) -> None:
        """Process ``text``, which continues the text so far."""
        if not (self._pending or self._run or "`" in text):
            return
        for piece in _SPAN_PIECE.findall(text):
            if piece[0] == "`":
                self._run += len(piece)
                continue
            self._end_run()
            if piece[0] in "\r\n":
                self._pending.clear()

    def is_code(self, text: str, start: int, end: int, *, is_end: bool) -> bool | None:
        """Return whether an open span closes on this line, in ``text[start:end]``, which comes next.

        None: unknown until more text arrives. ``is_end``: ignore the text after ``end``.
        """
        self._end_run()
        if not self._pending:
            return False
        line = _LINE.match(text, start, end)
        assert line is not None  # the pattern matches the empty string
        is_line_whole = is_end or line.end() < min(end, len(text))
        for run in _RUN.finditer(text, start, line.end()):
            if len(run[0]) in self._pending and (is_line_whole or run.end() < line.end()):
                return True
        return False if is_line_whole else None

    def _end_run(self) -> None:
        if self._run in self._pending:
            del self._pending[self._pending.index(self._run) :]
        elif self._run:
            self._pending.append(self._run)
        self._run = 0
