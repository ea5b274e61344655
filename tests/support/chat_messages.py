"""Messages of OpenAI's chat format as dictionaries, for tests that send them."""

from __future__ import annotations

from typing import Any


def user(text: str) -> dict[str, Any]:
    """Return a message of the user."""
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    """Return a reply without tool calls."""
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, Any]:
    """Return a system message."""
    return {"role": "system", "content": text}
