"""The range of times that is stored."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from tersely.domain.times import EARLIEST, LATEST, to_stored_time


def test_a_time_without_a_zone_is_in_utc() -> None:
    assert to_stored_time(datetime(2026, 1, 2, 3, 4)) == datetime(2026, 1, 2, 3, 4, tzinfo=UTC)  # noqa: DTZ001


def test_another_zone_becomes_utc() -> None:
    stored = to_stored_time(datetime(2026, 1, 1, 1, tzinfo=timezone(timedelta(hours=2))))

    assert (stored, stored.tzinfo) == (datetime(2025, 12, 31, 23, tzinfo=UTC), UTC)


@pytest.mark.parametrize("at", [EARLIEST - timedelta(microseconds=1), LATEST, datetime.max.replace(tzinfo=UTC)])
def test_times_out_of_range_are_refused(at: datetime) -> None:
    with pytest.raises(ValueError, match="out of range"):
        to_stored_time(at)


def test_the_ends_of_the_range() -> None:
    assert to_stored_time(EARLIEST) == EARLIEST
    assert to_stored_time(LATEST - timedelta(microseconds=1)) < LATEST
