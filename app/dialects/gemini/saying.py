"""Replies of our own in Gemini's format."""

from __future__ import annotations

from typing import Any

from app.dialects.dialect import Request
from app.dialects.saying import WrittenReply, event, stream, whole

# Gemini's own clients look for these line ends.
_NEWLINE = b"\r\n"


def write_reply(text: str, *, request: Request, name: str, created: int, as_array: bool = False) -> WrittenReply:
    """Generated content of one candidate; a stream is one such reply, as an event or in an array."""
    del created
    return pack(generated(text, request=request, name=name), request=request, as_array=as_array)


def generated(text: str, *, request: Request, name: str) -> dict[str, Any]:
    """The generated content that says ``text``."""
    candidate = {"content": {"parts": [{"text": text}], "role": "model"}, "finishReason": "STOP", "index": 0}
    return {
        "candidates": [candidate],
        "usageMetadata": {"promptTokenCount": 0, "candidatesTokenCount": 0, "totalTokenCount": 0},
        "modelVersion": request.model,
        "responseId": name,
    }


def pack(reply: dict[str, Any], *, request: Request, as_array: bool) -> WrittenReply:
    """``reply`` in the way in which ``request`` wants it."""
    if not request.stream:
        return whole(reply)
    return whole([reply]) if as_array else stream(event(reply, newline=_NEWLINE))
