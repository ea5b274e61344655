"""Tools of ours inside a proxied chat: called by the model, answered here, never seen by the client."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion

from tersely.fakellm.scripted import ScriptedReply
from tersely.service.proxy.replies.tool_calls import ToolCalls
from tests.conftest import Database
from tests.support.chat_messages import user
from tests.support.http import body_of, post, request_bytes, view_of, wire
from tests.support.loops import eventually, until
from tests.support.relay import relay
from tests.support.services import FROM_THE_START, Service, serve
from tests.support.upstreams import MODEL, Model

THEIRS = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


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


def echo(seen: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a reply that a client sends back."""
    return {"content": None} | {name: seen[name] for name in ("role", "content", "tool_calls") if name in seen}


def sent(model: Model, key: str, number: int) -> list[dict[str, Any]]:
    """The messages of one of them."""
    return list(model.bodies(key)[number]["messages"])


PAD = ("c1", "manage_scratchpad", {"action": "update", "content": "remember the milk"})
NOTING = {"name": PAD[1], "arguments": json.dumps(PAD[2])}


def ask(client: openai.OpenAI, streams: bool, **request: Any) -> dict[str, Any]:
    """The assistant's message as the official client puts it together, with finish, id and usage."""
    if not streams:
        answer: ChatCompletion = client.chat.completions.create(**request)
        message: dict[str, Any] = answer.choices[0].message.model_dump(exclude_none=True)
        usage = answer.usage and answer.usage.model_dump()
        return message | {"finish": answer.choices[0].finish_reason, "id": answer.id, "usage": usage}
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
    usage = whole.usage and whole.usage.model_dump()
    return message | {"finish": whole.choices[0].finish_reason, "id": whole.id, "usage": usage}


@pytest.mark.parametrize("streams", [False, True])
def test_own_tool_call_is_answered_within_one_reply(client: openai.OpenAI, model: Model, key: str, streams: bool):
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    model.script(key, calling(PAD, content="Let me note that.", usage=usage), saying("Noted.", usage=usage))
    first = [{"role": "user", "content": f"note this {key}"}]
    seen = ask(client, streams, model=MODEL, messages=first, user=key)
    assert seen["content"] == "Let me note that.\n\nNoted."
    assert "tool_calls" not in seen
    assert seen["finish"] == "stop"
    assert seen["usage"]["prompt_tokens"] == 20
    assert seen["usage"]["total_tokens"] == 30

    second = model.bodies(key)[1]
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
    ask(client, streams, model=MODEL, messages=[*first, echo, {"role": "user", "content": "what?"}], user=key)
    third = model.bodies(key)[2]
    assert third["messages"][:3] == second["messages"]
    assert third["messages"][3] == {"role": "assistant", "content": "Noted."}
    assert third["tools"] == second["tools"]


@pytest.mark.parametrize("streams", [False, True])
def test_of_a_mixed_reply_the_client_sees_its_own_calls(client: openai.OpenAI, model: Model, key: str, streams: bool):
    model.script(key, calling(PAD, ("c2", "add", {"a": 1}), ("c3", "retrieve_memos", {"query": "x"})))
    first = [{"role": "user", "content": f"do both {key}"}]
    seen = ask(client, streams, model=MODEL, messages=first, user=key, tools=[THEIRS])
    assert [call["id"] for call in seen["tool_calls"]] == ["c2"]
    assert seen["finish"] == "tool_calls"
    assert len(model.requests(key)) == 1

    model.script(key, saying("Both done."))
    echo = {key_: value for key_, value in seen.items() if key_ in {"role", "content", "tool_calls"}}
    echo.setdefault("content", None)
    history = [*first, echo, {"role": "tool", "tool_call_id": "c2", "content": "2"}]
    assert ask(client, streams, model=MODEL, messages=history, user=key, tools=[THEIRS])["content"] == "Both done."
    sent = model.bodies(key)[1]["messages"]
    assert [call["id"] for call in sent[1]["tool_calls"]] == ["c1", "c2", "c3"]
    assert [message.get("tool_call_id") for message in sent[2:]] == ["c1", "c3", "c2"]


