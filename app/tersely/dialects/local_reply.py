"""Write a reply of Tersely's own in a dialect, whole or as a stream, as the provider would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tersely.dialects.dialect import Request
from tersely.dialects.wire import raw_json

JSON = "application/json"
EVENT_STREAM = "text/event-stream"

ID_PREFIX = "tersely_"
"""Stands in the ids of replies of ours, which no provider knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenReply:
    """The body of a response and its content type."""

    body: bytes
    content_type: str = JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalReply:
    """A reply to ``request`` with a text, a normal end and no usage; whole or streamed as the request asks.

    The reply's ids contain ``name``, which begins with `ID_PREFIX`; ``created`` is its time in seconds. ``as_array``: a
    stream is sent as a JSON array, in dialects that have such streams.
    """

    text: str
    request: Request
    name: str
    created: int
    as_array: bool = False


ReplyWriter = Callable[[LocalReply], WrittenReply]


def whole_reply(reply: object) -> WrittenReply:
    """Return a reply at once."""
    return WrittenReply(body=raw_json.dump(reply))


def stream_reply(*events: bytes) -> WrittenReply:
    """Return the events of a stream."""
    return WrittenReply(body=b"".join(events), content_type=EVENT_STREAM)


def stream_event(data: object, name: str = "", newline: bytes = b"\n") -> bytes:
    """Return one event of a stream."""
    head = b"event: " + name.encode() + newline if name else b""
    return head + b"data: " + raw_json.dump(data) + newline * 2
