"""From the domain to Code Assist's format."""

from __future__ import annotations

from tersely.dialects.dialect import RequestPatch
from tersely.dialects.gemini import write as gemini
from tersely.dialects.wire import raw_json
from tersely.dialects.wire.members import split_body


def as_reply(content: bytes) -> bytes:
    """As Gemini's, inside of ``response``."""
    return b'{"response":' + gemini.as_reply(content) + b"}"


def write_request(body: bytes, patch: RequestPatch) -> bytes:
    """As Gemini's, inside of ``request``; the wrapping keeps its bytes."""
    members = split_body(body)
    members["request"] = gemini.write_request(members.get("request", b"{}"), patch)
    return raw_json.join_object(members)
