"""Access and failures over REST: tenants, keys, unknown paths, a database that is away."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tersely.domain.errors import StoreUnavailable
from tersely.service.common.metrics import _remove_dead_workers
from tersely.service.search.session_search import Searcher
from tests.api.conftest import Api, NewKey, serve
from tests.conftest import Database

MESSAGE = {"messages": [{"role": "user", "content": "secret"}]}

SHA = "0" * 64
ADMIN_KEY = "the-operator-s-own-key"

# Every route on one session, with a body that would do.
ROUTES: list[tuple[str, str, object]] = [
    ("GET", "/api/sessions/{id}", None),
    ("PATCH", "/api/sessions/{id}", {"strategy": "full"}),
    ("DELETE", "/api/sessions/{id}", None),
    ("GET", "/api/sessions/{id}/messages", None),
    ("GET", "/api/sessions/{id}/turns", None),
    ("GET", "/api/sessions/{id}/turns/t1", None),
    ("DELETE", "/api/sessions/{id}/turns/t1", None),
    ("POST", "/api/sessions/{id}/turns/t1/drop", None),
    ("POST", "/api/sessions/{id}/undo", None),
    ("POST", "/api/sessions/{id}/context", {}),
    ("POST", "/api/sessions/{id}/search", {"mode": "search", "query": "secret"}),
    ("POST", "/api/sessions/{id}/search", {"mode": "tail"}),
    ("GET", "/api/sessions/{id}/terse", None),
    ("GET", "/api/sessions/{id}/stats", None),
    ("GET", "/api/sessions/{id}/events", None),
    ("GET", "/api/sessions/{id}/calls", None),
    ("GET", "/api/sessions/{id}/epochs", None),
    ("GET", "/api/sessions/{id}/export", None),
    ("GET", "/api/sessions/{id}/state", None),
    ("PUT", "/api/sessions/{id}/state", {"text": "Goal: x"}),
    ("GET", "/api/sessions/{id}/state/history", None),
    ("GET", "/api/sessions/{id}/scratchpad", None),
    ("PUT", "/api/sessions/{id}/scratchpad", {"text": "x"}),
    ("POST", "/api/sessions/{id}/scratchpad/append", {"text": "x"}),
    ("POST", "/api/sessions/{id}/messages/1/pin", None),
    ("DELETE", "/api/sessions/{id}/messages/1/pin", None),
    ("PUT", "/api/sessions/{id}/messages/1/priority", {"priority": 80}),
    ("PATCH", "/api/sessions/{id}/messages/1", {"model_visible": False}),
    ("POST", "/api/sessions/{id}/query", {"sql": "SELECT content FROM messages"}),
    ("POST", "/api/sessions/{id}/compact", {}),
    ("POST", "/api/sessions/{id}/clear", None),
    ("POST", "/api/sessions/{id}/state/rebuild", None),
    ("POST", "/api/sessions/{id}/tools/context_search", {"arguments": {"mode": "tail"}}),
    ("POST", "/api/sessions/{id}/commands", {"text": "/message list"}),
]
OTHERS: list[tuple[str, str, object]] = [
    ("POST", "/api/sessions", {}),
    ("GET", "/api/sessions", None),
    ("POST", "/api/sessions/import", {"context": []}),
    ("POST", "/api/sessions/{id}/messages", MESSAGE),
    ("POST", "/api/memos", {"content": "x"}),
    ("GET", "/api/memos", None),
    ("GET", "/api/memos/export", None),
    ("DELETE", "/api/memos?tag=x", None),
    ("POST", "/api/memos/search", {"query": "x"}),
    ("GET", "/api/memos/m1", None),
    ("DELETE", "/api/memos/m1", None),
    ("GET", f"/api/artifacts/{SHA}", None),
    ("DELETE", f"/api/artifacts/{SHA}", None),
    ("GET", "/api/memory", None),
    ("DELETE", "/api/memory?day=2026-01-01", None),
    ("POST", "/api/memory/search", {"query": "x"}),
    ("GET", "/api/memory/export", None),
    ("GET", "/api/tools", None),
    ("GET", "/api/calls", None),
    ("GET", "/api/events?since=2026-01-01T00:00:00Z", None),
    ("GET", "/api/savings", None),
    ("POST", "/api/search", {"query": "x"}),
    ("GET", "/api/sessions/{id}/calls/1", None),
    ("GET", "/api/sessions/{id}/calls/1/context", None),
]
# Routes of the operator's key.
ADMIN: list[tuple[str, str, object]] = [
    ("GET", "/api/admin/tenants", None),
    ("POST", "/api/admin/tenants", {"id": "new"}),
    ("GET", "/api/admin/tenants/mine", None),
    ("GET", "/api/admin/tenants/mine/limits", None),
    ("PUT", "/api/admin/tenants/mine/limits", {"requests_per_minute": 1}),
    ("GET", "/api/admin/keys?tenant=mine", None),
    ("POST", "/api/admin/keys", {"tenant": "mine"}),
    ("DELETE", "/api/admin/keys/k1", None),
    ("GET", "/api/admin/keys/k1/limits", None),
    ("PUT", "/api/admin/keys/k1/limits", {"requests_per_minute": 1}),
]


EXAMPLES = {
    "tenant": "mine",
    "key_id": "k1",
    "id": "{id}",
    "turn": "t1",
    "memo_id": "m1",
    "sha256": SHA,
    "seq": "1",
    "name": "context_search",
    "number": "1",
}


async def call(api: Api, method: str, path: str, body: object, **headers: str) -> httpx.Response:
    given: dict[str, Any] = {} if body is None else {"json": body}
    return await api.http.request(method, path.replace("{id}", "s"), headers=headers, **given)


def test_the_lists_above_name_every_route() -> None:
    from tersely.composition.application import build
    from tersely.settings import Settings

    app = build(Settings(), database_url="postgresql://").rest
    known = {
        (method.upper(), path.replace("{session_id}", "{id}").format(**EXAMPLES))
        for path, operations in app.openapi()["paths"].items()
        for method in operations
        if path.startswith("/api/")
    }
    assert known == {(method, path.partition("?")[0]) for method, path, _ in ROUTES + OTHERS + ADMIN}


@pytest.mark.parametrize(("method", "path", "body"), ADMIN, ids=lambda v: str(v)[:40])
async def test_a_tenant_s_key_opens_no_operator_s_route(
    guarded: Api, new_tenant: NewKey, method: str, path: str, body: object
) -> None:
    mine = await new_tenant("mine")
    assert (await call(guarded, method, path, body, **mine)).status_code in (401, 403, 404)


@pytest.mark.parametrize(("method", "path", "body"), ROUTES, ids=lambda v: str(v)[:40])
async def test_another_tenant_s_session_is_not_there(
    guarded: Api, new_tenant: NewKey, method: str, path: str, body: object
) -> None:
    mine, yours = await new_tenant("mine"), await new_tenant("yours")
    await call(guarded, "POST", "/api/sessions/{id}/messages", MESSAGE, **mine)
    theirs = await call(guarded, method, path, body, **yours)
    assert theirs.status_code == 404
    assert "secret" not in theirs.text
    assert (await guarded.http.get("/api/sessions/s/messages", headers=mine)).json()["items"][0]["status"] == "live"
    own = await call(guarded, method, path, body, **mine)
    without_model = (409,) if path.endswith("/state/rebuild") else ()
    assert own.status_code in (200, 204, *without_model), own.text


async def test_two_tenants_may_use_one_id(guarded: Api, new_tenant: NewKey) -> None:
    mine, yours = await new_tenant("mine"), await new_tenant("yours")
    for key in (mine, yours):
        answer = await call(guarded, "POST", "/api/sessions/{id}/messages", MESSAGE, **key, **{"idempotency-key": "a"})
        assert answer.json()["first_seq"] == 1
        assert (
            await guarded.http.post("/api/sessions/import", json={"context": [], "id": "i"}, headers=key)
        ).is_success
    assert (await guarded.http.delete("/api/sessions/s", headers=mine)).status_code == 204
    listed = (await guarded.http.get("/api/sessions", headers=yours)).json()["items"]
    assert {session["id"] for session in listed} == {"s", "i"}
    child = await guarded.http.post("/api/sessions", json={"parent": "s"}, headers=mine)
    assert child.status_code == 422


@pytest.mark.parametrize(("method", "path", "body"), ROUTES + OTHERS, ids=lambda v: str(v)[:40])
async def test_without_a_key_nothing_opens(guarded: Api, method: str, path: str, body: object) -> None:
    for headers in (
        {},
        {"x-tersely-key": "tsk_nonsense"},
        {"authorization": "Bearer tsk_0123456789abcdef_" + "x" * 43},
    ):
        refused = await call(guarded, method, path, body, **headers)
        assert refused.status_code == 401
        assert refused.headers["content-type"] == "application/problem+json"
        assert refused.headers["www-authenticate"] == "Bearer"


STORED = [route for route in ROUTES + OTHERS if route[1] != "/api/tools"]


@pytest.mark.parametrize(("method", "path", "body"), STORED, ids=lambda v: str(v)[:40])
async def test_with_the_database_away_every_route_says_so(method: str, path: str, body: object) -> None:
    away = "postgresql://nobody@127.0.0.1:1/none"
    for auth in ("off", "keys"):
        async with serve(away, auth=auth) as api:
            key = {"x-tersely-key": "tsk_0123456789abcdef_" + "x" * 43}
            answer = await call(api, method, path, body, **key)
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "2"
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.json()["status"] == 503


@pytest.mark.parametrize(
    "path", ["/api", "/api/", "/api/nothing", "/api/sessions/s/state/x", "/nothing", "/api/sessions/a/b/c"]
)
async def test_unknown_paths(api: Api, path: str) -> None:
    answer = await api.http.get(path)
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["title"] == "Not found"


async def test_unknown_methods(api: Api) -> None:
    answer = await api.http.put("/api/sessions")
    assert answer.status_code == 405
    assert answer.headers["content-type"] == "application/problem+json"
    assert "GET" in answer.headers["allow"]


async def test_faults_show_nothing_of_the_inside(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    async def break_(*_: object) -> None:
        raise ZeroDivisionError("postgresql://user:password@host")

    monkeypatch.setattr(Searcher, "search", break_)
    answer = await api.http.post("/api/sessions/s/search", json={"mode": "tail"})
    assert answer.status_code == 500
    assert answer.headers["content-type"] == "application/problem+json"
    assert "password" not in answer.text
    assert "ZeroDivision" not in answer.text


async def test_an_outage_in_the_middle_of_a_request(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(*_: object) -> None:
        raise StoreUnavailable

    monkeypatch.setattr(Searcher, "search", away)
    answer = await api.http.post("/api/sessions/s/search", json={"mode": "tail"})
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "2"


async def test_requests_and_searches_are_counted(api: Api) -> None:
    await api.append("s", {"role": "user", "content": "x"})
    await api.http.post("/api/sessions/s/search", json={"mode": "search", "query": "x"})
    await api.http.get("/api/sessions/none")
    metrics = (await api.http.get("/metrics")).text
    assert 'tersely_search_seconds_count{mode="search"} 1.0' in metrics
    assert 'tersely_requests_total{dialect="",route="api",status="404",strategy=""} 1.0' in metrics
    assert 'tersely_requests_total{dialect="",route="api",status="201",strategy=""} 1.0' in metrics


async def test_a_method_that_is_not_there_names_the_others_once(api: Api) -> None:
    answer = await api.http.put("/healthz")
    assert answer.status_code == 405
    assert answer.headers.get_list("allow") == ["GET, HEAD"]


async def test_root_and_health_answer_head_and_redirect_to_the_docs(api: Api) -> None:
    assert (await api.http.head("/healthz")).status_code == 200
    assert (await api.http.head("/")).status_code == 200
    looked = await api.http.get("/")
    assert (looked.status_code, looked.headers["location"]) == (307, "/docs")


async def test_a_tag_on_its_own_line_leaves_no_blank_line(api: Api) -> None:
    """flo.monster's "Context Management": one paragraph per message."""
    await api.append(
        "s",
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "one\n"},
        {"role": "user", "content": "x"},
    )
    found = (await api.http.post("/api/sessions/s/search", json={"mode": "tail"})).text
    assert "one\\n[user t2] x" in found


