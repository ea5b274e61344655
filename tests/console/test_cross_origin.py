"""A page of another origin calls the service from a real browser."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from playwright.sync_api import Browser
from typing_extensions import override

from tersely.store.db.connection import Database as Store
from tests.conftest import Database
from tests.support.services import serve
from tests.support.tenants import Tenant, tenant
from tests.support.upstreams import scripted

CALL = """
async ([url, key]) => {
  try {
    const answer = await fetch(url + "/v1/messages", {
      method: "POST",
      headers: {"content-type": "application/json", "x-tersely-key": key, "anthropic-version": "2023-06-01"},
      body: JSON.stringify({
        model: "claude-sonnet-4-5", max_tokens: 64, stream: true, messages: [{role: "user", content: "Hello"}]
      }),
    });
    return {status: answer.status, session: answer.headers.get("x-tersely-session"), text: await answer.text()};
  } catch (error) {
    return {error: String(error)};
  }
}
"""


class Page(BaseHTTPRequestHandler):
    """An empty page."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>An app</title>")

    @override
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def pages() -> Iterator[list[str]]:
    """Two origins that serve a page."""
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Page) for _ in range(2)]
    threads = [Thread(target=server.serve_forever, args=(0.05,)) for server in servers]
    for thread in threads:
        thread.start()
    yield [f"http://127.0.0.1:{server.server_port}" for server in servers]
    for server, thread in zip(servers, threads, strict=True):
        server.shutdown()
        thread.join()
        server.server_close()


async def new_tenant(dsn: str) -> Tenant:
    store = Store(dsn=dsn)
    await store.open()
    made = await tenant(store)
    await store.close()
    return made


def test_only_the_page_of_a_configured_origin_gets_an_answer(
    store: Database, browser: Browser, pages: list[str]
) -> None:
    configured, other = pages
    with ThreadPoolExecutor(max_workers=1) as thread:  # the browser's driver keeps an event loop in this one
        key = thread.submit(asyncio.run, new_tenant(store.dsn)).result().key
    with scripted() as model, serve(store, model.url, auth="keys", cors_origins=configured) as service:

        def call(origin: str) -> Any:
            page = browser.new_page()
            page.goto(origin)
            try:
                return page.evaluate(CALL, [service.url, key])
            finally:
                page.close()

        answer = call(configured)
        assert answer["status"] == 200, answer
        assert answer["session"]
        assert "message_stop" in answer["text"]
        assert "TypeError" in call(other)["error"]
        assert len(model.state.received) == 1
