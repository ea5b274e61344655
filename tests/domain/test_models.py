"""Context windows by the names that hosts give to models."""

from __future__ import annotations

import pytest

from tersely.domain.models import DEFAULT_RESERVE, known_window, takes_instructions, usable_window


@pytest.mark.parametrize(
    ("model", "window"),
    [
        ("gpt-4o-mini", 128_000),
        ("openai/gpt-4o-2024-08-06", 128_000),
        ("gpt-4", 8_192),
        ("gpt-4-0613", 8_192),
        ("gpt-4-32k", 32_768),
        ("gpt-4.1-mini", 1_047_576),
        ("GPT-5-mini", 400_000),
        ("o3", 200_000),
        ("o4-mini", 200_000),
        ("anthropic/claude-sonnet-4-5", 200_000),
        ("gemini-2.5-pro", 1_048_576),
        ("models/gemini-3-flash", 1_048_576),
        ("llama-3.1-70b", None),
        ("my-gpt-4o", None),
        ("", None),
    ],
)
def test_known_window(model: str, window: int | None) -> None:
    assert known_window(model) == window


@pytest.mark.parametrize(
    ("model", "expected"),
    [("gemma-3-27b-it", False), ("o1-mini", False), ("gpt-4o", True), ("gemini-2.5-flash-image", False)],
)
def test_models_without_system_text(model: str, *, expected: bool) -> None:
    assert takes_instructions(model) == expected


def test_usable_window_keeps_room_for_the_answer() -> None:
    assert usable_window("gpt-4", 1_000) == 7_192
    assert usable_window("gpt-4", None) == 8_192 - DEFAULT_RESERVE
    assert usable_window("gpt-4", 1_000_000) == 2_048, "a quarter of the window is left in any case"
    assert usable_window("unknown", 1_000) is None
