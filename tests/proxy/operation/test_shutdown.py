"""SIGTERM: new calls are refused, open ones get time, then they end with their dialect's own error and are stored."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import pytest

from tests.conftest import Database
from tests.support.http import Wire, body_of, post, request_bytes, wire
from tests.support.loops import eventually
from tests.support.processes import greeting, start
from tests.support.rows import messages_by_number, query
from tests.support.services import Service
from tests.support.upstreams import DONE, RawUpstream, http_head, sse

MESSAGES = json.dumps(
    {"model": "m", "max_tokens": 9, "stream": True, "messages": [{"role": "user", "content": "hello"}]}
).encode()
CONTENTS = json.dumps({"contents": [{"role": "user", "parts": [{"text": "hello"}]}]}).encode()
RESPONSES = json.dumps({"model": "m", "stream": True, "input": "hello"}).encode()
GENERATE = "/v1beta/models/m:streamGenerateContent?alt=sse"
WHOLE = {
    "chat": ("/v1/chat/completions", body_of("whole")),
    "messages": ("/v1/messages", MESSAGES.replace(b'"stream": true', b'"stream": false')),
    "gemini": ("/v1beta/models/m:generateContent", CONTENTS),
    "responses": ("/v1/responses", RESPONSES.replace(b'"stream": true', b'"stream": false')),
}
ANTHROPIC_START = (
    b'event: message_start\ndata: {"type":"message_start","message":{"id":"m1","type":"message","role":"assistant",'
    b'"model":"m","content":[],"stop_reason":null,"usage":{"input_tokens":1,"output_tokens":1}}}\n\n'
    b'event: content_block_start\ndata: {"type":"content_block_start","index":0,"content_block":'
    b'{"type":"text","text":""}}\n\n'
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":'
    b'{"type":"text_delta","text":"so far"}}\n\n'
)
GEMINI_START = b'data: {"candidates":[{"content":{"role":"model","parts":[{"text":"so far"}]},"index":0}]}\r\n\r\n'
RESPONSES_START = (
    b'event: response.created\ndata: {"type":"response.created","response":{"id":"resp_x","object":"response",'
    b'"status":"in_progress","output":[]}}\n\n'
    b'event: response.output_item.added\ndata: {"type":"response.output_item.added","output_index":0,"item":'
    b'{"id":"msg_x","type":"message","role":"assistant","status":"in_progress","content":[]}}\n\n'
    b'event: response.content_part.added\ndata: {"type":"response.content_part.added","item_id":"msg_x",'
    b'"output_index":0,"content_index":0,"part":{"type":"output_text","text":"","annotations":[]}}\n\n'
    b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","item_id":"msg_x",'
    b'"output_index":0,"content_index":0,"delta":"so far"}\n\n'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """A service as a process."""

    service: Service
    process: subprocess.Popen[str]

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    async def ended(self, limit: float) -> int:
        return await asyncio.to_thread(self.process.wait, limit)


@contextmanager
def running(store: Database, raw: RawUpstream, *, workers: str = "1", **environment: str) -> Iterator[Ending]:
    host = raw.url.removesuffix("/v1")
    process = start(
        *("--port", "0", "--workers", workers),
        DATABASE_URL=store.dsn,
        TERSELY_OPENAI_BASE_URL=raw.url,
        TERSELY_ANTHROPIC_BASE_URL=host,
        TERSELY_GEMINI_BASE_URL=host,
        **environment,
    )
    try:
        found = re.search(r"http://127\.0\.0\.1:(\d+)", greeting(process))
        assert found is not None
        port = int(found[1])
        yield Ending(service=Service(url=f"http://127.0.0.1:{port}", port=port, database=store), process=process)
    finally:
        process.kill()
        process.communicate()


async def begin(line: Wire, body: bytes, *, path: str = "/v1/chat/completions", until: bytes, **headers: str) -> None:
    await line.send(request_bytes(body, path=path, host="localhost", **headers))
    await line.until(until, limit=30)


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_open_calls_get_their_time_and_new_ones_503(
    store: Database, raw: RawUpstream, key: str, workers: str
) -> None:
    with running(store, raw, workers=workers) as ending:
        service = ending.service
        raw.answer(http_head(), sse("one", role=True), 4.0, sse(" two", finish="stop"), DONE)
        async with wire(service) as line:
            await begin(line, body_of("hello", stream=True), until=b"one", X_Tersely_Session=key)
            ending.signal()
            await asyncio.sleep(1)

            own_id = {"X_Request_Id": "mine-503"}
            refused = [
                await post(service, body_of("new"), **own_id),
                await post(service, MESSAGES, path="/v1/messages", **own_id),
                await post(service, CONTENTS, path=GENERATE, **own_id),
                await post(service, b"", path="/api/sessions", method="GET", **own_id),
                await post(service, RESPONSES, path="/v1/responses", **own_id),
                await post(service, b"{}", path="/mcp", **own_id),
                await post(service, b"", path="/readyz", method="GET", **own_id),
            ]
            assert [each.status for each in refused] == [503] * 7
            assert all(each.headers["retry-after"] for each in refused)
            assert {each.headers["x-request-id"] for each in refused} == {"mine-503"}
            assert refused[0].json["error"]["code"] == "shutting_down"
            assert refused[1].json["type"] == "error"
            assert refused[2].json["error"]["status"] == "UNAVAILABLE"
            assert refused[3].json["title"] == "Shutting down"
            assert refused[4].json["error"]["code"] == "shutting_down"
            assert (await post(service, b"", path="/healthz", method="GET")).status == 200

            assert b" two" in await line.until(b"[DONE]")
        assert await ending.ended(15) == 0
        assert [each.finish for each in await messages_by_number(service, key)] == [None, "stop"]


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_streams_cut_at_shutdown_end_with_an_error_and_are_stored(
    store: Database, raw: RawUpstream, key: str, workers: str
) -> None:
    kinds = {
        "chat": ("/v1/chat/completions", body_of("hello", stream=True), sse("so far", role=True)),
        "messages": ("/v1/messages", MESSAGES, ANTHROPIC_START),
        "gemini": (GENERATE, CONTENTS, GEMINI_START),
        "responses": ("/v1/responses", RESPONSES, RESPONSES_START),
    }
    with running(store, raw, workers=workers, TERSELY_SHUTDOWN_GRACE="1", TERSELY_TOOLS="off") as ending:
        async with contextlib.AsyncExitStack() as stack:
            lines = {}
            for name, (path, body, first) in kinds.items():
                raw.answer(http_head(), first, 60.0)
                lines[name] = await stack.enter_async_context(wire(ending.service))
                await begin(lines[name], body, path=path, until=b"so far", X_Tersely_Session=f"{key}-{name}")
            raw.answer(60.0)
            waiting = {}
            for name, (path, body) in WHOLE.items():
                waiting[name] = await stack.enter_async_context(wire(ending.service))
                await waiting[name].send(
                    request_bytes(
                        body, path=path, host="localhost", X_Tersely_Session=f"{key}-{name}-whole", X_Request_Id="mine"
                    )
                )
            passed = await stack.enter_async_context(wire(ending.service))
            await passed.send(request_bytes(b"{}", path="/v1/embeddings", host="localhost"))
            await asyncio.sleep(0.5)

            began = time.monotonic()
            ending.signal()
            got = {name: await line.to_end(20) for name, line in lines.items()}
            whole = {name: await line.to_end(20) for name, line in waiting.items()}
            other = await passed.to_end(20)
            assert await ending.ended(15) == 0
            assert time.monotonic() - began < 12

    assert all(b"\r\nx-request-id: mine\r\n" in answer for answer in whole.values())
    for name, answer in got.items():
        assert b"shutting down" in answer, name
        assert answer.endswith(b"0\r\n\r\n"), name  # the stream ended in order
    assert b'"code":"shutting_down"' in got["chat"].replace(b": ", b":")
    assert b"event: error" in got["messages"]
    assert b"UNAVAILABLE" in got["gemini"]
    for answer in (*whole.values(), other):
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after" in answer
        assert b"shutting down" in answer
    for answer in (whole["chat"], whole["responses"], other):
        assert b"shutting_down" in answer
    assert b'"type":"error"' in whole["messages"].replace(b": ", b":")
    assert b'"UNAVAILABLE"' in whole["gemini"]
    for name in kinds:
        stored = await messages_by_number(ending.service, f"{key}-{name}")
        assert [(each.role, each.finish) for each in stored] == [("user", None), ("assistant", "interrupted")], name
        assert b"so far" in stored[1].raw


async def test_a_tool_round_ends_so_too(store: Database, raw: RawUpstream, key: str) -> None:
    with running(store, raw, TERSELY_SHUTDOWN_GRACE="0.5") as ending:
        raw.answer(http_head(), sse("so far", role=True), 60.0)
        async with wire(ending.service) as line:
            await begin(line, body_of("hello", stream=True), until=b"so far", X_Tersely_Session=key)
            ending.signal()
            assert b"shutting down" in await line.to_end(15)
        assert await ending.ended(15) == 0
    assert [each.finish for each in await messages_by_number(ending.service, key)] == [None, "interrupted"]


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_a_second_signal_ends_them_at_once(store: Database, raw: RawUpstream, key: str, workers: str) -> None:
    with running(store, raw, workers=workers, TERSELY_SHUTDOWN_GRACE="60") as ending:
        raw.answer(http_head(), sse("so far", role=True), 60.0)
        async with wire(ending.service) as line:
            await begin(line, body_of("hello", stream=True), until=b"so far", X_Tersely_Session=key)
            ending.signal()
            await asyncio.sleep(1.5)
            assert ending.process.poll() is None
            began = time.monotonic()
            ending.signal()
            assert b"shutting down" in await line.to_end(20)
            assert await ending.ended(20) == 0
            assert time.monotonic() - began < 20, "the grace is 60 seconds"
    assert [each.finish for each in await messages_by_number(ending.service, key)] == [None, "interrupted"]


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_idle_service_shuts_down_at_once(store: Database, raw: RawUpstream, workers: str) -> None:
    with running(store, raw, workers=workers) as ending:
        async with wire(ending.service) as idle, wire(ending.service) as half:
            await begin(idle, b"", path="/healthz", until=b"\r\n\r\n")
            await half.send(b"GET / HTTP/1.1\r\nhost: ")
            began = time.monotonic()
            ending.signal()
            assert await ending.ended(15) == 0
            assert time.monotonic() - began < 6


async def test_a_stream_of_events_does_not_hold_it(store: Database, raw: RawUpstream, key: str) -> None:
    with running(store, raw) as ending:
        assert (await post(ending.service, json.dumps({"id": key}).encode(), path="/api/sessions")).status == 201
        async with wire(ending.service) as line:
            head = f"GET /api/sessions/{key}/events HTTP/1.1\r\nhost: localhost\r\n"
            await line.send(f"{head}accept: text/event-stream\r\n\r\n".encode())
            await line.until(b": quiet")
            began = time.monotonic()
            ending.signal()
            assert (await line.to_end(10)).endswith(b"0\r\n\r\n")
            assert await ending.ended(15) == 0
            assert time.monotonic() - began < 5


async def test_second_signal_from_the_group_does_not_hurry_a_worker(
    store: Database, raw: RawUpstream, key: str
) -> None:
    """Service managers signal every process of a group, and the parent signals its workers besides."""
    with running(store, raw, workers="2", TERSELY_SHUTDOWN_GRACE="30") as ending:
        raw.answer(http_head(), sse("one", role=True), 3.0, sse(" two", finish="stop"), DONE)
        async with wire(ending.service) as line:
            await begin(line, body_of("hello", stream=True), until=b"one", X_Tersely_Session=key)
            family = psutil.Process(ending.process.pid).children(recursive=True)
            assert len([each for each in family if "forkserver" in " ".join(each.cmdline())]) == 3, "it, two workers"
            for each in family:
                each.send_signal(signal.SIGTERM)
            ending.signal()
            assert b" two" in await line.until(b"[DONE]")
        assert await ending.ended(15) == 0

    async def is_stored() -> bool:
        rows = await query(ending.service, "SELECT finish FROM messages WHERE session_id = $1 ORDER BY seq", key)
        return [row["finish"] for row in rows] == [None, "stop"]

    assert await eventually(is_stored)
