"""Technical anchors of texts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tersely.strategies.summaries.anchors import find_anchors, strip_markup


@pytest.mark.parametrize(
    ("text", "anchors"),
    [
        ("the service listens on port 8484", ["port 8484"]),
        ("port=0 and port 70000 are none", []),
        ("10.0.0.1:5432 and localhost:8080", ["10.0.0.1:5432", "localhost:8080"]),
        ("version 1.2.3.4 is an address, 999.1.1.1 is none", ["1.2.3.4"]),
        ("MAX_RETRIES = 3, later MAX_RETRIES=5.", ["MAX_RETRIES=5"]),
        ("maxRetries = 3 in lower case", []),
        ("8484 alone says nothing", []),
    ],
)
def test_find_anchors(text: str, anchors: list[str]) -> None:
    assert find_anchors([text]) == anchors


def test_the_last_value_of_a_constant_counts_over_several_texts() -> None:
    assert find_anchors(["LIMIT=1", "port 80", "LIMIT=2", "port 80"]) == ["LIMIT=2", "port 80"]


def test_strip_markup_takes_tags_comments_and_references() -> None:
    assert strip_markup("<p class='a'>1 &lt; 2<!-- no --></p>").split() == ["1", "2"]
    assert strip_markup("a < b and c > d") == "a < b and c > d"


@given(st.text(alphabet="<>&;!-ab =", max_size=200))
def test_strip_markup_never_makes_a_text_longer(text: str) -> None:
    assert len(strip_markup(text)) <= len(text)