def test_the_gauges_of_dead_workers_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    dead, alive = tmp_path / f"gauge_livesum_{gone.pid}.db", tmp_path / f"gauge_livesum_{os.getpid()}.db"
    counted = tmp_path / f"counter_{gone.pid}.db"
    for file in (dead, alive, counted):
        file.write_bytes(b"")
    _remove_dead_workers()
    assert [file.exists() for file in (dead, alive, counted)] == [False, True, True]


@pytest.mark.parametrize("user", ["nobody_like_that"])
async def test_wrong_database_role_is_logged_once(
    database: Database, user: str, caplog: pytest.LogCaptureFixture
) -> None:
    parts = urlsplit(database.dsn)
    wrong = parts._replace(netloc=f"{user}:x@{parts.netloc.rpartition('@')[2]}").geturl()
    with caplog.at_level("INFO", "tersely.lifespan"):
        async with serve(wrong):
            for _ in range(100):
                await asyncio.sleep(0.05)
                if caplog.records:
                    break
    records = [record for record in caplog.records if record.name == "tersely.lifespan"]
    assert [record.levelname for record in records] == ["WARNING"]
    assert "authorization" in records[0].getMessage()


LOCAL = ["127.0.0.1:8484", "localhost:1", "LOCALHOST", "[::1]:8484", "127.9.9.9"]
FOREIGN = ["evil.example", "localhost.evil.example:8484", "127.0.0.1.evil.example", "10.0.0.1", "", "[x"]


