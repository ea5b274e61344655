"""Replies of our own in Code Assist's format."""

from __future__ import annotations

from tersely.dialects.gemini.local_reply import generated_content, write_generated
from tersely.dialects.gemini_gca.stream import WRAPPER
from tersely.dialects.local_reply import LocalReply, WrittenReply


def write_reply(reply: LocalReply) -> WrittenReply:
    """As Gemini's, inside of ``response``."""
    return write_generated(reply, {WRAPPER: generated_content(reply), "traceId": reply.name})
