"""Cuts that tear nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tersely.domain.text.clipping import count_bytes, ends, head, head_bytes, tail

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
texts = st.text(st.sampled_from("ab\n\r\u0301\u200d\U0001f468\U0001f3fd\ud83d\ude00é"), max_size=60) | st.text(
    st.characters(), max_size=60
)


@pytest.mark.parametrize(
    ("text", "chars", "first", "last"),
    [
        ("abcdef", 3, "abc", "def"),
        ("ae\u0301b", 2, "a", "b"),
        (f"a{FAMILY}b", 3, "a", "b"),
        ("a\U0001f44d\U0001f3fdb", 2, "a", "b"),
        ("a\r\nb", 2, "a", "b"),
        ("a\ud83d\ude00b", 2, "a", "b"),
        ("\u0301" * 90, 40, "\u0301" * 40, "\u0301" * 40),
        ("abc", 0, "", ""),
        ("abc", 5, "abc", "abc"),
    ],
)
def test_joined_characters_are_kept_or_cut_together(text: str, chars: int, first: str, last: str) -> None:
    assert head(text, chars) == first
    assert tail(text, chars) == last


@given(texts, st.integers(0, 70))
def test_cuts_are_ends_of_the_text_within_the_limit(text: str, limit: int) -> None:
    assert text.startswith(head(text, limit))
    assert text.endswith(tail(text, limit))
    assert max(len(head(text, limit)), len(tail(text, limit)), len(ends(text, limit, "<..>"))) <= limit
    cut = head_bytes(text, limit)
    assert text.startswith(cut)
    assert count_bytes(cut) <= limit
    assert cut == text or count_bytes(text) > limit


def test_ends_keep_both_around_the_marker() -> None:
    assert ends("abcdefghij", 9, "...") == "abc...hij"
    assert ends("abcdefghij", 2, "...") == "ab"
    assert ends("abc", 3, "...") == "abc"


def test_bytes_are_cut_between_characters() -> None:
    assert head_bytes("aéé", 4) == "aé"
    assert head_bytes("a\ud800b", 3) == "a"
