"""Replies of our own in OpenAI's chat format."""

from __future__ import annotations

from typing import Any

from tersely.dialects.dialect import Request
from tersely.dialects.local_reply import WrittenReply, stream_event, stream_reply, whole_reply

_USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
_DONE = b"data: [DONE]\n\n"


def write_reply(text: str, *, request: Request, name: str, created: int, as_array: bool = False) -> WrittenReply:
    """Return a chat completion of one choice, or its chunks, with usage if it was requested."""
    del as_array
    head: dict[str, Any] = {"id": f"chatcmpl-{name}", "created": created, "model": request.model}
    if not request.stream:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
        return whole_reply({**head, "object": "chat.completion", "choices": [choice], "usage": _USAGE})
    head["object"] = "chat.completion.chunk"
    said = {"delta": {"role": "assistant", "content": text}, "finish_reason": None}
    end = {"delta": {}, "finish_reason": "stop"}
    chunks = [{**head, "choices": [{"index": 0, "logprobs": None, **each}]} for each in (said, end)]
    if request.include_usage:
        chunks = [{**chunk, "usage": None} for chunk in chunks]
        chunks.append({**head, "choices": [], "usage": _USAGE})
    return stream_reply(*map(stream_event, chunks), _DONE)
