"""The fields of a request's log line, added by whichever part of the service knows them."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

# Set by the outermost ASGI application (`CallLog`). Tasks that the request starts share the same dictionary.
fields: ContextVar[dict[str, Any] | None] = ContextVar("call_fields", default=None)


def add_fields(**more: Any) -> None:
    """Add to the log line of the request that is being answered; fields without a value are left out.

    Never add content, credentials or model strings.
    """
    known = fields.get()
    if known is not None:
        for name, value in more.items():
            if value is not None and value != "":
                known[name] = value
