"""Contexts over REST: what the next call would get, with its report, and nothing changes by it."""

from __future__ import annotations

from typing import Any

import asyncpg
import pytest

from tersely.strategies.presets import STRATEGIES
from tersely.strategies.prompts import TERSE_INSTRUCTIONS
from tests.api.conftest import Api

# Made when a session is first looked at by relevance, of what is stored already.
DERIVED = frozenset({"search_pages", "search_words", "term_pages"})


async def dump(database) -> dict[str, list[str]]:
    admin = await asyncpg.connect(database.admin_dsn)
    try:
        found = {}
        tables = await admin.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        for table in {row["tablename"] for row in tables} - DERIVED:
            rows = await admin.fetch(f"SELECT xmin::text || row_to_json(x)::text AS row FROM {table} x ORDER BY 1")
            found[table] = [row["row"] for row in rows]
        return found
    finally:
        await admin.close()


async def fill(api: Api, turns: int = 6, session: str = "s") -> None:
    await api.append(session, {"role": "system", "content": "be kind"})
    for n in range(1, turns + 1):
        await api.append(
            session,
            {"role": "user", "content": f"question {n}"},
            {"role": "assistant", "content": f"answer {n} <terse>did {n}</terse>"},
        )


async def build(api: Api, session: str = "s", **options: object) -> Any:
    answer = await api.http.post(f"/api/sessions/{session}/context", json=options)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_slim_as_the_document_has_it(api: Api) -> None:
    await fill(api)
    built = await build(api, strategy={"name": "slim", "recent_turns": 2}, epoch="every_request")
    log, acknowledgement, *recent = built["messages"]
    lines = log["content"].splitlines()
    assert log["role"] == "user"
    assert lines[0] == "[Context -- Activity Log]"
    assert [line.split("] ")[1] for line in lines[1:]] == [f"assistant: did {n}" for n in range(1, 5)]
    assert acknowledgement["role"] == "assistant"
    assert [m["content"] for m in recent] == [
        "question 5", "answer 5 <terse>did 5</terse>", "question 6", "answer 6 <terse>did 6</terse>",
    ]  # fmt: skip
    assert built["instructions"] == f"be kind\n\n{TERSE_INSTRUCTIONS}"
    assert built["instruction_messages"] == [{"role": "system", "content": built["instructions"]}]
    assert built["strategy"] == "slim"
    report = built["report"]
    assert set(report) == {"tokens_before", "tokens_after", "epoch", "layers", "turns", "turns_omitted"}
    assert report["epoch"] == {"number": 1, "reason": "first", "cut": 10}
    assert report["tokens_after"] == sum(layer["tokens"] for layer in report["layers"])
    assert {turn["turn"]: turn["kept"] for turn in report["turns"]} == {
        **{f"t{n}": "terse" for n in range(1, 5)}, "t5": "full", "t6": "full",
    }  # fmt: skip


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_context_far_from_its_first_cut_is_the_history_and_nothing_else(api: Api, strategy: str) -> None:
    history = [
        {"role": "system", "content": "be kind"},
        *({"role": role, "content": f"{role} {n}"} for n in range(3) for role in ("user", "assistant")),
        {"role": "user", "content": "and now?"},
    ]
    await api.append("s", *history)
    built = await build(api, strategy=strategy, epoch="auto")
    assert built["instruction_messages"] == history[:1]
    assert built["messages"] == history[1:]
    assert {layer["name"] for layer in built["report"]["layers"] if layer["tokens"]} == {"instructions", "tail"}


async def test_full_is_everything_and_given_messages_come_last(api: Api) -> None:
    await fill(api, 2)
    built = await build(
        api,
        strategy="full",
        messages=[{"role": "user", "content": "and now?"}, {"role": "assistant", "content": "hm"}],
    )
    assert [m["content"] for m in built["messages"]] == [
        "question 1", "answer 1 <terse>did 1</terse>", "question 2", "answer 2 <terse>did 2</terse>", "and now?", "hm",
    ]  # fmt: skip
    assert built["instructions"] == "be kind"
    assert [turn["turn"] for turn in built["report"]["turns"]] == ["t1", "t2", "t3"]
    own = await build(api, strategy="full", messages=[{"role": "developer", "content": "be brief"}])
    assert own["instructions"] == "be brief"


async def test_building_changes_nothing(api: Api, database) -> None:
    await fill(api)
    before = await dump(database)
    requests: tuple[dict[str, Any], ...] = (
        {},
        {"strategy": "slim", "epoch": "every_request", "model": "gpt-4o"},
        {"strategy": "full", "messages": [{"role": "user", "content": "unstored words"}]},
        {"max_tokens": 1000},
        *({"strategy": name, "epoch": epoch} for name in STRATEGIES for epoch in ("auto", "every_request")),
    )
    for options in requests:
        await build(api, **options)
    for bad in ({"max_tokens": 5}, {"strategy": "none"}, {"messages": [{"role": "wizard"}]}):
        assert (await api.http.post("/api/sessions/s/context", json=bad)).status_code == 422
    assert await dump(database) == before
    assert any(before.values())


async def test_max_tokens_is_the_window(api: Api) -> None:
    await api.append("w", {"role": "user", "content": "start"})
    for n in range(30):
        await api.append(
            "w",
            {"role": "assistant", "content": f"{n} " + "word " * 200 + f"<terse>step {n}</terse>"},
            {"role": "user", "content": f"go on {n}"},
        )
    whole = await build(api, "w")
    assert whole["report"]["tokens_after"] > 6000
    small = await build(api, "w", max_tokens=2000)
    assert small["report"]["tokens_after"] <= 2000
    assert small["messages"][-1]["content"] == "go on 29"
    too_small = await api.http.post("/api/sessions/w/context", json={"max_tokens": 10})
    assert too_small.status_code == 422
    assert too_small.json()["budget"] == 10
    assert too_small.json()["needed"] > 10


async def test_raw_bytes_of_messages_come_through(api: Api) -> None:
    odd = rb'{"role":"user","content":"\ud83d \u0000","n":[1.0,123456789012345678901234567890]}'
    await api.post_raw("/api/sessions/r/messages", b'{"messages":[' + odd + b"]}")
    answer = await api.post_raw("/api/sessions/r/context", b'{"strategy":"full","messages":[' + odd + b"]}")
    assert answer.content.count(odd) == 2


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"dialect": "smoke"}, "dialect"),
        ({"strategy": {"name": "slim", "recent_turns": 0}}, "strategy"),
        ({"epoch": {"stride": 4, "x": 1}}, "epoch"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": 10**12}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"messages": "none"}, "messages"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0]"),
        ({"store": True}, "store"),
    ],
)
async def test_bad_options_are_named(api: Api, options: dict[str, object], field: str) -> None:
    await fill(api, 1)
    refused = await api.http.post("/api/sessions/s/context", json=options)
    assert refused.status_code == 422
    assert refused.json()["field"] == field


async def test_an_empty_session_has_an_empty_context(api: Api) -> None:
    await api.http.post("/api/sessions", json={"id": "e", "strategy": "full"})
    built = await build(api, "e")
    assert (built["messages"], built["instructions"], built["report"]["turns"]) == ([], None, [])
