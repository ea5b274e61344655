"""Replies of our own in OpenAI's chat format."""

from __future__ import annotations

from typing import Any

from tersely.dialects.local_reply import LocalReply, WrittenReply, stream_event, stream_reply, whole_reply

_USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
_DONE = b"data: [DONE]\n\n"


def write_reply(reply: LocalReply) -> WrittenReply:
    """Return a chat completion of one choice, or its chunks, with usage if it was requested."""
    request = reply.request
    head: dict[str, Any] = {"id": f"chatcmpl-{reply.name}", "created": reply.created, "model": request.model}
    if not request.stream:
        message = {"role": "assistant", "content": reply.text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
        return whole_reply({**head, "object": "chat.completion", "choices": [choice], "usage": _USAGE})
    head["object"] = "chat.completion.chunk"
    start = {"delta": {"role": "assistant", "content": reply.text}, "finish_reason": None}
    end = {"delta": {}, "finish_reason": "stop"}
    chunks = [{**head, "choices": [{"index": 0, "logprobs": None, **each}]} for each in (start, end)]
    if request.include_usage:
        chunks = [{**chunk, "usage": None} for chunk in chunks]
        chunks.append({**head, "choices": [], "usage": _USAGE})
    return stream_reply(*map(stream_event, chunks), _DONE)
