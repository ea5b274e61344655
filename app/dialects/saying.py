"""What Tersely says itself, in a dialect: a whole reply, or the whole stream of one, as the provider would write it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from app.dialects import raw_json
from app.dialects.dialect import Request

JSON = "application/json"
EVENT_STREAM = "text/event-stream"

OWN = "tersely_"
"""Stands in the ids of replies of ours, which no provider knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenReply:
    """The body of a response, and what it is."""

    body: bytes
    content_type: str = JSON


class ReplyWriter(Protocol):
    """Writes a reply that says a text, ends well and cost nothing."""

    def __call__(self, text: str, *, request: Request, name: str, created: int, as_array: bool = False) -> WrittenReply:
        """The reply to ``request``, in the way in which that wants it.

        ``name``, which begins with `OWN`, is what the reply's ids are made of, ``created`` its time in seconds.
        ``as_array``: a stream is wanted as a JSON array, in dialects that know such streams.
        """


def whole(reply: object) -> WrittenReply:
    """A reply at once."""
    return WrittenReply(body=raw_json.dump(reply))


def stream(*events: bytes) -> WrittenReply:
    """The events of a stream."""
    return WrittenReply(body=b"".join(events), content_type=EVENT_STREAM)


def event(data: object, name: str = "", newline: bytes = b"\n") -> bytes:
    """One event of a stream."""
    head = b"event: " + name.encode() + newline if name else b""
    return head + b"data: " + raw_json.dump(data) + newline * 2
