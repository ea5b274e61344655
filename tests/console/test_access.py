"""Access to the console, and the security headers of its answers."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import httpx
import pytest

from tersely.store.db.connection import Database as Store
from tests.conftest import Database
from tests.support.services import Service, serve
from tests.support.stores import open_store
from tests.support.tenants import tenant

FORM = {"content-type": "application/x-www-form-urlencoded"}


@pytest.fixture
async def guarded(store: Database) -> AsyncIterator[Service]:
    """A service where every request needs a key."""
    with serve(store, "http://127.0.0.1:9/v1", auth="keys") as running:
        yield running


@pytest.fixture
async def keyring(store: Database) -> AsyncIterator[Store]:
    async with open_store(store) as opened:
        yield opened


def token_in(page: str) -> str:
    """The token of the forms of a page."""
    found = re.search(r'name="token" value="([0-9a-f]{64})"', page)
    assert found is not None
    return found[1]


async def test_a_key_opens_the_console_of_its_tenant_alone(guarded: Service, keyring: Store) -> None:
    mine, theirs = await tenant(keyring), await tenant(keyring)
    async with httpx.AsyncClient(base_url=guarded.url) as http:
        made = await http.post("/api/sessions", json={"id": "theirs"}, headers={"x-tersely-key": theirs.key})
        assert made.status_code == 201
        assert (await http.get("/console/sessions")).status_code == 401
        assert (await http.post("/console/login", data={"key": "tsk_wrong"})).status_code == 401
        entered = await http.post("/console/login", data={"key": mine.key, "following": "/console/live"})
        assert entered.status_code == 303
        assert entered.headers["location"] == "/console/live"
        cookie = entered.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert mine.key.lower() not in cookie
        assert (await http.get("/console/sessions")).status_code == 200
        missing = await http.get("/console/session", params={"id": "theirs"})
        assert missing.status_code == 404
        assert "theirs" not in missing.text


async def test_a_forged_or_old_cookie_opens_nothing(guarded: Service, keyring: Store) -> None:
    mine, theirs = await tenant(keyring), await tenant(keyring)
    async with httpx.AsyncClient(base_url=guarded.url) as http:
        entered = await http.post("/console/login", data={"key": mine.key})
        value = entered.cookies["tersely_console"]
    key_id, expires, nonce, signature = value.split(".")
    for forged in (
        f"{theirs.key_id}.{expires}.{nonce}.{signature}",
        f"{key_id}.{int(expires) + 9999}.{nonce}.{signature}",
        f"{key_id}.1000.{nonce}.{signature}",
        f"-.{expires}.{nonce}.{signature}",
        "a.b.c.d",
        value[:-1],
    ):
        async with httpx.AsyncClient(base_url=guarded.url, cookies={"tersely_console": forged}) as http:
            assert (await http.get("/console/sessions")).status_code == 401, forged


async def test_a_revoked_key_closes_the_console(guarded: Service, keyring: Store) -> None:
    mine = await tenant(keyring)
    async with httpx.AsyncClient(base_url=guarded.url) as http:
        await http.post("/console/login", data={"key": mine.key})
        assert (await http.get("/console/sessions")).status_code == 200
        async with keyring.transaction(mine.name) as connection:
            await connection.execute("UPDATE keys SET revoked_at = now() WHERE tenant_id = $1", mine.name)
        assert (await http.get("/console/sessions")).status_code == 401


@pytest.mark.parametrize("given", [{}, {"token": "0" * 64}])
async def test_a_change_without_its_token_is_refused(guarded: Service, keyring: Store, given: dict[str, str]) -> None:
    mine = await tenant(keyring)
    async with httpx.AsyncClient(base_url=guarded.url) as http:
        await http.post("/api/sessions", json={"id": "s"}, headers={"x-tersely-key": mine.key})
        await http.post("/console/login", data={"key": mine.key})
        refused = await http.post("/console/session/act", data={"id": "s", "act": "delete", **given})
        assert refused.status_code == 403
        page = await http.get("/console/session/hands", params={"id": "s", "act": "delete"})
        token = token_in(page.text)
        for headers in ({"origin": "https://elsewhere.example"}, {"sec-fetch-site": "cross-site"}):
            elsewhere = await http.post(
                "/console/session/act", data={"id": "s", "act": "delete", "token": token}, headers=headers
            )
            assert elsewhere.status_code == 403
        as_json = await http.post("/console/session/act", json={"id": "s", "act": "delete", "token": token})
        assert as_json.status_code == 403
        done = await http.post("/console/session/act", data={"id": "s", "act": "delete", "token": token})
        assert done.status_code == 303
        assert (await http.get("/console/session", params={"id": "s"})).status_code == 404


async def test_another_page_of_the_log_in_cannot_lead_elsewhere(guarded: Service, keyring: Store) -> None:
    mine = await tenant(keyring)
    async with httpx.AsyncClient(base_url=guarded.url) as http:
        for following in ("https://elsewhere.example/", "//elsewhere.example", "/console/..\\", "/api/sessions"):
            entered = await http.post("/console/login", data={"key": mine.key, "following": following})
            assert entered.headers["location"] == "/console/sessions"


async def test_every_answer_carries_the_policy(store: Database) -> None:
    with serve(store, "http://127.0.0.1:9/v1") as service:
        async with httpx.AsyncClient(base_url=service.url) as http:
            for path in (
                "/console", "/console/sessions", "/console/session?id=no", "/console/nothing", "/docs",
                "/console/static/console.css", "/console/static/none.css", "/console/static/../router.py",
            ):  # fmt: skip
                answer = await http.get(path)
                policy = answer.headers.get("content-security-policy", "")
                assert "default-src 'none'" in policy, path
                assert "unsafe" not in policy
                assert "<script>" not in answer.text
                assert " style=" not in answer.text
                assert not re.search(r"\son[a-z]+=", answer.text)


async def test_without_keys_pages_of_other_hosts_are_refused(store: Database) -> None:
    with serve(store, "http://127.0.0.1:9/v1") as service:
        async with httpx.AsyncClient(base_url=service.url) as http:
            page = await http.get("/console/sessions")
            assert page.status_code == 200
            assert "httponly" in page.headers["set-cookie"].lower()


async def test_page_explains_an_unavailable_database(store: Database) -> None:
    with serve(store, "http://127.0.0.1:9/v1", dsn="postgresql://nobody@127.0.0.1:9/none") as service:
        async with httpx.AsyncClient(base_url=service.url, timeout=30) as http:
            page = await http.get("/console/sessions")
            assert page.status_code == 503
            assert "database is unavailable" in page.text
