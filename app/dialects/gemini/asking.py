"""Plain questions in Gemini's format."""

from __future__ import annotations

from urllib.parse import quote

from app.dialects import raw_json
from app.dialects.asking import Asking, PlainRequest


def write_question(*, model: str, instructions: str, message: str, max_tokens: int) -> PlainRequest:
    """Generated content, not streamed."""
    body = {
        "systemInstruction": {"parts": [{"text": instructions}]},
        "contents": [{"role": "user", "parts": [{"text": message}]}],
        "generationConfig": {"maxOutputTokens": max_tokens},
    }
    name = quote(model.removeprefix("models/"), safe="")
    return PlainRequest(path=f"/v1beta/models/{name}:generateContent", body=raw_json.dump(body))


def authorize(key: str) -> list[tuple[str, str]]:
    """The header that carries a key."""
    return [("x-goog-api-key", key)]


ASKING = Asking(write=write_question, authorize=authorize)