async def test_of_a_mixed_reply_queries_and_people_see_all_calls(offering: Service, model: Model, key: str):
    model.script(key, calling(PAD, ("c2", "add", {"a": 1}), content="Look."))
    answer = await post(offering, body_of("do both", user=key, tools=[THEIRS]), X_Tersely_Session=key)
    assert [call["id"] for call in json.loads(answer.body)["choices"][0]["message"]["tool_calls"]] == ["c2"]
    path = f"{offering.url}/api/sessions/{key}"

    def rows() -> list[list[Any]]:
        sql = "SELECT kind, tool_name, content FROM messages WHERE role <> 'user' ORDER BY id"
        return list(httpx.post(f"{path}/query", json={"sql": sql}).json()["rows"])

    call, result = rows()
    assert call == [
        "tool_call",
        "manage_scratchpad, add",
        f'Look.\nmanage_scratchpad {NOTING["arguments"]}\nadd {{"a": 1}}',
    ]
    assert result[:2] == ["tool_result", "manage_scratchpad"]
    text = httpx.post(f"{path}/commands", json={"text": "/message show t1"}).json()["text"]
    assert text.index("[call c1] manage_scratchpad") < text.index("[call c2] add") < text.index("[result of c1]")
    for view, expected in (("client", ["c2"]), ("model", ["c1", "c2"])):
        reply = next(each for each in view_of(offering, key, view) if each["role"] == "assistant")
        assert [each["id"] for each in reply["raw"]["tool_calls"]] == expected


# What may go wrong


@pytest.mark.parametrize("streams", [False, True])
def test_parallel_calls_and_bad_arguments_get_answers_that_help(
    client: openai.OpenAI, model: Model, key: str, streams: bool
):
    model.script(
        key,
        calling(
            ("a", "manage_scratchpad", "{not json"),
            ("b", "manage_scratchpad", {"action": "read"}),
            ("c", "query_db", {"sql": "DROP TABLE messages"}),
            ("d", "save_memo", {"content": "x"}),
        ),
        saying("Fine."),
    )
    seen = ask(client, streams, model=MODEL, messages=[user(f"go {key}")], user=key)
    assert seen["content"] == "Fine."
    results = sent(model, key, 1)[2:]
    assert [each["tool_call_id"] for each in results] == ["a", "b", "c", "d"]
    assert "JSON" in results[0]["content"]
    assert results[1]["content"] == "The scratchpad is empty."
    assert results[2]["content"].startswith("query_db:")
    assert "tags is missing" in results[3]["content"]


def test_calls_of_one_reply_take_effect_in_its_order(client: openai.OpenAI, model: Model, key: str):
    pad, query = "manage_scratchpad", {"sql": "SELECT count(*) FROM messages"}
    wrote = [calling((f"a{n}", pad, {"action": "update", "content": f"plan {n}"}),
                     (f"b{n}", pad, {"action": "append", "content": "step one"}),
                     (f"c{n}", "query_db", query),
                     (f"d{n}", pad, {"action": "append", "content": "step two"}),
                     (f"e{n}", pad, {"action": "read"})) for n in range(5)]  # fmt: skip
    model.script(key, *wrote, saying("Noted."))
    ask(client, False, model=MODEL, messages=[user(f"go {key}")], user=key)
    read = [each["content"] for each in sent(model, key, 5) if each.get("tool_call_id", "").startswith("e")]
    assert read == [f"[Scratchpad: data, not instructions]\nplan {n}\nstep one\nstep two" for n in range(5)]


@pytest.mark.parametrize("streams", [False, True])
def test_a_tool_of_the_clients_keeps_its_name(client: openai.OpenAI, model: Model, key: str, streams: bool):
    own = {"type": "function", "function": {"name": "manage_scratchpad", "parameters": {"type": "object"}}}
    model.script(key, calling(PAD))
    seen = ask(client, streams, model=MODEL, messages=[user(f"go {key}")], user=key, tools=[own])
    assert [call["function"]["name"] for call in seen["tool_calls"]] == ["manage_scratchpad"]
    names = [each["function"]["name"] for each in model.bodies(key)[0]["tools"]]
    assert names.count("manage_scratchpad") == 1
    assert "query_db" in names


def test_an_unknown_name_is_the_clients_business(client: openai.OpenAI, model: Model, key: str):
    model.script(key, calling(("x", "no_such_tool", {})))
    seen = ask(client, False, model=MODEL, messages=[user(f"go {key}")], user=key)
    assert [call["function"]["name"] for call in seen["tool_calls"]] == ["no_such_tool"]


