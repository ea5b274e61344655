"""The terms by which texts are found."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tersely.domain.search.terms import MAX_TERM, STOP_WORDS, is_content_word, tokenize


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("running tests", ["run", "test"]),
        ("please go on", []),
        ("maxRetries", ["maxretries", "max", "retri"]),
        ("HTTPServer", ["httpserver", "http", "server"]),
        ("src/parser.js", ["src/parser.js", "src", "parser", "js"]),
        ("snake_case_name", ["snake_case_name", "snake", "case", "name"]),
        ("the user's file", ["user", "file"]),
        ("cafe\u0301", ["café"]),
        ("ＡＢＣ", ["abc"]),
    ],
)
def test_tokenize_gives_stems_and_whole_identifiers(text: str, terms: list[str]) -> None:
    assert tokenize(text) == terms


def test_scripts_without_blanks_give_pairs_of_characters() -> None:
    assert tokenize("数据库") == ["数据", "据库"]


@given(st.text(max_size=300))
def test_terms_of_any_text_are_bounded_and_not_empty(text: str) -> None:
    terms = tokenize(text)

    assert all(0 < len(term) <= MAX_TERM for term in terms)


@given(st.lists(st.sampled_from(["alpha", "src/parser.js", "maxRetries", "42", "the", "数据库"]), max_size=8))
def test_terms_of_a_text_are_the_terms_of_its_words(words: list[str]) -> None:
    assert tokenize(" ".join(words)) == [term for word in words for term in tokenize(word)]


def test_case_does_not_matter() -> None:
    assert tokenize("Migration ERROR") == tokenize("migration error")


@pytest.mark.parametrize(
    ("terms", "expected"), [(["file"], False), (["42", "py"], False), (["palett"], True), (["file", "test"], True)]
)
def test_one_everyday_word_is_no_content(terms: list[str], *, expected: bool) -> None:
    assert is_content_word(terms) == expected


def test_stop_words_are_lower_case_words() -> None:
    assert all(word == word.casefold() and word.isalpha() for word in STOP_WORDS)
