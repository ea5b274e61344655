"""A request's id: on every answer, whatever answers, and on every log line of that request."""

from __future__ import annotations

import asyncio
import io
import json

import pytest

from tersely.fakellm.scripted import ScriptedReply
from tests.conftest import Database
from tests.support.http import STORED, body_of, post, wire
from tests.support.loops import eventually
from tests.support.relay import relay
from tests.support.services import Service, many, serve
from tests.support.upstreams import Model, RawRequest, RawUpstream, http_head

CALLS = [
    ("POST", "/v1/chat/completions", body_of("hello"), 200),
    ("POST", "/v1/chat/completions", body_of("hello", stream=True), 200),
    ("POST", "/v1/chat/completions", b"{", 400),
    ("POST", "/v1/nothing", b"{}", 404),
    ("GET", "/v1/models", b"", 200),
    ("GET", "/api/sessions", b"", 200),
    ("GET", "/api/sessions/none", b"", 404),
    ("GET", "/api/sessions/%00", b"", 422),
    ("POST", "/api/sessions", b"{", 422),
    ("PUT", "/api/sessions", b"{}", 405),
    ("GET", "/nothing", b"", 404),
    ("GET", "/healthz", b"", 200),
    ("GET", "/metrics", b"", 200),
    ("HEAD", "/", b"", 200),
    ("POST", "/mcp", b"{}", 400),
]


@pytest.mark.parametrize(("method", "path", "body", "status"), CALLS)
async def test_the_callers_id_comes_back(service: Service, method: str, path: str, body: bytes, status: int) -> None:
    answer = await post(service, body, path=path, method=method, X_Request_Id="mine-1", accept="application/json")
    assert answer.status == status, answer.body
    assert answer.headers["x-request-id"] == answer.headers["x-tersely-request-id"] == "mine-1"

    own = await post(service, body, path=path, method=method, accept="application/json")
    assert own.headers["x-request-id"]
    assert own.headers["x-tersely-request-id"].startswith("req_")
    if not path.startswith("/v1"):
        assert own.headers["x-request-id"] == own.headers["x-tersely-request-id"]


async def test_the_model_hosts_id_comes_through(service: Service, raw: RawUpstream, behind_raw: Service) -> None:
    raw.answer(http_head("application/json", x_request_id="hosts-1"), b'{"choices":[]}')
    plain = await post(behind_raw, body_of("hello"))
    assert plain.headers["x-request-id"] == "hosts-1"
    assert plain.headers["x-tersely-request-id"].startswith("req_")

    given = await post(behind_raw, body_of("hello"), X_Request_Id="mine-2")
    assert given.headers["x-request-id"] == "mine-2"
    assert given.headers["x-upstream-request-id"] == "hosts-1"
    assert raw.requests[-1].headers["x-request-id"] == "mine-2"


@pytest.mark.parametrize("unusable", ["a b", "x" * 129, "é", "a\tb", '{"a":1}', "a'b"])
async def test_an_unusable_id_is_replaced(service: Service, unusable: str) -> None:
    answer = await post(service, b"", path="/api/sessions", method="GET", X_Request_Id=unusable)
    assert answer.headers["x-request-id"].startswith("req_")


async def test_an_unparsable_request_has_an_id(service: Service) -> None:
    for sent in (b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nx-request-id: mine-3\r\nx: " + b"a" * 40_000):
        async with wire(service) as line:
            await line.send(sent)
            assert b"\r\nx-request-id: " in await line.until(b"\r\n\r\n")


async def test_refusals_of_size_have_an_id(store: Database, model: Model) -> None:
    with serve(store, model.url, max_body=1024 * 1024) as service:
        for path in ("/v1/chat/completions", "/v1/messages", "/api/sessions/s/messages"):
            too_large = await post(service, b"x" * (2 * 1024 * 1024), path=path, X_Request_Id="mine-413")
            assert (too_large.status, too_large.headers["x-request-id"]) == (413, "mine-413")
        async with wire(service) as line:
            await line.send(b"GET / HTTP/1.1\r\nx-request-id: mine-431\r\nx-long: " + b"a" * 40_000 + b"\r\n\r\n")
            head = await line.until(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 431")
        assert b"\r\nx-request-id: mine-431\r\n" in head


async def test_refusals_of_an_overloaded_service_have_an_id(store: Database, raw: RawUpstream, key: str) -> None:
    """A large body without room."""
    gate = asyncio.Event()

    async def wait(_: RawRequest, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await gate.wait()
        writer.write(http_head("application/json") + b'{"choices":[]}')
        await writer.drain()

    raw.handler = wait
    large = body_of("x" * (3 * 1024 * 1024))
    with serve(store, raw.url, body_memory=16) as service:
        first = asyncio.create_task(post(service, large, X_Tersely_Session=key))
        await eventually(lambda: is_taken(service))
        for path in ("/v1/chat/completions", "/api/sessions/s/messages"):
            refused = await post(service, large, path=path, X_Request_Id="mine-503")
            assert (refused.status, refused.headers["x-request-id"]) == (503, "mine-503"), refused.body
            assert refused.headers["retry-after"].isdigit()
        gate.set()
        await first


async def is_taken(service: Service) -> bool:
    return b"tersely_body_memory_bytes 0.0" not in (await post(service, b"", path="/metrics", method="GET")).body


def lines(log_lines: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in log_lines.getvalue().splitlines()]


async def test_every_line_of_a_request_has_its_id(
    store: Database, model: Model, log_lines: io.StringIO, key: str
) -> None:
    with many(relay(store)) as (way,), serve(store, model.url, dsn=way.dsn, database_timeout=0.5) as service:
        await post(service, body_of("hello", user=key), X_Request_Id="call-1")
        way.cut()
        model.script(key, ScriptedReply(status=500, body=b"{}"))
        await post(service, body_of("hello", user=key), X_Request_Id="call-2")
        await post(service, b"", path="/api/sessions", method="GET", X_Request_Id="call-3")
        await post(service, b"", path="/healthz", method="GET", X_Request_Id="call-4")

    (first,) = [line for line in lines(log_lines) if line.get("request_id") == "call-1" and line["message"] == "call"]
    assert (first["method"], first["route"], first["dialect"], first["status"]) == ("POST", "chat", "openai_chat", 200)
    assert first["context"] in STORED
    assert float(str(first["duration_ms"])) > 0
    assert any(
        line.get("request_id") == "call-2" and "without the store" in str(line["message"]) for line in lines(log_lines)
    )
    (rest,) = [line for line in lines(log_lines) if line.get("request_id") == "call-3" and line["message"] == "call"]
    assert (rest["route"], rest["status"]) == ("/api/sessions", 503)
    assert not [line for line in lines(log_lines) if line.get("request_id") == "call-4"]
