"""A service with demonstration sessions, and a browser to look at them with."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.conftest import Database
from tests.support.demo import HOSTILE, TASKS, CachingModel, play
from tests.support.services import Service, serve
from tests.support.upstreams import Model, scripted

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """The service, and its sessions: a long one, one of another client, one full of hostile text."""

    service: Service
    upstream: Model
    long: str
    calls: int
    other: str
    hostile: str

    @property
    def url(self) -> str:
        return self.service.url


@pytest.fixture(scope="module")
def demo(store: Database) -> Iterator[Demo]:
    """The demonstration, played once."""
    model = CachingModel()
    with (
        scripted() as upstream,
        serve(store, upstream.url, epoch='{"high": 12000, "low": 5000}') as service,
    ):
        upstream.state.script = model.script

        async def fill() -> tuple[str, str, str]:
            long = await play(service.url, TASKS * 2, X_Session_Id="nightly-import")
            other = await play(service.url, TASKS[:2], model="claude-sonnet-4-5", agent="claude-cli/2.1")
            hostile = await play(service.url, [HOSTILE, "What is that?"], model="my-local-model", agent="aider/0.86")
            return long, other, hostile

        # The browser's driver keeps an event loop in this thread.
        with ThreadPoolExecutor(max_workers=1) as thread:
            long, other, hostile = thread.submit(asyncio.run, fill()).result()
        calls = httpx.get(f"{service.url}/api/sessions/{long}").json()["calls"]
        assert calls > 30
        yield Demo(service=service, upstream=upstream, long=long, calls=calls, other=other, hostile=hostile)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium; Debian's ``apt-get install chromium``, or the program that ``CHROMIUM`` names."""
    if CHROMIUM is None:
        if os.environ.get("TERSELY_TESTS_NEED_BROWSER"):
            pytest.fail("there is no Chromium, and the tests of the console must not be skipped")
        pytest.skip("the console's browser tests need Chromium: apt-get install chromium, or CHROMIUM=/path/to/it")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield running
        running.close()
