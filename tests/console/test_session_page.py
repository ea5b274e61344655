"""The page of a session: it shows a window of a call's context, and the call's reply."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from tersely.console.views.session_pages import ROWS
from tersely.fakellm.scripted import ReceivedRequest, ScriptedReply
from tersely.service.sessions import sent_lines
from tersely.service.sessions.calls import Calls
from tersely.service.sessions.sent_lines import ContextLine
from tests.conftest import Database
from tests.support.services import Service, serve
from tests.support.stores import open_store
from tests.support.upstreams import Model, scripted

BATCH = 1_000
MARKED = "Done. <terse>mended the import</terse>"


@pytest.fixture(scope="module")
def answering() -> Iterator[Model]:
    """A model that marks its replies for Tersely."""

    def answer(received: ReceivedRequest) -> ScriptedReply | None:
        del received
        return ScriptedReply(message={"role": "assistant", "content": MARKED})

    with scripted() as model:
        model.state.script = answer
        yield model


@pytest.fixture(scope="module")
def fronting(store: Database, answering: Model) -> Iterator[Service]:
    with serve(store, answering.url, epoch='{"stride": 2}') as running:
        yield running


@pytest.fixture
async def stored(store: Database) -> AsyncIterator[Calls]:
    async with open_store(store) as opened:
        yield Calls(opened)


async def ask(http: httpx.AsyncClient, session: str, text: str) -> None:
    body = {"model": "gpt-4o", "messages": [{"role": "user", "content": text}]}
    answer = await http.post("/v1/chat/completions", json=body, headers={"x-tersely-session": session})
    assert answer.status_code == 200, answer.text


async def fill(http: httpx.AsyncClient, session: str, count: int) -> None:
    for start in range(0, count, BATCH):
        messages = [
            {"role": ("user", "assistant")[n % 2], "content": f"Message {n}"}
            for n in range(start, min(start + BATCH, count))
        ]
        (await http.post(f"/api/sessions/{session}/messages", json={"messages": messages})).raise_for_status()


async def test_windows_together_are_the_whole_context(fronting: Service, stored: Calls) -> None:
    async with httpx.AsyncClient(base_url=fronting.url, timeout=60) as http:
        await fill(http, "windows", 40)
        for number in range(5):
            await ask(http, "windows", f"Question {number}")
        assert (await http.post("/api/sessions/windows/undo")).status_code == 200
        await ask(http, "windows", "One more")
    for number in range(1, 7):
        whole = await stored.context("default", "windows", number)
        assert any(line.seq is None for line in whole.lines)
        found = [
            await stored.window("default", "windows", number, start=start, limit=7)
            for start in range(0, len(whole.lines) + 1, 7)
        ]
        replies = len(found[0].replies)
        assert replies == 1
        assert found[0].total == len(whole.lines) + replies
        assert tuple(line for window in found for line in window.lines)[:-replies] == whole.lines
        assert {window.messages for window in found} == {whole.messages}
        if number > 1:
            before = {line.seq: line.kept for line in (await stored.context("default", "windows", number - 1)).lines}
            shown = {line.seq for line in whole.lines if line.seq is not None}
            earlier = {seq: kept for window in found for seq, kept in window.earlier.items()}
            assert earlier == {seq: before[seq] for seq in shown if seq in before}


async def test_newest_reply_is_shown_as_client_and_model_know_it(fronting: Service) -> None:
    async with httpx.AsyncClient(base_url=fronting.url, timeout=60) as http:
        await ask(http, "answered", "Mend the import.")
        page = (await http.get("/console/session", params={"id": "answered"})).text
        rows = re.findall(r'<div class="row .*?(?=<div class="row |</section>)', page, re.DOTALL)
        assert "kept-reply" in rows[-1]
        from_client, sent = rows[-1].split('<div class="sent">')
        assert "Done." in from_client
        assert "terse" not in from_client
        assert "&lt;terse&gt;mended the import" in sent
        await ask(http, "answered", "And the export.")
        older = (await http.get("/console/session", params={"id": "answered", "call": 1})).text
        assert older.count("kept-reply") == 1
        assert "And the export." not in older


async def test_page_of_a_long_session_builds_only_the_shown_rows(
    fronting: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = 0

    def count(**given: Any) -> ContextLine:
        nonlocal built
        built += 1
        return ContextLine(**given)

    monkeypatch.setattr(sent_lines, "ContextLine", count)
    async with httpx.AsyncClient(base_url=fronting.url, timeout=60) as http:
        await fill(http, "long", 2_000)
        for number in range(2):
            await ask(http, "long", f"Question {number}")
        (await http.get("/api/sessions/long/calls/2/context")).raise_for_status()
        assert built > 2_000
        for path in ("session?id=long", "session/rows?id=long&call=2&start=900&count=60"):
            built = 0
            page = await http.get(f"/console/{path}")
            assert page.text.count('class="row ') == ROWS
            # Those of the call, and those of the call before to compare with.
            assert ROWS <= built <= 2 * ROWS
