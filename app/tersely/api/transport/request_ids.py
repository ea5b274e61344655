"""The id of a request: the caller's, where it is one, or a new one. It is on every answer and every log line."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from contextvars import ContextVar

HEADER = b"x-request-id"
# Ours, on every answer, beside the `x-request-id` of a model host that comes through.
OWN_HEADER = b"x-tersely-request-id"
# The model host's, where the caller's own id is in its place.
UPSTREAM_HEADER = b"x-upstream-request-id"
# Printable, without blanks, and nothing that a log or a shell would read as more than a word.
_ID = re.compile(r"[A-Za-z0-9._:@/+=~-]{1,128}")

RawHeaders = list[tuple[bytes, bytes]]

current: ContextVar[str] = ContextVar("request_id", default="")


def new_request_id() -> str:
    """Make an id."""
    return f"req_{secrets.token_hex(12)}"


def caller_request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the caller's own id; empty where there is none, or one that cannot be used."""
    for name, value in headers:
        if name == HEADER:
            text = value.decode("latin-1").strip()
            return text if _ID.fullmatch(text) else ""
    return ""


def with_request_id(headers: Iterable[tuple[bytes, bytes]], request_id: str, *, is_callers: bool) -> RawHeaders:
    """Return the headers of an answer with the request's id.

    ``x-request-id`` is the caller's where it gave one (the model host's goes into ``x-upstream-request-id``), else the
    model host's where that gave one, else ours.
    """
    own = request_id.encode()
    found = [(name.lower(), value) for name, value in headers]
    hosts = [value for name, value in found if name == HEADER]
    if is_callers or not hosts:
        found = [(name, value) for name, value in found if name != HEADER]
        found.append((HEADER, own))
        found += [(UPSTREAM_HEADER, value) for value in hosts[:1] if value != own]
    found.append((OWN_HEADER, own))
    return found