async def test_web_page_cannot_call_a_service_on_loopback(database: Database) -> None:
    async with serve(database.dsn, is_local=True) as api:
        for host in LOCAL:
            for more in ({}, {"origin": f"http://{host}"}):
                assert (await api.http.get("/api/sessions", headers={"host": host, **more})).status_code == 200
        for host in FOREIGN:
            for headers in ({"host": host}, {"host": "localhost", "origin": f"http://{host}"}):
                rest = await api.http.get("/api/sessions", headers=headers)
                assert (rest.status_code, rest.headers["content-type"]) == (403, "application/problem+json")
                chat = await api.http.post(
                    "/v1/chat/completions", content=b"{}", headers={**headers, "content-type": "text/plain"}
                )
                assert (chat.status_code, chat.json()["error"]["code"]) == (403, "forbidden")
        assert (await api.http.get("/api/sessions", headers={"host": "localhost", "origin": "null"})).status_code == 403
    async with serve(database.dsn, is_local=True, auth="keys") as api:
        assert (await api.http.get("/api/sessions", headers={"host": "evil.example"})).status_code == 401


def _routes(api: Api) -> list[tuple[str, str, list[str]]]:
    """Each route under ``/api``: method, a path, and its query parameters as they are documented."""
    found: list[tuple[str, str, list[str]]] = []
    for path, operations in api.app.rest.openapi()["paths"].items():
        if path.startswith("/api/"):
            at = re.sub(r"\{\w+\}", "1", path)
            for method, operation in operations.items():
                parameters = operation.get("parameters", ())
                found.append((method, at, [each["name"] for each in parameters if each["in"] == "query"]))
    return found


async def test_unknown_query_parameters_are_refused_everywhere(database: Database) -> None:
    async with serve(database.dsn, admin_key=ADMIN_KEY) as api:
        api.http.headers["x-tersely-key"] = ADMIN_KEY
        routes = _routes(api)
        assert len(routes) > 40
        for method, path, known in routes:
            body: object = {} if method in {"post", "put", "patch"} else None
            answer = await api.http.request(method, path, params={"tags\u2028": "x"}, json=body)
            assert (answer.status_code, answer.json()["field"]) == (422, "tags\u2028"), (method, path)
            assert all(name in answer.json()["detail"] for name in known)
            for name in known:
                answer = await api.http.request(method, path, params={name: "1"}, json=body)
                refused = answer.status_code == 422 and "no query parameter" in answer.text
                assert not refused, (method, path, name)


async def test_whoever_has_no_key_learns_of_no_parameter(guarded: Api) -> None:
    assert (await guarded.http.get("/api/memos", params={"tags": "x"})).status_code == 401
