"""Calls of our own tools, and their answers, are found by no search and told by no summary."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.conftest import Database
from tests.proxy.tools.test_tool_rounds import calling, saying
from tests.support.http import body_of, post
from tests.support.services import Service, serve
from tests.support.upstreams import Model

SHAPE = {
    "X_Tersely_Strategy": json.dumps({"name": "slim", "recent_turns": 1}),
    "X_Tersely_Epoch": "every_request",
}
FILLER = "and so on, " * 60


@pytest.fixture(scope="module")
def searching(store: Database, model: Model) -> Iterator[Service]:
    """A service whose models may search and note from the start."""
    with serve(store, model.url, tools="query_db,manage_scratchpad,context_search", instructions="off") as running:
        yield running


async def converse_with_searches(service: Service, model: Model, key: str) -> None:
    """A session of four turns, in the third of which the model looked for the palette of the first and noted it."""
    look = ("s1", "context_search", {"mode": "search", "query": "palette"})
    note = ("s2", "manage_scratchpad", {"action": "update", "content": "palette is in src/zz_note.css"})
    query = ("s3", "query_db", {"sql": "SELECT content FROM messages WHERE content LIKE '%src/palette_one.css%'"})
    model.script(key, saying(f"The palette is in src/palette_one.css. {FILLER}"), saying("Second."))
    model.script(key, calling(look), calling(note, query), saying("There it was."), saying("Fourth."))
    for words in ("Make a palette.", f"Now the second thing. {FILLER}", "Where was it?", f"The fourth. {FILLER}"):
        answer = await post(service, body_of(words, user=key), X_Tersely_Session=key, **SHAPE)
        assert answer.status == 200


def ask(service: Service, key: str, **lookup: Any) -> dict[str, Any]:
    found = httpx.post(f"{service.url}/api/sessions/{key}/search", json=lookup)
    assert found.status_code == 200, found.text
    return dict(found.json())


async def test_search_finds_messages_and_no_earlier_search_results(searching: Service, model: Model, key: str) -> None:
    await converse_with_searches(searching, model, key)
    hidden = httpx.get(f"{searching.url}/api/sessions/{key}/messages", params={"view": "all"}).json()["items"]
    assert len([each for each in hidden if not each["client_visible"]]) == 5, "the model did use our tools"

    found = ask(searching, key, mode="search", query="palette", before=0, after=0)
    assert [each["turn"] for excerpt in found["excerpts"] for each in excerpt["messages"]] == ["t1", "t1"]
    assert "zz_note" not in ask(searching, key, mode="relevant", query="palette zz_note")["text"]
    for lookup in ({"mode": "tail", "last": 20}, {"mode": "head", "first": 20}, {"mode": "turn", "turnId": "t3"}):
        text = ask(searching, key, **lookup)["text"]
        assert "Where was it?" in text
        assert "zz_note" not in text
        assert "context_search" not in text
    assert "of 8 ---" in ask(searching, key, mode="tail", last=20)["text"]


async def test_imported_session_keeps_own_calls_in_place(searching: Service, model: Model, key: str) -> None:
    await converse_with_searches(searching, model, key)
    exported = httpx.get(f"{searching.url}/api/sessions/{key}/export").content
    assert len(json.loads(exported)["context"]) == 8
    assert "zz_note" not in json.dumps(json.loads(exported)["context"])
    imported = httpx.post(
        f"{searching.url}/api/sessions/import",
        content=b'{"id":"copy-%b",' % key.encode() + exported[1:],
        headers={"content-type": "application/json"},
    )
    assert imported.status_code == 201, imported.text

    def seen(session: str) -> list[bytes]:
        path = f"{searching.url}/api/sessions/{session}"
        context = {"strategy": "full", "epoch": "every_request", "model": "gpt-4o"}
        return [
            httpx.get(f"{path}/messages", params={"view": "client"}).content,
            httpx.get(f"{path}/messages", params={"view": "all"}).content,
            httpx.post(f"{path}/context", json={"model": "gpt-4o"}).content,
            httpx.post(f"{path}/context", json=context).content,
        ]

    assert seen(f"copy-{key}") == seen(key)
    assert b"zz_note" in seen(key)[3]


async def test_head_omits_own_calls(searching: Service, model: Model, key: str) -> None:
    await converse_with_searches(searching, model, key)
    await post(searching, body_of("The last one.", user=key), X_Tersely_Session=key, **SHAPE)
    sent = json.loads(model.requests(key)[-1].body)["messages"]
    head = json.dumps(sent[:-1])
    assert "There it was." in head
    assert "zz_note" not in head
    assert "context_search" not in head
