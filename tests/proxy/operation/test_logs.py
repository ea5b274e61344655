"""Logs say what happened, never what was said: no content, no keys, at any level, whatever goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import secrets
import sys
from collections.abc import Iterator

import aiohttp
import pytest

from tersely.fakellm.scripted import ScriptedReply
from tersely.server.run import log_as_json
from tests.conftest import Database
from tests.support.http import body_of, post, request_bytes, wire
from tests.support.relay import relay
from tests.support.services import many, serve
from tests.support.upstreams import DONE, Model, RawUpstream, chunk, http_head, scripted, sse


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Return the lines that the service writes to stderr at debug."""
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    levels = {name: logging.getLogger(name).level for name in logging.root.manager.loggerDict}
    log_as_json("debug")
    yield written
    root.handlers[:], root.level = before
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


async def test_log_contains_no_message_content(store: Database, raw: RawUpstream, logged: io.StringIO):
    word = f"marker{secrets.token_hex(6)}"
    key = f"sk-{word}"
    tsk = f"tsk_0123456789abcdef_{word}{'s' * 30}"
    headers = {"Authorization": f"Bearer {key}", "X-Tersely-Session": f"s{secrets.token_hex(4)}"}
    body = body_of(f"{word} in a question", stream=True, user=word, model=word)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    replies = [
        (http_head(), sse(f"{word} in an answer<terse>{word}</terse>", role=True), sse(finish="stop"), DONE),
        (head, chunk(sse(word, role=True)), chunk(sse(word)[:30])),
        (http_head("application/json", status="400 Bad Request"), b'{"error":{"message":"%s"}}' % word.encode()),
        (http_head("application/json", status="500 Oops"), word.encode()),
        (b"HTTP/1.1 200 OK\r\n%s: \x00\r\n\r\n" % word.encode(),),
        (f"not http {word}\r\n\r\n".encode(),),
        (http_head("application/json"), b'{"choices":[{"message":{"content":"%s","role":7}}]}' % word.encode()),
        (),
    ]
    with (
        many(relay(store)) as (way,),
        serve(store, raw.url, dsn=way.dsn, database_timeout=0.5, log_level="debug") as service,
    ):
        for pieces in replies:
            raw.answer(*pieces)
            for path in ("/v1/chat/completions", f"/v1/{word}?{word}={word}"):
                with contextlib.suppress(aiohttp.ClientPayloadError):
                    await post(service, body, path=path, **headers)
        for broken in (f'{{"{word}":'.encode(), f'{{"messages":"{word}"}}'.encode(), b"\xff" + word.encode()):
            await post(service, broken, **headers)
        await post(service, body, X_Tersely_Strategy=word)
        await post(service, body, X_Tersely_Bypass=word)
        raw.answer(http_head(), sse(word, role=True), 5.0)
        async with wire(service) as line:
            await line.send(request_bytes(body, **headers))
            await line.until(word.encode())
        async with wire(service) as line:
            await line.send(f"{word} {word}\r\n\r\n".encode())
            await line.to_end()
        way.cut()
        raw.answer(*replies[0])
        for _ in range(3):
            await post(service, body, **headers)
        await post(service, body, **{name: value for name, value in headers.items() if name != "X-Tersely-Session"})
        with serve(store, raw.url, dsn=way.dsn, auth="keys") as locked:
            await post(locked, body, X_Tersely_Key=tsk)
            way.restore()
            await asyncio.sleep(0.3)
            await post(locked, body, X_Tersely_Key=tsk)
            await post(locked, body, Authorization=f"Bearer {key}")

    assert "forwarding without the store" in logged.getvalue(), "there is something to look at"
    assert word not in logged.getvalue()


async def test_the_scripted_model_is_as_discreet(store: Database, logged: io.StringIO):
    word = f"marker{secrets.token_hex(6)}"
    with scripted() as model, serve(store, model.url, log_level="debug") as service:
        assert isinstance(model, Model)
        model.script(
            word, ScriptedReply(message={"content": word}, pieces=[word], break_after=1, break_with="disconnect")
        )
        await post(service, body_of(word, user=word, stream=True))
        await post(service, body_of({"role": "wizard", "content": word}))

    assert "aiohttp.server" in logged.getvalue(), "there is something to look at"
    assert word not in logged.getvalue()