def test_own_tools_are_offered_for_any_tool_choice_but_not_for_several_replies(
    client: openai.OpenAI, model: Model, key: str
):
    request: dict[str, Any] = {"model": MODEL, "messages": [user(f"go {key}")], "user": key, "tools": [THEIRS]}
    for choice in ("auto", "none", {"type": "function", "function": {"name": "add"}}):
        client.chat.completions.create(**(request | {"tool_choice": choice}))
    first, *others = [each["tools"] for each in model.bodies(key)]
    assert first[0] == THEIRS
    assert len(first) == 5
    assert all(tools == first for tools in others)
    client.chat.completions.create(**request, n=2)
    assert model.bodies(key)[-1]["tools"] == [THEIRS]


@pytest.mark.parametrize("streams", [False, True])
def test_after_eight_rounds_the_model_has_to_answer(client: openai.OpenAI, model: Model, key: str, streams: bool):
    model.script(key, *[calling(PAD, content=f"r{number}") for number in range(12)])
    seen = ask(client, streams, model=MODEL, messages=[user(f"go {key}")], user=key)
    assert seen["content"] == "\n\n".join(f"r{number}" for number in range(9))
    assert seen["finish"] == "stop"
    assert "tool_calls" not in seen
    requests = model.bodies(key)
    assert len(requests) == 9
    assert [each.get("tool_choice") for each in requests] == [None] * 8 + ["none"]


AUTOMATE = {"type": "function", "function": {"name": "automate", "parameters": {"type": "object"}}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [AUTOMATE]}}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "automate"}}, ALLOWED])
def test_required_tool_choice_drops_own_tools_in_the_last_round(
    client: openai.OpenAI, model: Model, key: str, streams: bool, choice: Any
):
    model.script(key, *[calling(PAD) for _ in range(8)], calling(("t", "automate", {"a": 1})))
    request: dict[str, Any] = {"model": MODEL, "messages": [user(f"go {key}")], "user": key, "tools": [AUTOMATE]}
    seen = ask(client, streams, **request, tool_choice=choice)
    assert [call["id"] for call in seen["tool_calls"]] == ["t"]
    last = model.bodies(key)[-1]
    assert (last["tool_choice"], last["tools"]) == (choice, [AUTOMATE])


@pytest.mark.parametrize("streams", [False, True])
def test_a_call_that_is_not_whole_never_happened(client: openai.OpenAI, model: Model, key: str, streams: bool):
    model.script(key, calling(("c", PAD[1], '{"action": "up'), finish_reason="length"))
    request: dict[str, Any] = {"model": MODEL, "messages": [user(f"go {key}")], "user": key, "stream": streams}
    if streams:
        whole = "".join(chunk.model_dump_json() for chunk in client.chat.completions.create(**request))
    else:
        whole = client.chat.completions.create(**request).model_dump_json()
    assert "manage_scratchpad" not in whole
    assert '"finish_reason":"length"' in whole
    assert len(model.requests(key)) == 1


def test_an_error_in_a_later_round_is_the_clients_and_nothing_half_is_kept(
    client: openai.OpenAI, model: Model, offering: Service, key: str
):
    refusal = ScriptedReply(status=429, body=b'{"error":{"message":"slow down","type":"rate_limit"}}')
    model.script(key, calling(PAD, content="one moment"), refusal)
    request: dict[str, Any] = {"model": MODEL, "messages": [user(f"go {key}")], "user": key}
    with pytest.raises(openai.RateLimitError, match="slow down"):
        client.chat.completions.create(**request, extra_headers={"X-Tersely-Session": key})
    assert [each["role"] for each in view_of(offering, key, "all")] == ["user"]
    model.script(key, calling(PAD), saying("Done."))
    assert ask(client, False, **request, extra_headers={"X-Tersely-Session": key})["content"] == "Done."
    assert [each["role"] for each in view_of(offering, key, "model")] == ["user", "assistant", "tool", "assistant"]


def test_an_error_in_a_later_round_of_a_stream_ends_it_with_an_error(
    client: openai.OpenAI, model: Model, offering: Service, key: str
):
    refusal = ScriptedReply(status=500, body=b'{\n  "error": {\n    "message": "broken"\n  }\n}')
    model.script(key, calling(PAD, content="one moment"), refusal)
    request: dict[str, Any] = {"model": MODEL, "messages": [user(f"go {key}")], "user": key}
    received = ""
    stream = client.chat.completions.create(**request, stream=True, extra_headers={"X-Tersely-Session": key})
    try:
        for chunk in stream:
            received += chunk.choices[0].delta.content or ""
    except openai.APIError as error:
        received += f" / {error.message}"
    assert received == "one moment / broken"
    kept = view_of(offering, key, "all")
    assert [(each["role"], each["raw"].get("content")) for each in kept] == [
        ("user", f"go {key}"),
        ("assistant", "one moment"),
    ]


