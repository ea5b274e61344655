"""Markdown code in a text that arrives in pieces (CommonMark): fences of backticks or tildes, and code spans."""

from __future__ import annotations

import re
from bisect import bisect_left

_LINE = re.compile(r"[^\r\n]*")
_RUN = re.compile(r"`+")
_BLANK = " \t"
# A line that may open or close a fence: the run of marks, and the rest.
_MARKED = re.compile(r"(?<=[\r\n]) {0,3}(?:(```+)|~~~+)([^\r\n]*)")
# A run of backticks, or anything else.
_SPAN_PIECE = re.compile(r"`+|[^`]+")


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
        """Process ``text``. Between its first and last line only possible fence marks are parsed. O(length)."""
        first = _LINE.match(text)
        assert first is not None  # the pattern matches the empty string
        if first.end():
            self._extend_line(first[0])
        if first.end() == len(text):
            return
        self._end_line()
        last = max(text.rfind("\n"), text.rfind("\r")) + 1
        for marked in _MARKED.finditer(text, first.end(), last):
            self._read_marked_line(marked[1], marked[0], marked[2])
        if last < len(text):
            self._extend_line(text[last:])

    def _read_marked_line(self, ticks: str | None, line: str, info: str) -> None:
        """Process a complete line that begins with a fence mark."""
        if self._open is None:
            if ticks is None or "`" not in info:
                mark = line.lstrip(" ")[: -len(info) or None]
                self._open = (mark[0], len(mark))
        elif self._open[0] == ("`" if ticks else "~") and not info.strip(_BLANK):
            run = len(line.lstrip(" ")) - len(info)
            if run >= self._open[1]:
                self._open = None

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
            self._info_blank = self._info_blank and not piece.strip(_BLANK)
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
        line = max(text.rfind("\n"), text.rfind("\r")) + 1
        if line:  # a span ends on its line
            self._pending.clear()
            self._run = 0
        for piece in _SPAN_PIECE.findall(text, line):
            if piece[0] == "`":
                self._run += len(piece)
            else:
                self._end_run()

    def is_code(self, runs: LineRuns, start: int, end: int, *, is_end: bool) -> bool | None:
        """Return whether an open span closes on this line, in ``runs.text[start:end]``, which comes next.

        None: unknown until more text arrives. ``is_end``: ignore the text after ``end``.
        """
        self._end_run()
        if not self._pending:
            return False
        line_end = min(runs.line_end(start), end)
        is_line_whole = is_end or line_end < min(end, len(runs.text))
        if runs.has_run(self._pending, start, line_end, is_end=is_line_whole):
            return True
        return False if is_line_whole else None

    def _end_run(self) -> None:
        if self._run in self._pending:
            del self._pending[self._pending.index(self._run) :]
        elif self._run:
            self._pending.append(self._run)
        self._run = 0


class LineRuns:
    """The runs of backticks on a line of ``text``, read once for all questions about the line. The lines are asked for
    in their order.
    """

    __slots__ = ("_begin", "_end", "_ends", "_starts", "_starts_by_length", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._begin = self._end = -1

    def line_end(self, position: int) -> int:
        """Return where the line of ``position`` ends, which is not inside a run."""
        if not self._begin <= position <= self._end:
            line = _LINE.match(self.text, position)
            assert line is not None  # the pattern matches the empty string
            self._begin, self._end = position, line.end()
            runs = [run.span() for run in _RUN.finditer(self.text, position, line.end())]
            self._starts = [start for start, _ in runs]
            self._ends = [end for _, end in runs]
            self._starts_by_length: dict[int, list[int]] = {}
            for start, end in runs:
                self._starts_by_length.setdefault(end - start, []).append(start)
        return self._end

    def has_run(self, lengths: list[int], start: int, end: int, *, is_end: bool) -> bool:
        """Return whether a run of one of these lengths stands in ``text[start:end]``, on the line read last.

        ``is_end``: no text follows. Else a run that reaches ``end`` may become longer.
        """
        most = end if is_end else end - 1
        for length in lengths:
            starts = self._starts_by_length.get(length, [])
            index = bisect_left(starts, start)
            if index < len(starts) and starts[index] + length <= most:
                return True
        index = bisect_left(self._starts, end) - 1
        if not is_end or index < 0 or self._starts[index] < start:
            return False
        # What `end` cuts off does not count.
        return min(self._ends[index], end) - self._starts[index] in lengths
