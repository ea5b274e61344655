"""Parallel calls whose first pieces come out of their order are kept as official clients put them together."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from tests.conftest import Database
from tests.support.http import Answered, post
from tests.support.services import FROM_THE_START, serve
from tests.support.upstreams import DONE, MODEL, RawUpstream, http_head

TOOLS = [{"type": "function", "function": {"name": f"add_{n}", "parameters": {"type": "object"}}} for n in range(3)]
OWN = "manage_scratchpad"
OFFERING: dict[str, Any] = {"strategy": "slim", "tools": OWN, "epoch": FROM_THE_START}


def event(delta: dict[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    body = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [choice]}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def piece(index: int, key: str, arguments: str, name: str = "") -> bytes:
    call: dict[str, Any] = {"index": index, "function": {"arguments": arguments}}
    if name:
        call |= {"id": f"{key}-{index}", "type": "function"}
        call["function"]["name"] = name
    return event({"tool_calls": [call]})


def stream_of(order: tuple[int, ...], key: str, names: list[str]) -> bytes:
    """The calls' first pieces in this order, and then the rest of each."""
    first = [piece(n, key, "", names[n]) for n in order]
    rest = [piece(n, key, json.dumps({"a": n})) for n in reversed(order)]
    start, end = event({"role": "assistant", "content": None}), event({}, "tool_calls")
    return b"".join([start, *first, *rest, end, DONE])


def read_by_index(answer: Answered) -> dict[str, Any]:
    """Return the message that OpenAI's JavaScript client makes of a stream: each call stands at its index."""
    calls: dict[int, dict[str, Any]] = {}
    for line in answer.body.decode().split("\n\n"):
        if not line.startswith("data: {"):
            continue
        for each in json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("tool_calls") or ():
            function = {"name": "", "arguments": ""}
            call = calls.setdefault(each["index"], {"id": "", "type": "function", "function": function})
            call["id"] = each.get("id") or call["id"]
            for name, text in each["function"].items():
                call["function"][name] += text
    assert sorted(calls) == list(range(len(calls)))
    return {"role": "assistant", "content": None, "tool_calls": [calls[index] for index in sorted(calls)]}


@pytest.mark.parametrize("offers", [False, True])
@pytest.mark.parametrize("order", [*itertools.permutations(range(3))][1:])
async def test_a_client_continues_after_calls_out_of_order(
    store: Database, raw: RawUpstream, key: str, offers: bool, order: tuple[int, ...]
) -> None:
    with serve(store, raw.url, **(OFFERING if offers else {"strategy": "full"})) as service:
        sent = stream_of(order, key, ["add_0", "add_1", "add_2"])
        raw.answer(http_head(), sent)
        question = {"role": "user", "content": f"add {key}"}
        body = {"model": MODEL, "messages": [question], "tools": TOOLS, "stream": True}
        first = await post(service, json.dumps(body).encode())
        reply = read_by_index(first)
        assert [call["function"]["name"] for call in reply["tool_calls"]] == ["add_0", "add_1", "add_2"]
        if not offers:
            assert first.body == sent
        results = [{"role": "tool", "tool_call_id": each["id"], "content": "1"} for each in reply["tool_calls"]]
        body["messages"] = [question, reply, *results]
        second = await post(service, json.dumps(body).encode())
        assert second.session == first.session
        assert second.headers["x-tersely-session-source"] == "lineage"


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
@pytest.mark.parametrize("own", range(3))
async def test_calls_out_of_order_beside_own_calls(
    store: Database, raw: RawUpstream, key: str, own: int, order: tuple[int, ...]
) -> None:
    """Calls of Tersely's tools among them are taken out; the client's stay in their order, without a gap."""
    names = [OWN if n == own else f"add_{n}" for n in range(3)]
    with serve(store, raw.url, **OFFERING) as service:
        raw.answer(http_head(), stream_of(order, key, names))
        body = {"model": MODEL, "messages": [{"role": "user", "content": key}], "tools": TOOLS, "stream": True}
        reply = read_by_index(await post(service, json.dumps(body).encode()))
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in reply["tool_calls"]]
        assert calls == [(f"add_{n}", json.dumps({"a": n})) for n in range(3) if n != own]
