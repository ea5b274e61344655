"""Replies of our own in Gemini's format."""

from __future__ import annotations

from typing import Any

from tersely.dialects.dialect import Request
from tersely.dialects.local_reply import WrittenReply, stream_event, stream_reply, whole_reply

# Gemini's own clients look for these line ends.
_NEWLINE = b"\r\n"


def write_reply(text: str, *, request: Request, name: str, created: int, as_array: bool = False) -> WrittenReply:
    """Generated content of one candidate; a stream is one such reply, as an event or in an array."""
    del created
    return write_generated(generated_content(text, request=request, name=name), request=request, as_array=as_array)


def generated_content(text: str, *, request: Request, name: str) -> dict[str, Any]:
    """Return generated content with the text ``text``."""
    candidate = {"content": {"parts": [{"text": text}], "role": "model"}, "finishReason": "STOP", "index": 0}
    return {
        "candidates": [candidate],
        "usageMetadata": {"promptTokenCount": 0, "candidatesTokenCount": 0, "totalTokenCount": 0},
        "modelVersion": request.model,
        "responseId": name,
    }


def write_generated(reply: dict[str, Any], *, request: Request, as_array: bool) -> WrittenReply:
    """Return ``reply`` in the form that ``request`` asks for."""
    if not request.stream:
        return whole_reply(reply)
    return whole_reply([reply]) if as_array else stream_reply(stream_event(reply, newline=_NEWLINE))
