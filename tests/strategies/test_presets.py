"""Strategies by name, with their parameters and ranges."""

from __future__ import annotations

import pytest

from tersely.domain.errors import InvalidRequest
from tersely.domain.tokens import estimate_text
from tersely.strategies.composition import needs_of
from tersely.strategies.presets import (
    Full,
    Slim,
    Strategy,
    Tiered,
    Window,
    parse_strategy,
    strategy_name,
    strategy_text,
)
from tersely.strategies.prompts import TERSE_INSTRUCTIONS


@pytest.mark.parametrize(
    ("value", "strategy"),
    [
        ("slim", Slim(recent_turns=3, references=None, derive_terse=True)),
        ("full", Full()),
        ({"name": "slim", "recent_turns": 10}, Slim(recent_turns=10)),
        ('{"name": "slim", "references": 0, "derive_terse": false}', Slim(references=0, derive_terse=False)),
        ({"name": "slim", "references": None}, Slim()),
    ],
)
def test_a_strategy_by_name_or_object(value: object, strategy: Strategy) -> None:
    assert parse_strategy(value) == strategy


def test_the_general_setting_of_the_index_yields_to_the_strategys_own() -> None:
    assert parse_strategy("slim", references=500) == Slim(references=500)
    assert parse_strategy({"name": "slim", "references": 7}, references=500) == Slim(references=7)
    assert parse_strategy("full", references=500) == Full()


@pytest.mark.parametrize(
    ("value", "pieces"),
    [
        ("slimmer", ["strategy", "full, slim", "'slimmer'"]),
        (None, ["strategy", "'None'"]),
        (5, ["'5'"]),
        ({}, ["full, slim"]),
        ({"name": ["slim"]}, ["full, slim"]),
        ("{broken", ["JSON"]),
        ({"name": "slim", "recent_turns": 0}, ["strategy.recent_turns", "'0'", "1 to 10"]),
        ({"name": "slim", "recent_turns": 11}, ["'11'", "1 to 10"]),
        ({"name": "slim", "recent_turns": True}, ["'True'"]),
        ({"name": "slim", "references": -1}, ["strategy.references", "'-1'", "0 to 100000"]),
        ({"name": "slim", "derive_terse": 1}, ["strategy.derive_terse", "'1'"]),
        ({"name": "slim", "turns": 3}, ["strategy.turns", "recent_turns"]),
        ({"name": "full", "recent_turns": 3}, ["strategy.recent_turns", "none"]),
    ],
)
def test_a_wrong_parameter_is_refused_with_name_value_and_range(value: object, pieces: list[str]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_strategy(value)
    assert refused.value.field == "strategy"
    assert all(piece in refused.value.detail for piece in pieces)


def test_defaults_are_those_of_the_documents() -> None:
    """`trim` and `compact` have theirs in their own tests."""
    assert Slim().recent_turns == 3
    window, tiered = Window(), Tiered()
    assert (window.context_size, window.recent_results, window.memos) == (10, 5, 5)
    assert (window.recent_chars, window.older_chars, window.inactive_chars) == (5_000, 1_000, 300)
    assert (tiered.permanent_budget, tiered.session_budget, tiered.working_budget) == (2_000, 4_000, 8_000)
    assert (tiered.total_budget, tiered.capacity_trigger) == (16_000, 80)
    assert (tiered.working_age, tiered.session_age) == (300, 1_800)


def test_strategy_has_name_and_parameters() -> None:
    assert strategy_name(Full()) == "full"
    assert strategy_text(Slim(files=0)) == "slim(derive_terse=True, recent_turns=3, references=None)"
    assert needs_of(Slim(recent_turns=5)).recent_turns == 5
    assert not needs_of(Full()).cuts


def test_instructions_ask_for_actions_and_key_decisions() -> None:
    """flo.monster: "Write good summaries": one line, what was done, key decisions, specific names."""
    for wanted in ("one line", "what was done", "key decisions", "with names"):
        assert wanted in TERSE_INSTRUCTIONS


def test_the_instructions_are_short() -> None:
    assert estimate_text(TERSE_INSTRUCTIONS) < 60
    assert "<terse>" in TERSE_INSTRUCTIONS
    assert TERSE_INSTRUCTIONS.isascii()
