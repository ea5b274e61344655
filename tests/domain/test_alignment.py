"""Alignment of an incoming history with stored rows: every match is equal, in order, and as long as it can be."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tersely.domain.history.alignment import MAX_CANDIDATES, match_rows
from tersely.domain.history.history import Status
from tersely.domain.history.links import MessageIdentity, StoredLink
from tersely.domain.history.links import as_incoming as resent
from tersely.domain.messages import Role


def row(seq: int, text: str, *, status: Status = "live", role: Role = "user") -> StoredLink:
    return StoredLink(
        seq=seq,
        position=float(seq),
        turn=0 if role == "system" else 1,
        tokens=1,
        role=role,
        status=status,
        digest=text.encode(),
        relayed=role == "assistant",
        call=1,
        follows=seq - 1,
    )


def message(text: str, *, role: Role = "user") -> MessageIdentity:
    is_link = role != "system"
    return MessageIdentity(digest=text.encode(), is_link=is_link, starts_turn=role == "user", role=role)


def matched(rows: Sequence[StoredLink], incoming: Sequence[MessageIdentity]) -> dict[int, int]:
    known = match_rows(rows, incoming, 0, len(incoming))
    return {index: row.seq for index, row in sorted(known.items())}


TEXTS = st.lists(st.sampled_from("abc"), max_size=8)


@given(TEXTS, TEXTS)
def test_matches_are_equal_and_in_the_order_of_both_sides(stored: list[str], sent: list[str]) -> None:
    rows = [row(seq, text) for seq, text in enumerate(stored, start=1)]
    incoming = [message(text) for text in sent]

    known = match_rows(rows, incoming, 0, len(incoming))

    assert all(incoming[index].digest == found.digest for index, found in known.items())
    positions = [known[index].position for index in sorted(known)]
    assert positions == sorted(set(positions))


@given(TEXTS, TEXTS)
def test_common_beginning_is_matched_first(stored: list[str], more: list[str]) -> None:
    rows = [row(seq, text) for seq, text in enumerate(stored, start=1)]
    found = matched(rows, [*map(resent, rows), *(message(f"new {text}") for text in more)])
    assert found == {index: each.seq for index, each in enumerate(rows)}


def test_unique_reply_is_matched_rather_than_a_longer_run_of_repeated_text() -> None:
    rows = [row(1, "ok"), row(2, "ok"), row(3, "the answer", role="assistant"), row(4, "end")]
    incoming = [message("new"), message("the answer", role="assistant"), message("ok"), message("ok")]
    assert matched(rows, incoming) == {1: 3}


def test_hidden_row_does_not_match_the_question() -> None:
    rows = [row(1, "a"), row(2, "go on", status="undone")]
    incoming = [message("a"), message("go on")]
    assert set(match_rows(rows, incoming, 0, question_index=1)) == {0}
    assert set(match_rows(rows, incoming, 0, question_index=2)) == {0, 1}


def test_live_row_is_matched_before_a_superseded_one() -> None:
    rows = [row(1, "x"), row(2, "q", status="superseded"), row(3, "q")]
    assert matched(rows, [message("x"), message("q")]) == {0: 1, 1: 3}


def test_instruction_is_matched_between_its_neighbours() -> None:
    rows = [row(1, "rules", role="system"), row(2, "a"), row(3, "rules", role="system"), row(4, "b")]
    incoming = [message("a"), message("rules", role="system"), message("b")]
    assert matched(rows, incoming) == {0: 2, 1: 3, 2: 4}


def test_repeated_text_is_compared_with_a_bounded_number_of_rows() -> None:
    rows = [row(1, "first"), *(row(seq, "ok") for seq in range(2, 50 * MAX_CANDIDATES))]
    incoming = [message("other"), *(message("ok") for _ in range(50 * MAX_CANDIDATES))]
    found = matched(rows, incoming)
    assert 0 not in found
    assert 0 < len(found) <= MAX_CANDIDATES
