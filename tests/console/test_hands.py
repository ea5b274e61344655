"""The console's previews of compacting and clearing agree with the results."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tersely.store.history.sessions import read_epoch
from tersely.strategies.presets import STRATEGIES
from tests.conftest import Database
from tests.support.rows import query
from tests.support.services import Service, serve
from tests.support.upstreams import Model, scripted

WORDS = "the importer skips every row whose order has no customer id " * 12


@pytest.fixture(scope="module")
def summarizing() -> Iterator[Model]:
    with scripted() as model:
        yield model


@pytest.fixture(scope="module")
def fronting(store: Database, summarizing: Model) -> Iterator[Service]:
    options = {"summarizer_model": "gpt-4o-mini", "summarizer_api_key": "k", "epoch": '{"high": 9000, "low": 900}'}
    with serve(store, summarizing.url, **options) as running:
        yield running


async def converse(http: httpx.AsyncClient, session: str, strategy: str, turns: int = 5) -> None:
    """Ask a few questions in one session."""
    history: list[dict[str, Any]] = []
    for number in range(turns):
        history.append({"role": "user", "content": f"Question {number} of {session}: {WORDS}"})
        headers = {"x-tersely-session": session, "x-tersely-strategy": strategy}
        answer = await http.post("/v1/chat/completions", json={"model": "gpt-4o", "messages": history}, headers=headers)
        assert answer.status_code == 200, answer.text
        history.append(answer.json()["choices"][0]["message"])
    (await http.patch(f"/api/sessions/{session}", json={"strategy": strategy})).raise_for_status()


def figures(page: str) -> dict[str, str]:
    """The terms and texts of a page's list of figures."""
    found = re.findall(r"<div><dt>(.*?)</dt><dd>(.*?)</dd></div>", page, re.DOTALL)
    return {term: " ".join(re.sub(r"<[^>]+>", " ", text).split()) for term, text in found}


async def kept_messages(service: Service, session: str) -> tuple[int, ...]:
    """The messages before the cut that stay in the context."""
    (row,) = await query(service, "SELECT plan FROM sessions WHERE id = $1", session)
    return read_epoch(row["plan"]).kept


def number_in(text: str, pattern: str = r"([\d,]+)") -> int:
    found = re.search(pattern, text)
    assert found is not None, text
    return int(found[1].replace(",", ""))


@pytest.mark.parametrize("act", ["compact", "clear"])
@pytest.mark.parametrize("strategy", [*STRATEGIES])
async def test_preview_says_what_the_action_does(fronting: Service, strategy: str, act: str) -> None:
    session = f"hands-{strategy}-{act}"
    async with httpx.AsyncClient(base_url=fronting.url, timeout=60) as http:
        await converse(http, session, strategy)
        before = await query(fronting, "SELECT version, edits, plan FROM sessions WHERE id = $1", session)
        page = await http.get("/console/session/hands", params={"id": session, "act": act})
        assert page.status_code == 200
        shown = figures(page.text)
        assert await query(fronting, "SELECT version, edits, plan FROM sessions WHERE id = $1", session) == before
        done = await http.post(f"/api/sessions/{session}/{act}", json={})
        assert done.status_code == 200, done.text
        report = done.json()["report"]
        tokens = number_in(shown["The next context"])
        if shown["The next context"].startswith("about"):
            assert strategy in {"compact", "trim"}
            assert tokens <= 4 * report["tokens_after"]
        else:
            assert tokens == report["tokens_after"]
        left = await query(
            fronting,
            "SELECT count(*) AS messages, sum(tokens)::int AS tokens FROM messages "
            "WHERE session_id = $1 AND seq < $2 AND turn > 0 AND NOT seq = ANY($3)",
            session,
            report["epoch"]["cut"],
            list(await kept_messages(fronting, session)),
        )
        counted = number_in(shown["Leave the context"]), number_in(shown["Leave the context"], r"([\d,]+) tokens")
        assert counted == (left[0]["messages"], left[0]["tokens"] or 0)
        if act == "clear":
            assert "All turns leave the context" in page.text
        assert "$" in shown["Cost of its beginning"]
        assert shown["Each call after it"].startswith("$")
        if strategy in {"compact", "trim"} and act == "compact":
            events = (await http.get(f"/api/sessions/{session}/events")).json()["items"]
            starts = [each for each in events if each["type"] == "compaction_start"]
            summarised = shown["Summarised first"]
            assert "by gpt-4o-mini: $" in summarised
            assert number_in(summarised) == starts[0]["messages"]
            assert number_in(summarised, r"([\d,]+) tokens") == starts[0]["tokens_before"]