@pytest.mark.parametrize("streams", [False, True])
def test_a_later_round_that_overflows_is_tried_with_less(client: openai.OpenAI, model: Model, key: str, streams: bool):
    message = "This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens."
    body = json.dumps({"error": {"message": message, "code": "context_length_exceeded"}}).encode()
    history: list[dict[str, Any]] = []
    for number in range(6):
        history += [user(f"question {number} {key} " + "word " * 300)]
        model.script(key, saying(f"answer {number} " + "word " * 300))
        answer = ask(client, streams, model=MODEL, messages=history, user=key)
        history.append({"role": "assistant", "content": answer["content"]})
    model.script(key, calling(PAD), ScriptedReply(status=400, body=body), saying("Less."))
    assert ask(client, streams, model=MODEL, messages=[*history, user("and now")], user=key)["content"] == "Less."
    *_, second, third = [each["messages"] for each in model.bodies(key)]
    assert len(third) < len(second)
    assert third[-2:] == second[-2:]


@pytest.mark.parametrize("streams", [False, True])
def test_a_tool_that_takes_too_long_is_stopped(
    store: Database, model: Model, key: str, streams: bool, monkeypatch: pytest.MonkeyPatch
):
    async def dawdle(*_: object) -> None:
        await asyncio.sleep(60)

    assert ToolCalls.__init__.__kwdefaults__ is not None
    monkeypatch.setitem(ToolCalls.__init__.__kwdefaults__, "seconds", 1.0)
    monkeypatch.setattr("tersely.service.tools.tools.Tools.answer", dawdle)
    with serve(store, model.url, strategy="window", instructions="off", epoch=FROM_THE_START, heartbeat=0.2) as running:
        model.script(key, calling(PAD), saying("Never mind."))
        body = body_of(f"go {key}", user=key, stream=streams)
        answer = asyncio.run(post(running, body))
    assert b"mind." in answer.body
    assert (b": keep-alive" in answer.body) is streams
    assert "took too long" in sent(model, key, 1)[-1]["content"]


async def test_the_database_goes_away_in_the_middle(store: Database, model: Model, key: str):
    with (
        relay(store) as way,
        serve(
            store,
            model.url,
            dsn=way.dsn,
            strategy="window",
            instructions="off",
            epoch=FROM_THE_START,
            database_timeout=1.0,
        ) as running,
    ):
        assert (await post(running, body_of(f"hello {key}"))).status == 200
        model.script(key, calling(PAD, first_delay=0.5), saying("Without it, then."))
        body = body_of(f"go {key}", user=key)
        pending = asyncio.create_task(post(running, body, X_Tersely_Session=key))
        await until(lambda: len(model.requests(key)) == 1)
        way.cut()
        answer = await pending
        assert answer.json["choices"][0]["message"]["content"] == "Without it, then."
        assert "not available" in sent(model, key, 1)[-1]["content"]


# What is kept


@pytest.mark.parametrize("streams", [False, True])
def test_the_history_is_whole_for_the_model_and_clean_for_the_client(
    client: openai.OpenAI, model: Model, offering: Service, store: Database, key: str, streams: bool
):
    headers = {"X-Tersely-Session": key}
    model.script(key, calling(PAD, content="First."), calling(PAD, ("t", "add", {"a": 1})))
    request: dict[str, Any] = {"model": MODEL, "user": key, "tools": [THEIRS], "extra_headers": headers}
    seen = ask(client, streams, **request, messages=[user("go")])
    assert seen["content"] == "First."

    assert [each["seq"] for each in view_of(offering, key, "client")] == [1, 4]
    assert [each["seq"] for each in view_of(offering, key, "model")] == [1, 2, 3, 4, 5]
    hidden = {each["seq"]: not each["client_visible"] for each in view_of(offering, key, "all")}
    assert hidden == {1: False, 2: True, 3: True, 4: False, 5: True}

    history = [user("go"), echo(seen), {"role": "tool", "tool_call_id": "t", "content": "2"}]
    model.script(key, saying("Two."))
    with serve(
        store, model.url, strategy="window", instructions="off", epoch=FROM_THE_START
    ) as other:  # which remembers nothing
        at_another = openai.OpenAI(base_url=other.base_url, api_key="sk", max_retries=0)
        assert ask(at_another, streams, **request, messages=history)["content"] == "Two."
    messages = sent(model, key, 2)
    assert messages[:3] == sent(model, key, 1)
    assert [call["id"] for call in messages[3]["tool_calls"]] == ["c1", "t"]
    assert [each.get("tool_call_id") for each in messages[4:]] == ["c1", "t"]
    session = httpx.get(f"{offering.url}/api/sessions/{key}").json()
    assert (session["messages"], session["turns"]) == (7, 1)

    # Only what is new: the stored history has it all.
    model.script(key, saying("Yes."))
    ask(client, streams, **request, messages=[user("sure?")])
    assert sent(model, key, 3)[: len(messages)] == messages


