"""Plain questions in OpenAI's responses format."""

from __future__ import annotations

from app.dialects import raw_json
from app.dialects.asking import Asking, PlainRequest
from app.dialects.openai_chat.asking import authorize


def write_question(*, model: str, instructions: str, message: str, max_tokens: int) -> PlainRequest:
    """A response, not streamed and not kept by the provider."""
    body = {
        "model": model,
        "instructions": instructions,
        "input": message,
        "max_output_tokens": max_tokens,
        "store": False,
    }
    return PlainRequest(path="/responses", body=raw_json.dump(body))


ASKING = Asking(write=write_question, authorize=authorize)
