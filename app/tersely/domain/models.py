"""Context windows of known models, in tokens. Models that are not listed have an unknown window."""

from __future__ import annotations

import re
from functools import lru_cache

# The first match counts; names may carry a host's prefix ("openai/gpt-4o") or a date.
WINDOWS: tuple[tuple[str, int], ...] = (
    (r"gpt-5", 400_000),
    (r"gpt-4\.1", 1_047_576),
    (r"gpt-4o|chatgpt-4o|gpt-4-turbo|gpt-4-1106|gpt-4-0125", 128_000),
    (r"gpt-4-32k", 32_768),
    (r"gpt-4(?![\w.])|gpt-4-0[36]", 8_192),
    (r"gpt-3\.5|gpt-35", 16_385),
    (r"\bo[134](?![\w.])|\bo[134]-(?:mini|pro|preview)", 200_000),
    (r"claude", 200_000),
    (r"gemini-(?:1\.5|2|3)", 1_048_576),
)
_WINDOWS = tuple((re.compile(rf"(?:^|/){pattern}", re.IGNORECASE), window) for pattern, window in WINDOWS)

# Their hosts refuse system text and functions: "Developer instruction is not enabled for models/gemma-3-27b-it".
_WITHOUT_INSTRUCTIONS = re.compile(r"(?:^|/)(?:gemma-|o1-(?:mini|preview)|gemini-[\w.-]*-(?:image|tts))", re.IGNORECASE)

# Tokens reserved for the answer when the request does not limit it.
DEFAULT_RESERVE = 4_096


@lru_cache(maxsize=256)
def known_window(model: str) -> int | None:
    """Return the model's context window, where it is known."""
    return next((window for pattern, window in _WINDOWS if pattern.search(model)), None)


def takes_instructions(model: str) -> bool:
    """Return whether Tersely may add system text and tools to requests for the model."""
    return _WITHOUT_INSTRUCTIONS.search(model) is None


def usable_window(model: str, reserve: int | None) -> int | None:
    """Return the window without the tokens that are kept free for the answer (``reserve``, or a default)."""
    window = known_window(model)
    if window is None:
        return None
    kept = DEFAULT_RESERVE if reserve is None else reserve
    return max(window // 4, window - kept)