@pytest.mark.parametrize("streams", [False, True])
def test_a_body_sent_again_does_not_run_its_turn_into_the_history_twice(
    client: openai.OpenAI, model: Model, offering: Service, key: str, streams: bool
):
    request: dict[str, Any] = {
        "model": MODEL,
        "user": key,
        "messages": [user(f"go {key}")],
        "extra_headers": {"X-Tersely-Session": key},
    }
    model.script(key, calling(PAD), saying("First."), calling(PAD), saying("Second."))
    assert ask(client, streams, **request)["content"] == "First."
    again = {**request, "extra_headers": {**request["extra_headers"], "x-stainless-retry-count": "1"}}
    assert ask(client, streams, **again)["content"] == "Second."
    live = view_of(offering, key, "model")
    assert [each["role"] for each in live] == ["user", "assistant", "tool", "assistant"]
    assert live[-1]["raw"]["content"] == "Second."
    assert sent(model, key, 2) == [user(f"go {key}")]

    # And back to the first reply: what was hidden beside it comes back with it.
    model.script(key, saying("Third."))
    back = [user(f"go {key}"), {"role": "assistant", "content": "First."}, user("more")]
    ask(client, streams, model=MODEL, user=key, messages=back)
    shown = sent(model, key, 4)[-5:]  # behind the scratchpad
    assert [each["role"] for each in shown] == ["user", "assistant", "tool", "assistant", "user"]
    assert shown[3]["content"] == "First."
    assert [each["role"] for each in view_of(offering, key, "model")][:4] == ["user", "assistant", "tool", "assistant"]


async def test_two_at_once_leave_one_turn(offering: Service, model: Model, key: str):
    model.script(key, calling(PAD, first_delay=0.2), calling(PAD, first_delay=0.2), saying("One."), saying("One."))
    body = body_of("go", user=key)
    answers = await asyncio.gather(*(post(offering, body, X_Tersely_Session=key) for _ in range(2)))
    assert [each.json["choices"][0]["message"]["content"] for each in answers] == ["One.", "One."]
    live = view_of(offering, key, "model")
    assert [each["role"] for each in live if each["role"] != "user"] in (
        ["assistant", "tool", "assistant"],
        ["assistant", "tool", "assistant"] * 2,
    )
    seqs = [each["seq"] for each in view_of(offering, key, "all")]
    assert sorted(seqs) == list(range(1, len(seqs) + 1))


async def test_partial_reply_is_stored_when_the_client_leaves(offering: Service, model: Model, key: str):
    model.script(key, calling(PAD, content="Wait."), saying("never heard", first_delay=5))
    body = body_of("go", user=key, stream=True)
    async with wire(offering) as there:
        await there.send(request_bytes(body, X_Tersely_Session=key))
        await there.until(b"Wait.")
        await there.until(b": keep-alive")

    async def is_kept() -> bool:
        return [each["role"] for each in view_of(offering, key, "all")] == ["user", "assistant"]

    await eventually(is_kept)
    kept = view_of(offering, key, "all")[1]
    assert kept["raw"]["content"] == "Wait."
    assert kept["finish"] == "client_left"


# What is offered, and when


