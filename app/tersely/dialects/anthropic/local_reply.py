"""Replies of our own in Anthropic's Messages format."""

from __future__ import annotations

from typing import Any

from tersely.dialects.local_reply import LocalReply, WrittenReply, stream_event, stream_reply, whole_reply

_INPUT = {"input_tokens": 0, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


def write_reply(reply: LocalReply) -> WrittenReply:
    """Return a message of one text block, or the events in which it comes."""
    message: dict[str, Any] = {
        "id": f"msg_{reply.name}",
        "type": "message",
        "role": "assistant",
        "model": reply.request.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**_INPUT, "output_tokens": 0},
    }
    end = {"stop_reason": "end_turn", "stop_sequence": None}
    if not reply.request.stream:
        return whole_reply({**message, "content": [{"type": "text", "text": reply.text}], **end})
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": reply.text}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": end, "usage": {"output_tokens": 0}},
        {"type": "message_stop"},
    ]
    return stream_reply(*(stream_event(each, each["type"]) for each in events))
