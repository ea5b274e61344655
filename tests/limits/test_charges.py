"""The use of a call is what its host reports, and an estimate where a host answers without reporting it."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import operator
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tersely.fakellm.scripted import ScriptedReply
from tersely.service.common.offload import LONG
from tersely.service.proxy.recording.recorder import Recorder
from tests.conftest import Database
from tests.limits.conftest import ADMIN_KEY, NewTenant, admin, make_tenant
from tests.support.dialect_wires import WIRES
from tests.support.http import body_of
from tests.support.loops import until
from tests.support.services import FROM_THE_START, Worker, run_worker
from tests.support.tenants import Tenant
from tests.support.upstreams import MODEL, Model, RawUpstream, raw_upstream

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_accounts")]
# A worker has given back what it holds for idle tenants after so many seconds.
FOLLOWED = 1.3
LIMIT = 10_000_000
QUESTION = "a question of some length " * 400
TOKENS = 2_000
"""About the tokens of `QUESTION`."""
NONE: dict[str, Any] = {}
"""The usage of a host that reports none."""
BAD: list[dict[str, Any]] = [
    {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    {"prompt_tokens": -9, "completion_tokens": -9, "total_tokens": -18},
    {"prompt_tokens": "9", "completion_tokens": None},
    {"prompt_tokens": 10**30, "completion_tokens": 10**30},
    {"prompt_tokens": 1.5, "completion_tokens": []},
]
ERROR = b'{"error": {"message": "no", "type": "server_error", "code": null}}'


async def used(worker: Worker, tenant: Tenant, limit: str = "tokens_per_day") -> float:
    await asyncio.sleep(FOLLOWED)
    found = await admin(worker.http, worker.base_url, "GET", f"/tenants/{tenant.name}/limits")
    return float(found["used"][limit])


async def ask(
    worker: Worker, tenant: Tenant, body: bytes, path: str = "/v1/chat/completions", **headers: str
) -> tuple[int, bytes]:
    """Return status and body of a call; underscores in header names stand for hyphens."""
    sent = {"content-type": "application/json", "X-Tersely-Key": tenant.key}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    async with worker.http.post(worker.base_url + path, data=body, headers=sent) as answer:
        return answer.status, await answer.read()


async def saved_tokens(worker: Worker) -> float:
    async with worker.http.get(f"{worker.base_url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("tersely_tokens_saved_total"))


async def stored_savings(worker: Worker, tenant: Tenant) -> list[int]:
    """Return the saved tokens of the tenant's sessions in the list, in their statistics, and in the savings."""

    async def get(path: str) -> Any:
        async with worker.http.get(f"{worker.base_url}/api{path}", headers={"X-Tersely-Key": tenant.key}) as answer:
            return await answer.json()

    sessions = (await get("/sessions"))["items"]
    stats = [await get(f"/sessions/{session['id']}/stats") for session in sessions]
    saved = (await get("/savings"))["total"]["tokens_saved"]
    return [sum(each["tokens_saved"] for each in sessions), sum(each["saved"] for each in stats), saved]


# Calls that fail


@pytest.mark.parametrize("path", ["stored", "forwarded"])
async def test_calls_that_a_host_refuses_use_no_tokens(
    worker: Worker, new_tenant: NewTenant, model: Model, path: str
) -> None:
    tenant = await new_tenant(tokens_per_day=LIMIT)
    headers = {"X_Tersely_Bypass": "true"} if path == "forwarded" else {}
    for wire in WIRES.values():
        for status in (429, 500):
            script = model.script(tenant.name, ScriptedReply(status=status, body=ERROR))
            given = await ask(worker, tenant, wire.body(QUESTION), wire.path, X_Script=script, **headers)
            assert given[0] == status
    # A host may report an error under status 200.
    script = model.script(tenant.name, ScriptedReply(body=ERROR))
    assert (await ask(worker, tenant, body_of(QUESTION), X_Script=script, **headers))[0] == 200
    assert await used(worker, tenant) == 0


