"""Plain questions in Gemini's format."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from tersely.dialects.completion import CompletionFormat, PlainRequest
from tersely.dialects.wire import raw_json
from tersely.domain.models import takes_instructions


def write_completion(*, model: str, instructions: str, message: str, max_tokens: int) -> PlainRequest:
    """Write a request for generated content, not streamed. A model without system text gets everything in
    one message.
    """
    parts = [{"text": message}]
    body: dict[str, Any] = {}
    if takes_instructions(model):
        body["systemInstruction"] = {"parts": [{"text": instructions}]}
    else:
        parts.insert(0, {"text": instructions})
    body |= {
        "contents": [{"role": "user", "parts": parts}],
        "generationConfig": {"maxOutputTokens": max_tokens},
    }
    name = quote(model.removeprefix("models/"), safe="")
    return PlainRequest(path=f"/v1beta/models/{name}:generateContent", body=raw_json.dump(body))


def authorize(key: str) -> list[tuple[str, str]]:
    """Return the header that carries a key."""
    return [("x-goog-api-key", key)]


COMPLETION = CompletionFormat(write=write_completion, authorize=authorize)
