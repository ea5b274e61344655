"""The pages that people read, taken apart: links, headings, code blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# README first: the commands of the other pages go on from the session that it makes.
PAGES = (
    ROOT / "README.md",
    *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
)
NAMES = tuple(str(page.relative_to(ROOT)) for page in PAGES)

_FENCE = re.compile(r"^( {0,3})```([^\n`]*)\n(.*?)^\1```[ \t]*$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<!\\)\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(([^()\s]+)(?:\s+\"[^\"]*\")?\)")
_IMAGE = re.compile(r"<(?:img|source)[^>]*?(?:src|srcset)=\"([^\"]+)\"")
_HEADING = re.compile(r"^#{1,6} (.+?) *#*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of ``page``, which begins at ``line``."""

    page: str
    line: int
    language: str
    code: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


@cache
def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def prose(name: str) -> str:
    """Return a page without its fenced blocks."""
    return _FENCE.sub("", read(name))


def blocks(name: str) -> list[Block]:
    """Return the fenced blocks of a page."""
    text = read(name)
    return [
        Block(name, text.count("\n", 0, found.start()) + 1, found[2].strip(), found[3])
        for found in _FENCE.finditer(text)
    ]


def links(name: str) -> list[str]:
    """Return the targets of a page's links and pictures."""
    text = prose(name)
    return [*_LINK.findall(re.sub(r"`[^`\n]*`", "`code`", text)), *_IMAGE.findall(text)]


def anchors(name: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in _HEADING.findall(prose(name)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        number = 0
        while (anchor if not number else f"{anchor}-{number}") in found:
            number += 1
        found.add(anchor if not number else f"{anchor}-{number}")
    return found
