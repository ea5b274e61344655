"""Users who say something beside the results of tools: it has one form throughout an epoch, wherever the cut is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tersely.fakellm.scripted import ScriptedReply
from tests.support.http import post
from tests.support.services import Service
from tests.support.upstreams import Model

BY_TURNS = json.dumps({"name": "window", "context_size": 1})
BY_TOKENS = json.dumps({"name": "window", "context_size": 0})
EPOCH = json.dumps({"high": 1500, "low": 600})
LONG = "line of the file " * 60


def called(number: int) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{number}", "name": "read_file", "input": {"number": number}}


def result(number: int, text: str) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": text}


@pytest.mark.parametrize("strategy", ["slim", BY_TOKENS, BY_TURNS])
async def test_a_kept_question_with_results_stays_as_it_is(
    service: Service, model: Model, key: str, strategy: str
) -> None:
    """Its calls are loaded at the first call of the epoch alone."""
    forms: dict[str, set[str]] = {}

    async def say(content: Any, reply: dict[str, Any]) -> None:
        model.script(key, ScriptedReply(message={"role": "assistant", "content": [reply]}))
        body = {"model": "claude-sonnet-4-5", "max_tokens": 100, "messages": [{"role": "user", "content": content}]}
        tools = [{"name": "read_file", "input_schema": {"type": "object"}}]
        answer = await post(
            service,
            json.dumps({**body, "tools": tools}).encode(),
            path="/v1/messages",
            X_Script=key,
            X_Tersely_Session=key,
            X_Tersely_Strategy=strategy,
            X_Tersely_Epoch=EPOCH,
        )
        assert answer.status == 200, answer.body
        for each in (model.last.request or {})["messages"]:
            if "Stop, and" in json.dumps(each):
                parts = [{**part, "cache_control": None} for part in each["content"]]
                forms.setdefault(answer.headers["x-tersely-epoch"], set()).add(json.dumps(parts))

    await say("Read the file.", called(1))
    await say([result(1, LONG), {"type": "text", "text": "Stop, and look for the fault."}], called(2))
    for number in range(2, 12):
        await say([result(number, LONG)], called(number + 1))

    assert len(forms) > 1
    assert [len(each) for each in forms.values()] == [1] * len(forms), forms
