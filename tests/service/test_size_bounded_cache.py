"""Cached values: the newest stay within a budget of bytes."""

from __future__ import annotations

from tersely.service.common.size_bounded_cache import SizeBoundedCache


def test_values_are_kept_while_they_are_used_and_others_go() -> None:
    cache: SizeBoundedCache[int] = SizeBoundedCache(100)
    cache.put("used", 0, 10)
    for number in range(20):
        cache.put(number, number, 10)
        assert cache.get("used", 10) == 0
    assert cache.get(19, 10) == 19
    assert cache.get(0, 10) is None


def test_a_value_beyond_the_budget_takes_nothing_out() -> None:
    cache: SizeBoundedCache[int] = SizeBoundedCache(100)
    for number in range(5):
        cache.put(number, number, 10)
    for _ in range(3):
        cache.put("large", -1, 1_000)
    assert cache.get("large", 1_000) is None
    assert [cache.get(number, 10) for number in range(5)] == [0, 1, 2, 3, 4]
