"""Plain questions in Anthropic's format."""

from __future__ import annotations

from tersely.dialects.completion import CompletionFormat, PlainRequest
from tersely.dialects.wire import raw_json

VERSION = "2023-06-01"


def write_completion(*, model: str, instructions: str, message: str, max_tokens: int) -> PlainRequest:
    """Return a message, not streamed."""
    body = {
        "model": model,
        "max_tokens": max_tokens,
        "system": instructions,
        "messages": [{"role": "user", "content": message}],
    }
    return PlainRequest(path="/v1/messages", body=raw_json.dump(body))


def authorize(key: str) -> list[tuple[str, str]]:
    """Return the headers with the key and the API version."""
    return [("x-api-key", key), ("anthropic-version", VERSION)]


COMPLETION = CompletionFormat(write=write_completion, authorize=authorize)
