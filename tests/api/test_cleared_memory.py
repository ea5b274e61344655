"""Cleared messages go into the memory, and the memory tells nothing of hidden or removed ones."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tersely.service.summaries import memory_updates
from tersely.strategies.presets import STRATEGIES
from tests.api.conftest import Api


async def fill(api: Api, turns: int, *, session: str = "s", strategy: str = "slim", first: int = 1) -> None:
    if first == 1:
        made = await api.http.post("/api/sessions", json={"id": session, "strategy": strategy})
        assert made.status_code == 201, made.text
    texts = []
    for number in range(first, first + turns):
        texts += [f"please see to quokka_{number:02}", f"Decided to keep wombat_{number:02} because it is quick."]
    messages = [{"role": "assistant" if index % 2 else "user", "content": text} for index, text in enumerate(texts)]
    answer = await api.append(session, *messages)
    assert answer.status_code == 201, answer.text


async def memory(api: Api, session: str = "s") -> str:
    return "\n".join(item["text"] for item in await entries(api, session))


async def entries(api: Api, session: str = "s") -> list[dict[str, Any]]:
    answer = await api.http.get("/api/memory", params={"session": session})
    assert answer.status_code == 200, answer.text
    return list(answer.json()["items"])


async def clear(api: Api, session: str = "s") -> None:
    answer = await api.http.post(f"/api/sessions/{session}/clear")
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_cleared_messages_are_found_in_the_memory(api: Api, strategy: str) -> None:
    await fill(api, 4, strategy=strategy)
    await clear(api)
    memory_text = await memory(api)
    assert all(f"wombat_{number:02}" in memory_text for number in range(1, 5))
    found = await api.http.post(
        "/api/sessions/s/tools/search_memory", json={"arguments": {"query": "what of wombat_03"}}
    )
    assert "wombat_03" in found.json()["text"]


async def test_a_single_turn_is_remembered_too(api: Api) -> None:
    await fill(api, 1)
    await clear(api)
    assert "wombat_01" in await memory(api)


async def test_messages_cleared_twice_are_remembered_once(api: Api) -> None:
    await fill(api, 3)
    await clear(api)
    await clear(api)
    first = await entries(api)
    assert len(first) == 1
    await fill(api, 2, first=4)
    await clear(api)
    later, earlier = await entries(api)
    assert earlier == first[0]
    assert "wombat_04" in later["text"]
    assert "wombat_03" not in later["text"]


async def test_trimmed_messages_are_not_remembered_again_by_a_clear(api: Api) -> None:
    await fill(api, 4, strategy="trim")
    assert (await api.http.post("/api/sessions/s/compact")).status_code == 200
    await clear(api)
    assert [(each["first_seq"], each["last_seq"]) for each in reversed(await entries(api))] == [(1, 6), (7, 8)]


async def test_an_empty_session_leaves_nothing(api: Api) -> None:
    await api.http.post("/api/sessions", json={"id": "s"})
    await clear(api)
    assert await entries(api) == []


@pytest.mark.parametrize(
    ("method", "path", "gone"),
    [("POST", "turns/t2/drop", "02"), ("POST", "undo", "04"), ("DELETE", "turns/t2", "02")],
)
@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
async def test_hidden_messages_are_not_in_the_memory(
    api: Api, method: str, path: str, gone: str, is_first: bool
) -> None:
    await fill(api, 4)
    if not is_first:
        await clear(api)
    assert (await api.http.request(method, f"/api/sessions/s/{path}")).is_success
    if is_first:
        await clear(api)
    memory_text = await memory(api)
    for number in ("01", "02", "03", "04"):
        assert (f"wombat_{number}" in memory_text, f"quokka_{number}" in memory_text) == ((number != gone,) * 2), number


async def test_a_long_session_is_remembered_piece_by_piece(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_updates, "PIECE", 4)
    monkeypatch.setattr(memory_updates, "MOST", 3)
    await fill(api, 10)
    await clear(api)
    found = await entries(api)
    assert [(each["first_seq"], each["last_seq"]) for each in reversed(found)] == [(9, 12), (13, 16), (17, 20)]
    memory_text = await memory(api)
    assert all(f"wombat_{number:02}" in memory_text for number in range(5, 11))


async def test_whoever_clears_at_once_is_served(api: Api) -> None:
    await fill(api, 6)
    calls = [api.http.post(f"/api/sessions/s/{verb}") for verb in ("clear", "compact") * 4]
    assert [answer.status_code for answer in await asyncio.gather(*calls)] == [200] * 8
    assert len(await entries(api)) == 1


async def test_a_cleared_context_says_so_and_counts_as_the_others_do(api: Api) -> None:
    """Instructions count everywhere, also where nothing else is left."""
    system = {"role": "system", "content": "Speak of the harbour, and of nothing else, in short words."}
    await api.append("s", system, {"role": "user", "content": "well?"}, {"role": "assistant", "content": "Ships."})
    built: dict[str, Any] = {}
    for verb, reason in (("compact", "compact"), ("clear", "clear")):
        done = (await api.http.post(f"/api/sessions/s/{verb}")).json()
        report = done.get("report", done)
        built = (await api.http.post("/api/sessions/s/context", json={})).json()["report"]
        assert report["epoch"]["reason"] == built["epoch"]["reason"] == reason
        assert (report["tokens_before"], report["tokens_after"]) == (built["tokens_before"], built["tokens_after"])
        assert report["layers"] == built["layers"]
        assert built["layers"][0]["tokens"] > 0
    answer = await api.http.post("/api/sessions/s/commands", json={"text": "/context clear"})
    assert f"{built['tokens_after']} tokens" in answer.json()["text"]


async def test_the_children_of_a_deleted_session_go_on(api: Api) -> None:
    await api.http.post("/api/sessions", json={"id": "s"})
    await api.http.post("/api/sessions", json={"id": "child", "parent": "s"})
    assert (await api.http.delete("/api/sessions/s")).status_code == 204
    assert (await api.http.get("/api/sessions/child")).json()["parent"] is None
    answer = await api.append("child", {"role": "user", "content": "still there?"})
    assert answer.status_code == 201
