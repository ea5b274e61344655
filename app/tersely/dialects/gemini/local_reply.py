"""Replies of our own in Gemini's format."""

from __future__ import annotations

from typing import Any

from tersely.dialects.local_reply import LocalReply, WrittenReply, stream_event, stream_reply, whole_reply

# Gemini's own clients look for these line ends.
_NEWLINE = b"\r\n"


def write_reply(reply: LocalReply) -> WrittenReply:
    """Return generated content of one candidate; a stream is one such reply, as an event or in an array."""
    return write_generated(reply, generated_content(reply))


def generated_content(reply: LocalReply) -> dict[str, Any]:
    """Return generated content with the reply's text."""
    candidate = {"content": {"parts": [{"text": reply.text}], "role": "model"}, "finishReason": "STOP", "index": 0}
    return {
        "candidates": [candidate],
        "usageMetadata": {"promptTokenCount": 0, "candidatesTokenCount": 0, "totalTokenCount": 0},
        "modelVersion": reply.request.model,
        "responseId": reply.name,
    }


def write_generated(reply: LocalReply, content: dict[str, Any]) -> WrittenReply:
    """Return ``content`` in the form that the request asks for."""
    if not reply.request.stream:
        return whole_reply(content)
    return whole_reply([content]) if reply.as_array else stream_reply(stream_event(content, newline=_NEWLINE))
