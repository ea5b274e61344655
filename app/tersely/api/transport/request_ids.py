"""The id of a request: the caller's if it is valid, else a new one. It is on every answer and log line."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextvars import ContextVar

HEADER = b"x-request-id"
# Tersely's own id, on every answer, besides the model host's `x-request-id`.
OWN_HEADER = b"x-tersely-request-id"
# The model host's, where the caller's own id is in its place.
UPSTREAM_HEADER = b"x-upstream-request-id"
# Printable characters without blanks, which a log or a shell reads as one word.
_ID = re.compile(r"[A-Za-z0-9._:@/+=~-]{1,128}")

RawHeaders = list[tuple[bytes, bytes]]

current: ContextVar[str] = ContextVar("request_id", default="")


def new_request_id() -> str:
    """Make an id."""
    return f"req_{os.urandom(12).hex()}"


def caller_request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the caller's own id; empty if it is missing or invalid."""
    for name, value in headers:
        if name == HEADER:
            text = value.decode("latin-1").strip()
            return text if _ID.fullmatch(text) else ""
    return ""


def with_request_id(headers: Iterable[tuple[bytes, bytes]], request_id: str, *, is_callers: bool) -> RawHeaders:
    """Return the headers of an answer with the request's id.

    ``x-request-id`` is the caller's id if it sent one (the model host's then becomes ``x-upstream-request-id``), else
    the model host's, else Tersely's own.
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
