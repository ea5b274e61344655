"""Replies of Tersely's own in OpenAI's responses format.

A client may continue from a reply by its id alone, and the provider does not know our ids. So the reply bears the id of
the previous response, if there is one.
"""

from __future__ import annotations

from typing import Any

from tersely.dialects.local_reply import LocalReply, WrittenReply, stream_event, stream_reply, whole_reply

PREVIOUS = "previous_response_id"

_USAGE = {
    "input_tokens": 0,
    "input_tokens_details": {"cached_tokens": 0},
    "output_tokens": 0,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 0,
}


def write_reply(reply: LocalReply) -> WrittenReply:
    """Return a response of one message, or the events in which it comes."""
    part = {"type": "output_text", "annotations": [], "logprobs": [], "text": reply.text}
    item = {"id": f"msg_{reply.name}", "type": "message", "role": "assistant", "status": "completed"}
    started = _response(reply)
    completed = {**started, "status": "completed", "output": [{**item, "content": [part]}], "usage": _USAGE}
    if not reply.request.stream:
        return whole_reply(completed)
    indexes = {"item_id": item["id"], "output_index": 0, "content_index": 0}
    new_item = {**item, "status": "in_progress", "content": []}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": started},
        {"type": "response.in_progress", "response": started},
        {"type": "response.output_item.added", "output_index": 0, "item": new_item},
        {"type": "response.content_part.added", **indexes, "part": {**part, "text": ""}},
        {"type": "response.output_text.delta", **indexes, "delta": reply.text, "logprobs": []},
        {"type": "response.output_text.done", **indexes, "text": reply.text, "logprobs": []},
        {"type": "response.content_part.done", **indexes, "part": part},
        {"type": "response.output_item.done", "output_index": 0, "item": {**item, "content": [part]}},
        {"type": "response.completed", "response": completed},
    ]
    return stream_reply(
        *(stream_event({**each, "sequence_number": number}, each["type"]) for number, each in enumerate(events))
    )


def _response(reply: LocalReply) -> dict[str, Any]:
    previous = reply.request.ids.get(PREVIOUS)
    return {
        "id": previous or f"resp_{reply.name}",
        "object": "response",
        "created_at": reply.created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": reply.request.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": previous,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "usage": None,
    }
