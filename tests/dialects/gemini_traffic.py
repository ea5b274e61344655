"""Recorded traffic of Gemini's API, and replies made up for tests, in its own framings."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from tersely.dialects.wire.json_array import ArrayDecoder
from tersely.dialects.wire.sse import SseDecoder
from tests.dialects.recordings import MISSING, SHARED, WIRE, index, requests

CLI = SHARED / "clients" / "gemini-cli" / "requests.jsonl"

REPLIES = sorted({WIRE / line["file"] for line in index("enerateContent")})
REQUESTS = requests("enerateContent")
needs_recordings = pytest.mark.skipif(not REPLIES, reason=MISSING)
needs_client = pytest.mark.skipif(not CLI.exists(), reason=f"the recorded client is not there: {CLI}")


def payloads(stream: bytes) -> list[Any]:
    """The events of a stream in either framing, parsed."""
    if stream.lstrip()[:1] in {b"[", b"{"}:
        array = ArrayDecoder()
        elements = array.feed(stream) + array.close()
        return [json.loads(element.data) for element in elements if element.data]
    events = SseDecoder()
    return [json.loads(event.data) for event in events.feed(stream) + events.close() if event.data]


def texts(stream: bytes) -> dict[int, str]:
    """Return the texts that a client puts together from a stream, per candidate; in either wrapping."""
    found: dict[int, str] = {}
    for payload in payloads(stream):
        for candidate in payload.get("response", payload).get("candidates", ()):
            text = found.setdefault(candidate.get("index", 0), "")
            for part in candidate.get("content", {}).get("parts", ()):
                text += part.get("text", "") if not part.get("thought") else ""
            found[candidate.get("index", 0)] = text
    return found


def others(stream: bytes) -> list[Any]:
    """Everything but words, in order: other parts, and each candidate's end."""
    found: list[Any] = []
    for payload in payloads(stream):
        for candidate in payload.get("response", payload).get("candidates", ()):
            parts = candidate.get("content", {}).get("parts", ())
            found += [part for part in parts if part.keys() != {"text"}]
            found += [candidate[key] for key in ("finishReason", "groundingMetadata") if key in candidate]
    return found


def event(*parts: dict[str, Any], finish: str | None = None, index: int = 0, **more: Any) -> dict[str, Any]:
    """One event of a stream."""
    candidate: dict[str, Any] = {"content": {"parts": list(parts), "role": "model"}, "index": index}
    if finish:
        candidate["finishReason"] = finish
    return {"candidates": [candidate], "modelVersion": "m", "responseId": "r1", **more}


def text(words: str, **more: Any) -> dict[str, Any]:
    """A part of words."""
    return {"text": words, **more}


def as_sse(events: Iterable[dict[str, Any]], newline: str = "\r\n") -> bytes:
    """Events framed as server-sent events."""
    return "".join(f"data: {json.dumps(each)}{newline * 2}" for each in events).encode()


def as_array(events: Iterable[dict[str, Any]]) -> bytes:
    """Events framed as Google frames an array."""
    return ("[" + "\n,\r\n".join(json.dumps(each, indent=2) for each in events) + "\n]").encode()


def wrapped(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Events as Code Assist wraps them."""
    return [{"response": each, "traceId": "t"} for each in events]


def wrap_stream(stream: bytes) -> bytes:
    """A stream's bytes with each event in Code Assist's wrapping, the inner bytes as they were."""
    if stream.lstrip()[:1] in {b"[", b"{"}:
        array = ArrayDecoder()
        elements = array.feed(stream) + array.close()
        return b"".join(
            each.with_data(b'{"response": ' + each.data + b"}") if each.data else each.raw for each in elements
        )
    decoder = SseDecoder()
    events = decoder.feed(stream) + decoder.close()
    return b"".join(
        each.raw.replace(each.data, b'{"response": ' + each.data + b"}") if each.data else each.raw for each in events
    )
