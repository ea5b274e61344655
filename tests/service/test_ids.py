"""The ids that the service makes: short, unguessable, in the order of time."""

from __future__ import annotations

import math
import re
import time

import pytest

from tersely.composition import clock
from tersely.domain.history.sessions import check_session_id


def test_ids_are_short_and_begin_with_their_kind() -> None:
    for kind in ("s", "m"):
        assert re.fullmatch(kind + "[0-9A-Za-z]{18}", clock.new_id(kind))
    assert check_session_id(clock.new_id(), "id")


def test_ids_have_at_least_80_random_bits() -> None:
    assert clock._RANDOM_DIGITS * math.log2(62) >= 80
    assert clock._RANDOM_BYTES * 8 >= 80
    made = [clock.new_id() for _ in range(2_000)]
    assert len({each[5:] for each in made}) == len(made)
    for place in range(5, 19):
        assert len({each[place] for each in made}) == 62


def test_ids_are_in_the_order_of_time_to_a_few_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [0.0, 256.0, 1.7e9, 1.7e9 + 256, 1.8e9, 3.7e9]
    found = []
    for at in times:
        monkeypatch.setattr(time, "time", lambda at=at: at)
        found.append(clock.new_id())
    assert found == sorted(found)
    assert len({each[:5] for each in found}) == len(times)
