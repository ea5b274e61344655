"""Regular expressions that every supported Python matches alike."""

from __future__ import annotations

import re
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "app"
REPEATED_GROUP = re.compile(r"\)(?:[*+?]|\{[0-9,]+\})\+")
"""A possessive repeat of a group: CPython before 3.11.5 matches it wrongly (its issue 106052)."""


def test_no_regular_expression_repeats_a_group_possessively() -> None:
    found = [
        f"{path.relative_to(SOURCES)}:{number}: {line.strip()}"
        for path in SOURCES.rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if REPEATED_GROUP.search(line)
    ]
    assert found == []


def test_search_for_possessive_repeats_finds_them() -> None:
    assert REPEATED_GROUP.search(r"(?:a|b)++")
    assert REPEATED_GROUP.search(r"(?:ab){2,}+c")
    assert not REPEATED_GROUP.search(r"(?:[^\n]*+\n)+")
