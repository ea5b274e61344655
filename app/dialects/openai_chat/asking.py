"""Plain questions in OpenAI's chat format."""

from __future__ import annotations

import re

from app.dialects import raw_json
from app.dialects.asking import Asking, PlainRequest

# OpenAI's reasoning models refuse `max_tokens`; many compatible hosts know nothing else.
_COMPLETION_TOKENS = re.compile(r"(?:^|/)(?:o\d|gpt-5)")


def write_question(*, model: str, instructions: str, message: str, max_tokens: int) -> PlainRequest:
    """A chat completion, not streamed."""
    limit = "max_completion_tokens" if _COMPLETION_TOKENS.search(model) else "max_tokens"
    body = {
        "model": model,
        "messages": [{"role": "system", "content": instructions}, {"role": "user", "content": message}],
        limit: max_tokens,
    }
    return PlainRequest(path="/chat/completions", body=raw_json.dump(body))


def authorize(key: str) -> list[tuple[str, str]]:
    """The header that carries a key."""
    return [("authorization", f"Bearer {key}")]


ASKING = Asking(write=write_question, authorize=authorize)
