"""Keys that may only read, or only call models, and keys that expire."""

from __future__ import annotations

import asyncio
import secrets
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from tersely.fakellm.scripted import ScriptedReply
from tersely.service.common.auth import new_key
from tersely.store.db.connection import Database as Store
from tersely.store.ops import keys
from tests.conftest import Database
from tests.support.http import body_of, post
from tests.support.services import Service, serve
from tests.support.upstreams import Model


async def make_key(
    store: Database,
    *,
    scope: str | None = None,
    days: int | None = None,
    age: timedelta | None = None,
    client: str | None = None,
) -> str:
    keyring = Store(dsn=store.dsn)
    await keyring.open()
    now = datetime.now(UTC) - (age or timedelta())
    text, stored = new_key(
        "narrow",
        "",
        now=now,
        key_id=secrets.token_hex(8),
        secret=secrets.token_urlsafe(32),
        scope=scope,
        days=days,
        client=client,
    )
    await keys.add(keyring, stored)
    await keyring.close()
    return text


async def status(service: Service, key: str, method: str, path: str, body: bytes = b"") -> int:
    return (
        await post(service, body, path=path, method=method, X_Tersely_Key=key, Content_Type="application/json")
    ).status


async def test_narrowed_key_works_within_its_scope(store: Database, model: Model):
    every, read, proxy = [await make_key(store, scope=scope) for scope in (None, "read", "proxy")]
    future = await make_key(store, scope="something-of-a-later-version")
    message = b'{"messages": [{"role": "user", "content": "hello"}]}'
    calls = {
        "call a model": ("POST", "/v1/chat/completions", body_of("hello")),
        "list models": ("GET", "/v1/models", b""),
        "append": ("POST", "/api/sessions/s/messages", message),
        "read messages": ("GET", "/api/sessions/s/messages", b""),
        "search": ("POST", "/api/sessions/s/search", b'{"mode": "tail"}'),
        "preview": ("POST", "/api/sessions/s/context", b"{}"),
        "change": ("PATCH", "/api/sessions/s", b'{"metadata": {}}'),
        "write a memo": ("POST", "/api/memos", b'{"content": "x", "tags": []}'),
        "tools": ("POST", "/mcp", b"{}"),
        "delete": ("DELETE", "/api/sessions/s", b""),
    }
    allowed: dict[str, set[str]] = {}
    with serve(store, model.url, auth="keys") as service:
        assert await status(service, every, *calls["append"]) == 201
        for name, key in (("read", read), ("proxy", proxy), ("future", future), ("every", every)):
            found = {what: await status(service, key, *call) for what, call in calls.items()}
            allowed[name] = {what for what, code in found.items() if code != 403}
            assert {code for what, code in found.items() if what in allowed[name] and what != "tools"} <= {
                200,
                201,
                204,
            }
    assert allowed == {
        "read": {"read messages", "search", "preview"},
        "proxy": {"call a model", "list models"},
        "future": set(),
        "every": set(calls),
    }


async def test_expired_key_is_refused_even_if_cached(store: Database, model: Model, monkeypatch: pytest.MonkeyPatch):
    expired = await make_key(store, days=1, age=timedelta(days=2))
    lasting = await make_key(store, days=1)
    ahead = timedelta()
    monkeypatch.setattr("tersely.composition.application.clock", lambda: datetime.now(UTC) + ahead)
    with serve(store, model.url, auth="keys") as service:
        assert await status(service, expired, "GET", "/v1/models") == 401
        assert await status(service, lasting, "GET", "/v1/models") == 200
        ahead = timedelta(days=1, seconds=1)
        assert await status(service, lasting, "GET", "/v1/models") == 401
        assert await status(service, lasting, "GET", "/api/sessions") == 401


@pytest.mark.parametrize("end", ["expires", "is revoked"])
async def test_streams_of_events_end_with_their_key(
    store: Database, model: Model, monkeypatch: pytest.MonkeyPatch, end: str
):
    """A stream without an end would show a tenant's events to a key that has ended; a call under way finishes."""
    key = await make_key(store, days=1)
    ahead = timedelta()
    monkeypatch.setattr("tersely.composition.application.clock", lambda: datetime.now(UTC) + ahead)
    words = [f"{number} " for number in range(8)]
    script = model.script(
        key, ScriptedReply(message={"role": "assistant", "content": "".join(words)}, pieces=words, delay=0.5)
    )
    with serve(store, model.url, auth="keys") as service:
        async with httpx.AsyncClient(base_url=service.url, headers={"x-tersely-key": key}, timeout=20) as http:
            await http.post("/api/sessions", json={"id": "s"})
            await http.post("/console/login", data={"key": key})

            async def read(path: str) -> bool:
                async with http.stream("GET", path, headers={"accept": "text/event-stream"}) as answer:
                    assert answer.status_code == 200
                    opened.release()
                    async for _ in answer.aiter_bytes():
                        pass
                return True

            async def call() -> str:
                body = body_of("hello", user=script, stream=True)
                async with http.stream("POST", "/v1/chat/completions", content=body) as answer:
                    assert answer.status_code == 200
                    opened.release()
                    return (await answer.aread()).decode()

            opened = asyncio.Semaphore(0)
            paths = ["/api/events", "/api/sessions/s/events", "/console/live/events"]
            tasks = [asyncio.create_task(read(path)) for path in paths]
            answered = asyncio.create_task(call())
            for _ in range(len(tasks) + 1):
                await asyncio.wait_for(opened.acquire(), 10)
            if end == "expires":
                ahead = timedelta(days=1, seconds=1)
            else:
                keyring = Store(dsn=store.dsn)
                await keyring.open()
                await keys.revoke(keyring, "narrow", key.split("_")[1], datetime.now(UTC))
                await keyring.close()
            done, _ = await asyncio.wait(tasks, timeout=5)
            ended = [path for path, task in zip(paths, tasks, strict=True) if task in done]
            for task in tasks:
                task.cancel()
            assert ended == paths
            assert words[-1] in await answered
            assert (await http.get("/api/events", headers={"accept": "text/event-stream"})).status_code == 401


async def test_a_key_for_one_client_opens_no_console(store: Database, model: Model):
    key = await make_key(store, client="codex")
    with serve(store, model.url, auth="keys") as service:
        async with httpx.AsyncClient(base_url=service.url) as http:
            answer = await http.post("/console/login", data={"key": key})
    assert (answer.status_code, "tersely_console" in answer.cookies) == (403, False)
