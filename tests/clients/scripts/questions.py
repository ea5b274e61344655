"""The questions for the frameworks' agents, one turn after the other, and the tool that they have."""

import os

FILLER = os.environ.get("FILLER", "")
QUESTIONS = (
    f"Say hello to amber-1. {FILLER}",
    'call weather {"city": "Paris"}',
    f"And cobalt-3? {FILLER}",
    f"And drab-4? {FILLER}",
    f"And ebony-5? {FILLER}",
    'call weather {"city": "Oslo"}',
    "And gold-7?",
)


def weather(city: str) -> str:
    """Tell the weather of a city.

    Args:
        city: The city's name.
    """
    return f"{city} is sunny"
