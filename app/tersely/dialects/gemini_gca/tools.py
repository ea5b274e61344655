"""Tools in Code Assist's format: Gemini's, inside of ``request``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tersely.dialects.dialect import ToolOffer
from tersely.dialects.gemini import tools as gemini
from tersely.dialects.wire import raw_json
from tersely.dialects.wire.members import split_body


def add_tools(body: bytes, offers: Sequence[ToolOffer]) -> bytes:
    """As Gemini's, inside of ``request``; the wrapping keeps its bytes."""
    return _inside(body, lambda request: gemini.add_tools(request, offers))


def forbid_tools(body: bytes) -> bytes:
    """As Gemini's, inside of ``request``; the wrapping keeps its bytes."""
    return _inside(body, gemini.forbid_tools)


def _inside(body: bytes, change: Callable[[bytes], bytes]) -> bytes:
    members = split_body(body)
    members["request"] = change(members.get("request", b"{}"))
    return raw_json.join_object(members)
