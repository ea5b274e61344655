"""A policy that names a model: its marks and prices come from the table of prices."""

from __future__ import annotations

import pytest

from tersely.service.context.context_configs import ContextConfigs
from tersely.service.money.model_watermarks import policy_for_model
from tersely.service.money.prices import ModelPrice, Prices
from tersely.strategies.epochs.policies import Auto


def policy(text: str, **overrides: ModelPrice) -> object:
    configs = ContextConfigs(
        strategy="slim",
        epoch=text,
        references=None,
        instructions=True,
        derive_terse=True,
        policy_for_model=policy_for_model(Prices(overrides)),
    )
    return configs.choose().policy


def test_prices_of_a_model_are_relative_to_its_plain_input() -> None:
    mine = ModelPrice(input=2e-6, cached=5e-7, write=2.5e-6, output=1e-5)
    chosen = policy('{"model": "mine"}', mine=mine)
    assert isinstance(chosen, Auto)
    assert (chosen.write_price, chosen.read_price) == (1.25, 0.25)
    assert 9_000 == chosen.low < chosen.high <= 30_000


@pytest.mark.parametrize(("model", "read"), [("gpt-4o", 0.5), ("claude-sonnet-4-5", 0.1)])
def test_known_models_have_the_prices_of_the_table(model: str, read: float) -> None:
    chosen = policy(f'{{"model": "{model}"}}')
    assert isinstance(chosen, Auto)
    assert chosen.read_price == pytest.approx(read, abs=0.01)


def test_a_model_without_a_price_has_the_constant_marks() -> None:
    assert policy('{"model": "no such model"}') == Auto()


def test_marks_fit_a_small_window() -> None:
    chosen = policy('{"model": "gpt-4"}')
    assert isinstance(chosen, Auto)
    assert chosen.high <= 4_096
