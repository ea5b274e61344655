"""Watermarks by the prices of a model's cache."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tersely.domain.errors import InvalidRequest
from tersely.strategies.epochs.policies import Auto, parse_policy
from tersely.strategies.epochs.priced_watermarks import (
    LEAST_LOW,
    CachePrices,
    WatermarkPair,
    choose_watermarks,
    expected_price,
)

ANTHROPIC, GPT_4O = CachePrices(write=1.25, read=0.1), CachePrices(write=1.0, read=0.5)
ratios = st.builds(CachePrices, write=st.floats(0.5, 3.0), read=st.floats(0.02, 1.0))


def simulated_price(pair: WatermarkPair, prices: CachePrices, *, fixed: int, growth: int, calls: int) -> float:
    """Play a session that grows evenly; the mean price of a call."""
    content, total = pair.low, 0.0
    for _ in range(calls):
        if content + growth > pair.high:
            content = pair.low
            total += (prices.write - prices.read) * pair.low
        total += prices.read * (fixed + content) + prices.write * growth
        content += growth
    return total / calls


@pytest.mark.parametrize("prices", [ANTHROPIC, GPT_4O])
@pytest.mark.parametrize("pair", [WatermarkPair(high=20_000, low=10_000), WatermarkPair(high=40_000, low=8_000)])
def test_the_expected_price_is_that_of_a_session_that_grows_evenly(prices: CachePrices, pair: WatermarkPair) -> None:
    played = simulated_price(pair, prices, fixed=12_000, growth=100, calls=30_000)
    assert expected_price(pair, prices, fixed=12_000, growth=100) == pytest.approx(played, rel=0.01)


@given(ratios)
def test_no_other_high_mark_is_cheaper(prices: CachePrices) -> None:
    chosen = choose_watermarks(prices)
    least = expected_price(chosen, prices)
    for high in range(2 * chosen.low, 200_000, 1_000):
        assert least <= 1.001 * expected_price(WatermarkPair(high=high, low=chosen.low), prices)


@given(ratios, st.none() | st.integers(2_000, 2_000_000))
def test_marks_stay_within_the_window_and_above_the_least(prices: CachePrices, window: int | None) -> None:
    pair = choose_watermarks(prices, window=window)
    assert 0 < pair.low < pair.high
    assert pair.low <= LEAST_LOW
    if window is None or window >= 4 * LEAST_LOW:
        assert pair.low == LEAST_LOW
    if window is not None:
        assert pair.high <= window // 2


def test_a_cheap_cache_is_cut_later() -> None:
    assert choose_watermarks(ANTHROPIC).high > choose_watermarks(GPT_4O).high == 2 * LEAST_LOW
    assert choose_watermarks(CachePrices(write=1.0, read=0.0)).high > choose_watermarks(ANTHROPIC).high


def test_a_policy_that_names_a_model_has_its_marks_and_prices() -> None:
    asked: list[str] = []

    def policy_for_model(model: str) -> Auto:
        asked.append(model)
        return Auto(high=20_000, low=9_000, write_price=1.0, read_price=0.5)

    policy = parse_policy('{"model": "gpt-4o", "high": 25000}', policy_for_model=policy_for_model)
    assert policy == Auto(high=25_000, low=9_000, write_price=1.0, read_price=0.5)
    assert asked == ["gpt-4o"]
    assert parse_policy({"model": "gpt-4o"}) == Auto()


@pytest.mark.parametrize("model", ["", None, 3, "x" * 201])
def test_a_name_that_is_no_models_is_refused(model: object) -> None:
    with pytest.raises(InvalidRequest, match=r"epoch\.model must be a model's name"):
        parse_policy({"model": model})