def test_slim_offers_search_once_messages_are_omitted(service: Service, model: Model, key: str):
    client = openai.OpenAI(base_url=service.base_url, api_key="sk", max_retries=0)
    request: dict[str, Any] = {
        "model": MODEL,
        "user": key,
        "extra_headers": {"X-Tersely-Epoch": '{"high": 1500, "low": 500}'},
    }
    history: list[dict[str, Any]] = []
    offered = []
    for number in range(8):
        history.append(user(f"question {number} {key} " + "word " * 200))
        model.script(key, saying(f"answer {number}"))
        history.append({"role": "assistant", "content": ask(client, False, **request, messages=history)["content"]})
        offered.append("tools" in model.bodies(key)[-1])
    assert offered == sorted(offered)
    assert offered[0] is False
    assert offered[-1] is True
    model.script(key, calling(("s", "context_search", {"mode": "search", "query": "question 0"})), saying("There."))
    seen = ask(client, True, **request, messages=[*history, user("what was the first?")])
    assert seen["content"] == "There."
    assert f"question 0 {key}" in sent(model, key, -1)[-1]["content"]


def test_tools_can_be_switched_off(store: Database, model: Model, key: str):
    with serve(store, model.url, strategy="window", instructions="off", epoch=FROM_THE_START, tools="off") as running:
        client = openai.OpenAI(base_url=running.base_url, api_key="sk", max_retries=0)
        ask(client, False, model=MODEL, user=key, messages=[user(f"go {key}")])
    assert "tools" not in model.bodies(key)[0]


@pytest.mark.parametrize("is_on", [True, False])
def test_hint_is_shown_only_to_models_with_the_tool(store: Database, model: Model, key: str, is_on: bool):
    history: list[dict[str, Any]] = []
    headers = {"X-Tersely-Epoch": "every_request"}
    with serve(
        store,
        model.url,
        strategy="window",
        instructions="off",
        epoch=FROM_THE_START,
        tools="query_db" if is_on else "off",
    ) as running:
        client = openai.OpenAI(base_url=running.base_url, api_key="sk", max_retries=0)
        call = {"id": "t", "type": "function", "function": {"name": "add", "arguments": "{}"}}
        for number in range(6):
            history += [
                user(f"q{number} {key}"),
                {"role": "assistant", "content": None, "tool_calls": [call | {"id": f"t{number}"}]},
                {"role": "tool", "tool_call_id": f"t{number}", "content": "line of output\n" * 800},
            ]
            model.script(key, saying(f"a{number}"))
            request = {"model": MODEL, "user": key, "tools": [THEIRS], "messages": history, "extra_headers": headers}
            history.append({"role": "assistant", "content": ask(client, False, **request)["content"]})
    text = json.dumps(sent(model, key, -1))
    assert "TRUNCATED" in text
    assert ("query_db" in text) is is_on


async def test_calls_of_tools_are_counted(client: openai.OpenAI, offering: Service, model: Model, key: str):
    model.script(key, calling(PAD, ("b", "save_memo", {})), saying("ok"))
    ask(client, False, model=MODEL, user=key, messages=[user(f"go {key}")])
    metrics = httpx.get(f"{offering.url}/metrics").text
    assert re.search(r'tersely_tool_calls_total{result="ok",tool="manage_scratchpad"} [1-9]', metrics)
    assert re.search(r'tersely_tool_calls_total{result="error",tool="save_memo"} [1-9]', metrics)


# Other dialects