async def test_preview_of_an_empty_session_and_of_none(fronting: Service) -> None:
    async with httpx.AsyncClient(base_url=fronting.url, timeout=60) as http:
        (await http.post("/api/sessions", json={"id": "hands-empty"})).raise_for_status()
        for act in ("compact", "clear"):
            page = await http.get("/console/session/hands", params={"id": "hands-empty", "act": act})
            assert page.status_code == 200, page.text
            assert number_in(figures(page.text)["Leave the context"]) == 0
            missing = await http.get("/console/session/hands", params={"id": "hands-none", "act": act})
            assert missing.status_code == 404


async def test_tools_of_a_call_are_listed_with_their_definitions(fronting: Service) -> None:
    tool = {"type": "function", "function": {"name": "<b>mine</b>", "description": "</pre><script>alert(1)</script>"}}
    async with httpx.AsyncClient(base_url=fronting.url, timeout=60) as http:
        history: list[dict[str, Any]] = []
        for number in range(9):
            history.append({"role": "user", "content": f"Tools, question {number}: {WORDS * 12}"})
            body = {"model": "gpt-4o", "messages": history, "tools": [tool] if number else []}
            answer = await http.post("/v1/chat/completions", json=body, headers={"x-tersely-session": "tools"})
            assert answer.status_code == 200
            history.append(answer.json()["choices"][0]["message"])
        none = await http.get("/console/session/tools", params={"id": "tools", "call": 1})
        assert "sent no tools" in none.text
        listed = (await http.get("/console/session/tools", params={"id": "tools", "call": 9})).text
        assert re.search(r"<summary>context_search .*added by Tersely", listed)
        assert "<script>" not in listed
        assert "&lt;script&gt;alert(1)" in listed
        page = await http.get("/console/session", params={"id": "tools", "call": 9})
        assert "/console/session/tools?id=tools&amp;call=9" in page.text
        assert (await http.get("/console/session/tools", params={"id": "tools", "call": 99})).status_code == 404
        await query(fronting, "UPDATE calls SET sent = NULL WHERE session_id = $1 AND number = 9", "tools")
        older = await http.get("/console/session/tools", params={"id": "tools", "call": 9})
        assert "was not recorded" in older.text


ODD = "\n<b>bold</b> \u202eturned\u202c bell \x07 escape \x1b[31m\r\nend"


async def test_every_page_shows_control_characters_as_pictures_and_forms_keep_them(fronting: Service) -> None:
    async with httpx.AsyncClient(base_url=fronting.url, timeout=60) as http:
        memo = (await http.post("/api/memos", json={"content": ODD, "tags": ["odd"]})).json()
        body = {"messages": [{"role": "user", "content": ODD}, {"role": "assistant", "content": ODD}]}
        (await http.post("/api/sessions/odd/messages", json=body)).raise_for_status()
        (await http.put("/api/sessions/odd/state", json={"text": ODD})).raise_for_status()
        for path, fields in (
            ("memory", 1),
            ("sessions", 0),
            ("session?id=odd", 0),
            ("session/memory?id=odd", 1),
            ("session/hands?id=odd&act=undo", 0),
            ("search?query=turned", 0),
        ):
            page = (await http.get(f"/console/{path}")).text
            shown = re.sub(r"<textarea.*?</textarea>", "", page, flags=re.DOTALL)
            assert "<b>" not in page, path
            assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", shown), path
            assert page.count("\u202e") == fields, path
        page = (await http.get("/console/memory")).text
        found = re.search(r"<textarea[^>]*>\n(.*?turned.*?)</textarea>", page, re.DOTALL)
        assert found is not None
        token = re.search(r'name="token" value="([^"]+)"', page)
        assert token is not None
        form = {"token": token[1], "memo": memo["id"], "content": html.unescape(found[1]), "tags": "odd"}
        assert (await http.post("/console/memory/edit", data=form)).status_code == 303
        kept = (await http.get(f"/api/memos/{memo['id']}")).json()["content"]
        assert kept.replace("\r\n", "\n") == ODD.replace("\r\n", "\n")


async def test_undo_hides_only_the_turn_that_was_shown(fronting: Service) -> None:
    """Two people who look at the same preview take one turn back, not two."""
    async with httpx.AsyncClient(base_url=fronting.url, timeout=60) as http:
        await converse(http, "twice", "slim", turns=3)
        page = (await http.get("/console/session/hands?id=twice&act=undo")).text
        form = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', page[page.index("confirmbox") :]))
        assert form["turn"] == "3"
        assert (await http.post("/console/session/act", data=form)).status_code == 303
        late = await http.post("/console/session/act", data=form)
        assert late.status_code == 409
        assert "Another turn is the last one by now" in late.text
        turns = (await http.get("/api/sessions/twice/turns")).json()["items"]
        assert [turn["status"] for turn in turns] == ["live", "live", "undone"]
