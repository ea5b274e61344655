"""Bad requests get a clear error, quickly, and everybody else is served meanwhile."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterator

import pytest

from tests.conftest import Database
from tests.support.http import body_of, post, request_bytes, wire
from tests.support.rows import messages_by_number, query
from tests.support.services import Service, serve
from tests.support.upstreams import Model

MEGABYTE = 1024 * 1024


@pytest.fixture(scope="module")
def strict(store: Database, model: Model) -> Iterator[Service]:
    """A service with short deadlines and small bodies."""
    with serve(store, model.url, header_timeout=0.8, body_timeout=0.8, max_body=MEGABYTE) as running:
        yield running


async def sessions(service: Service) -> int:
    return len(await query(service, "SELECT FROM sessions"))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"model":"m","messages":[{"role":"user","content":"x"}]} trailing',
        b'{"model":"m","messages":[{"role":"user","content":"\xff\xfe"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"\xed\xa0\x80"}]}',
        b'{"model":"m","messages":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"model":"m","messages":[],"x":' + b'{"a":' * 200_000 + b"1" + b"}" * 200_000 + b"}",
        b'{"model":"m","messages":[{"role":"user","content":' + b"[" * 200_000 + b"]" * 200_000 + b"}]}",
        b"[" * 200_000,
        b"[]",
        b"null",
        b'"text"',
        b"{}",
        b'{"model":"m"}',
        b'{"model":"m","messages":"hello"}',
        b'{"model":"m","messages":{"role":"user"}}',
        b'{"model":7,"messages":[{"role":"user","content":"x"}]}',
        b'{"model":"m","stream":"yes","messages":[{"role":"user","content":"x"}]}',
        b'{"model":"m","n":1e400,"messages":[{"role":"user","content":"x"}]}',
        b"\x00" * 100,
        b"{'model': 'm'}",
    ],
    ids=range(22),
)
async def test_a_body_that_cannot_be_read(service: Service, model: Model, body: bytes):
    before, calls = await sessions(service), model.state.calls

    answer = await post(service, body)

    assert answer.status == 400
    error = answer.json["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert answer.seconds < 1.0
    assert answer.headers["content-type"] == "application/json"
    assert await sessions(service) == before
    assert model.state.calls in (calls, calls + 1), "at most the provider itself judged it"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "wizard", "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": 7}],
        [{"role": "user", "content": []}],
        [{"content": "x"}],
        [7],
        [None],
        ["text"],
        [{"role": "tool", "content": "x"}],
        [{"role": "tool", "tool_call_id": "nobody", "content": "x"}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "hologram", "data": 1}]}],
        [{"role": "assistant", "tool_calls": [{"id": "a"}]}, {"role": "user", "content": "x"}],
        [{"role": "assistant", "tool_calls": "many"}, {"role": "user", "content": "x"}],
        [{"role": "assistant", "content": None, "tool_calls": []}, {"role": "user", "content": "x"}],
        [{"role": "user", "content": ""}],
        [{"role": "system", "content": "only this"}],
    ],
    ids=json.dumps,
)
async def test_messages_are_the_providers_to_judge(service: Service, key: str, messages: list):
    answer = await post(service, body_of(*messages), X_Tersely_Session=key)

    assert answer.status in (200, 400)
    assert "error" in answer.json or "choices" in answer.json
    assert len(await messages_by_number(service, key)) <= len(messages) + (answer.status == 200)


async def test_duplicate_and_conflicting_call_ids(service: Service, key: str):
    call = {"id": "same", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "same", "content": "1"},
        {"role": "tool", "tool_call_id": "same", "content": "2"},
        {"role": "tool", "tool_call_id": "other", "content": "3"},
        {"role": "user", "content": "go on"},
    ]

    answer = await post(service, body_of(*messages), X_Tersely_Session=key)

    assert answer.status in (200, 400)
    assert answer.seconds < 2
    await messages_by_number(service, key)


@pytest.mark.parametrize(
    "text",
    [
        b"nul \\u0000 inside",
        b"lone \\ud800 surrogate",
        b"\\udfff\\ud800",
        b"\\u2028\\u2029\\ufeff\\u202e",
        b"' OR 1=1; DROP TABLE messages; --",
        b"$1 {0} %s ${jndi}",
    ],
)
async def test_odd_text_is_stored_unchanged(service: Service, key: str, text: bytes):
    for _ in range(2):
        body = b'{"model":"%s","messages":[{"role":"user","content":"%s"}],"user":"%s"}' % (text, text, text)
        answer = await post(service, body, X_Tersely_Session=key)
        assert answer.status == 200

    stored = await messages_by_number(service, key)
    assert stored[0].raw == b'{"role":"user","content":"%s"}' % text
    assert [each.role for each in stored].count("assistant") >= 1


async def test_huge_numbers_pass_or_are_refused(service: Service, key: str):
    body = (
        b'{"model":"m","messages":[{"role":"user","content":"x","big":%s}],"max_tokens":%s,"seed":1e309,"temperature":-0.0}'
    ) % (b"9" * 4000, b"9" * 30)

    answer = await post(service, body, X_Tersely_Session=key)

    assert answer.status in (200, 400)
    assert answer.seconds < 1


@pytest.mark.parametrize("session", ["x" * 257, "a\u00adb", ".", "..", "", "  "])
async def test_unusable_session_ids(service: Service, session: str):
    async with wire(service) as line:
        await line.send(request_bytes(body_of("x"), X_Tersely_Session=session, connection="close"))
        got = await line.to_end()

    if session.strip():
        assert got.startswith(b"HTTP/1.1 400")
        assert b"X-Tersely-Session" in got
    else:
        assert got.startswith((b"HTTP/1.1 400", b"HTTP/1.1 200"))


@pytest.mark.parametrize("session", ["\u30bb\u30c3\u30b7\u30e7\u30f3", "caf\u00e9", "a/b?c=d&e", '"quoted"', "x" * 256])
async def test_printable_session_ids_round_trip(service: Service, session: str):
    async with wire(service) as line:
        request = request_bytes(body_of("x"), connection="close").replace(
            b"\r\n\r\n", b"\r\nx-tersely-session: " + session.encode() + b"\r\n\r\n", 1
        )
        await line.send(request)
        got = await line.to_end()

    assert got.startswith(b"HTTP/1.1 200")
    assert b"x-tersely-session: " + session.encode() + b"\r\n" in got
    assert [each.role for each in await messages_by_number(service, session)] == ["user", "assistant"]


async def test_ids_cannot_inject_headers(service: Service):
    evil = "id\r\nset-cookie: a=b"

    answer = await post(service, body_of("x", session_id=evil, prompt_cache_key=evil, metadata={"session_id": evil}))

    assert answer.status == 200
    assert "set-cookie" not in answer.headers
    assert "\n" not in answer.session


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("X-Tersely-Strategy", "unknown"),
        ("X-Tersely-Strategy", '{"name": "slim", "recent_turns": 99}'),
        ("X-Tersely-Strategy", "{" * 1000),
        ("X-Tersely-Epoch", "never"),
        ("X-Tersely-Epoch", '{"stride": -1}'),
        ("X-Tersely-Epoch", '{"high": 1e400}'),
    ],
)
async def test_unusable_overrides(service: Service, name: str, value: str):
    answer = await post(service, body_of("x"), **{name: value})

    assert answer.status == 400
    assert answer.json["error"]["message"]


@pytest.mark.parametrize("has_length", [True, False])
async def test_a_body_over_the_limit(strict: Service, model: Model, has_length: bool):
    calls = model.state.calls
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\n"
    async with wire(strict) as line:
        if has_length:
            await line.send(head + b"content-length: 3000000\r\n\r\n" + b"x" * 2_000_000)
        else:
            await line.send(head + b"transfer-encoding: chunked\r\n\r\n" + b"10000\r\n" + b"x" * 65536 + b"\r\n")
            for _ in range(40):
                await line.send(b"10000\r\n" + b"x" * 65536 + b"\r\n")
        got = await line.to_end()

    assert got.startswith(b"HTTP/1.1 413")
    assert json.loads(got.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_too_large"
    assert model.state.calls == calls


async def test_a_client_library_gets_to_see_the_413(strict: Service):
    answer = await post(strict, body_of("x" * (3 * MEGABYTE)))

    assert answer.status == 413


async def test_a_slow_body_has_a_deadline_and_its_connection_ends(strict: Service):
    began = time.monotonic()
    async with wire(strict) as line:
        await line.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\ncontent-length: 1000\r\n\r\n{")
        trickle = asyncio.create_task(_trickle(line, b" "))
        got = await line.to_end()
        trickle.cancel()

    assert got.startswith(b"HTTP/1.1 4")
    assert b"did not arrive" in got
    assert 0.7 < time.monotonic() - began < 3.5


async def test_a_refused_body_that_arrives_quickly_is_read_to_its_end(strict: Service):
    """A client that is cut off while it sends does not get to see why."""
    async with wire(strict) as line:
        size = 24 * MEGABYTE
        await line.send(f"POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\ncontent-length: {size}\r\n\r\n".encode())
        for _ in range(size // MEGABYTE):
            await line.send(b"x" * MEGABYTE)
            await asyncio.sleep(0.05)
        got = await line.to_end()

    assert got.startswith(b"HTTP/1.1 413")


async def test_a_refused_body_is_read_to_its_end_as_long_as_an_accepted_one(service: Service):
    """Many clients at once share a line: each takes more than a few seconds."""
    async with wire(service) as line:
        size = 80 * MEGABYTE
        await line.send(f"POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\ncontent-length: {size}\r\n\r\n".encode())
        for _ in range(40):
            await line.send(b"x" * (2 * MEGABYTE))
            await asyncio.sleep(0.15)
        got = await line.to_end()

    assert got.startswith(b"HTTP/1.1 413")


async def test_a_client_that_pauses_in_a_refused_body_sees_the_refusal(service: Service):
    """One program that sends many large bodies at once leaves each of them alone for seconds."""
    async with wire(service) as line:
        size = 80 * MEGABYTE
        await line.send(f"POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\ncontent-length: {size}\r\n\r\n".encode())
        for _ in range(2):
            for _ in range(20):
                await line.send(b"x" * (2 * MEGABYTE))
            await asyncio.sleep(5)
        got = await line.to_end()

    assert got.startswith(b"HTTP/1.1 413")


async def _trickle(line, byte: bytes) -> None:
    while True:
        await line.send(byte)
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("start", [b"", b"POST /v1/chat", b"GET / HTTP/1.1\r\nx-slow: "])
async def test_slow_headers_have_a_deadline(strict: Service, start: bytes):
    began = time.monotonic()
    async with wire(strict) as line:
        await line.send(start)
        trickle = asyncio.create_task(_trickle(line, b"a")) if start else None
        await line.to_end()
        if trickle is not None:
            trickle.cancel()

    assert 0.7 < time.monotonic() - began < 2.5


async def test_nine_hundred_half_open_connections(strict: Service):
    lines = [await asyncio.open_connection("127.0.0.1", strict.port) for _ in range(900)]
    for _, writer in lines:
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: ")

    answer = await post(strict, body_of("somebody else"))
    assert answer.status == 200
    assert answer.seconds < 1.5
    async with asyncio.timeout(5):
        await asyncio.gather(*(_ended(reader) for reader, _ in lines))
    for _, writer in lines:
        writer.close()


async def _ended(reader: asyncio.StreamReader) -> None:
    try:
        while await reader.read(1000):
            pass
    except ConnectionError:
        pass


async def test_others_are_served_while_a_huge_body_is_read(service: Service):
    deep = b'{"model":"m","messages":[],"x":' + b"[" * 5_000_000 + b"]" * 5_000_000 + b"}"
    wide = body_of(*({"role": "user", "content": "y" * 20} for _ in range(5_000)))
    slowest = 0.0
    for body in (deep, wide):
        pending = asyncio.create_task(post(service, body))
        while not pending.done():
            slowest = max(slowest, (await post(service, b"", method="GET", path="/healthz")).seconds)
            await asyncio.sleep(0.02)
        assert (await pending).status in (200, 400)

    assert slowest < 2.5


async def test_http_1_0(service: Service, key: str):
    async with wire(service) as line:
        request = request_bytes(body_of("old"), X_Tersely_Session=key).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
        await line.send(request)
        got = await line.to_end()

    assert b" 200 " in got.partition(b"\r\n")[0]
    assert b"transfer-encoding" not in got.lower()
    assert json.loads(got.partition(b"\r\n\r\n")[2])["choices"]


async def test_pipelined_requests_are_answered_in_order(service: Service, key: str):
    async with wire(service) as line:
        requests = (request_bytes(body_of(f"number {n}"), X_Tersely_Session=f"{key}-{n}") for n in range(3))
        last = request_bytes(body_of("number 3"), X_Tersely_Session=f"{key}-3", connection="close")
        await line.send(b"".join(requests) + last)
        got = await line.to_end()

    assert [got.find(f"number {n}".encode()) for n in range(4)] == sorted(
        got.find(f"number {n}".encode()) for n in range(4)
    )
    assert got.count(b"HTTP/1.1 200") == 4
    for number in range(4):
        assert len(await messages_by_number(service, f"{key}-{number}")) == 2


async def test_a_knock_at_the_door(service: Service):
    assert (await post(service, b"", method="HEAD", path="/")).status == 200
    assert (await post(service, b"", method="GET", path="/nowhere")).status == 404


async def test_a_websocket_is_refused_at_once(service: Service, caplog: pytest.LogCaptureFixture):
    async with wire(service) as line:
        await line.send(
            b"GET /v1/responses HTTP/1.1\r\nhost: t\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
            b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        got = await line.until(b"\r\n\r\n", limit=2)

    assert got.startswith(b"HTTP/1.1 426")
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_expect_100_continue(service: Service, strict: Service, key: str):
    body = body_of("wait for it")
    async with wire(service) as line:
        request = request_bytes(body, expect="100-continue", X_Tersely_Session=key, connection="close")
        await line.send(request[: -len(body)])
        await line.until(b"100 Continue\r\n\r\n")
        await line.send(body)
        assert b"HTTP/1.1 200" in await line.to_end()
    async with wire(strict) as line:
        await line.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\nexpect: 100-continue\r\ncontent-length: 99999999\r\n\r\n"
        )
        got = await line.to_end()
        assert got.startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    "request_line",
    [
        b"GET\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100,
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/x HTTP/1.1\r\nhost: t\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET /v1/models HTTP/9.9\r\n\r\n",
    ],
)
@pytest.mark.usefixtures("brief_linger")
async def test_bytes_that_are_no_http_are_refused(strict: Service, request_line: bytes):
    async with wire(strict) as line:
        await line.send(request_line)
        got = await line.to_end()

    assert got == b"" or got.startswith(b"HTTP/1.1 4")
    assert (await post(strict, b"", method="GET", path="/healthz")).status == 200


async def test_a_client_that_leaves_within_its_body_leaves_nothing(service: Service, key: str):
    body = body_of("half")
    async with wire(service) as line:
        await line.send(request_bytes(body, X_Tersely_Session=key)[:-5])
    assert (await post(service, b"", method="GET", path="/healthz")).status == 200
    assert await messages_by_number(service, key) == []
