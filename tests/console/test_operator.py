"""The operator's view: who gets in, and what it shows."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.conftest import Database
from tests.support.services import Service, many, serve
from tests.support.upstreams import scripted

ADMIN = "the-admin-key-of-this-test"


@pytest.fixture
async def guarded(store: Database) -> AsyncIterator[Service]:
    """A service with keys and an admin key."""
    with serve(store, "http://127.0.0.1:9/v1", auth="keys", admin_key=ADMIN) as running:
        yield running


def token_in(page: str) -> str:
    found = re.search(r'name="token" value="([0-9a-f]{64})"', page)
    assert found is not None
    return found[1]


async def test_only_the_admin_key_opens_the_operators_view(guarded: Service) -> None:
    async with httpx.AsyncClient(base_url=guarded.url) as http:
        shut = await http.get("/console/operator")
        assert shut.status_code == 401
        assert "Tenants" not in shut.text
        assert (await http.post("/console/operator/login", data={"key": "wrong"})).status_code == 401
        entered = await http.post("/console/operator/login", data={"key": ADMIN})
        assert entered.status_code == 303
        cookie = entered.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert "path=/console/operator" in cookie
        assert ADMIN not in cookie
        page = await http.get("/console/operator")
        assert page.status_code == 200
        assert "Model hosts" in page.text
        # The operator is not a tenant.
        assert (await http.get("/console/sessions")).status_code == 401


@pytest.mark.parametrize("cookie", ["", "a.b.c", "9999999999.nonce.signature", "1.2", "\u0661.b.c"])
async def test_forged_cookie_of_the_operator_opens_nothing(guarded: Service, cookie: str) -> None:
    async with httpx.AsyncClient(base_url=guarded.url) as http:
        page = await http.get("/console/operator", headers={b"cookie": f"tersely_operator={cookie}".encode()})
        assert page.status_code == 401


async def test_without_an_admin_key_keys_shut_the_view(store: Database) -> None:
    with serve(store, "http://127.0.0.1:9/v1", auth="keys") as service:
        async with httpx.AsyncClient(base_url=service.url) as http:
            page = await http.get("/console/operator")
            assert page.status_code == 404
            assert "TERSELY_ADMIN_KEY" in page.text


async def test_key_is_made_used_and_revoked(guarded: Service) -> None:
    async with httpx.AsyncClient(base_url=guarded.url) as http:
        await http.post("/console/operator/login", data={"key": ADMIN})
        token = token_in((await http.get("/console/operator")).text)
        refused = await http.post("/console/operator/key", data={"tenant": "made-here"})
        assert refused.status_code == 403
        made = await http.post("/console/operator/key", data={"token": token, "tenant": "made-here", "label": "ci"})
        found = re.search(r"tsk_\w+", made.text)
        assert found is not None
        assert found[0] not in (await http.get("/console/operator")).text
        headers = {"x-tersely-key": found[0]}
        assert (await http.get("/api/sessions", headers=headers)).status_code == 200
        limits = {"token": token, "tenant": "made-here", "requests_per_minute": "7", "money_per_month": "2.5"}
        assert (await http.post("/console/operator/limits", data=limits)).status_code == 303
        assert "of 7<" in (await http.get("/console/operator")).text
        wrong = await http.post("/console/operator/limits", data={**limits, "concurrent": "many"})
        assert wrong.status_code == 422
        await http.post("/console/operator/revoke", data={"token": token, "key": found[0].split("_")[1]})
        assert "revoked" in (await http.get("/console/operator")).text


async def test_view_is_there_while_the_database_is_away(store: Database) -> None:
    away = "postgresql://nobody@127.0.0.1:9/none"
    with serve(store, "http://127.0.0.1:9/v1", dsn=away, admin_key=ADMIN) as service:
        async with httpx.AsyncClient(base_url=service.url, timeout=30) as http:
            await http.post("/console/operator/login", data={"key": ADMIN})
            page = await http.get("/console/operator")
            assert page.status_code == 200
            assert "away" in page.text


async def test_side_calls_are_shown_with_examples(store: Database) -> None:
    with scripted() as upstream, serve(store, upstream.url) as service:
        async with httpx.AsyncClient(base_url=service.url, timeout=30) as http:
            body = {
                "model": "gpt-4o",
                "messages": [
                    {"role": "system", "content": "Generate a title for this conversation."},
                    {"role": "user", "content": "Generate a title for this conversation:\n<i>what</i> is up?"},
                ],
            }
            headers = {"user-agent": "opencode/1.18.33"}
            assert (await http.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
            page = (await http.get("/console/operator")).text
            assert "&lt;i&gt;what&lt;/i&gt; is up?" in page


async def test_named_hosts_are_listed_one_by_one_with_their_errors(store: Database) -> None:
    with many(scripted(), scripted()) as (main, local):
        upstreams = {
            "local": {"dialect": "openai", "base_url": f"{local.url}", "models": ["llama*"]},
            "away": {"dialect": "anthropic", "base_url": "http://user:secret@127.0.0.1:9"},
        }
        with serve(store, main.url, upstreams=upstreams) as service:
            async with httpx.AsyncClient(base_url=service.url, timeout=30) as http:
                for model in ("gpt-4o", "llama3", "llama3"):
                    body = {"model": model, "messages": [{"role": "user", "content": f"ask {model}"}]}
                    assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
                question = {"model": "claude", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
                assert (await http.post("/u/away/v1/messages", json=question)).status_code >= 500
                page = (await http.get("/console/operator")).text
                metrics = (await http.get("/metrics")).text
    rows = re.findall(
        r"<tr data-row><th scope=.row.>(\w+)</th><td>(\w+)</td><td class=.mono.>([^<]*)</td>(.*?)</tr>", page
    )
    counts = {(dialect, name): re.findall(r">(\d+)<", rest) for dialect, name, _, rest in rows}
    assert counts["openai_chat", "default"] == ["1", *"0000000"]
    assert counts["openai_chat", "local"] == ["2", *"0000000"]
    assert counts["openai_responses", "local"] == list("00000000")
    assert counts["anthropic", "away"] == list("00010000")
    assert "secret" not in page
    assert 'tersely_host_calls_total{dialect="anthropic",host="away",outcome="upstream_limited"} 0.0' in metrics
