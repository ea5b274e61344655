"""``<terse>`` summaries in a model's text: finding them and taking them out.

The rule (reference 000, "How It Works", made exact):

- A tag is ``<terse>`` up to the first ``</terse>`` that follows, at most ``MAX_TAG`` characters in all.
  Exactly the tag is removed and nothing else, no blank and no line end: a text with a tag planted in it comes
  out as if the tag had never been there.
- What has no end, or is longer, is text.
- A tag inside a Markdown code fence (CommonMark: three or more backticks or tildes after at most three
  blanks, closed by a line of at least as many of the same and nothing else) is text, and so is one on the line that
  opens a fence. The fences are those of the model's *full* text, tags included: a fence mark inside a removed
  tag counts, and a mark with a tag in front of it on its line is no mark.
- A tag directly behind the mark that closes a fence (blanks aside) is a tag, and the fence ends at that mark.
- A ``<terse>`` inside a code span is text. A span is code where it begins and ends on the line of the ``<terse>``,
  and ends within ``MAX_TAG`` characters.

Whether a ``<terse>`` is a tag depends only on what stands before it and on the ``MAX_TAG`` characters from
it on, so a stream never holds back more than these.
"""

from __future__ import annotations

import re

from tersely.domain.text.code_fences import CodeSpans, Fences, LineRuns

OPEN = "<terse>"
CLOSE = "</terse>"
MAX_TAG = 4000
"""Characters of the longest tag, its two marks included."""
_OPEN_TO_CLOSE = re.compile(f"{OPEN}(.{{0,{MAX_TAG - len(OPEN) - len(CLOSE)}}}?){CLOSE}", re.DOTALL)
_MAX_TRIED = 8
"""Beginnings of tags in a text that is searched for whole tags: each may be compared with `MAX_TAG` characters."""
_OPEN = re.compile(OPEN[0] + "".join(f"(?:\\Z|{character}" for character in OPEN[1:]) + ")" * (len(OPEN) - 1))


def strip_terse(text: str) -> tuple[str, tuple[str, ...]]:
    """Return ``text`` without its tags, and their contents: one line each, blanks collapsed, empty ones left out."""
    if OPEN not in text:
        return text, ()
    if "`" not in text and "~~~" not in text and text.count(OPEN) <= _MAX_TRIED:  # there is no code in it
        entries = [" ".join(tag.split()) for tag in _OPEN_TO_CLOSE.findall(text)]
        return _OPEN_TO_CLOSE.sub("", text), tuple(filter(None, entries))
    stream = TerseStream()
    shown = stream.feed(text) + stream.close()
    return shown, stream.entries


class TerseStream:
    """``strip_terse`` for a text that arrives in pieces; the result does not depend on where they were cut."""

    __slots__ = ("_entries", "_fences", "_held", "_spans")

    def __init__(self) -> None:
        self._entries: list[str] = []
        self._fences = Fences()
        self._spans = CodeSpans()
        self._held = ""

    @property
    def entries(self) -> tuple[str, ...]:
        """Return the contents of the tags found so far."""
        return tuple(self._entries)

    @property
    def held(self) -> str:
        """The text that is held back because it may be the beginning of a tag."""
        return self._held

    def feed(self, piece: str) -> str:
        """Return the text that may be shown now: everything but tags and a possible tag's beginning at the end."""
        held = self._held
        if not held and "<" not in piece:
            self._advance(piece)
            return piece
        if held.startswith(OPEN) and self._is_inside(held, piece):
            self._held = held + piece
            return ""
        return self._read(held + piece, is_end=False)

    @staticmethod
    def _is_inside(held: str, piece: str) -> bool:
        """Return whether the tag that has begun in ``held`` goes on behind ``piece``: neither it nor a code span can
        end there.
        """
        if ">" in piece or "`" in piece or held[-1] == "`" or CLOSE in held:
            return False
        return len(held) + len(piece) < MAX_TAG

    def close(self) -> str:
        """The text is over: what was held back is a tag, or text after all."""
        return self._read(self._held, is_end=True)

    def _read(self, text: str, *, is_end: bool) -> str:
        self._held = ""
        shown: list[str] = []
        position = 0
        runs, close = LineRuns(text), text.find(CLOSE)
        while found := _OPEN.search(text, position):
            start = found.start()
            self._show(text[position:start], shown)
            if found.end() - start < len(OPEN):  # the text's end
                if is_end or (self._fences.is_inside and not self._fences.is_at_closing_mark):
                    position = start
                    break
                self._held = text[start:]
                return "".join(shown)
            # Searched for once, however many tags begin in front of it.
            if 0 <= close < start:
                close = text.find(CLOSE, start)
            position = self._read_open(runs, start, close, shown, is_end=is_end)
            if position < 0:
                self._held = text[start:]
                return "".join(shown)
        self._show(text[position:], shown)
        return "".join(shown)

    def _show(self, text: str, shown: list[str]) -> None:
        if text:
            self._advance(text)
            shown.append(text)

    def _advance(self, text: str) -> None:
        self._fences.advance(text)
        self._spans.advance(text)

    def _read_open(self, runs: LineRuns, start: int, close: int, shown: list[str], *, is_end: bool) -> int:
        """Deal with the ``<terse>`` at ``start``; where to go on, or -1 when more text is needed to tell.

        ``close``: where the next ``</terse>`` is; -1: there is none.
        """
        text = runs.text
        body, limit = start + len(OPEN), start + MAX_TAG
        is_behind_fence = self._fences.is_at_closing_mark
        if self._fences.is_inside and not is_behind_fence:
            self._show(OPEN, shown)
            return body
        is_all = is_end or len(text) >= limit
        is_code = False if is_behind_fence else self._spans.is_code(runs, body, limit, is_end=is_all)
        end = close + len(CLOSE) if 0 <= close <= limit - len(CLOSE) else -1
        if is_code is None or (not is_code and end < 0 and not is_all):
            return -1
        if is_code or end < 0:
            self._show(OPEN, shown)
            return body
        if is_behind_fence:
            self._fences.close_fence()
        self._take(text[start:end])
        return end

    def _take(self, tag: str) -> None:
        self._advance(tag)
        entry = " ".join(tag[len(OPEN) : -len(CLOSE)].split())
        if entry:
            self._entries.append(entry)
