"""A checkpoint without a model, over REST: what was open when it was made is not open for good."""

from __future__ import annotations

import json

import pytest

from tests.api.conftest import Api

OPEN = "no result yet of migrate"
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "migrate", "arguments": '{"to": "v2"}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "migrated to v2"}


async def talk(api: Api, first: int, last: int) -> None:
    for number in range(first, last + 1):
        question = {"role": "user", "content": f"Question {number} about module_{number}.py. " + "why " * 150}
        reply = {"role": "assistant", "content": f"Answer {number}: see module_{number}.py. " + "so " * 150}
        assert (await api.append("s", question, reply)).status_code == 201


async def compacted(api: Api) -> str:
    done = await api.http.post("/api/sessions/s/compact")
    assert done.status_code == 200, done.text
    return json.dumps((await api.http.post("/api/sessions/s/context", json={})).json()["messages"])


@pytest.mark.parametrize("strategy", ["compact", "trim"])
async def test_an_answered_call_is_open_in_no_checkpoint(api: Api, strategy: str) -> None:
    await api.http.post("/api/sessions", json={"id": "s", "strategy": strategy})
    await talk(api, 1, 8)
    await api.append("s", {"role": "user", "content": "Migrate the ledger."}, CALL)
    await compacted(api)
    await api.append("s", RESULT, {"role": "assistant", "content": "The ledger is migrated."})
    for first in (31, 61, 91):
        await talk(api, first, first + 29)
        context = await compacted(api)
        assert "## Goals" in context
        assert "no result yet" not in context
        assert "no words" not in context
        assert "not answered yet" not in context
    assert await epochs(api) > 1


@pytest.mark.parametrize("strategy", ["compact", "trim"])
async def test_a_call_that_was_given_up_stays_open_in_later_checkpoints(api: Api, strategy: str) -> None:
    await api.http.post("/api/sessions", json={"id": "s", "strategy": strategy})
    await talk(api, 1, 8)
    await api.append("s", {"role": "user", "content": "Migrate the ledger."}, CALL)
    for first in (9, 39):
        await talk(api, first, first + 29)
        assert OPEN in await compacted(api)


@pytest.mark.parametrize("strategy", ["compact", "trim"])
@pytest.mark.parametrize("is_compacted_between", [True, False])
async def test_a_call_answered_turns_later_is_open_in_no_checkpoint(
    api: Api, strategy: str, *, is_compacted_between: bool
) -> None:
    await api.http.post("/api/sessions", json={"id": "s", "strategy": strategy})
    await talk(api, 1, 8)
    await api.append("s", {"role": "user", "content": "Migrate the ledger."}, CALL)
    await talk(api, 9, 39)
    if is_compacted_between:
        assert OPEN in await compacted(api)
    await talk(api, 40, 45)
    await api.append("s", RESULT, {"role": "assistant", "content": "The ledger is migrated."})
    for first in (61, 91):
        await talk(api, first, first + 29)
        context = await compacted(api)
        assert "## Goals" in context
        assert "no result yet" not in context
        assert "t46: [Result" not in context, "a result is no request"
    assert await epochs(api) > 1


async def test_a_call_answered_in_another_dialect_is_open_in_no_checkpoint(api: Api) -> None:
    """The result reaches the store in the form of another provider; later contexts are built for the first one."""
    await api.http.post("/api/sessions", json={"id": "s", "strategy": "compact"})
    await talk(api, 1, 8)
    await api.append("s", {"role": "user", "content": "Migrate the ledger."}, CALL)
    await talk(api, 9, 39)
    assert OPEN in await compacted(api)
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "migrated to v2"}
    body = {"dialect": "anthropic", "messages": [{"role": "user", "content": [result]}]}
    assert (await api.http.post("/api/sessions/s/messages", json=body)).status_code == 201
    await talk(api, 61, 90)
    context = await compacted(api)
    assert "## Goals" in context
    assert "no result yet" not in context


async def epochs(api: Api) -> int:
    return len((await api.http.get("/api/sessions/s/epochs")).json()["items"])
