"""Recorded requests of openai-agents that continue from the id of a reply."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tersely.fakellm.scripted import ScriptedReply
from tests.dialects.recordings import SHARED
from tests.support.http import post
from tests.support.responses_talks import upstream_input
from tests.support.rows import messages_by_number
from tests.support.services import Service
from tests.support.upstreams import Model

RECORDED = SHARED / "clients" / "openai-agents"


def recorded(name: str) -> dict[int, Any]:
    lines = map(json.loads, (RECORDED / name).read_text().splitlines())
    return {line["n"]: line for line in lines}


@pytest.mark.skipif(not RECORDED.exists(), reason=f"the recordings are not there: {RECORDED}")
async def test_openai_agents_by_ids(host: tuple[Service, Model], key: str) -> None:
    service, model = host
    requests, replies = recorded("requests.jsonl"), recorded("responses.jsonl")
    numbers = [n for n, line in requests.items() if " | P" in line["note"]]
    assert len(numbers) == 4
    known: dict[str, str] = {}
    ids = [requests[n]["body"].get("previous_response_id") for n in numbers]
    session = ""
    for n, next_id in zip(numbers, [*ids[1:], None], strict=True):
        request = {**requests[n]["body"], "user": key}
        if named := request.get("previous_response_id"):
            request["previous_response_id"] = known[named]
        output = [{**item, "id": item["id"] + key} for item in replies[n]["reply"]]
        model.script(key, *[ScriptedReply(message={"output": output})])
        answer = await post(service, json.dumps(request).encode(), path="/v1/responses")
        assert answer.status == 200, answer.body
        session = session or answer.session
        assert answer.session == session
        known[next_id or ""] = answer.json["id"]

    stored = [each for each in await messages_by_number(service, session) if each.turn]
    assert [(each.role, each.turn) for each in stored] == [
        ("user", 1), ("assistant", 1), ("user", 2), ("assistant", 2), ("tool", 2), ("assistant", 2), ("user", 3),
        ("assistant", 3),
    ]  # fmt: skip
    sent = upstream_input(model, key)
    if "previous_response_id" not in json.loads(model.requests(key)[-1].body):
        assert [item.get("type") or item["role"] for item in sent] == [
            "user", "message", "user", "function_call", "function_call_output", "message", "user",
        ]  # fmt: skip
