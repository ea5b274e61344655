"""The term index: made in pages, extended at its end."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tersely.domain.search.term_index import (
    MAX_TIMES,
    SHIFT,
    WHOLE_PAGE,
    TermIndex,
    make_page,
    merge_pages,
    read_page,
    write_page,
)

documents = st.lists(st.lists(st.sampled_from("abcde"), max_size=6), max_size=12)


def contents(index: TermIndex) -> dict[str, dict[int, int]]:
    """Term -> document -> times."""
    return {
        term: {posting >> SHIFT: posting & MAX_TIMES for posting in postings}
        for term, postings in index.postings.items()
    }


def counted(listed: list[list[str]]) -> dict[str, dict[int, int]]:
    found: dict[str, dict[int, int]] = {}
    for number, document in enumerate(listed):
        for term, times in Counter(document).items():
            found.setdefault(term, {})[number] = times
    return found


@given(documents, st.integers(0, 12), st.integers(0, 12))
def test_pages_that_overlap_give_the_same_index_as_one_page(listed: list[list[str]], end: int, start: int) -> None:
    """A page that was made while documents were added holds some of them again."""
    first = make_page(0, listed[:end])
    start = min(start, end, len(listed))
    index = TermIndex()
    index.add(first)
    index.add(make_page(start, listed[start:]))

    assert contents(index) == counted(listed)
    assert list(index.lengths) == [len(document) for document in listed]


@given(documents, st.lists(st.integers(0, 12)))
def test_merged_pages_are_the_page_of_all_their_documents(listed: list[list[str]], at: list[int]) -> None:
    bounds = [0, *sorted(min(each, len(listed)) for each in at), len(listed)]
    pages = [make_page(first, listed[first:last]) for first, last in pairwise(bounds)]

    assert merge_pages(pages) == make_page(0, listed)


@given(documents, documents, st.sampled_from("abcde"))
def test_postings_that_were_read_grow_with_later_pages(
    listed: list[list[str]], later: list[list[str]], term: str
) -> None:
    index = TermIndex()
    index.add(make_page(0, listed))
    index.postings.get(term)
    index.add(make_page(len(listed), later))

    assert contents(index) == counted([*listed, *later])


@given(st.lists(st.sampled_from([1, 5, WHOLE_PAGE, WHOLE_PAGE + 3]), max_size=5))
def test_small_and_whole_pages_keep_the_order_of_their_documents(sizes: list[int]) -> None:
    listed = [["a", *"bcde"[: number % 5]] for number in range(sum(sizes))]
    index = TermIndex()
    for size in sizes:
        first = len(index.lengths)
        index.add(make_page(first, listed[first : first + size]))

    assert contents(index) == counted(listed)
    assert set(index.postings) == set(counted(listed))
    for term in index.postings:
        numbers = [posting >> SHIFT for posting in index.postings[term]]
        assert numbers == sorted(counted(listed)[term])


@given(documents)
def test_index_page_round_trips(listed: list[list[str]]) -> None:
    page = make_page(3, listed)

    assert read_page(write_page(page)) == page


def test_read_page_refuses_anything_else() -> None:
    with pytest.raises(msgspec.DecodeError):
        read_page(b"\x00page")


def test_add_refuses_a_gap() -> None:
    with pytest.raises(ValueError, match="document 0 is missing before 2"):
        TermIndex().add(make_page(2, [["a"]]))


def test_an_index_of_some_terms_keeps_their_postings_alone() -> None:
    index = TermIndex(only=frozenset("a"))
    index.add(make_page(0, [["a", "b"], ["b"]]))

    assert (contents(index), list(index.lengths), index.is_whole) == ({"a": {0: 1}}, [2, 1], False)


def test_a_term_counts_up_to_a_limit() -> None:
    index = TermIndex()
    index.add(make_page(0, [["a"] * 1_000]))

    assert contents(index) == {"a": {0: MAX_TIMES}}
