"""A body with a million messages: refused at once, and nobody else waits for it."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from tersely.dialects.wire.lengths import check_lengths
from tersely.domain.errors import TooLarge
from tersely.settings import Settings
from tests.conftest import Database
from tests.support.http import STORED, body_of, post
from tests.support.loop_time import callback_times
from tests.support.services import Service, serve
from tests.support.upstreams import Model

MILLION = 1_000_000
# Seconds.
LONGEST = 0.02
# Freeing 23 MB of texts alone takes the interpreter 15 ms, in one step.
LONGEST_WITH_FREEING = 0.03
CHAT = b'{"role":"user","content":"a"}'
LISTS = {
    "chat": ("/v1/chat/completions", b'{"model":"m","messages":[%s]}', CHAT),
    "no objects": ("/v1/chat/completions", b'{"model":"m","messages":[%s]}', b"1"),
    "parts": (
        "/v1/chat/completions",
        b'{"model":"m","messages":[{"role":"user","content":[%s]}]}',
        b'{"type":"text","text":"a"}',
    ),
    "tools": ("/v1/chat/completions", b'{"model":"m","messages":[{"role":"user","content":"a"}],"tools":[%s]}', b"{}"),
    "messages": ("/v1/messages", b'{"model":"m","max_tokens":9,"messages":[%s]}', CHAT),
    "responses": ("/v1/responses", b'{"model":"m","input":[%s]}', CHAT),
    "gemini": ("/v1beta/models/m:generateContent", b'{"contents":[%s]}', b'{"role":"user","parts":[{}]}'),
    "code assist": (
        "/v1internal:generateContent",
        b'{"model":"m","project":"p","request":{"contents":[%s]}}',
        b'{"role":"user","parts":[{}]}',
    ),
    "import": ("/api/sessions/import", b'{"context":[%s]}', CHAT),
    "append": ("/api/sessions/s/messages", b'{"messages":[%s]}', CHAT),
    "preview": ("/api/sessions/s/context", b'{"messages":[%s]}', CHAT),
}


@pytest.mark.parametrize("name", LISTS)
async def test_a_million_are_refused_at_once(service: Service, model: Model, name: str) -> None:
    path, body, element = LISTS[name]
    calls = model.state.calls
    body = body % b",".join([element] * MILLION)
    pending = asyncio.create_task(post(service, body, path=path))
    slowest = 0.0
    while not pending.done():
        slowest = max(slowest, (await post(service, b"", path="/healthz", method="GET")).seconds)
        await asyncio.sleep(0.01)
    answer = await pending

    assert answer.status == 413, answer.body
    assert b"TERSELY_MAX_MESSAGES" in answer.body
    assert answer.seconds < 5
    assert slowest < 2  # client and service share one process here
    assert model.state.calls == calls


async def test_the_allowed_number_of_messages_is_built_and_stored(store: Database, model: Model, key: str) -> None:
    messages = [{"role": ("user", "assistant")[n % 2], "content": f"m{n}"} for n in range(10_000)]
    with serve(store, model.url, max_messages=10_001) as service:
        answer = await post(service, body_of(*messages, "end"), X_Tersely_Session=key)
        assert answer.status == 200
        assert answer.context in STORED
        refused = await post(service, body_of(*messages, "one", "more"), X_Tersely_Session=key)
        assert refused.status == 413


async def test_no_callback_is_long_at_the_default_limit(store: Database, model: Model, key: str) -> None:
    """A first request, the same session with its end edited, and one that is refused."""
    most = Settings(_env_file=None).max_messages
    messages = [{"role": ("user", "assistant")[n % 2], "content": f"m{n}"} for n in range(most - 3)]
    refused = LISTS["chat"][1] % b",".join([CHAT] * MILLION)
    bodies = [
        body_of(*messages, "end"),
        body_of(*messages, "end", {"role": "assistant", "content": "x"}, "more"),
        refused,
    ]
    with serve(store, model.url) as service, callback_times(service) as times:
        answers = [await post(service, body, X_Tersely_Session=key) for body in bodies]
    assert [answer.status for answer in answers] == [200, 200, 413]
    assert times.worst[0] < LONGEST, times.worst


async def test_no_callback_is_long_for_very_many_questions(store: Database, model: Model) -> None:
    """Each may be a summary by which the client goes on."""
    words = "some words here for you " * 50
    body = body_of(*[f"{n} {words}" for n in range(19_000)])
    with serve(store, model.url) as service, callback_times(service) as times:
        answer = await post(service, body)
    assert (answer.status, answer.context) == (200, "built")
    assert times.worst[0] < LONGEST_WITH_FREEING, times.worst


async def test_no_callback_is_long_where_a_long_context_is_looked_at(store: Database, model: Model, key: str) -> None:
    most = Settings(_env_file=None).max_messages
    messages = [{"role": ("user", "assistant")[n % 2], "content": f"m{n}"} for n in range(most - 2)]
    with serve(store, model.url) as service:
        sent = await post(service, body_of(*messages, "end"), X_Tersely_Session=key, X_Tersely_Strategy="full")
        assert sent.status == 200
        call = f"/api/sessions/{key}/calls/1"
        await post(service, b"", path=f"{call}/context", method="GET")  # the routes are made when used
        with callback_times(service) as times:
            context = await post(service, b"", path=f"{call}/context", method="GET")
    assert context.json["exact"]
    assert len(context.json["messages"]) == most - 1
    assert times.worst[0] < LONGEST, times.worst


async def test_no_callback_is_long_for_a_long_import(store: Database, model: Model, key: str) -> None:
    context = [{"role": ("user", "assistant")[n % 2], "content": f"m{n}"} for n in range(30_000)]
    body = json.dumps({"id": key, "context": context}).encode()
    with serve(store, model.url) as service:
        small = json.dumps({"context": context[:2]}).encode()
        assert (await post(service, small, path="/api/sessions/import")).status == 201  # the route is made when used
        with callback_times(service) as times:
            answer = await post(service, body, path="/api/sessions/import")
    assert (answer.status, answer.json["messages"]) == (201, 30_000)
    assert times.worst[0] < LONGEST, times.worst


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":"' + b'\\"' * 8_000_000,
        b'{"a":"' + b"," * 16_000_000 + b'"}',
        b"[" * 16_000_000,
        b'{"a":' * 3_000_000 + b"," * 100_000,
        b'"\\' * 8_000_000,
    ],
    ids=["unterminated", "commas in a text", "deep", "deep objects", "escapes"],
)
def test_counting_is_linear(body: bytes) -> None:
    began = time.perf_counter()
    check_lengths(body, 50_000)
    assert time.perf_counter() - began < 5


def test_the_limit_is_exact() -> None:
    lists: list[list[object]] = [["x,y" * 40] * 1000, [{"a": [1, 2, 3]}] * 1000, [[]] * 1000, list(range(1000))]
    for elements in lists:
        check_lengths(json.dumps({"messages": elements}).encode(), 1000)
        with pytest.raises(TooLarge):
            check_lengths(json.dumps({"messages": [*elements, 1]}).encode(), 1000)


async def test_the_limit_holds_for_calls_that_continue_a_live_session(store: Database, model: Model) -> None:
    """New messages may be too many, whatever came before; commas in earlier texts are no elements."""
    history: list[dict[str, object]] = [{"role": "user", "content": "one, two, " * 600}]
    with serve(store, model.url, max_messages=1000) as service:
        for number in range(4):
            answer = await post(service, body_of(*history))
            assert answer.status == 200
            history += [
                json.loads(answer.body)["choices"][0]["message"],
                {"role": "user", "content": f"go on {number}"},
            ]
        parts = [{"type": "text", "text": "a"}] * 1001
        refused = await post(service, body_of(*history[:-1], {"role": "user", "content": parts}))
        metrics = (await post(service, b"", path="/metrics", method="GET")).body.decode()
    assert refused.status == 413, refused.body
    assert 'tersely_live_calls_total{result="hit"} 3.0' in metrics
