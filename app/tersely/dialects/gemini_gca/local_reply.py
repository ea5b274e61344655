"""Replies of our own in Code Assist's format."""

from __future__ import annotations

from tersely.dialects.dialect import Request
from tersely.dialects.gemini.local_reply import generated_content, write_generated
from tersely.dialects.gemini_gca.stream import WRAPPER
from tersely.dialects.local_reply import WrittenReply


def write_reply(text: str, *, request: Request, name: str, created: int, as_array: bool = False) -> WrittenReply:
    """As Gemini's, inside of ``response``."""
    del created
    reply = {WRAPPER: generated_content(text, request=request, name=name), "traceId": name}
    return write_generated(reply, request=request, as_array=as_array)
