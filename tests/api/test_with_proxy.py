"""REST and proxied calls on one session: what is hidden here is not sent there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest

from tersely.fakellm.scripted import ScriptedReply
from tests.api.conftest import Api, serve
from tests.support.upstreams import MODEL, Model, scripted

STRATEGY = {"x-tersely-strategy": '{"name": "slim", "recent_turns": 1}', "x-tersely-epoch": "every_request"}


@pytest.fixture
async def both(database) -> AsyncIterator[tuple[Api, Model]]:
    with scripted() as model:
        async with serve(database.dsn, upstream=model.url) as api:
            yield api, model


async def say(api: Api, model: Model, text: str, reply: ScriptedReply, **headers: str):
    model.script("u", reply)
    body = {"model": MODEL, "user": "u", "messages": [{"role": "user", "content": text}]}
    return await api.http.post(
        "/v1/chat/completions", json=body, headers={"x-tersely-session": "s", **headers}, timeout=30
    )


async def talk(api: Api, model: Model) -> None:
    for word in ("alpha", "beta", "gamma"):
        reply = ScriptedReply(message={"content": f"about {word}_name_9.txt <terse>told {word}</terse>"})
        answer = await say(api, model, f"tell {word}", reply, **STRATEGY)
        assert answer.status_code == 200, answer.text


async def stored(database) -> str:
    """Everything in the store as text."""
    admin = await asyncpg.connect(database.admin_dsn)
    try:
        found = []
        for table in ("sessions", "messages", "terse", "epochs", "search_pages", "search_words", "attributes", "calls"):
            for row in await admin.fetch(f"SELECT * FROM {table}"):
                found += [v.decode("utf-8", "replace") if isinstance(v, bytes) else str(v) for v in row.values()]
        return "\n".join(found)
    finally:
        await admin.close()


async def test_a_dropped_turn_is_not_sent_any_more(both) -> None:
    api, model = both
    await talk(api, model)
    await api.http.post("/api/sessions/s/turns/t2/drop")
    await say(api, model, "next", ScriptedReply(message={"content": "ok."}), **STRATEGY)
    sent = model.requests("u")[-1].body
    assert b"alpha" in sent
    assert b"gamma" in sent
    assert b"beta" not in sent


async def test_preview_equals_the_context_of_the_next_call(both) -> None:
    api, model = both
    await talk(api, model)
    options = {
        "strategy": {"name": "slim", "recent_turns": 1},
        "epoch": "every_request",
        "model": MODEL,
        "messages": [{"role": "user", "content": "next"}],
    }
    preview = (await api.http.post("/api/sessions/s/context", json=options)).json()
    await say(api, model, "next", ScriptedReply(message={"content": "ok."}), **STRATEGY)
    sent = model.requests("u")[-1].request
    assert sent is not None
    assert sent["messages"] == preview["instruction_messages"] + preview["messages"]
    assert preview["report"]["epoch"]["number"] == 4


async def test_a_removed_turn_is_nowhere(both, database) -> None:
    api, model = both
    await talk(api, model)
    await api.http.post("/api/sessions/s/search", json={"mode": "search", "query": "beta"})
    assert "beta" in await stored(database)
    assert (await api.http.delete("/api/sessions/s/turns/t2")).status_code == 204
    assert "beta" not in await stored(database)
    await say(api, model, "next", ScriptedReply(message={"content": "ok."}), **STRATEGY)
    assert b"beta" not in model.requests("u")[-1].body
    assert b"alpha" in model.requests("u")[-1].body


LONG = "with some more words, so that the call is described by what differs from stored messages"


async def test_descriptions_of_calls_quote_nothing_that_was_removed(both, database) -> None:
    api, model = both
    history: list[dict[str, str]] = []
    session = ""
    for word in ("alpha", "beta", "gamma", "delta"):
        history.append({"role": "user", "content": f"tell {word} {LONG}"})
        model.script("u", ScriptedReply(message={"content": f"about {word} {LONG} <terse>told {word}</terse>"}))
        body = {"model": MODEL, "user": "u", "messages": history}
        answer = await api.http.post("/v1/chat/completions", json=body, timeout=30)
        # A client with a spelling of its own.
        history.append({"content": answer.json()["choices"][0]["message"]["content"], "role": "assistant"})
        session = answer.headers["x-tersely-session"]
    before = (await api.http.get(f"/api/sessions/{session}/calls/2/context")).json()
    assert before["messages"]
    assert (await api.http.delete(f"/api/sessions/{session}/turns/t2")).status_code == 204
    assert "beta" not in await stored(database)
    for number, is_kept in ((1, True), (2, False), (3, False), (4, False)):
        context = (await api.http.get(f"/api/sessions/{session}/calls/{number}/context")).json()
        assert bool(context["messages"]) == is_kept


async def test_a_call_under_way_quotes_nothing_that_is_removed_meanwhile(both, database) -> None:
    api, model = both
    for word in ("alpha", "beta", "gamma"):
        reply = ScriptedReply(message={"content": f"about {word} {LONG} <terse>told {word}</terse>"})
        await say(api, model, f"tell {word} {LONG}", reply)
    calling = asyncio.create_task(say(api, model, "next", ScriptedReply(message={"content": "late."}, first_delay=1.5)))
    for _ in range(100):
        await asyncio.sleep(0.02)
        if (await api.http.get("/api/sessions/s")).json()["messages"] == 7:
            break
    else:
        pytest.fail("the question was not stored while the model spoke")
    assert (await api.http.delete("/api/sessions/s/turns/t2")).status_code == 204
    assert "late." in (await calling).text
    assert "beta" not in await stored(database)
    assert (await api.http.get("/api/sessions/s/calls/4/context")).json()["messages"] is None


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("POST", "undo", "undone"), ("POST", "turns/t4/drop", "dropped"), ("DELETE", "turns/t4", "removed")],
)
async def test_a_turn_that_is_taken_back_while_the_model_speaks(both, database, method, path, status) -> None:
    api, model = both
    await talk(api, model)
    late = ScriptedReply(message={"content": "delta is late <terse>told delta</terse>"}, first_delay=1.5)
    calling = asyncio.ensure_future(say(api, model, "tell delta", late, **STRATEGY))
    for _ in range(100):
        await asyncio.sleep(0.02)
        if (await api.http.get("/api/sessions/s")).json()["messages"] == 7:
            break
    else:
        pytest.fail("the question was not stored while the model spoke")
    changed = await api.http.request(method, f"/api/sessions/s/{path}")
    assert changed.is_success, changed.text
    answer = await calling
    assert "delta is late" in answer.text
    items = (await api.http.get("/api/sessions/s/messages", params={"view": "all"})).json()["items"]
    assert [m["status"] for m in items] == ["live"] * 6 + [status] * 2
    await say(api, model, "next", ScriptedReply(message={"content": "ok."}))
    assert b"delta" not in model.requests("u")[-1].body
    if status == "removed":
        assert "delta" not in await stored(database)


async def test_calls_and_epochs_show_in_the_figures(both) -> None:
    api, model = both
    await talk(api, model)
    stats = (await api.http.get("/api/sessions/s/stats")).json()
    assert (stats["calls"], stats["turns"], stats["messages"]) == (3, 3, 6)
    assert stats["epochs"]["by_reason"] == {"every_request": 2, "first": 1}
    assert stats["reported"]["input"] > 0
    assert stats["terse"] == {"model": 3}
    turn = (await api.http.get("/api/sessions/s/turns/t2")).json()
    assert (turn["usage"]["calls"], turn["terse"]) == (1, ["told beta"])
    events = (await api.http.get("/api/sessions/s/events")).json()["items"]
    assert [e["number"] for e in events] == [1, 2, 3]


@pytest.mark.parametrize("strategy", ["slim", "trim", "full"])
async def test_figures_agree(both, strategy) -> None:
    """A preview, a call's headers, clearing and compacting give the same figures, with instructions and tools."""
    api, model = both
    await api.http.post("/api/sessions", json={"id": "s", "strategy": strategy})
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    messages = [{"role": "system", "content": "Speak of the harbour."}]

    async def ask(text: str) -> tuple[int, int]:
        messages.append({"role": "user", "content": text})
        model.script("u", ScriptedReply(message={"content": f"about {text}."}))
        body = {"model": MODEL, "user": "u", "tools": tools, "messages": messages}
        answer = await api.http.post("/v1/chat/completions", json=body, headers={"x-tersely-session": "s"}, timeout=30)
        assert answer.status_code == 200, answer.text
        messages.append(answer.json()["choices"][0]["message"])
        return int(answer.headers["x-tersely-tokens-before"]), int(answer.headers["x-tersely-tokens-after"])

    async def preview(**options: object) -> tuple[int, int]:
        report = (await api.http.post("/api/sessions/s/context", json=options)).json()["report"]
        return report["tokens_before"], report["tokens_after"]

    for word in ("alpha", "beta", "gamma"):
        await ask(word)
    expected = await preview(messages=[{"role": "user", "content": "delta"}])
    # A call estimates its new message, a preview counts it.
    assert await ask("delta") == pytest.approx(expected, abs=2)
    for verb in ("compact", "clear"):
        done = (await api.http.post(f"/api/sessions/s/{verb}")).json()
        report = done.get("report", done)
        assert (report["tokens_before"], report["tokens_after"]) == await preview()
        answer = (await api.http.post("/api/sessions/s/commands", json={"text": "/context"})).json()["text"]
        assert f"{report['tokens_after']:,} tokens, of {report['tokens_before']:,} in all" in answer