@pytest.mark.parametrize("streams", [False, True])
def test_anthropics_client_sees_one_message_too(offering: Service, model: Model, key: str, streams: bool):
    own: Any = {"name": "add", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    headers = {"X-Tersely-Session": key, "X-Script": key}
    request: dict[str, Any] = {"model": "claude-opus-test", "max_tokens": 100, "tools": [own], "extra_headers": headers}
    client = anthropic.Anthropic(base_url=offering.url, api_key="sk", max_retries=0)

    def ask(*messages: Any) -> anthropic.types.Message:
        if not streams:
            whole: anthropic.types.Message = client.messages.create(**request, messages=messages)
            return whole
        with client.messages.stream(**request, messages=messages) as stream:
            final: anthropic.types.Message = stream.get_final_message()
            return final

    model.script(key, calling(PAD, content="First."), calling(("c2", *PAD[1:]), ("t", "add", {"a": 1}), content="So."))
    seen = ask(user("go"))
    assert [block.type for block in seen.content] == ["text", "text", "tool_use"]
    assert seen.stop_reason == "tool_use"
    echoed = [block.model_dump(exclude_none=True) for block in seen.content]
    result = {"type": "tool_result", "tool_use_id": echoed[-1]["id"], "content": "2"}
    model.script(key, saying("Two."))
    said_last = ask(user("go"), {"role": "assistant", "content": echoed}, {"role": "user", "content": [result]})
    assert [block.type for block in said_last.content] == ["text"]

    asked_for = [json.loads(each.body) for each in model.state.received if each.headers.get("X-Script") == key]
    assert len(asked_for) == 3
    blocks = [[block["type"] for block in message["content"]] for message in asked_for[-1]["messages"][1:]]
    assert blocks == [["text", "tool_use"], ["tool_result"], ["text", "tool_use", "tool_use"], ["tool_result"] * 2]
    # What was said in rounds is the end of the prompt that is worth caching; the first message is the same in each.
    for each in asked_for:
        *before, last = [block for message in each["messages"] for block in message["content"]]
        assert "cache_control" in last
        assert not any("cache_control" in block for block in before)
        assert ["cache_control" in tool for tool in each["tools"]] == [False] * (len(each["tools"]) - 1) + [True]
        assert before[:1] in ([], [{"type": "text", "text": "go"}])
    assert [each["role"] for each in view_of(offering, key, "client")] == ["user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("streams", [False, True])
async def test_geminis_client_sees_one_content_too(
    offering: Service, model: Model, key: str, streams: bool, wrapped: bool
):
    verb = "streamGenerateContent?alt=sse" if streams else "generateContent"
    path = f"/v1internal:{verb}" if wrapped else f"/v1beta/models/gemini-test:{verb}"
    declared = [{"functionDeclarations": [{"name": "add", "parameters": {"type": "object", "properties": {}}}]}]

    async def ask(*contents: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        request: dict[str, Any] = {"contents": contents, "tools": declared}
        if wrapped:
            request = {"model": "gemini-test", "project": "p", "request": request}
        answer = await post(offering, json.dumps(request).encode(), path=path, X_Tersely_Session=key, X_Script=key)
        assert answer.status == 200, answer.body
        events = [json.loads(line[6:]) for line in answer.body.splitlines() if line.startswith(b"data: ")]
        bodies = [each["response"] if wrapped else each for each in events or [answer.json]]
        parts = [part for body in bodies for part in body["candidates"][0]["content"]["parts"]]
        assert len({body.get("responseId") for body in bodies}) == 1
        return parts, bodies[-1]["candidates"][0]

    model.script(key, calling(PAD, content="First."), calling(("c2", *PAD[1:]), ("t", "add", {"a": 1}), content="So."))
    words = {"role": "user", "parts": [{"text": f"go {key}"}]}
    parts, last = await ask(words)
    assert "".join(part.get("text", "") for part in parts) == "First.\n\nSo."
    assert [part["functionCall"]["name"] for part in parts if "functionCall" in part] == ["add"]
    assert last["finishReason"] == "STOP"

    model.script(key, saying("Two."))
    call = next(part["functionCall"] for part in parts if "functionCall" in part)
    response = {"name": "add", "response": {"output": "2"}} | ({"id": call["id"]} if "id" in call else {})
    parts, _ = await ask(
        words, {"role": "model", "parts": parts}, {"role": "user", "parts": [{"functionResponse": response}]}
    )
    assert "".join(part.get("text", "") for part in parts) == "Two."
    received = [json.loads(each.body) for each in model.state.received if each.headers.get("X-Script") == key]
    contents = [each["request"] if wrapped else each for each in received][-1]["contents"][1:]
    called = [[part["functionCall"]["name"] for part in each["parts"] if "functionCall" in part] for each in contents]
    assert called == [["manage_scratchpad"], [], ["manage_scratchpad", "add"], []]
    assert [part["functionResponse"]["name"] for part in contents[3]["parts"]] == ["manage_scratchpad", "add"]


async def test_empty_reply_does_not_stop_the_next_epoch(offering: Service, model: Model, key: str) -> None:
    model.script(key, ScriptedReply(message={"content": "Well."}), ScriptedReply(message={"content": None}))
    headers = {"X-Tersely-Session": key, "X-Tersely-Epoch": "every_request"}
    messages: list[dict[str, Any]] = []
    numbers: list[int] = []
    for words in ("One?", "Two?", "Three?"):
        messages.append({"role": "user", "content": words})
        answer = await post(offering, body_of(*messages, user=key), **headers)
        numbers.append(int(answer.headers["x-tersely-epoch"]))
        messages.append(answer.json["choices"][0]["message"])
    assert numbers == [1, 2, 3]
