"""Questions of a conversation that have failed: their call ended, and no reply stands behind them."""

from __future__ import annotations

import pytest

from tersely.domain.history.failed_requests import failed_links, links_without_reply
from tests.builders import stored_links


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("qa", []),
        ("qaqa", []),
        ("qatta", []),  # results of two tools are one request
        ("qaq", [3]),
        ("qaqqa", [3, 4]),
        ("qaqqaq", [3, 4, 6]),
    ],
)
def test_questions_at_the_end_or_before_another_may_be_without_a_reply(kinds: str, expected: list[int]) -> None:
    assert links_without_reply(stored_links(kinds)) == expected


def test_a_call_under_way_has_not_failed() -> None:
    assert failed_links(stored_links("qaq"), set()) == frozenset()


def test_a_question_whose_call_ended_without_a_reply_has_failed() -> None:
    assert failed_links(stored_links("qaq"), {3}) == {3}


def test_a_failed_question_behind_one_that_is_under_way_fails_alone() -> None:
    assert failed_links(stored_links("qaqq", follows={4: 2}), {4}) == {4}


def test_a_failed_question_before_one_that_was_answered_fails_alone() -> None:
    assert failed_links(stored_links("qaqqa", follows={4: 2}), {3, 4}) == {3}


def test_all_messages_of_a_failed_request_have_failed() -> None:
    assert failed_links(stored_links("qaqq"), {4}) == {3, 4}


def test_a_request_of_two_messages_that_was_answered_has_not_failed() -> None:
    assert failed_links(stored_links("qaqqa"), {4}) == frozenset()


def test_what_a_failed_request_brought_of_the_assistant_has_failed_too() -> None:
    assert links_without_reply(stored_links("qaqit")) == [3, 4, 5]
    assert failed_links(stored_links("qaqit"), {5}) == {3, 4, 5}
    assert failed_links(stored_links("qaiqa"), {4}) == frozenset()
