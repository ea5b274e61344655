"""Replies of our own in Anthropic's Messages format."""

from __future__ import annotations

from typing import Any

from tersely.dialects.dialect import Request
from tersely.dialects.local_reply import WrittenReply, stream_event, stream_reply, whole_reply

_INPUT = {"input_tokens": 0, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


def write_reply(text: str, *, request: Request, name: str, created: int, as_array: bool = False) -> WrittenReply:
    """Return a message of one text block, or the events in which it comes."""
    del created, as_array
    message: dict[str, Any] = {
        "id": f"msg_{name}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**_INPUT, "output_tokens": 0},
    }
    end = {"stop_reason": "end_turn", "stop_sequence": None}
    if not request.stream:
        return whole_reply({**message, "content": [{"type": "text", "text": text}], **end})
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": end, "usage": {"output_tokens": 0}},
        {"type": "message_stop"},
    ]
    return stream_reply(*(stream_event(each, each["type"]) for each in events))
