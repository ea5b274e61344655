"""Links of a conversation beside those of branches out of it."""

from __future__ import annotations

import pytest

from tersely.domain.history.conversations import links_in_conversation
from tests.builders import stored_links


@pytest.mark.parametrize(
    ("kinds", "superseded", "failed", "expected"),
    [
        ("", (), (), []),
        ("qaqa", (), (), [1, 2, 3, 4]),
        ("qaqb", (), (), [1, 2]),
        ("qaqbtbq", (), (), [1, 2, 7]),  # the last question may belong to a call under way
        ("qaqiqb", (), (), [1, 2]),  # a reply that the client sent belongs to the request
        ("qaqbqa", (3, 4), (), [1, 2, 5, 6]),
        ("qaqq", (), (3,), [1, 2, 4]),
    ],
)
def test_links_of_a_conversation(
    kinds: str, superseded: tuple[int, ...], failed: tuple[int, ...], expected: list[int]
) -> None:
    stored = stored_links(kinds, superseded=superseded)
    outside = {seq for seq, kind in enumerate(kinds, start=1) if kind == "b"}
    assert sorted(links_in_conversation(stored, failed=failed, outside=outside)) == expected