async def test_calls_that_reach_no_host_use_no_tokens(store: Database) -> None:
    async with run_worker(store, "http://127.0.0.1:9/v1", auth="keys", admin_key=ADMIN_KEY) as worker:
        tenant = await make_tenant(worker.http, worker.base_url, tokens_per_day=LIMIT)
        for wire in WIRES.values():
            assert (await ask(worker, tenant, wire.body(QUESTION), wire.path))[0] >= 500
        assert await used(worker, tenant) == 0


async def test_refused_calls_save_no_tokens(store: Database, model: Model) -> None:
    settings = {"strategy": "slim", "epoch": '{"high": 2000, "low": 900}'}
    async with run_worker(store, model.url, auth="keys", admin_key=ADMIN_KEY, **settings) as worker:
        tenant = await make_tenant(worker.http, worker.base_url, tokens_per_day=LIMIT)
        roles = ("user", "assistant")
        history = [{"role": roles[n % 2], "content": f"{n} some words " * 60} for n in range(41)]
        script = model.script(tenant.name, *(ScriptedReply(status=500, body=ERROR) for _ in range(3)))
        for _ in range(3):
            assert (await ask(worker, tenant, body_of(*history), X_Script=script))[0] == 500
        assert await saved_tokens(worker) == 0
        assert await stored_savings(worker, tenant) == [0, 0, 0]
        assert (await ask(worker, tenant, body_of(*history)))[0] == 200
        saved = await saved_tokens(worker)
        assert saved > 1000
        assert await stored_savings(worker, tenant) == [saved] * 3


@pytest.mark.parametrize("streams", [False, True])
async def test_rounds_before_a_refused_one_count(store: Database, model: Model, streams: bool) -> None:
    settings = {"strategy": "slim", "tools": "manage_scratchpad", "epoch": FROM_THE_START}
    async with run_worker(store, model.url, auth="keys", admin_key=ADMIN_KEY, **settings) as worker:
        tenant = await make_tenant(worker.http, worker.base_url, tokens_per_day=LIMIT)
        call = {"name": "manage_scratchpad", "arguments": '{"action": "read"}'}
        message = {"content": None, "tool_calls": [{"id": "c1", "type": "function", "function": call}]}
        usage = {"prompt_tokens": 700, "completion_tokens": 77, "total_tokens": 777}
        script = model.script(
            tenant.name, ScriptedReply(message=message, usage=usage), ScriptedReply(status=500, body=ERROR)
        )
        await ask(worker, tenant, body_of(QUESTION, stream=streams), X_Script=script)
        assert not model.replies[script]
        assert await used(worker, tenant) == 777


# Calls whose usage is not reported


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", ["stored", "forwarded"])
async def test_request_and_reply_are_estimated_where_the_host_reports_no_usage(
    worker: Worker, new_tenant: NewTenant, model: Model, path: str, streams: bool
) -> None:
    tenant = await new_tenant(tokens_per_day=LIMIT)
    script = model.script(tenant.name, ScriptedReply(message={"content": "word " * 4_000}, usage=NONE))
    headers = {"X_Tersely_Bypass": "true"} if path == "forwarded" else {}
    assert (await ask(worker, tenant, body_of(QUESTION, stream=streams), X_Script=script, **headers))[0] == 200
    assert TOKENS + 4_000 <= await used(worker, tenant) <= 1.5 * (TOKENS + 4_000)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", ["stored", "forwarded"])
async def test_impossible_usage_counts_as_none(
    worker: Worker, new_tenant: NewTenant, model: Model, path: str, streams: bool
) -> None:
    tenants = [await new_tenant(tokens_per_day=LIMIT) for _ in BAD]
    headers = {"X_Tersely_Bypass": "true"} if path == "forwarded" else {}
    for tenant, usage in zip(tenants, BAD, strict=True):
        script = model.script(tenant.name, ScriptedReply(message={"content": "word " * 4_000}, usage=usage))
        body = body_of(QUESTION, stream=streams, stream_options={"include_usage": True} if streams else None)
        assert (await ask(worker, tenant, body, X_Script=script, **headers))[0] == 200
    for tokens in await asyncio.gather(*(used(worker, tenant) for tenant in tenants)):
        assert TOKENS + 4_000 <= tokens <= 1.5 * (TOKENS + 4_000)


