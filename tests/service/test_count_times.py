"""Counting tokens takes time linear in the length of a text, whatever the text is."""

from __future__ import annotations

import time

import pytest

from tersely.service.common.tokens import count_text

LENGTH = 1_000_000
PROSE = "The step looked at src/part_7.py and ran it again. "
RUN = 1_999
UNITS = {
    "letter": "x",
    "letters of both cases": "aA",
    "space": " ",
    "line feed": "\n",
    "digit": "1",
    "mark": "!",
    "ideograph": "中",
    "accent": "\u0301",
    "runs of letters": "x" * RUN + " ",
    "runs of ideographs": "中" * RUN + "\n",
    "runs of spaces": " " * RUN + "x",
    "runs of marks and line feeds": "!" * RUN + "\n" * RUN,
    "words of half a run": "x" * (RUN // 2) + " ",
}


def seconds(text: str) -> float:
    begun = time.thread_time()
    assert count_text(text, "o200k_base") > 0
    return time.thread_time() - begun


@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS)
def test_no_text_takes_much_longer_than_prose(unit: str) -> None:
    seconds(PROSE)
    prose = seconds(PROSE * (LENGTH // len(PROSE)))
    assert seconds(unit * (LENGTH // len(unit))) < 8 * prose


def test_a_run_is_off_by_at_most_a_token_a_piece() -> None:
    # The encoder has tokens of 8, 16, ... equal letters, so a piece of 1,000 letters is 125 tokens.
    assert count_text("x" * 10_000, "o200k_base") == pytest.approx(count_text("x" * 1000, "o200k_base") * 10, abs=10)
