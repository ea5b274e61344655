"""Gemini's clients fail at comments and at every field but ``data``: they get neither, whatever the host sends."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator

import pytest

from tests.conftest import Database
from tests.support.http import STORED, post
from tests.support.rows import messages_by_number
from tests.support.services import Service, serve
from tests.support.upstreams import RawUpstream, http_head

PATHS = ["/v1beta/models/gemini-3-flash:streamGenerateContent?alt=sse", "/v1internal:streamGenerateContent?alt=sse"]
ASKED = {"contents": [{"role": "user", "parts": [{"text": "Greet me."}]}]}
TOOL = {"functionDeclarations": [{"name": "look", "description": "d", "parameters": {"type": "object"}}]}


def _data(text: str, end: bytes, *, is_wrapped: bool, **more: str) -> bytes:
    candidate = {"content": {"role": "model", "parts": [{"text": text}]}, **more}
    event: dict[str, object] = {"candidates": [candidate], "responseId": "r1"}
    return b"data: " + json.dumps({"response": event} if is_wrapped else event).encode() + end


def _pieces(end: bytes, *, is_wrapped: bool) -> tuple[list[bytes], bytes]:
    """Return the bytes of the host, and their ``data`` lines."""
    blank = end * 2
    hello = _data("Hel", b"", is_wrapped=is_wrapped)
    rest = _data("lo: all", blank, is_wrapped=is_wrapped, finishReason="STOP")
    pieces = [
        b": ready" + blank,
        b"event: message" + end + b"id: 7" + end + hello[:9],
        hello[9:] + end + b": between" + end + end,
        b": keep-",
        b"alive" + blank + b"retry: 5" + blank + rest[:30],
        rest[30:],
        b": bye" + blank,
    ]
    return pieces, hello + blank + rest


@pytest.fixture(scope="module", params=["full", "slim", "window"])
def there(request: pytest.FixtureRequest, store: Database, raw: RawUpstream) -> Iterator[Service]:
    with serve(store, raw.url, heartbeat=0.2, idle_timeout=3, strategy=request.param) as running:
        yield running


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("path", PATHS)
async def test_gemini_streams_carry_data_lines_alone(
    there: Service, raw: RawUpstream, key: str, path: str, end: bytes
) -> None:
    is_wrapped = "internal" in path
    pieces, expected = _pieces(end, is_wrapped=is_wrapped)
    raw.answer(http_head(), *(part for piece in pieces for part in (piece, 0.25)))
    request = {"model": "gemini-3-flash", "request": ASKED} if is_wrapped else ASKED | {"tools": [TOOL]}

    answer = await post(there, json.dumps(request).encode(), path=path, X_Tersely_Session=key)

    assert answer.context in STORED
    assert answer.body == expected
    assert [each.role for each in await messages_by_number(there, key)] == ["user", "assistant"]


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_gemini_streams_that_are_only_forwarded_carry_data_lines_alone(
    behind_raw: Service, raw: RawUpstream, path: str, *, is_packed: bool
) -> None:
    pieces, expected = _pieces(b"\r\n", is_wrapped="internal" in path)
    whole = b"".join(pieces)
    if is_packed:
        packed = gzip.compress(whole)
        raw.answer(http_head(content_encoding="gzip", content_length=str(len(packed))), packed)
    else:
        raw.answer(http_head(content_length=str(len(whole))), *pieces)

    answer = await post(behind_raw, json.dumps(ASKED).encode(), path=path, X_Tersely_Bypass="true")

    assert answer.context == "bypass"
    assert answer.body == expected


async def test_other_dialects_keep_comments(plain_behind_raw: Service, raw: RawUpstream, key: str) -> None:
    stream = b': hi\n\nevent: message_start\ndata: {"type":"message_start","message":{"role":"assistant"}}\n\n'
    raw.answer(http_head(), stream)
    request = {"model": "m", "max_tokens": 5, "stream": True, "messages": [{"role": "user", "content": "Hello"}]}

    answer = await post(plain_behind_raw, json.dumps(request).encode(), path="/v1/messages", X_Tersely_Session=key)

    assert answer.body == stream