async def test_forwarded_streams_count_though_the_client_does_not_ask_for_usage(
    worker: Worker, new_tenant: NewTenant
) -> None:
    tenant = await new_tenant(tokens_per_day=LIMIT, money_per_month=1_000)
    for _ in range(4):
        body = body_of(QUESTION, model="gpt-4o", stream=True)
        assert (await ask(worker, tenant, body, X_Tersely_Bypass="true"))[0] == 200
    assert await used(worker, tenant) >= 4 * TOKENS
    # 2.50 USD per million tokens.
    assert await used(worker, tenant, "money_per_month") >= 4 * TOKENS * 2.5e-6


async def test_compressed_requests_count(worker: Worker, new_tenant: NewTenant, model: Model) -> None:
    tenant = await new_tenant(tokens_per_day=LIMIT)
    script = model.script(tenant.name, ScriptedReply(usage=NONE))
    words = " ".join(f"{n * 7919 % 100_003:x}" for n in range(4_000))
    body = gzip.compress(body_of(words))
    await ask(worker, tenant, body, X_Script=script, content_encoding="gzip")
    assert model.last.headers["content-encoding"] == "gzip"
    assert await used(worker, tenant) >= 4_000


async def test_images_count_as_images(worker: Worker, new_tenant: NewTenant) -> None:
    tenant = await new_tenant(tokens_per_day=LIMIT)
    image = base64.b64encode(b"\x89PNG" * 100_000).decode()
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}]
    body = body_of({"role": "user", "content": parts}, stream=True)
    assert (await ask(worker, tenant, body, X_Tersely_Bypass="true"))[0] == 200
    assert 100 <= await used(worker, tenant) <= 5_000


async def test_requests_in_the_background_count_when_they_are_accepted(
    worker: Worker, new_tenant: NewTenant, model: Model
) -> None:
    tenant = await new_tenant(tokens_per_day=LIMIT)
    queued = {
        "id": "resp_1", "object": "response", "created_at": 1, "status": "queued", "background": True, "model": MODEL,
        "output": [], "usage": None,
    }  # fmt: skip
    model.state.is_strict = False
    try:
        script = model.script(tenant.name, ScriptedReply(body=json.dumps(queued).encode()))
        body = json.dumps({"model": MODEL, "input": QUESTION, "background": True}).encode()
        assert (await ask(worker, tenant, body, "/v1/responses", X_Script=script))[0] == 200
    finally:
        model.state.is_strict = True
    assert TOKENS <= await used(worker, tenant) <= 1.5 * TOKENS


@pytest.mark.parametrize("path", ["stored", "forwarded"])
@pytest.mark.parametrize("streams", [False, True])
async def test_replies_over_the_size_limit_count(store: Database, model: Model, path: str, streams: bool) -> None:
    """Their usage comes after the last byte that is read."""
    async with run_worker(store, model.url, auth="keys", admin_key=ADMIN_KEY, max_reply=100_000) as worker:
        tenant = await make_tenant(worker.http, worker.base_url, tokens_per_day=LIMIT)
        script = model.script(tenant.name, ScriptedReply(message={"content": "word " * 40_000}, chunk_chars=2_000))
        headers = {"X_Tersely_Bypass": "true"} if path == "forwarded" else {}
        body = body_of(QUESTION, stream=streams)
        assert (await ask(worker, tenant, body, X_Script=script, **headers))[0] == 200
        assert await used(worker, tenant) >= TOKENS + 15_000


# Clients that leave


