"""Agents that only use REST get what proxied agents get: epochs, events, memory, summaries, and a stable prefix."""

from __future__ import annotations

import asyncio
import json
import time
from itertools import pairwise
from typing import Any

import pytest

from tersely.strategies.presets import STRATEGIES
from tests.api.conftest import Api

# Small enough that 20 turns pass the limits of each strategy several times.
SMALL: dict[str, dict[str, Any]] = {
    "full": {"name": "full"},
    "slim": {"name": "slim"},
    "window": {"name": "window", "context_size": 5},
    "trim": {"name": "trim", "max_context_turns": 8},
    "compact": {"name": "compact", "max_tokens": 12_000, "reserve_tokens": 100_000, "keep_recent_tokens": 3_000},
    "tiered": {"name": "tiered", "total_budget": 8_000, "session_budget": 2_000, "working_budget": 4_000},
}
TURNS = 20
POLICIES: list[Any] = ["auto", {"high": 6000, "low": 2500}, {"stride": 4}, "every_request"]
PADDING = " ".join(f"and so on number {n} of it" for n in range(60))


def asks(turn: int) -> dict[str, Any]:
    return {"role": "user", "content": f"quokka_{turn:02} please look at src/mod_{turn}.py. {PADDING}"}


def steps(turn: int) -> list[dict[str, Any]]:
    """A tool call with its result in every third turn."""
    if turn % 3:
        return []
    call = {"id": f"c{turn}", "type": "function", "function": {"name": "read", "arguments": f'{{"n": {turn}}}'}}
    return [
        {"role": "assistant", "content": "Reading.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"c{turn}", "content": f"result {turn}: {PADDING}"},
    ]


def says(turn: int) -> dict[str, Any]:
    return {"role": "assistant", "content": f"wombat_{turn:02} is done in src/mod_{turn}.py. {PADDING}"}


async def context(api: Api, session: str = "s", **options: Any) -> dict[str, Any]:
    answer = await api.http.post(f"/api/sessions/{session}/context", json=options)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def append(api: Api, *messages: dict[str, Any], session: str = "s") -> None:
    answer = await api.append(session, *messages)
    assert answer.status_code == 201, answer.text


async def events(api: Api, session: str = "s") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    after = "0"
    while True:
        page = (await api.http.get(f"/api/sessions/{session}/events", params={"after": after})).json()
        found += page["items"]
        if page["next"] is None:
            return found
        after = page["next"]


async def stored(api: Api) -> Any:
    session = (await api.http.get("/api/sessions/s")).json()
    return session, len(await events(api)), (await api.http.get("/api/memory")).json()


async def settled(api: Api) -> Any:
    """Return the stored rows once nothing more is written in the background."""
    before = None
    while (now := await stored(api)) != before:
        before = now
        await asyncio.sleep(0.3)
    return now


def check(contexts: list[dict[str, Any]]) -> int:
    """Each context begins as the one before it did, within an epoch; how many epochs there were."""
    numbers = [each["report"]["epoch"]["number"] for each in contexts]
    assert numbers == sorted(numbers)
    for before, after in pairwise(contexts):
        if before["report"]["epoch"] == after["report"]["epoch"]:
            shared = zip(before["messages"], after["messages"], strict=False)
            assert [pair for pair in shared if pair[0] != pair[1]] == [], after["report"]["epoch"]
            assert len(before["messages"]) <= len(after["messages"])
    return len(set(numbers))


@pytest.mark.parametrize("policy", POLICIES, ids=["auto", "small", "stride", "every"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("flow", ["stored", "preview"])
async def test_each_context_begins_as_the_one_before_it(api: Api, strategy: str, policy: Any, flow: str) -> None:
    """``stored``: the question is appended before the context is asked for; ``preview``: it comes with the reply."""
    made = await api.http.post("/api/sessions", json={"id": "s", "strategy": SMALL[strategy], "epoch": policy})
    assert made.status_code == 201, made.text
    contexts = []
    for turn in range(1, TURNS + 1):
        if flow == "stored":
            await append(api, asks(turn))
            contexts.append(await context(api))
            for step in steps(turn):
                await append(api, step)
            if steps(turn):
                contexts.append(await context(api))
            await append(api, says(turn))
            contexts.append(await context(api))
        else:
            contexts.append(await context(api, messages=[asks(turn)]))
            await append(api, asks(turn), *steps(turn), says(turn))
    count = check(contexts)
    started = [each for each in await events(api) if each["type"] == "epoch"]
    if policy != "every_request" and started:
        assert started[-1]["number"] >= count - 1
    assert len(contexts) >= TURNS
    if strategy == "full":
        assert count == 1
    elif strategy in {"trim", "compact", "tiered"} or policy != "auto":
        assert count > 2
    assert any(f"wombat_{TURNS - 1}" in json.dumps(message) for message in contexts[-1]["messages"])


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_completion_for_a_context_changes_nothing(api: Api, strategy: str) -> None:
    await api.http.post("/api/sessions", json={"id": "s", "strategy": SMALL[strategy]})
    for turn in range(1, 30):
        await append(api, asks(turn), says(turn))
    before = await settled(api)
    first = await context(api)
    assert (await context(api)) == first
    assert await stored(api) == before


async def test_trimming_writes_the_daily_memory(api: Api) -> None:
    await api.http.post("/api/sessions", json={"id": "s", "strategy": "trim"})
    for turn in range(1, 23):
        await append(api, asks(turn))
        await append(api, says(turn))
    deadline = time.monotonic() + 20
    while not (items := (await api.http.get("/api/memory")).json()["items"]):
        assert time.monotonic() < deadline
        await api.http.get("/healthz")
    assert [(each["first_seq"], each["last_seq"]) for each in items] == [(1, 20)]
    assert "quokka_05" in items[0]["text"] or "wombat_05" in items[0]["text"]


@pytest.mark.parametrize("strategy", ["trim", "compact"])
async def test_a_context_costs_the_same_whatever_the_length(api: Api, strategy: str) -> None:
    async def fill(session: str, turns: int) -> None:
        await api.http.post("/api/sessions", json={"id": session, "strategy": SMALL[strategy]})
        messages = [message for turn in range(turns) for message in (asks(turn), says(turn))]
        for start in range(0, len(messages), 1_000):
            await append(api, *messages[start : start + 1_000], session=session)

    async def measure(session: str) -> float:
        started = time.process_time()
        await context(api, session)
        return time.process_time() - started

    await fill("medium", 150)
    await fill("large", 1_500)
    times = [(await measure("large"), await measure("medium")) for _ in range(25)]
    large, medium = map(min, zip(*times, strict=True))  # what is written in the background counts too
    assert large < 3 * medium
