"""Tools of ours inside a proxied chat: called by the model, answered here, never seen by the client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from app.upstream.scripted import ScriptedReply
from tests.conftest import Database
from tests.proxy.harness import MODEL, Model, Service, serve

THEIRS = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


@pytest.fixture(scope="module")
def offering(store: Database, model: Model) -> Iterator[Service]:
    """A service whose strategy offers tools from the start."""
    with serve(store, model.url, strategy="window", instructions="off", heartbeat=0.3) as running:
        yield running


@pytest.fixture
def client(offering: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=offering.base_url, api_key="sk-upstream", max_retries=0) as made:
        yield made


def calling(*calls: tuple[str, str, dict[str, Any] | str], content: str | None = None, **more: Any) -> ScriptedReply:
    """A reply with calls: (id, name, arguments)."""
    made = [
        {
            "id": call_id,
            "type": "function",
            "function": {"name": name, "arguments": given if isinstance(given, str) else json.dumps(given)},
        }
        for call_id, name, given in calls
    ]
    return ScriptedReply(message={"role": "assistant", "content": content, "tool_calls": made}, **more)


def saying(text: str, **more: Any) -> ScriptedReply:
    return ScriptedReply(message={"role": "assistant", "content": text}, **more)


PAD = ("c1", "manage_scratchpad", {"action": "update", "content": "remember the milk"})


def said(client: openai.OpenAI, streams: bool, **request: Any) -> dict[str, Any]:
    """The assistant's message as the official client puts it together, with finish, id and usage."""
    if not streams:
        answer = client.chat.completions.create(**request)
        message = answer.choices[0].message.model_dump(exclude_none=True)
        return message | {
            "finish": answer.choices[0].finish_reason, "id": answer.id, "usage": answer.usage and answer.usage.model_dump()
        }  # fmt: skip
    with client.chat.completions.stream(**request, stream_options={"include_usage": True}) as stream:
        ids = set()
        for event in stream:
            if event.type == "chunk":
                ids.add(event.chunk.id)
        whole = stream.get_final_completion()
    assert len(ids) == 1
    message = whole.choices[0].message.model_dump(exclude_none=True)
    message.pop("parsed", None)
    for call in message.get("tool_calls", ()):
        call["function"].pop("parsed_arguments", None)
        call.pop("index", None)
    return message | {
        "finish": whole.choices[0].finish_reason, "id": whole.id, "usage": whole.usage and whole.usage.model_dump()
    }  # fmt: skip


@pytest.mark.parametrize("streams", [False, True])
def test_a_call_of_ours_is_answered_and_the_client_sees_one_reply(
    client: openai.OpenAI, model: Model, key: str, streams: bool
):
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    model.script(key, calling(PAD, content="Let me note that.", usage=usage), saying("Noted.", usage=usage))
    first = [{"role": "user", "content": f"note this {key}"}]
    seen = said(client, streams, model=MODEL, messages=first, user=key)
    assert seen["content"] == "Let me note that.\n\nNoted."
    assert "tool_calls" not in seen
    assert seen["finish"] == "stop"
    assert seen["usage"]["prompt_tokens"] == 20
    assert seen["usage"]["total_tokens"] == 30

    second = model.requests(key)[1].request
    assert second["messages"][1:] == [
        {
            "role": "assistant",
            "content": "Let me note that.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": PAD[1], "arguments": json.dumps(PAD[2])}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": second["messages"][2]["content"]},
    ]
    assert second["messages"][2]["content"].startswith("Saved.")

    model.script(key, saying("Milk."))
    echo = {"role": "assistant", "content": seen["content"]}
    said(client, streams, model=MODEL, messages=[*first, echo, {"role": "user", "content": "what?"}], user=key)
    third = model.requests(key)[2].request
    assert third["messages"][:3] == second["messages"]
    assert third["messages"][3] == {"role": "assistant", "content": "Noted."}
    assert third["tools"] == second["tools"]


@pytest.mark.parametrize("streams", [False, True])
def test_of_a_mixed_reply_the_client_sees_its_own_calls(client: openai.OpenAI, model: Model, key: str, streams: bool):
    model.script(key, calling(PAD, ("c2", "add", {"a": 1}), ("c3", "retrieve_memos", {"query": "x"})))
    first = [{"role": "user", "content": f"do both {key}"}]
    seen = said(client, streams, model=MODEL, messages=first, user=key, tools=[THEIRS])
    assert [call["id"] for call in seen["tool_calls"]] == ["c2"]
    assert seen["finish"] == "tool_calls"
    assert len(model.requests(key)) == 1

    model.script(key, saying("Both done."))
    echo = {key_: value for key_, value in seen.items() if key_ in {"role", "content", "tool_calls"}}
    echo.setdefault("content", None)
    history = [*first, echo, {"role": "tool", "tool_call_id": "c2", "content": "2"}]
    assert said(client, streams, model=MODEL, messages=history, user=key, tools=[THEIRS])["content"] == "Both done."
    sent = model.requests(key)[1].request["messages"]
    assert [call["id"] for call in sent[1]["tool_calls"]] == ["c1", "c2", "c3"]
    assert [message.get("tool_call_id") for message in sent[2:]] == ["c1", "c3", "c2"]