async def leave(
    worker: Worker,
    tenant: Tenant,
    body: bytes,
    path: str,
    headers: dict[str, str] | None = None,
    when: Callable[[], object] = lambda: True,
) -> None:
    """Start a call, and go away once something has come and ``when`` holds, or after half a second of silence."""
    sent = {"content-type": "application/json", "X-Tersely-Key": tenant.key, **(headers or {})}
    timeout = aiohttp.ClientTimeout(sock_read=0.5)
    try:
        async with worker.http.post(worker.base_url + path, data=body, headers=sent, timeout=timeout) as answer:
            assert answer.status == 200
            await answer.content.readany()
            await until(when)
            answer.close()
    except aiohttp.ServerTimeoutError:
        pass


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", ["stored", "forwarded"])
async def test_calls_count_whose_client_leaves_before_the_reply(
    worker: Worker, new_tenant: NewTenant, model: Model, path: str, streams: bool
) -> None:
    tenant = await new_tenant(tokens_per_day=LIMIT)
    script = model.script(tenant.name, ScriptedReply(message={"content": "late"}, first_delay=1))
    headers = {"X-Script": script} | ({"X-Tersely-Bypass": "true"} if path == "forwarded" else {})
    await leave(worker, tenant, body_of(QUESTION, stream=streams), "/v1/chat/completions", headers)
    assert TOKENS <= await used(worker, tenant) <= 1.5 * TOKENS


@pytest.mark.parametrize("silent", [0, 1])
@pytest.mark.parametrize("streams", [False, True])
async def test_a_round_counts_that_reports_no_usage_beside_one_that_does(
    store: Database, model: Model, streams: bool, silent: int
) -> None:
    settings = {"strategy": "slim", "tools": "manage_scratchpad", "epoch": FROM_THE_START, "instructions": "off"}
    async with run_worker(store, model.url, auth="keys", admin_key=ADMIN_KEY, **settings) as worker:
        tenant = await make_tenant(worker.http, worker.base_url, tokens_per_day=LIMIT)
        call = {"name": "manage_scratchpad", "arguments": '{"action": "read"}'}
        message = {"content": "", "tool_calls": [{"id": "c1", "type": "function", "function": call}]}
        usage = {"prompt_tokens": TOKENS, "completion_tokens": 7, "total_tokens": TOKENS + 7}
        usages = [NONE, usage] if silent == 0 else [usage, NONE]
        messages: list[dict[str, Any]] = [message, {"content": "ok"}]
        replies = [ScriptedReply(message=said, usage=given) for said, given in zip(messages, usages, strict=True)]
        script = model.script(tenant.name, *replies)
        assert (await ask(worker, tenant, body_of(QUESTION, stream=streams), X_Script=script))[0] == 200
        assert not model.replies[script]
        assert 2 * TOKENS <= await used(worker, tenant) <= 3 * TOKENS


@pytest.mark.parametrize("reports", [False, True])
@pytest.mark.parametrize("streams", [False, True])
async def test_rounds_count_whose_client_leaves_before_the_last(
    store: Database, model: Model, streams: bool, reports: bool
) -> None:
    settings = {"strategy": "slim", "tools": "manage_scratchpad", "epoch": FROM_THE_START, "instructions": "off"}
    async with run_worker(store, model.url, auth="keys", admin_key=ADMIN_KEY, **settings) as worker:
        tenant = await make_tenant(worker.http, worker.base_url, tokens_per_day=LIMIT, concurrent=1)
        call = {"name": "manage_scratchpad", "arguments": '{"action": "read"}'}
        message = {"content": "", "tool_calls": [{"id": "c1", "type": "function", "function": call}]}
        usage = {"prompt_tokens": TOKENS, "completion_tokens": 77, "total_tokens": TOKENS + 77} if reports else NONE
        script = model.script(
            tenant.name,
            ScriptedReply(message=message, usage=usage),
            ScriptedReply(message={"content": "late"}, first_delay=5),
        )
        body = body_of(QUESTION, stream=streams)
        has_last_begun = partial(operator.not_, model.replies[script])
        await leave(worker, tenant, body, "/v1/chat/completions", {"X-Script": script}, has_last_begun)
        assert not model.replies[script]
        # Both rounds send the question, and the second one the tool's result too.
        assert 2 * TOKENS <= await used(worker, tenant) <= 4 * TOKENS
        assert await used(worker, tenant, "concurrent") == 0


