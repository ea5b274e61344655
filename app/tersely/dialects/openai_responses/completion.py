"""Plain questions in OpenAI's responses format."""

from __future__ import annotations

from tersely.dialects.completion import CompletionFormat, PlainRequest
from tersely.dialects.openai_chat.completion import authorize
from tersely.dialects.wire import raw_json


def write_completion(*, model: str, instructions: str, message: str, max_tokens: int) -> PlainRequest:
    """Return a response, not streamed and not kept by the provider."""
    body = {
        "model": model,
        "instructions": instructions,
        "input": message,
        "max_output_tokens": max_tokens,
        "store": False,
    }
    return PlainRequest(path="/responses", body=raw_json.dump(body))


COMPLETION = CompletionFormat(write=write_completion, authorize=authorize)
