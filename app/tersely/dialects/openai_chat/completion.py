"""Plain questions in OpenAI's chat format."""

from __future__ import annotations

import re

from tersely.dialects.completion import CompletionFormat, PlainRequest
from tersely.dialects.wire import raw_json

# OpenAI's reasoning models refuse `max_tokens`; many compatible hosts only accept it.
_COMPLETION_TOKENS = re.compile(r"(?:^|/)(?:o\d|gpt-5)")


def write_completion(*, model: str, instructions: str, message: str, max_tokens: int) -> PlainRequest:
    """Return a chat completion, not streamed."""
    limit = "max_completion_tokens" if _COMPLETION_TOKENS.search(model) else "max_tokens"
    body = {
        "model": model,
        "messages": [{"role": "system", "content": instructions}, {"role": "user", "content": message}],
        limit: max_tokens,
    }
    return PlainRequest(path="/chat/completions", body=raw_json.dump(body))


def authorize(key: str) -> list[tuple[str, str]]:
    """Return the header that carries a key."""
    return [("authorization", f"Bearer {key}")]


COMPLETION = CompletionFormat(write=write_completion, authorize=authorize)