@pytest.mark.parametrize(("streams", "seconds"), [(False, 0.8), (True, 0.8), (True, 2.0)])
async def test_calls_count_whose_client_leaves_while_a_long_reply_is_read(
    worker: Worker, new_tenant: NewTenant, monkeypatch: pytest.MonkeyPatch, streams: bool, seconds: float
) -> None:
    """Long replies are read in a thread, and counted when it is done, also when the tenant has been idle since."""
    read = Recorder._reply_write

    def read_slowly(*given: Any, **named: Any) -> Any:
        time.sleep(seconds)
        return read(*given, **named)

    monkeypatch.setattr(Recorder, "_reply_write", read_slowly)
    monkeypatch.setattr(Recorder, "_work_size", lambda *_: LONG)
    tenant = await new_tenant(tokens_per_day=LIMIT)
    await leave(worker, tenant, body_of(QUESTION, stream=streams), "/v1/chat/completions")
    await asyncio.sleep(2 * seconds - 0.5)
    assert TOKENS / 2 <= await used(worker, tenant) <= 1.5 * TOKENS
    sessions = f"{worker.base_url}/api/sessions"
    async with worker.http.get(sessions, headers={"X-Tersely-Key": tenant.key}) as answer:
        assert [each["messages"] for each in (await answer.json())["items"]] == [2]


@pytest.fixture
async def before_raw(store: Database) -> AsyncIterator[tuple[Worker, RawUpstream]]:
    """A service in front of a host that is written byte by byte."""
    with raw_upstream() as host:
        async with run_worker(store, host.url, auth="keys", admin_key=ADMIN_KEY) as worker:
            yield worker, host


@pytest.mark.parametrize("path", ["stored", "forwarded"])
async def test_text_counts_that_came_before_its_usage(before_raw: tuple[Worker, RawUpstream], path: str) -> None:
    """Anthropic's streams begin with one token of output, and report all of them in the last event but one."""
    worker, host = before_raw
    tenant = await make_tenant(worker.http, worker.base_url, tokens_per_day=LIMIT)
    usage = {"input_tokens": 3_000, "output_tokens": 1}
    message = {"id": "m", "type": "message", "role": "assistant", "model": "claude-x", "content": [], "usage": usage}
    block = {"type": "text", "text": ""}
    delta = {"type": "text_delta", "text": "word " * 4_000}
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": block},
        {"type": "content_block_delta", "index": 0, "delta": delta},
    ]
    written = b"".join(b"event: %s\ndata: %s\n\n" % (e["type"].encode(), json.dumps(e).encode()) for e in events)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    host.answer(head + written, 5.0)
    body = WIRES["anthropic"].body(QUESTION, stream=True)
    headers = {"X-Tersely-Bypass": "true"} if path == "forwarded" else {}
    await leave(worker, tenant, body, "/v1/messages", headers)
    assert 3_000 + 4_000 <= await used(worker, tenant) <= 3_000 + 6_000


# Prices


@pytest.mark.parametrize("path", ["stored", "forwarded"])
async def test_money_is_that_of_the_model_which_the_request_names(
    store: Database, model: Model, tmp_path: Path, path: str
) -> None:
    """The host answers under the name of a dated version."""
    prices = tmp_path / "prices.json"
    prices.write_text(json.dumps({"my-model": {"input": 1000, "output": 1000}}))
    async with run_worker(store, model.url, auth="keys", admin_key=ADMIN_KEY, prices=prices) as worker:
        tenant = await make_tenant(worker.http, worker.base_url, money_per_month=1_000)
        whole = {
            "id": "c", "object": "chat.completion", "created": 1, "model": "dated-version-1",
            "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 500, "completion_tokens": 500, "total_tokens": 1000},
        }  # fmt: skip
        script = model.script(tenant.name, ScriptedReply(body=json.dumps(whole).encode()))
        headers = {"X_Tersely_Bypass": "true"} if path == "forwarded" else {}
        assert (await ask(worker, tenant, body_of("hi", model="my-model"), X_Script=script, **headers))[0] == 200
        assert await used(worker, tenant, "money_per_month") == pytest.approx(1.0)
