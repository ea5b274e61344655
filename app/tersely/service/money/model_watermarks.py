"""Watermarks by a model's prices and window."""

from __future__ import annotations

from collections.abc import Callable

from tersely.domain.models import known_window
from tersely.service.money.prices import Prices
from tersely.strategies.epochs.policies import Auto
from tersely.strategies.epochs.priced_watermarks import CachePrices, choose_watermarks


def policy_for_model(prices: Prices) -> Callable[[str], Auto]:
    """Return the function that gives a model's name the policy with its prices, and with the watermarks of the least
    expected price. A model without a price gets the constant ones.
    """

    def choose(model: str) -> Auto:
        price = prices.of(model)
        if price is None or not price.input:
            return Auto()
        relative = CachePrices(write=round(price.write / price.input, 4), read=round(price.cached / price.input, 4))
        pair = choose_watermarks(relative, window=known_window(model))
        return Auto(high=pair.high, low=pair.low, write_price=relative.write, read_price=relative.read)

    return choose
