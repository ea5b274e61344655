"""Replies of our own in Code Assist's format."""

from __future__ import annotations

from app.dialects.dialect import Request
from app.dialects.gemini.saying import generated, pack
from app.dialects.gemini_gca.stream import WRAPPER
from app.dialects.saying import WrittenReply


def write_reply(text: str, *, request: Request, name: str, created: int, as_array: bool = False) -> WrittenReply:
    """As Gemini's, inside of ``response``."""
    del created
    reply = {WRAPPER: generated(text, request=request, name=name), "traceId": name}
    return pack(reply, request=request, as_array=as_array)
