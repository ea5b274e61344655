"""Visibility per message over REST (tiancaiamao/ai, "Message Visibility"): who sees it, and what follows from that."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tersely.domain.history.pairing import NO_RESULT
from tersely.fakellm.scripted import ScriptedReply
from tests.api.conftest import Api, NewKey, serve
from tests.support.upstreams import MODEL, Model, scripted

FUNCTION = {"name": "read", "arguments": "{}"}
CALLS = [{"id": each, "type": "function", "function": FUNCTION} for each in ("c1", "c2")]
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "look at the heron"},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "c1", "content": "a grey heron"},
    {"role": "tool", "tool_call_id": "c2", "content": "a second heron"},
    {"role": "assistant", "content": "Two herons. <terse>saw herons</terse>"},
    {"role": "user", "content": "and the stork?"},
    {"role": "assistant", "content": "One stork. <terse>saw a stork</terse>"},
]


async def change(api: Api, seq: int, session: str = "s", **flags: object):
    return await api.http.patch(f"/api/sessions/{session}/messages/{seq}", json=flags)


async def seqs(api: Api, view: str, session: str = "s") -> list[int]:
    items = (await api.http.get(f"/api/sessions/{session}/messages", params={"view": view})).json()["items"]
    return [item["seq"] for item in items]


async def context(api: Api, session: str = "s", **options: object) -> list[dict[str, Any]]:
    made = await api.http.post(f"/api/sessions/{session}/context", json={"model": "gpt-4o", **options})
    assert made.status_code == 200, made.text
    return list(made.json()["messages"])


async def found(api: Api, query: str, session: str = "s") -> bool:
    answer = await api.http.post(f"/api/sessions/{session}/search", json={"mode": "search", "query": query})
    return bool(answer.json()["excerpts"])


@pytest.fixture
async def filled(api: Api) -> Api:
    assert (await api.append("s", *MESSAGES)).status_code == 201
    return api


@pytest.mark.parametrize("strategy", ["full", "slim", "window", "trim", "compact", "tiered"])
@pytest.mark.parametrize("epoch", ["auto", "every_request"])
async def test_messages_hidden_from_the_model_are_in_no_context(filled: Api, strategy: str, epoch: str) -> None:
    options = {"strategy": strategy, "epoch": epoch}
    assert "stork" in json.dumps(await context(filled, **options))
    for seq in (7, 8):
        changed = await change(filled, seq, model_visible=False)
        assert changed.status_code == 200, changed.text
        shown = {name: changed.json()[name] for name in ("status", "client_visible", "model_visible")}
        assert shown == {"status": "live", "client_visible": True, "model_visible": False}
    assert "stork" not in json.dumps(await context(filled, **options))
    assert await seqs(filled, "client") == list(range(1, 9))
    assert await seqs(filled, "model") == list(range(1, 7))
    assert not await found(filled, "stork")
    rows = await filled.http.post("/api/sessions/s/query", json={"sql": "SELECT content FROM messages"})
    assert "stork" not in rows.text
    for seq in (7, 8):
        assert (await change(filled, seq, model_visible=True)).status_code == 200
    assert "stork" in json.dumps(await context(filled, **options))
    assert await found(filled, "stork")


async def test_messages_hidden_from_the_model_are_not_counted(api: Api) -> None:
    """A message of 9,000 tokens is over the limit of `compact` and asks for no compaction once it is hidden."""
    await api.append("c", {"role": "user", "content": "heron " * 9_000}, {"role": "assistant", "content": "Well."})
    await api.append("c", {"role": "user", "content": "and the stork?"})
    options = {"strategy": {"name": "compact", "max_tokens": 8_000}, "epoch": "every_request"}
    before = (await api.http.post("/api/sessions/c/context", json=options)).json()
    assert any("[Previous conversation summary]" in str(message) for message in before["messages"])
    assert (await change(api, 1, "c", model_visible=False)).status_code == 200
    after = (await api.http.post("/api/sessions/c/context", json=options)).json()
    assert [message["content"] for message in after["messages"]] == ["Well.", "and the stork?"]
    assert after["report"]["tokens_before"] == after["report"]["tokens_after"] < 500


@pytest.mark.parametrize("flag", ["model_visible", "client_visible"])
async def test_a_checkpoint_is_made_of_visible_messages_only(api: Api, flag: str) -> None:
    await api.http.post("/api/sessions", json={"id": "k", "strategy": "compact"})
    for number in range(12):
        reply = f"decided on shade_{number}.css because it is warm. " + "Some words of it. " * 60
        await api.append(
            "k", {"role": "user", "content": f"Which shade, number {number}?"}, {"role": "assistant", "content": reply}
        )
    await change(api, 4, "k", **{flag: False})
    assert (await api.http.post("/api/sessions/k/compact")).status_code == 200
    shown = json.dumps(await context(api, "k"))
    head = shown[: shown.index("Which shade, number 11?")]
    assert "shade_0" in head
    assert "shade_3" in head
    assert "shade_1.css" not in shown


@pytest.mark.parametrize("seq", [3, 4, 5])
async def test_calls_and_results_are_hidden_together(filled: Api, seq: int) -> None:
    assert (await change(filled, seq, model_visible=False)).status_code == 200
    shown = json.dumps(await context(filled))
    assert "grey" not in shown
    assert NO_RESULT not in shown
    assert "Two herons." in shown
    assert await seqs(filled, "model") == [1, 2, 6, 7, 8]
    other = 3 if seq != 3 else 5
    assert (await change(filled, other, model_visible=True)).status_code == 200
    assert await seqs(filled, "model") == list(range(1, 9))
    assert [message["role"] for message in await context(filled)][:4] == ["user", "assistant", "tool", "tool"]


async def test_log_and_summary_omit_hidden_messages(filled: Api) -> None:
    assert (await change(filled, 6, model_visible=False)).status_code == 200
    log = (await filled.http.get("/api/sessions/s/terse")).json()["items"]
    assert [entry["summary"] for entry in log] == ["saw a stork"]
    await filled.http.post("/api/sessions/s/clear")
    memory = (await filled.http.get("/api/memory?session=s")).text
    assert "stork" in memory
    assert "Two herons" not in memory


async def test_summary_is_rewritten_when_a_message_of_its_range_is_hidden(filled: Api) -> None:
    await filled.http.post("/api/sessions/s/clear")
    assert "the heron" in (await filled.http.get("/api/memory?session=s")).text
    assert (await change(filled, 2, model_visible=False)).status_code == 200
    memory_text = (await filled.http.get("/api/memory?session=s")).text
    assert "the heron" not in memory_text
    assert "stork" in memory_text


async def test_messages_hidden_from_the_client_are_in_the_context_alone(filled: Api) -> None:
    changed = await change(filled, 7, client_visible=False)
    assert changed.json()["client_visible"] is False
    assert await seqs(filled, "client") == [1, 2, 3, 4, 5, 6, 8]
    assert 7 in await seqs(filled, "model")
    assert "and the stork?" in json.dumps(await context(filled))
    assert not await found(filled, "and the stork?")
    exported = (await filled.http.get("/api/sessions/s/export")).json()
    assert "and the stork?" not in json.dumps(exported["context"])
    await change(filled, 7, client_visible=True)
    assert await found(filled, "and the stork?")


async def test_an_export_carries_the_flags(filled: Api) -> None:
    await change(filled, 3, model_visible=False)
    await change(filled, 7, client_visible=False)
    document = (await filled.http.get("/api/sessions/s/export")).content
    again = await filled.post_raw("/api/sessions/import", b'{"id":"copy",' + document[1:])
    assert again.status_code == 201, again.text
    for view in ("client", "model", "all"):
        assert await seqs(filled, view, "copy") == await seqs(filled, view)
    assert await context(filled, "copy") == await context(filled)


async def test_a_dropped_turn_takes_its_hidden_messages_along(filled: Api) -> None:
    await change(filled, 4, model_visible=False)
    await filled.http.post("/api/sessions/s/turns/t1/drop")
    assert await seqs(filled, "client") == [1, 7, 8]
    refused = await change(filled, 4, model_visible=True)
    assert (refused.status_code, refused.json()["field"]) == (409, "seq")


async def test_visibility_of_some_messages_cannot_be_changed(filled: Api, guarded: Api, new_tenant: NewKey) -> None:
    assert (await change(filled, 1, model_visible=False)).status_code == 409  # instructions
    assert (await change(filled, 99, model_visible=False)).status_code == 404
    assert (await change(filled, 2, "nobody", model_visible=False)).status_code == 404
    assert (await change(filled, 2, model_visible="no")).status_code == 422
    assert (await change(filled, 2, visible=False)).status_code == 422
    assert (await change(filled, 2)).json()["model_visible"] is True
    north, south = await new_tenant("north"), await new_tenant("south")
    await guarded.append("s", {"role": "user", "content": "hi"}, **north)
    path, body = "/api/sessions/s/messages/1", {"model_visible": False}
    assert (await guarded.http.patch(path, json=body, headers=south)).status_code == 404
    assert (await guarded.http.patch(path, json=body, headers=north)).status_code == 200


@pytest.fixture
async def both(database) -> AsyncIterator[tuple[Api, Model]]:
    with scripted() as model:
        async with serve(database.dsn, upstream=model.url) as api:
            yield api, model


@pytest.mark.parametrize("flag", ["model_visible", "client_visible"])
async def test_client_that_resends_its_history_continues_its_session(both, flag: str) -> None:
    """A message that is hidden from the model is not sent on, though the client sends it; nothing is stored twice."""
    api, model = both
    history: list[dict[str, Any]] = []

    async def ask(text: str) -> str:
        model.script("u", ScriptedReply(message={"role": "assistant", "content": f"reply to {text}"}))
        history.append({"role": "user", "content": text})
        body = {"model": MODEL, "user": "u", "messages": history}
        answer = await api.http.post("/v1/chat/completions", json=body, timeout=30)
        assert answer.status_code == 200, answer.text
        history.append(answer.json()["choices"][0]["message"])
        return str(answer.headers["x-tersely-session"])

    session = await ask("the heron")
    assert await ask("the stork") == session
    for seq in (3, 4):
        assert (await change(api, seq, session, **{flag: False})).status_code == 200
    for number, text in enumerate(("the crane", "the ibis")):
        assert await ask(text) == session
        sent = model.requests("u")[-1].body.decode()
        assert ("the stork" in sent) == (flag == "client_visible")
        assert "the heron" in sent
        assert await seqs(api, "all", session) == list(range(1, 7 + 2 * number))
    everything = list(range(1, 9))
    shown = [seq for seq in everything if seq not in (3, 4)]
    assert await seqs(api, "client", session) == (everything if flag == "model_visible" else shown)
    assert await seqs(api, "model", session) == (shown if flag == "model_visible" else everything)
