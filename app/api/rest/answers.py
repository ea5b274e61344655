"""Answers as JSON, with stored JSON put in byte for byte."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from fastapi import Response

_encoder = msgspec.json.Encoder()


def answer(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """``value`` as JSON."""
    return Response(
        _encoder.encode(value), status_code=status, media_type="application/json", headers=dict(headers or {})
    )


def page(items: Sequence[Any], following: object) -> Response:
    """A page of a list, and the cursor of the next one."""
    return answer({"items": items, "next": following})


def verbatim(raw: bytes | None) -> msgspec.Raw | None:
    """Stored JSON for an answer; nothing where it was removed."""
    return msgspec.Raw(raw) if raw else None


def moment(at: datetime) -> str:
    """A time in ISO 8601, UTC."""
    return at.astimezone(UTC).isoformat().replace("+00:00", "Z")


def printable(text: str) -> str:
    """Text that UTF-8 can carry: lone surrogates are replaced."""
    return text.encode("utf-8", "replace").decode()
