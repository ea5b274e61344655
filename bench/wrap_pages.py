"""Wrap the prose of README and docs at 120 characters; tables, code, headings and pictures stay as they are.

``make fmt`` runs it on every page.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 120

_LEAD = re.compile(r" *(?:[-*] |\d+\. )?")
_ITEM = re.compile(r" *(?:[-*] |\d+\. )")
_FENCE = re.compile(r" *```")
_AS_IT_IS = re.compile(r" *\||#|<|!\[")


def wrap(page: str) -> str:
    """Return the page with every paragraph and list item wrapped."""
    lines: list[str] = []
    paragraph: list[str] = []
    is_code = False

    def close_paragraph() -> None:
        if paragraph:
            lines.extend(_wrap_paragraph(paragraph))
            paragraph.clear()

    for line in page.split("\n"):
        if _FENCE.match(line):
            close_paragraph()
            is_code = not is_code
            lines.append(line)
        elif is_code or not line.strip() or _AS_IT_IS.match(line):
            close_paragraph()
            lines.append(line)
        else:
            if _ITEM.match(line):
                close_paragraph()
            paragraph.append(line)
    close_paragraph()
    return "\n".join(lines)


def _wrap_paragraph(paragraph: list[str]) -> list[str]:
    found = _LEAD.match(paragraph[0])
    lead = found[0] if found else ""
    words = " ".join([paragraph[0][len(lead) :].strip(), *(line.strip() for line in paragraph[1:])])
    return textwrap.wrap(
        words,
        WIDTH,
        initial_indent=lead,
        subsequent_indent=" " * len(lead),
        break_long_words=False,
        break_on_hyphens=False,
    )


def pages() -> list[Path]:
    """Return README, docs and the pages beside README."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def main() -> None:
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (wrapped := wrap(text)) != text:
            page.write_text(wrapped, encoding="utf-8")


if __name__ == "__main__":
    main()
