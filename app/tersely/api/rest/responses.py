"""Answers as JSON, with stored JSON put in byte for byte."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from fastapi import Response
from fastapi.responses import StreamingResponse

from tersely.domain.text.encodable import with_encodable_texts

JSON_LINES = "application/x-ndjson"
AS_JSON_LINES: dict[int | str, dict[str, Any]] = {
    200: {"description": "One item per line", "content": {JSON_LINES: {"schema": {"type": "string"}}}}
}
EVENT_STREAM = "text/event-stream"
AS_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {"x-alternative-content": {EVENT_STREAM: "With `Accept: text/event-stream`."}}
}
_encoder = msgspec.json.Encoder()


def write_json(value: Any) -> bytes:
    """Return ``value`` as JSON, with `encodable` texts."""
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:
        return _encoder.encode(with_encodable_texts(value))


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return ``value`` as JSON."""
    return Response(write_json(value), status_code=status, media_type="application/json", headers=dict(headers or {}))


def page_response(items: Sequence[Any], following: object) -> Response:
    """Return a page of a list, and the cursor of the next one."""
    return json_response({"items": items, "next": following})


async def json_lines_response(items: AsyncIterator[Any]) -> Response:
    """Return all items, one per line, streamed."""
    lines = (write_json(item) + b"\n" async for item in items)
    # If the database is unavailable, the status says so, since it is sent before the first line.
    first = await anext(lines, b"")
    return StreamingResponse(_from_first(first, lines), media_type=JSON_LINES)


async def _from_first(first: bytes, lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for line in lines:
        yield line


def raw_value(raw: bytes | None) -> msgspec.Raw | None:
    """Return stored JSON for an answer; None if it was removed."""
    return msgspec.Raw(raw) if raw else None


def write_time(at: datetime) -> str:
    """Return a time in ISO 8601, UTC."""
    return at.astimezone(UTC).isoformat().replace("+00:00", "Z")
