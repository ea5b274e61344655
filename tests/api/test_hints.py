"""No model is told of a tool, or given a handle for one, that it cannot use: whatever the strategy and the offer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from itertools import combinations
from typing import Any

import pytest

from tersely.domain.tools.catalog import OFFERED_BY_DEFAULT, TOOLS
from tersely.fakellm.scripted import ScriptedModel, ScriptedReply, run_scripted
from tests.api.conftest import Api, serve
from tests.conftest import Database

MODEL = "gpt-4o"
STRATEGIES = {
    "slim": {"recent_turns": 1},
    "full": {},
    "window": {"context_size": 4},
    "trim": {},
    "compact": {},
    "tiered": {},
}
WAYS = ("context_search", "query_db", "read_artifact")
OFFERS = [set(some) for size in range(4) for some in combinations(WAYS, size)] + [set(TOOLS) - set(WAYS)]
THEIRS = {"name": "add", "parameters": {"type": "object", "properties": {}}}
OUTPUTS = ("ok", "line of output\n" * 800, "word " * 9_000, "x" * 210_000)


def history(turns: int) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for turn in range(turns):
        call = {"id": f"c{turn}", "type": "function", "function": {"name": "add", "arguments": "{}"}}
        made += [
            {"role": "user", "content": f"Question {turn} about src/file_{turn}.py"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{turn}", "content": OUTPUTS[turn % len(OUTPUTS)]},
            {"role": "assistant", "content": f"Answer {turn}."},
        ]
    return made


def named_in(text: str) -> set[str]:
    """The tools of ours that a context speaks of; the digest of an output counts as one's that reads it."""
    found = {name for name in TOOLS if name in text}
    return found | ({"read_artifact"} if "sha256" in text else set())


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_hints_in_contexts_over_rest(api: Api, strategy: str) -> None:
    setting = {"name": strategy, **STRATEGIES[strategy]}
    await api.http.post("/api/sessions", json={"id": "s", "strategy": setting, "epoch": "every_request"})
    await api.append("s", *history(8))
    tools_named: set[str] = set()
    for offered in (None, *OFFERS):
        options: dict[str, Any] = {"model": MODEL, "max_tokens": 200_000}
        if offered is not None:
            options["tools"] = sorted(offered)
        contexts = [(await api.http.post("/api/sessions/s/context", json=options)).text for _ in range(2)]
        assert contexts[0] == contexts[1]
        named = named_in(contexts[0])
        assert named <= (offered or set())
        tools_named |= named
    if strategy in {"window", "trim", "compact"}:
        assert tools_named == {"query_db", "context_search"} | ({"read_artifact"} if strategy == "compact" else set())


async def test_tools_that_are_none(api: Api) -> None:
    await api.append("s", *history(1))
    refused = await api.http.post("/api/sessions/s/context", json={"tools": ["rm"]})
    assert (refused.status_code, refused.json()["field"]) == (422, "tools")


@pytest.fixture
async def proxied(database: Database) -> AsyncIterator[tuple[ScriptedModel, str]]:
    """A model that says something, and where it is."""
    async with run_scripted(model=ScriptedModel()) as running:
        running.model.script = lambda _: ScriptedReply(message={"role": "assistant", "content": "Well."})
        yield running.model, running.base_url


CIRCUMSTANCES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as the strategy offers": ({}, {}),
    "none are offered": ({"tools": "off"}, {}),
    "no instructions": ({"instructions": "off"}, {}),
    "several replies": ({}, {"n": 2}),
    "names are taken": ({}, {"tools": [{"type": "function", "function": {**THEIRS, "name": n}} for n in TOOLS]}),
    "one name is taken": ({}, {"tools": [{"type": "function", "function": {**THEIRS, "name": "context_search"}}]}),
    "all are offered": ({"tools": ",".join(TOOLS)}, {}),
}


@pytest.mark.parametrize("circumstances", CIRCUMSTANCES)
@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_hints_in_proxied_chats(
    database: Database, proxied: tuple[ScriptedModel, str], strategy: str, circumstances: str
) -> None:
    model, url = proxied
    settings, more = CIRCUMSTANCES[circumstances]
    setting = json.dumps({"name": strategy, **STRATEGIES[strategy]})
    async with serve(database.dsn, upstream=url, strategy=setting, **settings) as api:
        headers = {"X-Tersely-Session": "s", "X-Tersely-Epoch": '{"high": 12000, "low": 4000}'}
        offered: set[str] = set()
        epoch = 0
        for turns in (3, 6, 9):
            messages = [*history(turns), {"role": "user", "content": "And now?"}]
            body = {"model": MODEL, "messages": messages, **more}
            answer = await api.http.post("/v1/chat/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            sent = json.loads(model.received[-1].body)
            theirs = {each["function"]["name"] for each in more.get("tools", ())}
            offered = {each["function"]["name"] for each in sent.get("tools", ())} - theirs
            assert named_in(json.dumps(sent["messages"])) <= offered
            epoch = int(answer.headers["x-tersely-epoch"])
            if "tools" not in settings and not more:
                assert offered <= set(OFFERED_BY_DEFAULT[strategy])
        # What is shown of the context names what the model has, too, and goes on in its epoch.
        shown = await api.http.post("/api/sessions/s/context", json={"epoch": headers["X-Tersely-Epoch"]})
        assert named_in(shown.text) <= offered
        assert shown.json()["report"]["epoch"]["number"] == epoch
