"""The log line of a call: one per call, with what an operator asks about it, and nothing that was said."""

from __future__ import annotations

import io
import json
import re
import secrets
from collections import Counter
from typing import Any

import httpx
import pytest

from tersely.dialects.clients.names import client_name
from tersely.fakellm.scripted import ScriptedReply
from tests.conftest import SHARED_DATA, Database
from tests.support.http import body_of, post, request_bytes, wire
from tests.support.loops import until
from tests.support.relay import relay
from tests.support.services import many, serve
from tests.support.upstreams import DONE, Model, RawUpstream, http_head, sse


def call_lines(written: io.StringIO, request_id: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    return [line for line in lines if line["message"] == "call" and line.get("request_id") == request_id]


def the_line(written: io.StringIO, request_id: str) -> dict[str, Any]:
    (line,) = call_lines(written, request_id)
    assert not [name for name, value in line.items() if value in (None, "")], "fields that do not apply are missing"
    return line


@pytest.mark.parametrize("stream", [False, True])
async def test_line_of_an_answered_call(store: Database, model: Model, log_lines: io.StringIO, key: str, stream: bool):
    usage = {
        "prompt_tokens": 21,
        "completion_tokens": 5,
        "total_tokens": 26,
        "prompt_tokens_details": {"cached_tokens": 8},
    }
    with serve(store, model.url) as service:
        model.script(key, ScriptedReply(usage=usage))
        answer = await post(
            service,
            body_of("hello", user=key, stream=stream),
            X_Request_Id=key,
            X_Tersely_Session=key,
            User_Agent="codex_exec/0.169.0 (Debian)",
        )
        assert answer.status == 200
        await until(lambda: call_lines(log_lines, key))

    line = the_line(log_lines, key)
    expected = {
        "session": key,
        "tenant": "default",
        "client": "codex",
        "strategy": "slim",
        "route": "chat",
        "dialect": "openai_chat",
        "context": "built" if stream else "passthrough",  # a stream is asked for its usage
        "status": 200,
        "outcome": "answered",
        "input_tokens": 21,
        "cached_tokens": 8,
        "output_tokens": 5,
    }
    assert {name: line.get(name) for name in expected} == expected
    assert line["tokens_before"] > 0
    assert line["tokens_after"] > 0
    assert 0 < line["overhead_ms"] <= line["duration_ms"]
    assert 0 < line["upstream_ms"] <= line["duration_ms"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_without_usage_has_no_fields_for_it(
    store: Database, model: Model, log_lines: io.StringIO, key: str, stream: bool
):
    with serve(store, model.url) as service:
        model.script(key, ScriptedReply(usage={}))
        await post(service, body_of("hello", user=key, stream=stream), X_Request_Id=key, User_Agent="<script>")
        await until(lambda: call_lines(log_lines, key))
    line = the_line(log_lines, key)
    assert line["outcome"] == "answered"
    assert not line.keys() & {"input_tokens", "cached_tokens", "output_tokens", "client"}


def host_outcomes(url: str) -> dict[str, float]:
    """The outcomes of chat calls that ``tersely_host_calls_total`` has counted."""
    text = httpx.get(f"{url}/metrics", timeout=10).text
    found = re.findall(r'tersely_host_calls_total\{dialect="openai_chat",host="",outcome="(\w+)"\} ([\d.]+)', text)
    return {outcome: float(value) for outcome, value in found if float(value)}


async def test_outcomes_in_the_log_and_in_the_metric(store: Database, model: Model, log_lines: io.StringIO, key: str):
    replies = {
        "host-refuses": ScriptedReply(status=404, body=b'{"error":{"message":"no such model"}}'),
        "host-limits": ScriptedReply(status=429, body=b'{"error":{"message":"slow down"}}'),
        "host-fails": ScriptedReply(status=500, body=b'{"error":{"message":"no"}}'),
        "host-breaks-off": ScriptedReply(pieces=["one", "two"], break_after=1, break_with="disconnect"),
    }
    with many(relay(store)) as (way,), serve(store, model.url, dsn=way.dsn, database_timeout=0.5) as service:
        for name, reply in replies.items():
            model.script(key, reply)
            await post(service, body_of("hello", user=key, stream=reply.pieces is not None), X_Request_Id=name)
        await post(service, b"{", X_Request_Id="bad-body")
        await post(service, body_of("hello", user=key), X_Tersely_Strategy="none", X_Request_Id="bad-strategy")
        way.cut()
        await post(service, body_of("hello", user=key), X_Request_Id="no-database")
        await post(service, body_of("hello", user=key), X_Request_Id="delta", X_Tersely_Session=key)
        way.restore()
        counted = host_outcomes(service.url)

    outcomes = {name: the_line(log_lines, name)["outcome"] for name in (*replies, "bad-strategy", "bad-body", "delta")}
    assert outcomes == {
        "host-refuses": "upstream_refused",
        "host-limits": "upstream_limited",
        "host-fails": "upstream_error",
        "host-breaks-off": "interrupted",
        "bad-strategy": "refused",
        "bad-body": "refused",
        "delta": "failed",
    }
    away = the_line(log_lines, "no-database")
    assert (away["context"], away["outcome"]) == ("fail-open", "answered")
    assert the_line(log_lines, "delta")["status"] == 503
    assert counted == Counter(outcomes.values()) + Counter(["answered"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/audio/speech"])
async def test_a_reply_that_breaks_off_in_an_event_is_interrupted(
    store: Database, raw: RawUpstream, log_lines: io.StringIO, key: str, path: str
):
    with serve(store, raw.url) as service:
        raw.answer(http_head(content_length="500"), sse("a word", role=True), b'data: {"choi')
        async with wire(service) as line:
            await line.send(request_bytes(body_of("hello", stream=True), path=path, X_Request_Id=key))
            await line.until(b"a word")
            await until(lambda: call_lines(log_lines, key))
    assert the_line(log_lines, key)["outcome"] == "interrupted"
    assert the_line(log_lines, key)["status"] == 200


async def test_overhead_of_the_log_line_is_that_of_the_metric(
    store: Database, model: Model, log_lines: io.StringIO, key: str
):
    with serve(store, model.url) as service:
        for stream in (False, True):
            name = f"{key}-{stream}"
            await post(service, body_of("hello", user=key, stream=stream), X_Request_Id=name)
        await until(lambda: call_lines(log_lines, f"{key}-True"))
        text = httpx.get(f"{service.url}/metrics", timeout=10).text
    lines = [the_line(log_lines, f"{key}-{stream}") for stream in (False, True)]
    measured = float(re.findall(r"tersely_overhead_seconds_sum (\S+)", text)[0])
    assert sum(line["overhead_ms"] for line in lines) == pytest.approx(measured * 1000, abs=0.02)
    for line in lines:
        assert line["overhead_ms"] + line["upstream_ms"] == pytest.approx(line["duration_ms"], abs=20)


async def test_a_client_that_goes_away(store: Database, raw: RawUpstream, log_lines: io.StringIO, key: str):
    with serve(store, raw.url) as service:
        raw.answer(http_head(), sse("a word", role=True), 5.0, DONE)
        async with wire(service) as line:
            await line.send(request_bytes(body_of("hello", stream=True), X_Request_Id=key))
            await line.until(b"a word")
        await until(lambda: call_lines(log_lines, key))
    assert the_line(log_lines, key)["outcome"] == "client_gone"


@pytest.mark.parametrize(
    ("recorded", "name"),
    [
        ("claude-code", "claude-code"),
        ("codex", "codex"),
        ("copilot-cli", "copilot-cli"),
        ("gemini-cli", "gemini-cli"),
        ("langchain", "langchain"),
        ("openai-agents", "openai-agents"),
        ("opencode", "opencode"),
        ("pydantic-ai", "pydantic-ai"),
        ("qwen-code", "qwen-code"),
        ("vercel-ai-sdk", "vercel-ai-sdk"),
    ],
)
def test_recorded_clients_have_a_name(recorded: str, name: str):
    file = SHARED_DATA / "clients" / recorded / "requests.jsonl"
    if not file.is_file():
        pytest.skip(f"no recorded requests at {file}")
    names: dict[str, int] = {}
    for line in file.read_text().splitlines():
        request = json.loads(line)
        headers = {header.lower(): value for header, value in request["headers"].items()}
        if request.get("method") == "POST":
            found = client_name(headers)
            names[found] = names.get(found, 0) + 1
    assert max(names, key=lambda each: names[each]) in (name, "openai-python")
    assert name in names


def test_an_unknown_program_is_its_first_product():
    assert client_name({"user-agent": "MyAgent/1.2 (x)"}) == "myagent"
    assert client_name({"user-agent": f"{secrets.token_hex(40)}/1"}) == ""
    assert client_name({"user-agent": "<script>"}) == ""
    assert client_name({}) == ""
