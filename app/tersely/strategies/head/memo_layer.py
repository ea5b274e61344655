"""Write the relevant memos of a user's message as a text in front of it."""

from __future__ import annotations

from collections.abc import Sequence

from tersely.domain.memos import Memo
from tersely.strategies.prompts import MEMOS_END, MEMOS_TITLE

LAYER = "memos"


def render_memos(memos: Sequence[Memo]) -> str:
    """Render one item per memo, followed by its tags; empty without memos. Equal memos give equal bytes.

    A memo's text stays inside its item: every line after the first is indented.
    """
    if not memos:
        return ""
    return "\n".join((MEMOS_TITLE, *map(_item, memos), MEMOS_END))


def memos_in(text: str) -> str:
    """Return the rendered memos at the beginning of a text; empty if there are none."""
    end = text.find(f"\n{MEMOS_END}")
    return text[: end + 1 + len(MEMOS_END)] if end >= 0 and text.startswith(MEMOS_TITLE) else ""


def _item(memo: Memo) -> str:
    tags = f" [{', '.join(memo.tags)}]" if memo.tags else ""
    return "- " + "\n  ".join(memo.content.strip().splitlines()) + tags
