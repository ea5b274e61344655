"""Which questions of a conversation have failed: their call ended, and no reply stands behind them."""

from __future__ import annotations

import pytest

from tersely.domain.history.failed_requests import failed_links, links_without_reply
from tersely.domain.history.links import StoredLink
from tersely.domain.messages import Role

ROLES: dict[str, Role] = {"q": "user", "t": "tool", "a": "assistant"}


def rows(*kinds: str, follows: dict[int, int] | None = None) -> list[StoredLink]:
    """Messages in order; each follows the one before, but for those that ``follows`` names."""
    return [
        StoredLink(
            seq=seq,
            position=float(seq),
            turn=seq,
            tokens=1,
            role=ROLES[kind],
            status="live",
            digest=str(seq).encode(),
            relayed=kind == "a",
            call=0,
            follows=(follows or {}).get(seq, seq - 1),
        )
        for seq, kind in enumerate(kinds, start=1)
    ]


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
    assert links_without_reply(rows(*kinds)) == expected


def test_a_call_under_way_has_not_failed() -> None:
    assert failed_links(rows("q", "a", "q"), set()) == frozenset()


def test_a_question_whose_call_ended_without_a_reply_has_failed() -> None:
    assert failed_links(rows("q", "a", "q"), {3}) == {3}


def test_a_failed_question_behind_one_that_is_under_way_fails_alone() -> None:
    assert failed_links(rows("q", "a", "q", "q", follows={4: 2}), {4}) == {4}


def test_a_failed_question_before_one_that_was_answered_fails_alone() -> None:
    assert failed_links(rows("q", "a", "q", "q", "a", follows={4: 2}), {3, 4}) == {3}


def test_all_messages_of_a_failed_request_have_failed() -> None:
    assert failed_links(rows("q", "a", "q", "q"), {4}) == {3, 4}


def test_a_request_of_two_messages_that_was_answered_has_not_failed() -> None:
    assert failed_links(rows("q", "a", "q", "q", "a"), {4}) == frozenset()
