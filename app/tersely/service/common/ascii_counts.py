"""Counting the tokens of short ASCII texts by the pieces that a vocabulary splits them into.

The encoder looks each piece up among 200,000 tokens, which other work has displaced from the processor's caches since
the last call: beside other calls it takes twice as long as this. A conversation has few different pieces.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Final

from tiktoken import Encoding

from tersely.service.common.vocabulary import EncodingName, load_encoding

# The pieces whose counts are remembered, and the characters of the longest: together some 5 MB.
PIECES: Final = 32_768
LONGEST: Final = 32
# What the classes of characters in the patterns of vocabularies have of ASCII.
_ASCII: Final = {"L": "A-Za-z", "Lu": "A-Z", "Ll": "a-z", "Lt": "", "Lm": "", "Lo": "", "M": "", "N": "0-9"}
_CLASS: Final = re.compile(r"\\p\{(\w+)\}")
_SET: Final = re.compile(r"\[[^\]]*\]|\\p\{\w+\}")


class AsciiCounter:
    """Counts the tokens of ASCII texts in one vocabulary."""

    def __init__(self, encoding: Encoding) -> None:
        self._split = ascii_pattern(encoding._pat_str).findall  # noqa: SLF001  # it is nowhere else
        self._count = _PieceCounts(encoding).__getitem__

    def count(self, text: str) -> int:
        """Return the tokens of an ASCII text. Meant for short ones: a long piece is encoded at each call."""
        return sum(map(self._count, self._split(text)))


class _PieceCounts(dict[str, int]):
    """Tokens by piece."""

    def __init__(self, encoding: Encoding) -> None:
        super().__init__()
        self._encoding = encoding

    def __missing__(self, piece: str) -> int:
        found = len(self._encoding.encode_ordinary(piece))
        if len(piece) <= LONGEST:
            if len(self) >= PIECES:
                self.clear()
            self[piece] = found
        return found


def ascii_pattern(pattern: str) -> re.Pattern[str]:
    """Return the pattern of a vocabulary as it matches in ASCII texts. Raises `KeyError` for an unknown class."""

    def in_ascii(found: re.Match[str]) -> str:
        characters = _CLASS.sub(lambda each: _ASCII[each[1]], found[0])
        return characters if found[0].startswith("[") else f"[{characters}]"

    return re.compile(_SET.sub(in_ascii, pattern), re.ASCII)


@cache
def ascii_counter(name: EncodingName) -> AsciiCounter:
    """Return the counter of a vocabulary."""
    return AsciiCounter(load_encoding(name))
