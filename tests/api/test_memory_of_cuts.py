"""The daily memory: one entry for each cut, of the messages that left the context with it; and what summaries cost."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from tersely.fakellm.scripted import ScriptedModel, ScriptedReply, run_scripted
from tests.api.conftest import Api, serve
from tests.conftest import Database

WORDS = " ".join(f"and so on number {n}" for n in range(20))


def turn(number: int) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": f"quokka_{number:03} is asked for. {WORDS}"},
        {"role": "assistant", "content": f"wombat_{number:03} is the answer. {WORDS}"},
    ]


def summarize(received: Any) -> ScriptedReply:
    """A model that names what it was given."""
    text = received.request["messages"][1]["content"]
    names = sorted(set(re.findall(r"(?:quokka|wombat)_\d+", text)))
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    return ScriptedReply(message={"content": "- " + " ".join(names)}, usage=usage)


@asynccontextmanager
async def with_model(database: Database, replicas: int = 1, **settings: Any) -> AsyncIterator[tuple[Any, ...]]:
    async with AsyncExitStack() as stack:
        model = await stack.enter_async_context(run_scripted(model=ScriptedModel(script=summarize)))
        given = {"summarizer_model": "m", "summarizer_base_url": model.base_url, "summarizer_api_key": "k", **settings}
        apis = [await stack.enter_async_context(serve(database.dsn, **given)) for _ in range(replicas)]
        yield model, *apis


async def run(api: Api, first: int, last: int, session: str = "s") -> None:
    for number in range(first, last + 1):
        for message in turn(number):
            assert (await api.append(session, message)).status_code == 201


async def entries(api: Api) -> list[dict[str, Any]]:
    """The memory once nothing more is written, the oldest first."""
    before = None
    while (now := (await api.http.get("/api/memory")).json()["items"]) != before:
        before = now
        await asyncio.sleep(0.4)
    return list(reversed(now))


async def cuts(api: Api, session: str = "s") -> list[int]:
    found = (await api.http.get(f"/api/sessions/{session}/events", params={"limit": 500})).json()["items"]
    return [each["cut"] for each in found if each["type"] == "epoch" and each["cut"] > 1]


def turns_named(entry: dict[str, Any]) -> set[int]:
    return {int(number) for number in re.findall(r"quokka_(\d+)", entry["text"])}


async def stats(api: Api, session: str = "s") -> dict[str, Any]:
    return dict((await api.http.get(f"/api/sessions/{session}/stats")).json()["summaries"])


def check(found: list[dict[str, Any]], at: list[int]) -> None:
    """One entry for each cut, of exactly what lies between it and the one before."""
    assert [(each["first_seq"], each["last_seq"]) for each in found] == [
        (first, cut - 1) for first, cut in zip([1, *at], at, strict=False)
    ]
    for each in found:
        assert turns_named(each) == set(range((each["first_seq"] + 1) // 2, each["last_seq"] // 2 + 1))


async def test_one_entry_for_each_cut_and_each_message_is_read_once(database: Database) -> None:
    async with with_model(database) as (model, api):
        await api.http.post("/api/sessions", json={"id": "s", "strategy": "trim"})
        await run(api, 1, 20)
        assert await entries(api) == [], "nothing has left the context"
        assert len(model.model.received) == 1, "made ahead, once"
        await run(api, 21, 60)
        found = await entries(api)
        assert len(found) == 4
        check(found, await cuts(api))
        read = [name for received in model.model.received for name in _given(received)]
        assert len(read) <= 1.3 * len(set(read)), "messages are read again and again"
        assert len(model.model.received) <= 2 * len(found)


def _given(received: Any) -> list[str]:
    text = received.request["messages"][1]["content"]
    return sorted(set(re.findall(r"(?:quokka|wombat)_\d+", text)))


async def test_memory_of_cuts_by_tokens(database: Database) -> None:
    async with with_model(database) as (model, api):
        strategy = {"name": "trim", "max_context_tokens": 4_000, "max_context_turns": 1000}
        await api.http.post("/api/sessions", json={"id": "s", "strategy": strategy})
        await run(api, 1, 50)
        found = await entries(api)
        assert len(found) >= 2
        check(found, await cuts(api))
        assert len(model.model.received) <= 2 * len(found) + 1


@pytest.mark.parametrize("policy", ["auto", "every_request"])
async def test_entries_name_the_messages_that_each_covers(database: Database, policy: str) -> None:
    """A turn may lose its tool calls before its question and its reply: the two entries interlock, and no message is
    in both.
    """
    async with with_model(database) as (_, api):
        strategy = {"name": "trim", "max_context_tokens": 3_000}
        await api.http.post("/api/sessions", json={"id": "s", "strategy": strategy, "epoch": policy})
        names: dict[int, str] = {}
        for number in range(1, 9):
            question, reply = turn(number)
            steps = [step for each in range(6) for step in call_and_result(f"{number:02}{each}")]
            for message in (question, *steps, reply):
                answer = await api.append("s", message)
                found = re.findall(r"(?:quokka|wombat)_\d+", message.get("content") or "")
                names[answer.json()["last_seq"]] = found[0] if found else ""
        found = await entries(api)
    ranges = [each for entry in found for each in entry["ranges"]]
    covered = [seq for run in ranges for seq in range(run["first_seq"], run["last_seq"] + 1)]
    assert len(covered) == len(set(covered)) > 50
    assert any(len(entry["ranges"]) > 1 for entry in found)
    for entry in found:
        seqs = [seq for run in entry["ranges"] for seq in range(run["first_seq"], run["last_seq"] + 1)]
        assert (min(seqs), max(seqs)) == (entry["first_seq"], entry["last_seq"])
        assert set(re.findall(r"(?:quokka|wombat)_\d+", entry["text"])) == {names[seq] for seq in seqs} - {""}


def call_and_result(name: str) -> list[dict[str, Any]]:
    call = {"id": f"c{name}", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"c{name}", "content": f"quokka_9{name} {WORDS}"},
    ]


async def test_several_replicas_tell_of_a_cut_once(database: Database) -> None:
    async with with_model(database, 2) as (_, one, other):
        await one.http.post("/api/sessions", json={"id": "s", "strategy": "trim"})
        for number in range(1, 46):
            for index, message in enumerate(turn(number)):
                await (one, other)[(number + index) % 2].append("s", message)
        found = await entries(one)
        check(found, await cuts(one))
        assert len(found) == len({each["first_seq"] for each in found}) >= 2, "one entry for each cut"


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
async def test_dropped_messages_are_in_no_memory_entry_and_others_in_one(database: Database, is_after: bool) -> None:
    async with with_model(database) as (_, api):
        await api.http.post("/api/sessions", json={"id": "s", "strategy": "trim"})
        await run(api, 1, 19)
        if not is_after:
            await api.http.post("/api/sessions/s/turns/t3/drop")
        await run(api, 20, 25)
        await entries(api)
        if is_after:
            await api.http.post("/api/sessions/s/turns/t3/drop")
        await run(api, 26, 40)
        found = await entries(api)
        numbers = [number for each in found for number in turns_named(each)]
        assert len(numbers) == len(set(numbers))
        assert 3 not in numbers
        assert set(numbers) == set(range(1, (await cuts(api))[-1] // 2 + 1)) - {3}


async def test_a_deleted_memory_entry_does_not_return(database: Database) -> None:
    async with with_model(database) as (_, api):
        await api.http.post("/api/sessions", json={"id": "s", "strategy": "trim"})
        await run(api, 1, 25)
        assert len(await entries(api)) == 1
        assert (await api.http.delete("/api/memory?session=s")).json() == {"deleted": 1}
        assert await entries(api) == []
        await api.http.post("/api/sessions/s/clear")
        (left,) = await entries(api)
        assert min(turns_named(left)) > 10


async def test_tiered_summarises_several_turns_with_one_call(database: Database) -> None:
    def lines(received: Any) -> ScriptedReply:
        numbers = sorted({int(n) for n in re.findall(r"quokka_(\d+)", received.request["messages"][1]["content"])})
        return ScriptedReply(message={"content": "\n".join(f"t{n}: summary of turn {n}" for n in numbers)})

    async with with_model(database) as (model, api):
        model.model.script = lines
        strategy = {"name": "tiered", "total_budget": 3_000, "working_budget": 1_000, "session_budget": 2_000}
        await api.http.post("/api/sessions", json={"id": "s", "strategy": strategy})
        await run(api, 1, 60)
        await entries(api)
        assert 1 <= len(model.model.received) <= 60 / 3
        context = (await api.http.post("/api/sessions/s/context", json={})).json()
        assert "summary of turn 1" in context["messages"][0]["content"]


async def test_summary_costs_are_in_the_stats_of_any_process(database: Database) -> None:
    prices = {"summarizer_input_price": 2.0, "summarizer_output_price": 10.0}
    async with with_model(database, 2, **prices) as (model, one, other):
        await one.http.post("/api/sessions", json={"id": "s", "strategy": "trim"})
        await run(one, 1, 25)
        await entries(one)
        calls = len(model.model.received)
        assert calls > 0
        for api in (one, other):
            found = await stats(api)
            assert (found["calls"], found["input_tokens"], found["output_tokens"]) == (calls, 100 * calls, 10 * calls)
            assert found["money"] == {"currency": "USD", "sent": pytest.approx(calls * 0.0003)}
            assert found["today"]["calls"] == calls
        metrics = (await one.http.get("/metrics")).text
        assert f'tersely_summarizer_calls_total{{result="answered"}} {calls}.0' in metrics
    async with with_model(database) as (_, api):
        assert (await stats(api))["calls"] == calls
        assert (await stats(api))["money"] is None


@pytest.mark.parametrize("limit", [{"summarizer_daily_calls": 2}, {"summarizer_daily_tokens": 150}])
async def test_beyond_the_daily_limit_summaries_are_extracted(database: Database, limit: dict[str, int]) -> None:
    async with with_model(database, **limit) as (model, api):
        await api.http.post("/api/sessions", json={"id": "s", "strategy": "trim"})
        await run(api, 1, 60)
        found = await entries(api)
        check([{**each, "text": found[0]["text"]} for each in found[:1]], (await cuts(api))[:1])
        assert len(found) == 4
        assert len(model.model.received) == 2
        today = (await stats(api))["today"]
        assert today["calls"] == 2
        assert today["refused"] > 0
        events = (await api.http.get("/api/sessions/s/events", params={"limit": 500})).json()["items"]
        assert any("of the day" in (each.get("error") or "") for each in events)
        assert "wombat" in found[-1]["text"]
