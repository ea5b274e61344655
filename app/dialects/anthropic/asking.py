"""Plain questions in Anthropic's format."""

from __future__ import annotations

from app.dialects import raw_json
from app.dialects.asking import Asking, PlainRequest

VERSION = "2023-06-01"


def write_question(*, model: str, instructions: str, message: str, max_tokens: int) -> PlainRequest:
    """A message, not streamed."""
    body = {
        "model": model,
        "max_tokens": max_tokens,
        "system": instructions,
        "messages": [{"role": "user", "content": message}],
    }
    return PlainRequest(path="/v1/messages", body=raw_json.dump(body))


def authorize(key: str) -> list[tuple[str, str]]:
    """The headers that carry a key, and the version that goes with every request."""
    return [("x-api-key", key), ("anthropic-version", VERSION)]


ASKING = Asking(write=write_question, authorize=authorize)
