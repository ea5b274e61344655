"""`TERSELY_CORS_ORIGINS`: which web pages may call the APIs from a browser."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from pydantic import ValidationError

from tersely.settings import Settings
from tests.api.conftest import Api, NewKey, serve
from tests.conftest import Database

ORIGIN = "https://app.example.com"
OTHER = "https://evil.example"
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "content-type,x-tersely-key"}


@pytest.fixture
async def open_to_pages(database: Database) -> AsyncIterator[Api]:
    """The application with keys, which pages of two origins may call."""
    async with serve(database.dsn, auth="keys", cors_origins=f"{ORIGIN}, http://[::1]:5173") as running:
        yield running


def allowed(answer: httpx.Response) -> str | None:
    origin: str | None = answer.headers.get("access-control-allow-origin")
    return origin


@pytest.mark.parametrize(
    "path", ["/api/sessions", "/v1/messages", "/v1/chat/completions", "/mcp", "/u/local/v1/models"]
)
async def test_a_preflight_needs_no_key_and_allows_configured_origins_alone(open_to_pages: Api, path: str) -> None:
    answer = await open_to_pages.http.options(path, headers={"origin": ORIGIN, **PREFLIGHT})
    assert answer.status_code == 200
    assert allowed(answer) == ORIGIN
    assert answer.headers["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "origin" in answer.headers["vary"].lower()
    for origin in (OTHER, "null", ORIGIN + ".evil.example", ORIGIN.replace("https", "http"), f"{ORIGIN}:444"):
        refused = await open_to_pages.http.options(path, headers={"origin": origin, **PREFLIGHT})
        assert refused.status_code == 400
        assert allowed(refused) is None, origin


async def test_answers_and_refusals_can_be_read_by_configured_origins_alone(
    open_to_pages: Api, new_tenant: NewKey
) -> None:
    key = await new_tenant("acme")
    answer = await open_to_pages.http.get("/api/sessions", headers={"origin": ORIGIN, **key})
    assert (answer.status_code, allowed(answer)) == (200, ORIGIN)
    assert "X-Tersely-Session" in answer.headers["access-control-expose-headers"]
    unkeyed = await open_to_pages.http.post("/v1/messages", json={}, headers={"origin": ORIGIN})
    assert (unkeyed.status_code, allowed(unkeyed)) == (401, ORIGIN)
    assert allowed(await open_to_pages.http.get("/api/sessions", headers={"origin": OTHER, **key})) is None


async def test_cookies_are_never_allowed_and_the_console_is_for_no_other_origin(open_to_pages: Api) -> None:
    for path in ("/api/sessions", "/console/login"):
        answer = await open_to_pages.http.options(path, headers={"origin": ORIGIN, **PREFLIGHT})
        assert "access-control-allow-credentials" not in answer.headers
    page = await open_to_pages.http.get("/console/login", headers={"origin": ORIGIN})
    assert page.status_code == 200
    assert allowed(page) is None


async def test_without_the_setting_no_page_is_allowed(api: Api) -> None:
    answer = await api.http.get("/api/sessions", headers={"origin": ORIGIN})
    assert allowed(answer) is None
    assert (await api.http.options("/api/sessions", headers={"origin": ORIGIN, **PREFLIGHT})).status_code == 405


async def test_without_keys_a_configured_origin_is_the_only_one_beside_loopback(database: Database) -> None:
    async with serve(database.dsn, is_local=True, cors_origins=ORIGIN) as api:
        host = {"host": "127.0.0.1:8484"}
        served = await api.http.get("/api/sessions", headers={"origin": ORIGIN, **host})
        assert (served.status_code, allowed(served)) == (200, ORIGIN)
        assert (await api.http.get("/api/sessions", headers={"origin": OTHER, **host})).status_code == 403
        assert (await api.http.get("/console/sessions", headers={"origin": ORIGIN, **host})).status_code == 403


@pytest.mark.parametrize(
    "given",
    ["*", "https://*.example.com", "app.example.com", "https://app.example.com/", "null", "https://a b", "file://"],
)
def test_invalid_origins_are_refused(given: str) -> None:
    with pytest.raises(ValidationError, match="is not an origin"):
        Settings(_env_file=None, cors_origins=f"{ORIGIN},{given}")
